//! Where this process is among those that were started with it, for commands that train.

use crate::Code;
use crate::Result;
use crate::place::{Engine, Environment, Found, Place, find};

/// What the environment of this process says.
pub fn own_place() -> Result<Found> {
    find(&Environment::own())
}

/// Whether this process is one of several ranks. One that should be, and does not know which, counts: the error comes later.
pub fn is_rank() -> bool {
    is_rank_by(&own_place(), |_| true)
}

/// Whether another launcher than `kolo train --ranks` has started this process as a rank.
pub fn has_other_launcher() -> bool {
    is_rank_by(&own_place(), |engine| engine != Engine::KoloRanks)
}

/// Whether this process is a task of a cluster with parameter servers.
pub fn is_task() -> bool {
    matches!(own_place(), Ok(Found { place: Place::Task(_), .. }))
}

fn is_rank_by(found: &Result<Found>, is_about: impl Fn(Engine) -> bool) -> bool {
    match found {
        Ok(found) => matches!(found.place, Place::Rank(_)) && is_about(found.engine),
        // There is room for more processes, and this one may start them.
        Err(error) => error.code() != Code::FailedPrecondition,
    }
}
