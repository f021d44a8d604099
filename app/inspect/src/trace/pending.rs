//! What waits for the return of a function.

use std::sync::Arc;

use ring3_trace::Event;

use super::calls::Call;
use crate::linux::Task;

/// A function that has been entered.
pub struct Pending {
    pub(super) event: Event,
    pub(super) task: Task,
    pub(super) arguments: Vec<u64>,
    pub(super) of: Of,
    /// Its file name, where it has one and a filter may ask for it at its end.
    pub(super) path: Option<String>,
    /// The memory that was recorded at its entry.
    pub(super) entry: Vec<u8>,
}

/// What has been entered.
pub(super) enum Of {
    Call(Arc<Call>),
    Function,
    /// `get_signal`.
    Signal,
}
