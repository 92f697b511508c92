//! All ops that a graph may use, by name, with their signatures read.

use std::collections::HashMap;

use kolo_core::{Error, Result};

use crate::{OpDef, Signature};

/// The ops that graphs may use. Immutable once made.
pub struct OpRegistry {
    ops: HashMap<&'static str, RegisteredOp>,
}

struct RegisteredOp {
    def: OpDef,
    signature: Signature,
}

impl OpRegistry {
    /// Reads all signatures. A bad signature or a double name is a bug in the table and an `Internal` error.
    pub fn new(defs: impl IntoIterator<Item = OpDef>) -> Result<OpRegistry> {
        let mut ops = HashMap::new();
        for def in defs {
            let signature = Signature::parse(def.signature).map_err(|error| error.context(def.name))?;
            if ops.insert(def.name, RegisteredOp { def, signature }).is_some() {
                return Err(Error::internal(format!("op '{}' is in the table twice", def.name)));
            }
        }
        Ok(OpRegistry { ops })
    }

    /// The op of this name; an error that suggests a similar name otherwise.
    pub fn find(&self, name: &str) -> Result<(&OpDef, &Signature)> {
        match self.ops.get(name) {
            Some(op) => Ok((&op.def, &op.signature)),
            None => {
                let hint = did_you_mean(name, self.ops.keys().copied());
                Err(Error::not_found(format!("Op type not registered '{name}'{hint}")))
            }
        }
    }

    /// All names, sorted.
    pub fn names(&self) -> Vec<&'static str> {
        let mut names: Vec<_> = self.ops.keys().copied().collect();
        names.sort_unstable();
        names
    }
}

/// ` (did you mean 'x'?)`, if one of the candidates is near enough to be a likely slip; else nothing.
pub(crate) fn did_you_mean<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> String {
    let limit = (name.chars().count() / 3).clamp(1, 4);
    candidates
        .map(|candidate| (edit_distance(name, candidate, limit), candidate))
        .filter(|(distance, _)| *distance <= limit)
        .min()
        .map(|(_, candidate)| format!(" (did you mean '{candidate}'?)"))
        .unwrap_or_default()
}

/// Up to three candidates that are most like `name`: a slip away, or longer or shorter by a version or a variant
/// (`MaxPool` for `MaxPool3D`).
pub(crate) fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    /// Shorter names begin too many others.
    const SHORTEST: usize = 4;
    let limit = (name.chars().count() / 3).clamp(1, 4);
    let lower = name.to_lowercase();
    let is_variant = |candidate: &str| {
        let candidate = candidate.to_lowercase();
        candidate.len().min(lower.len()) >= SHORTEST && (candidate.starts_with(&lower) || lower.starts_with(&candidate))
    };
    let mut found: Vec<(usize, &str)> = candidates
        .into_iter()
        .filter(|candidate| !candidate.starts_with('_'))
        .map(|candidate| (edit_distance(name, candidate, limit), candidate))
        .filter(|(distance, candidate)| *distance <= limit || is_variant(candidate))
        .collect();
    found.sort_unstable_by_key(|(distance, candidate)| (*distance, candidate.len(), *candidate));
    found.into_iter().take(3).map(|(_, candidate)| candidate).collect()
}

/// Levenshtein's distance, ignoring case; gives up above `limit`.
fn edit_distance(a: &str, b: &str, limit: usize) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.to_lowercase().chars().collect(), b.to_lowercase().chars().collect());
    if a.len().abs_diff(b.len()) > limit {
        return limit + 1;
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substitute = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substitute.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_is_recognised() {
        let names = ["MatMul", "Mul", "Add"];
        assert_eq!(did_you_mean("Matmull", names.into_iter()), " (did you mean 'MatMul'?)");
        assert_eq!(did_you_mean("Conv2D", names.into_iter()), "");
    }

    #[test]
    fn the_nearest_names_are_slips_and_variants() {
        let names = ["MaxPool", "MaxPoolV2", "MaxPoolGradGrad", "AvgPool", "_Send", "Mul", "Max"];
        assert_eq!(nearest("MaxPool3D", names), ["MaxPool", "MaxPoolV2"]);
        assert_eq!(nearest("MaxPoolGrad", names), ["MaxPool", "MaxPoolGradGrad"]);
        assert_eq!(nearest("mul", names), ["Mul"]);
        assert!(nearest("Qr", names).is_empty());
    }
}
