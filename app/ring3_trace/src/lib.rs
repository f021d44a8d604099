//! Services below a guest, in processes of their own.
//!
//! A service connects to a machine of its user ([`Service::connect`]), says what it wants to be told of ([`Request`]), and gets
//! [`Event`]s. By default the guest goes on meanwhile. With [`Request::stops`] the vCPU stands at each event until the service
//! lets it go: its registers and memory can be read and, as far as the request asks for that, written; a system call can be
//! changed or answered in the kernel's stead. A service has the rights its request names and no others.
//!
//! What is said on the socket is one JSON object a line, in both directions; docs/tracing.md shows it. With [`Request::ring`] events
//! come by memory that both share ([`ring`]).

mod client;
pub mod filter;
pub mod kernel_text;
mod lines;
mod names;
pub mod ring;
pub mod services;
mod wire;

pub use client::{Problem, Service};
pub use lines::{Lines, pass};
pub use names::{ERRORS, OPEN, constant};
pub use wire::{Answer, Event, Line, Order, Request, Rights, Stops, bytes, hex};
