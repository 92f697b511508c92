//! `conformance/ops/known.txt`: where Kolo differs from TensorFlow on purpose.
//!
//! A line is `pattern: reason`. The pattern is a case's name and mode, `Op/dtype/label (mode)`, where `*` stands for any
//! text.

use std::path::Path;

pub struct Known(Vec<(String, String)>);

impl Known {
    pub fn read(path: &Path) -> Known {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
        let parts =
            lines.map(|line| line.split_once(": ").unwrap_or_else(|| panic!("known.txt: '{line}' has no reason")));
        Known(parts.map(|(pattern, why)| (pattern.trim().to_owned(), why.trim().to_owned())).collect())
    }

    /// Takes another file's lines in.
    pub fn add(&mut self, mut other: Known) {
        self.0.append(&mut other.0);
    }

    pub fn covers(&self, name: &str, mode: &str) -> bool {
        let full = format!("{name} ({mode})");
        self.0.iter().any(|(pattern, _)| matches(pattern, &full))
    }

    /// The lines that some complaint needed, with how many.
    pub fn used(&self, complaints: &[(String, &str, String)]) -> Vec<String> {
        let counted = self.0.iter().map(|line| (line, count(&line.0, complaints)));
        counted.filter(|(_, n)| *n > 0).map(|((pattern, why), n)| format!("{pattern} [{n}]: {why}")).collect()
    }

    /// The lines that none needed.
    pub fn unused(&self, complaints: &[(String, &str, String)]) -> Vec<String> {
        let idle = self.0.iter().filter(|(pattern, _)| count(pattern, complaints) == 0);
        idle.map(|(pattern, _)| pattern.clone()).collect()
    }
}

fn count(pattern: &str, complaints: &[(String, &str, String)]) -> usize {
    complaints.iter().filter(|(name, mode, _)| matches(pattern, &format!("{name} ({mode})"))).count()
}

/// Whether `text` is `pattern` with each `*` replaced by something.
fn matches(pattern: &str, text: &str) -> bool {
    let Some((head, tail)) = pattern.split_once('*') else { return pattern == text };
    let Some(rest) = text.strip_prefix(head) else { return false };
    (0..=rest.len()).filter(|&i| rest.is_char_boundary(i)).any(|i| matches(tail, &rest[i..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_any_text() {
        assert!(matches("Abs/* (fed)", "Abs/float32/x (fed)") && matches("*", "") && matches("a*b*c", "a1b2c"));
        assert!(!matches("Abs/* (fed)", "Abs/float32 (forward)") && !matches("a*b", "a"));
    }
}
