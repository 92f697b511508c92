//! Einsum equations: `ij,jk->ik`, with `...` for dimensions that are not named.

use std::collections::HashMap;

use kolo_core::{Dim, Error, Result};

/// What stands for a dimension: a letter, or one of the dimensions behind an ellipsis, counted from the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Label {
    Letter(char),
    Ellipsis(usize),
}

/// The labels of one operand.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Subscript {
    pub before: Vec<char>,
    pub ellipsis: bool,
    pub after: Vec<char>,
}

/// Labels of all operands, and of what comes out.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Equation {
    pub inputs: Vec<Subscript>,
    pub output: Subscript,
}

impl Equation {
    /// Reads an equation for `n_inputs` operands.
    pub fn parse(text: &str, n_inputs: usize) -> Result<Equation> {
        let bad = |why: String| Error::invalid_argument(format!("einsum equation '{text}': {why}"));
        let Some((inputs, output)) = text.split_once("->").filter(|(_, output)| !output.contains("->")) else {
            return Err(Error::invalid_argument(format!("Expecting exactly one '->' in einsum equation: {text}")));
        };
        let inputs = inputs.split(',').map(|part| Subscript::parse(part).map_err(bad)).collect::<Result<Vec<_>>>()?;
        let output = Subscript::parse(output).map_err(bad)?;
        if inputs.len() != n_inputs {
            return Err(Error::invalid_argument(format!(
                "Expected {} inputs for einsum equation '{text}' but got: {n_inputs}",
                inputs.len()
            )));
        }
        for letter in output.letters() {
            if !inputs.iter().any(|input| input.letters().any(|other| other == letter)) {
                return Err(bad(format!("output label '{letter}' does not appear in any input")));
            }
        }
        Ok(Equation { inputs, output })
    }

    /// The labels of the output, once the operands' are known.
    pub fn output_labels(&self, inputs: &[Vec<Label>]) -> Result<Vec<Label>> {
        let hidden = |label: &&Label| matches!(label, Label::Ellipsis(_));
        let n = inputs.iter().map(|labels| labels.iter().filter(hidden).count()).max().unwrap_or(0);
        if n > 0 && !self.output.ellipsis {
            return Err(Error::invalid_argument(format!(
                "Output contains {n} broadcasting dimension(s) but no ellipsis (...) was found in the output subscripts."
            )));
        }
        Ok(self.output.expand(n))
    }
}

impl Subscript {
    pub fn parse(text: &str) -> std::result::Result<Subscript, String> {
        let (before, ellipsis, after) = match text.split_once("...") {
            Some((before, after)) => (before, true, after),
            None => (text, false, ""),
        };
        let letters = |text: &str| -> std::result::Result<Vec<char>, String> {
            text.chars().map(|c| if c != '.' { Ok(c) } else { Err(format!("'{c}' is not a label")) }).collect()
        };
        Ok(Subscript { before: letters(before)?, ellipsis, after: letters(after)? })
    }

    pub fn letters(&self) -> impl Iterator<Item = char> {
        self.before.iter().chain(&self.after).copied()
    }

    pub fn has(&self, letter: char) -> bool {
        self.letters().any(|other| other == letter)
    }

    /// The labels of an operand of this rank.
    pub fn labels(&self, rank: usize, input: usize) -> Result<Vec<Label>> {
        let named = self.before.len() + self.after.len();
        if rank < named || (rank > named && !self.ellipsis) {
            let at_least = if self.ellipsis { "at least " } else { "" };
            return Err(Error::invalid_argument(format!(
                "Expected input {input} to have rank {at_least}{named} but got: {rank}"
            )));
        }
        Ok(self.expand(rank - named))
    }

    fn expand(&self, n_hidden: usize) -> Vec<Label> {
        let hidden = if self.ellipsis { n_hidden } else { 0 };
        let letter = |&c: &char| Label::Letter(c);
        let before = self.before.iter().map(letter);
        before.chain((0..hidden).rev().map(Label::Ellipsis)).chain(self.after.iter().map(letter)).collect()
    }
}

impl std::fmt::Display for Subscript {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.before.iter().try_for_each(|c| write!(f, "{c}"))?;
        if self.ellipsis {
            f.write_str("...")?;
        }
        self.after.iter().try_for_each(|c| write!(f, "{c}"))
    }
}

/// The size of every label. Sizes behind an ellipsis broadcast; all others must agree.
pub(super) fn sizes<'a>(operands: impl IntoIterator<Item = (&'a [Label], Vec<Dim>)>) -> Result<HashMap<Label, Dim>> {
    let mut sizes: HashMap<Label, Dim> = HashMap::new();
    for (input, (labels, dims)) in operands.into_iter().enumerate() {
        for (axis, (&label, dim)) in labels.iter().zip(dims).enumerate() {
            let known = sizes.entry(label).or_insert(dim);
            *known = match (*known, dim, label) {
                (Some(a), Some(b), _) if a == b => Some(a),
                (Some(1), b, Label::Ellipsis(_)) => b,
                (a, Some(1), Label::Ellipsis(_)) => a,
                (Some(a), Some(b), _) => {
                    return Err(Error::invalid_argument(format!(
                        "Expected dimension {a} at axis {axis} of input {input} but got dimension {b}"
                    )));
                }
                (a, b, Label::Letter(_)) => a.or(b),
                // One of them is larger than 1 and decides; or neither is known.
                (a, b, Label::Ellipsis(_)) => a.or(b),
            };
        }
    }
    Ok(sizes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equations() {
        let equation = Equation::parse("a...b,bc->...ac", 2).unwrap();
        assert_eq!(equation.inputs[0].to_string(), "a...b");
        assert_eq!(equation.output.to_string(), "...ac");
        let labels = equation.inputs[0].labels(4, 0).unwrap();
        let (a, b, e) = (Label::Letter('a'), Label::Letter('b'), Label::Ellipsis);
        assert_eq!(labels, [a, e(1), e(0), b]);
        assert_eq!(equation.output_labels(&[labels]).unwrap(), [e(1), e(0), a, Label::Letter('c')]);
        let fails = |text: &str, n: usize| Equation::parse(text, n).unwrap_err().to_string();
        assert!(fails("ij", 1).contains("Expecting exactly one '->'"));
        assert!(fails("i->i->i", 1).contains("Expecting exactly one '->'"));
        assert!(fails("i->j", 1).contains("'j' does not appear"));
        assert!(fails("i,j->ij", 1).contains("Expected 2 inputs"));
        assert!(fails("i......->i", 1).contains("'.' is not a label"));
        assert!(equation.inputs[1].labels(3, 1).unwrap_err().message().contains("rank 2 but got: 3"));
    }
}
