//! A vCPU's pages, and kicks for the wedges that share them.

use crate::Modes;
use bus::Kicker;
use std::sync::Arc;
use wedge::{Common, Error, Pages, Turns};

/// A vCPU's pages, as the options have them.
pub(crate) fn pages(common: &Arc<Common>, modes: Modes) -> Result<Pages, Error> {
    let mut pages = Pages::with(Arc::clone(common)).map_err(Error::Start)?;
    if modes.options.user_dispatch {
        pages.use_dispatch().map_err(Error::Start)?;
    }
    if modes.options.unpatched {
        pages.leave_sites();
    }
    if modes.options.traced {
        pages.trace();
    }
    if modes.options.unmap_flushed {
        pages.unmap_flushed();
    }
    if modes.options.without_keys {
        pages.leave_keys();
    }
    if modes.is_strict() {
        pages.keep_user_apart();
    }
    Ok(pages)
}

struct WedgeKicker(Turns);

impl Kicker for WedgeKicker {
    fn kick(&self) {
        self.0.kick();
    }
}

/// Kicks whichever wedge of a vCPU has the turn.
pub(crate) fn kicker(pages: &Pages) -> Arc<dyn Kicker> {
    Arc::new(WedgeKicker(pages.turns().clone()))
}
