//! Remembers request ids, so that a duplicate request is not executed twice.

use std::collections::{HashSet, VecDeque};

use kolo_core::{Error, Result};
use parking_lot::Mutex;

/// The ids of the last requests.
pub(crate) struct RequestIds {
    most: usize,
    seen: Mutex<(HashSet<i64>, VecDeque<i64>)>,
}

impl RequestIds {
    /// Remembers the last `most` ids.
    pub fn new(most: usize) -> RequestIds {
        RequestIds { most, seen: Mutex::default() }
    }

    /// Records a request; a duplicate is refused. The id 0 means that the sender does not number its requests.
    pub fn check(&self, id: i64, what: &str) -> Result<()> {
        if id == 0 {
            return Ok(());
        }
        let mut seen = self.seen.lock();
        let (set, order) = &mut *seen;
        if !set.insert(id) {
            return Err(Error::aborted(format!(
                "The same {what} request was received twice. It was carried out when it came first; ask again under a new \
                 number"
            )));
        }
        order.push_back(id);
        if order.len() > self.most
            && let Some(oldest) = order.pop_front()
        {
            set.remove(&oldest);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_taken_once_until_it_is_forgotten() {
        let ids = RequestIds::new(2);
        assert!(ids.check(0, "RunGraph").is_ok() && ids.check(0, "RunGraph").is_ok());
        assert!(ids.check(1, "RunGraph").is_ok());
        let error = ids.check(1, "RunGraph").unwrap_err();
        assert!(error.message().starts_with("The same RunGraph request was received twice."));
        assert!(ids.check(2, "RunGraph").is_ok() && ids.check(3, "RunGraph").is_ok());
        assert!(ids.check(1, "RunGraph").is_ok());
    }
}
