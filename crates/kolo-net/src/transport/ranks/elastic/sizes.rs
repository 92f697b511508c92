//! With how many ranks a training can go on.

use kolo_core::{Error, Result};

use super::messages::MOST_MEMBERS;

/// The numbers of ranks that a training can have: those between a least and a most by which its batches, or their parts, can be shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes {
    allowed: Vec<usize>,
    why: String,
}

impl Sizes {
    /// From `least` to `most` ranks, those of which `fits` says yes. `why` is said when there are more than can train: `--batch-size 100
    /// can be shared by 1, 2, 4 or 5`. An error if there is no such number.
    pub fn new(least: usize, most: usize, fits: impl Fn(usize) -> bool, why: &str) -> Result<Sizes> {
        if least == 0 || least > most || most > MOST_MEMBERS {
            return Err(Error::invalid_argument(format!(
                "a training cannot have {least} to {most} ranks: at least 1, at most {MOST_MEMBERS}"
            )));
        }
        let allowed: Vec<usize> = (least..=most).filter(|n| fits(*n)).collect();
        match allowed.is_empty() {
            true => {
                Err(Error::invalid_argument(format!("no number of ranks from {least} to {most} is possible: {why}")))
            }
            false => Ok(Sizes { allowed, why: why.to_owned() }),
        }
    }

    /// The largest number of ranks when so many are there; none if they are too few.
    pub fn largest(&self, n: usize) -> Option<usize> {
        self.allowed.iter().copied().rfind(|allowed| *allowed <= n)
    }

    /// The fewest.
    pub fn least(&self) -> usize {
        self.allowed.first().copied().unwrap_or(1)
    }

    /// The most.
    pub fn most(&self) -> usize {
        self.allowed.last().copied().unwrap_or(1)
    }

    /// Why not any number.
    pub fn describe(&self) -> &str {
        &self.why
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_number_that_fits_is_taken() {
        let sizes = Sizes::new(2, 8, |n| 8 % n == 0, "8 parts").unwrap();
        let found: Vec<Option<usize>> = (0..10).map(|n| sizes.largest(n)).collect();
        let wanted = [None, None, Some(2), Some(2), Some(4), Some(4), Some(4), Some(4), Some(8), Some(8)];
        assert_eq!(found, wanted);
        assert_eq!((sizes.least(), sizes.most()), (2, 8));
    }

    #[test]
    fn no_possible_number_is_an_error() {
        let says = |result: Result<Sizes>, text: &str| {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        };
        says(Sizes::new(3, 3, |n| 8 % n == 0, "8 parts"), "no number of ranks from 3 to 3 is possible: 8 parts");
        says(Sizes::new(0, 3, |_| true, ""), "a training cannot have 0 to 3 ranks");
        says(Sizes::new(4, 3, |_| true, ""), "a training cannot have 4 to 3 ranks");
        says(Sizes::new(1, 5000, |_| true, ""), "at most 1024");
    }
}
