//! System-level behaviour of the reference CPU, on a small fake machine.

#[path = "../support/mod.rs"]
mod support;

mod code_cache;
mod control;
mod debug;
mod exceptions;
mod lab;
mod legacy;
mod observer;
mod paging;
mod transfers;
