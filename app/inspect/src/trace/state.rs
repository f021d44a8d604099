//! What a trace selects, and the state that its vCPUs share.

use std::{
    collections::{HashMap, HashSet},
    sync::Mutex,
};

use ring3_trace::{Stops, filter::Filter};
use x86::paging::Roots;

use super::{pending::PendingReturn, plan::Tracepoint};

/// Which events are traced, and at which of them vCPUs stop.
pub struct EventSelection {
    pub filter: Option<Filter>,
    pub comm: Option<String>,
    pub pid: Option<u32>,
    pub stops: Stops,
}

/// State shared by all vCPUs of a trace and by the thread that carries out a service's orders.
#[derive(Default)]
pub struct Shared {
    /// Functions entered and not returned, by RSP at their entry, which no two threads have in common.
    pub pending: Mutex<HashMap<u64, PendingReturn>>,
    /// Places that functions return to whose ends are not known (GVA).
    pub returns: Mutex<HashSet<u64>>,
    /// Places that a service may move, if vCPUs stop at them (GVA).
    pub breaks: Mutex<HashMap<u64, Tracepoint>>,
    /// vCPUs that are stopped, by number.
    pub stopped: Mutex<HashMap<usize, StoppedVcpu>>,
}

/// A vCPU that is stopped at a point.
#[derive(Clone, Copy)]
pub struct StoppedVcpu {
    pub rip: u64,
    pub roots: Roots,
    /// RSP, if it is a function's entry.
    pub entry: Option<u64>,
    /// Where the arguments of a system call are, at its entry (GVA).
    pub frame: Option<[u64; 6]>,
}
