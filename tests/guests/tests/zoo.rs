//! The part of the program zoo that every machine has; docs/zoo.md is the whole.

use anyhow::{Result, ensure};
use guests::zoo::programs;

#[test]
fn programs_do_in_a_guest_what_they_do_on_the_host() -> Result<()> {
    for program in programs()?.iter().filter(|program| program.short) {
        let (name, missing) = (&program.name, program.missing());
        ensure!(missing.is_empty(), "{name}: install {}", missing.join(", "));
        let compared = program.compare()?;
        let told = compared.difference();
        ensure!(compared.is_same(), "{name}: {told}\n{}", compared.said);
        ensure!(compared.is_hardly_interpreted(), "{name}: interpreted\n{}", compared.said);
    }
    Ok(())
}
