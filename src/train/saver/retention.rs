//! Which checkpoints to keep.

/// The checkpoints a saver knows of, and the rules by which old ones go. TensorFlow's rules, except that with
/// `max_to_keep` 0 all are remembered, not only the last: recovery can then fall back on an older one.
pub(super) struct Retention {
    /// Prefixes and the times they were written, in seconds since 1970, oldest first.
    kept: Vec<(String, f64)>,
    max_to_keep: usize,
    keep_every: f64,
    /// A checkpoint written after this is kept for ever when its turn to go comes.
    next_kept: f64,
}

impl Retention {
    /// Keeps `max_to_keep` (0 is all), and one in every `hours` for ever.
    pub fn new(max_to_keep: usize, hours: f64, now: f64) -> Retention {
        let keep_every = hours * 3600.0;
        Retention { kept: Vec::new(), max_to_keep, keep_every, next_kept: now + keep_every }
    }

    /// Prefixes, oldest first.
    pub fn prefixes(&self) -> impl Iterator<Item = &String> {
        self.kept.iter().map(|(prefix, _)| prefix)
    }

    /// Forgets what it knew and takes over checkpoints of an earlier process.
    pub fn recover(&mut self, checkpoints: Vec<(String, f64)>) {
        self.kept = checkpoints;
    }

    /// Notes a new checkpoint; returns those that may be deleted.
    pub fn add(&mut self, prefix: &str, now: f64) -> Vec<String> {
        self.kept.retain(|(old, _)| old != prefix);
        self.kept.push((prefix.to_owned(), now));
        let mut gone = Vec::new();
        while self.max_to_keep > 0 && self.kept.len() > self.max_to_keep {
            let (prefix, written) = self.kept.remove(0);
            if written > self.next_kept {
                self.next_kept += self.keep_every;
            } else {
                gone.push(prefix);
            }
        }
        gone
    }

    /// Takes a checkpoint back that could not be deleted after all.
    pub fn put_back(&mut self, prefix: String, written: f64) {
        self.kept.insert(0, (prefix, written));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(retention: &Retention) -> Vec<&str> {
        retention.prefixes().map(String::as_str).collect()
    }

    #[test]
    fn the_oldest_go() {
        let mut retention = Retention::new(2, 10_000.0, 0.0);
        assert_eq!(retention.add("a", 1.0), [""; 0]);
        assert_eq!(retention.add("b", 2.0), [""; 0]);
        assert_eq!(retention.add("c", 3.0), ["a"]);
        // The same prefix again is the newest, and counts once.
        assert_eq!(retention.add("b", 4.0), [""; 0]);
        assert_eq!(kept(&retention), ["c", "b"]);
        retention.recover(vec![("x".into(), 0.0), ("y".into(), 0.0), ("z".into(), 0.0)]);
        assert_eq!(retention.add("d", 5.0), ["x", "y"]);
        assert_eq!(kept(&retention), ["z", "d"]);
    }

    #[test]
    fn none_go_without_a_limit() {
        let mut retention = Retention::new(0, 10_000.0, 0.0);
        for i in 0..100 {
            assert_eq!(retention.add(&i.to_string(), 1.0), [""; 0]);
        }
        assert_eq!(kept(&retention).len(), 100);
    }

    #[test]
    fn one_in_every_few_hours_stays() {
        // A checkpoint every half hour, one kept every two hours: those written just after hours 2, 4, 6.
        let mut retention = Retention::new(1, 2.0, 0.0);
        let mut gone = Vec::new();
        for half_hours in 1..=14 {
            let name = half_hours.to_string();
            gone.extend(retention.add(&name, f64::from(half_hours) * 1800.0 + 1.0));
        }
        let stayed: Vec<String> = (1..14).map(|i| i.to_string()).filter(|name| !gone.contains(name)).collect();
        assert_eq!(stayed, ["4", "8", "12"]);
    }
}
