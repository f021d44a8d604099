//! PostgreSQL when the power goes. Minutes, and its packages: `cargo test -p guests --test postgres -- --ignored`.

use anyhow::{Result, ensure};
use guests::{
    campaign::{COMPARE, CUT_AFTER_TWENTY_ROWS, Campaign, Results},
    postgres,
};
use tempfile::TempDir;

/// Cuts the power when twenty rows have been acknowledged, by a server with these words.
fn cut(words: &str) -> Result<Results> {
    let folder = TempDir::new()?;
    let write = format!(
        "starts {words}\nfor i in $(seq 30); do\n \
         echo \"insert into t values ($i, repeat('x', 2000)); select 'done $i';\"\ndone | query\nleaves\n"
    );
    let look = "starts; echo \"found $(query -c 'select count(*) from t')\"; leaves\n";
    let database = postgres::database(folder.path())?;
    let campaign = Campaign::new(&postgres::guest(&write), &database, CUT_AFTER_TWENTY_ROWS)?;
    let campaign = campaign.with("iterations = 3").verified_by(&postgres::guest(look))?;
    campaign.has("compare", COMPARE.as_bytes())?.runs()
}

#[test]
#[ignore = "minutes"]
fn postgresql_keeps_what_it_has_acknowledged() -> Result<()> {
    let results = cut("")?;
    ensure!(results.of("masked") == results.count(), "{}", results.said);
    Ok(())
}

#[test]
#[ignore = "minutes"]
fn postgresql_that_does_not_flush_loses_rows() -> Result<()> {
    let results = cut("-c fsync=off")?;
    ensure!(results.of("wrong") == results.count(), "{}", results.said);
    Ok(())
}
