//! As whom a command's machine runs.
//!
//! A guest that a root starts has all of root's files in front of it. Who calls ring3 by sudo seldom means that. So the machine
//! runs as the user who called, unless that is refused, or as any other one that root names.

use std::env;

use host_linux::account::{self, Account};

use super::arguments::Guest;
use crate::{failure::Failure, output};

/// Where sudo says who called it: a user's number.
const CALLER: &str = "SUDO_UID";

/// Returns if this process runs as the wanted user; otherwise ring3 starts anew as that one.
pub fn settle(arguments: &Guest) -> Result<(), Failure> {
    let named = arguments.user.as_deref().map(named).transpose()?;
    if !account::is_root() {
        return named.map_or(Ok(()), |account| refuse_others(&account));
    }
    let account = match named {
        Some(account) => account,
        None if arguments.as_root => return Ok(()),
        None => match caller()? {
            Some(account) => account,
            None => return Ok(()),
        },
    };
    if account.uid == 0 {
        return Ok(());
    }
    if arguments.user.is_none() {
        let name = account.name.display();
        output::say(&format!(
            "ring3: as {name}, who called sudo (--as-root keeps root's rights)\n"
        ));
    }
    let error = account.start_again();
    Err(Failure::host(format!("cannot run as {}: {error}", account.name.display())))
}

fn named(name: &str) -> Result<Account, Failure> {
    Account::find(name)
        .ok_or_else(|| Failure::usage(format!("--user {name}: there is no such user")))
}

fn refuse_others(account: &Account) -> Result<(), Failure> {
    if account.uid == host_linux::user::current().0 {
        return Ok(());
    }
    let name = account.name.display();
    Err(Failure::usage(format!("--user {name}: only root may run as another user")))
}

/// Who called sudo, if anybody did.
fn caller() -> Result<Option<Account>, Failure> {
    let Some(number) = env::var_os(CALLER).filter(|number| !number.is_empty()) else {
        return Ok(None);
    };
    let account = number.to_str().and_then(|number| number.parse().ok()).and_then(Account::by_uid);
    account.map(Some).ok_or_else(|| {
        let number = number.display();
        Failure::usage(format!(
            "{CALLER}={number}: there is no such user; give --user or --as-root"
        ))
    })
}
