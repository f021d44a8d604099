//! Functions that have been entered and whose return is traced.

use std::sync::Arc;

use ring3_trace::Event;

use super::calls::Call;
use crate::linux::Task;

/// A function that has been entered and has not returned.
pub struct PendingReturn {
    pub(super) event: Event,
    pub(super) task: Task,
    pub(super) arguments: Vec<u64>,
    pub(super) entered: Entered,
    /// The file name among the arguments, if a filter may ask for it when the function returns.
    pub(super) path: Option<String>,
    /// The tap's record at the entry.
    pub(super) entry: Vec<u8>,
}

/// What has been entered.
pub(super) enum Entered {
    Call(Arc<Call>),
    Function,
    /// `get_signal`.
    Signal,
}
