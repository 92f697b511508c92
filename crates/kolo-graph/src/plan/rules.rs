//! Placement rules: pins by pattern, kept in a file beside the program, so that moving work needs no edit of it.
//!
//! ```text
//! # Patterns of names; * stands for anything, slashes too, and ? for one character.
//! */weights                    -> /cpu:0
//! op=VarHandleOp               -> /cpu:0
//! op=MatMul dtype=float tower1/* -> /gpu:1
//! ! loss/*                     -> /cpu:0      # wins over a pin in the program
//! ```
//!
//! A node takes the first rule whose conditions all hold. What the program itself asks for wins, and the rule fills in
//! what it leaves open, as a device function would; a rule that begins with `!` wins over the program.

use std::fmt;
use std::sync::Arc;

use kolo_core::{DType, DeviceSpec, Error, Result};

use crate::plan::place::node_dtype;
use crate::{Node, Nodes, Origin};

/// Rules from patterns to devices, in order. See the format in [`PlacementRules::parse`].
#[derive(Clone, Debug, Default)]
pub struct PlacementRules {
    rules: Arc<[PinRule]>,
}

/// One rule.
#[derive(Clone, Debug)]
struct PinRule {
    origin: Origin,
    /// Wins over a pin in the program.
    overrides: bool,
    name: Option<String>,
    op: Option<String>,
    dtype: Option<DType>,
    device: DeviceSpec,
}

/// What the rules make of one node.
#[derive(Clone, Debug, PartialEq)]
pub struct RuleRow {
    /// The node.
    pub node: String,
    /// Its op.
    pub op: String,
    /// What the program asks for.
    pub pin: DeviceSpec,
    /// What it asks for under the rules.
    pub device: DeviceSpec,
    /// The rule that the node takes, whether or not that changes anything.
    pub rule: Option<Origin>,
}

/// What the rules make of a graph, without running or placing it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RuleTable {
    /// One row per node, in graph order.
    pub rows: Vec<RuleRow>,
    /// The rules that no node takes: often a slip in a pattern.
    pub unused: Vec<Origin>,
}

impl PlacementRules {
    /// Reads rules, one per line: conditions, `->` and a device. A condition is a pattern for the node's name (`*/weights`),
    /// or `name=`, `op=` or `dtype=` with a value; all must hold. `!` at the beginning wins over pins in the program, `#`
    /// begins a comment. `source` is what messages call the text, such as the file's name; errors begin with it and the line.
    ///
    /// ```
    /// use kolo_graph::PlacementRules;
    ///
    /// let rules = PlacementRules::parse("*/weights -> /cpu:0\nop=MatMul -> /gpu:0", "pins.txt")?;
    /// assert_eq!(rules.len(), 2);
    /// let error = PlacementRules::parse("# pins\n*/weights /cpu:0", "pins.txt").unwrap_err();
    /// assert!(error.message().starts_with("pins.txt:2: "));
    /// # Ok::<(), kolo_core::Error>(())
    /// ```
    pub fn parse(text: &str, source: &str) -> Result<PlacementRules> {
        let source: Arc<str> = source.into();
        let mut rules = Vec::new();
        for (i, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let origin = Origin::file(source.clone(), i + 1);
            rules.push(parse_rule(line, origin.clone()).map_err(|error| error.context(origin))?);
        }
        Ok(PlacementRules { rules: rules.into() })
    }

    /// How many rules there are.
    pub fn len(&self) -> usize {
        self.rules.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// What a node asks for under the rules; what it asks for itself where no rule applies. Usable as a device function.
    pub fn device(&self, node: &Node) -> DeviceSpec {
        self.find(node).map_or_else(|| node.device.clone(), |rule| rule.device_of(node))
    }

    /// Whether a rule decides what this node asks for: one that the program's own pin does not outweigh.
    pub fn decides(&self, node: &Node) -> bool {
        self.find(node).is_some_and(|rule| rule.overrides || node.device.is_empty())
    }

    /// The nodes with what they ask for under the rules. Nodes that no rule changes are shared with `nodes`.
    pub fn apply(&self, nodes: &Nodes) -> Nodes {
        let mut ruled = nodes.clone();
        if self.is_empty() {
            return ruled;
        }
        for (id, node) in nodes.iter() {
            let Some(rule) = self.find(node) else { continue };
            let device = rule.device_of(node);
            if device != node.device {
                let changed = ruled.node_mut(id);
                // A pin that was only completed is still the program's.
                if rule.overrides || node.device.is_empty() {
                    changed.device_source = Some(rule.origin.clone());
                }
                changed.device = device;
            }
        }
        ruled
    }

    /// What the rules make of a graph.
    pub fn table(&self, nodes: &Nodes) -> RuleTable {
        let mut used = vec![false; self.rules.len()];
        let rows = nodes.iter().map(|(_, node)| {
            let at = self.rules.iter().position(|rule| rule.matches(node));
            let rule = at.map(|at| {
                used[at] = true;
                &self.rules[at]
            });
            RuleRow {
                node: node.name.to_string(),
                op: node.op().to_owned(),
                pin: node.device.clone(),
                device: rule.map_or_else(|| node.device.clone(), |rule| rule.device_of(node)),
                rule: rule.map(|rule| rule.origin.clone()),
            }
        });
        let rows = rows.collect();
        let unused = self.rules.iter().zip(&used).filter(|(_, used)| !**used).map(|(rule, _)| rule.origin.clone());
        RuleTable { rows, unused: unused.collect() }
    }

    fn find(&self, node: &Node) -> Option<&PinRule> {
        self.rules.iter().find(|rule| rule.matches(node))
    }
}

impl PinRule {
    fn matches(&self, node: &Node) -> bool {
        self.op.as_deref().is_none_or(|op| glob(op, node.op()))
            && self.name.as_deref().is_none_or(|name| glob(name, &node.name))
            && self.dtype.is_none_or(|dtype| node_dtype(node) == Some(dtype))
    }

    /// What a node that takes this rule asks for.
    fn device_of(&self, node: &Node) -> DeviceSpec {
        match self.overrides {
            true => node.device.overridden_by(&self.device),
            false => self.device.overridden_by(&node.device),
        }
    }
}

fn parse_rule(line: &str, origin: Origin) -> Result<PinRule> {
    let (conditions, device) = line.rsplit_once("->").or_else(|| line.rsplit_once('→')).ok_or_else(|| {
        Error::invalid_argument(format!("'{line}' has no '->'; write for example '*/weights -> /cpu:0'"))
    })?;
    let device = device.trim();
    if device.is_empty() {
        return Err(Error::invalid_argument("there is no device after '->'; write for example /cpu:0"));
    }
    let conditions = conditions.trim();
    let (overrides, conditions) = match conditions.strip_prefix('!') {
        Some(rest) => (true, rest),
        None => (false, conditions),
    };
    let device = DeviceSpec::parse(device)?;
    let mut rule = PinRule { origin, overrides, name: None, op: None, dtype: None, device };
    let mut n_conditions = 0;
    for condition in conditions.split_whitespace() {
        n_conditions += 1;
        let (key, value) = condition.split_once('=').unwrap_or(("name", condition));
        if value.is_empty() {
            return Err(Error::invalid_argument(format!("'{condition}' has no value")));
        }
        let twice = match key {
            "name" => rule.name.replace(value.to_owned()).is_some(),
            "op" => rule.op.replace(value.to_owned()).is_some(),
            "dtype" => rule.dtype.replace(DType::from_name(value)?).is_some(),
            _ => {
                return Err(Error::invalid_argument(format!(
                    "'{condition}': conditions are a pattern for the name, or name=, op= or dtype= with a value"
                )));
            }
        };
        if twice {
            return Err(Error::invalid_argument(format!("there are two conditions on the {key}; write two rules")));
        }
    }
    if n_conditions == 0 {
        return Err(Error::invalid_argument("there is nothing before '->'; write * for all nodes"));
    }
    Ok(rule)
}

/// Whether `text` is as `pattern` says: `*` stands for anything, `?` for one character.
fn glob(pattern: &str, text: &str) -> bool {
    let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
    let (mut p, mut t) = (0, 0);
    // Where to go on if what follows the last star does not fit: that star takes one more.
    let mut retry = None;
    loop {
        match (pattern.get(p), text.get(t)) {
            (Some(b'*'), _) => {
                retry = Some((p + 1, t));
                p += 1;
                continue;
            }
            (Some(b'?'), Some(_)) => {}
            (Some(want), Some(have)) if want == have => {}
            (None, None) => return true,
            _ => match retry {
                Some((after, from)) if from < text.len() => {
                    retry = Some((after, from + 1));
                    (p, t) = (after, from + 1);
                    continue;
                }
                _ => return false,
            },
        }
        p += 1;
        t += 1;
    }
}

impl fmt::Display for RuleTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dash = |spec: &DeviceSpec| if spec.is_empty() { "-".to_owned() } else { spec.to_string() };
        let rule = |row: &RuleRow| row.rule.as_ref().map_or_else(|| "-".to_owned(), Origin::to_string);
        for row in &self.rows {
            writeln!(f, "{} ({}): {} => {} [{}]", row.node, row.op, dash(&row.pin), dash(&row.device), rule(row))?;
        }
        for origin in &self.unused {
            writeln!(f, "{origin}: no node is like this")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::graph;

    fn table(rules: &str) -> RuleTable {
        let g = graph();
        let x = g.op("Source").name("tower1/weights").out();
        g.device("/gpu:1", || g.op("Neg").name("tower1/neg").input(x).build());
        g.op("Integer").name("n").build();
        PlacementRules::parse(rules, "pins.txt").unwrap().table(&g.snapshot())
    }

    fn devices(rules: &str) -> Vec<String> {
        let table = table(rules);
        table.rows.iter().map(|row| row.device.to_string()).collect()
    }

    #[test]
    fn the_first_rule_that_holds_decides() {
        let rules = "# comment\n\n*/weights -> /cpu:0  # tail\n* -> /cpu:2";
        assert_eq!(devices(rules), ["/device:CPU:0", "/device:GPU:1", "/device:CPU:2"]);
        let rows = table(rules).rows;
        let origins: Vec<String> = rows.iter().map(|row| row.rule.as_ref().unwrap().to_string()).collect();
        assert_eq!(origins, ["pins.txt:3", "pins.txt:4", "pins.txt:4"]);
    }

    #[test]
    fn ops_and_dtypes_and_names_must_all_hold() {
        assert_eq!(devices("op=S*ce -> /cpu:3"), ["/device:CPU:3", "/device:GPU:1", ""]);
        assert_eq!(devices("dtype=int32 -> /cpu:3"), ["", "/device:GPU:1", "/device:CPU:3"]);
        assert_eq!(devices("dtype=float op=Source x* -> /cpu:3"), ["", "/device:GPU:1", ""]);
        assert_eq!(devices("dtype=float op=Source t* -> /cpu:3"), ["/device:CPU:3", "/device:GPU:1", ""]);
    }

    #[test]
    fn a_pin_of_the_program_is_completed_and_overridden_only_on_request() {
        assert_eq!(devices("*/neg -> /job:ps/cpu:5")[1], "/job:ps/device:GPU:1");
        assert_eq!(devices("! */neg → /cpu")[1], "/device:CPU:*");
        assert_eq!(devices("!*/neg -> /job:ps")[1], "/job:ps/device:GPU:1");
    }

    #[test]
    fn nodes_carry_the_rule_as_the_place_of_their_pin() {
        let g = graph();
        g.op("Source").name("a").build();
        g.device("/cpu:1", || g.op("Source").name("b").build());
        let rules = PlacementRules::parse("* -> /job:w/cpu:0", "p").unwrap();
        let nodes = rules.apply(&g.snapshot());
        let line = |name: &str| nodes.node(nodes.find(name).unwrap()).device_source.as_ref().unwrap().to_string();
        assert_eq!(line("a"), "p:1");
        assert!(line("b").contains("rules.rs:"), "a pin that is completed is still the program's: {}", line("b"));
    }

    #[test]
    fn rules_that_nothing_takes_are_listed() {
        let table = table("*/wieghts -> /cpu:0\nn -> /cpu:1");
        assert_eq!(table.unused, [Origin::file("pins.txt", 1)]);
        let text = table.to_string();
        assert!(text.contains("n (Integer): - => /device:CPU:1 [pins.txt:2]\n"), "{text}");
        assert!(text.ends_with("pins.txt:1: no node is like this\n"), "{text}");
    }

    #[test]
    fn errors_name_file_line_and_what_is_wrong() {
        for (text, part) in [
            ("a /cpu:0", "pins.txt:1: 'a /cpu:0' has no '->'"),
            ("\n\na -> ", "pins.txt:3: there is no device"),
            ("-> /cpu:0", "pins.txt:1: there is nothing before"),
            ("! -> /cpu:0", "pins.txt:1: there is nothing before"),
            ("a -> /cpu:x", "pins.txt:1: Malformed device specification '/cpu:x'"),
            ("dtype=flaot -> /cpu:0", "flaot"),
            ("type=float -> /cpu:0", "'type=float': conditions are"),
            ("op= -> /cpu:0", "'op=' has no value"),
            ("a b -> /cpu:0", "two conditions on the name"),
        ] {
            let error = PlacementRules::parse(text, "pins.txt").unwrap_err();
            assert!(error.message().contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn globs() {
        for (pattern, text) in
            [("*", ""), ("a*c", "abc"), ("a*c", "ac"), ("*a*b", "xaxbab"), ("??", "ab"), ("**", "x"), ("a>-b", "a>-b")]
        {
            assert!(glob(pattern, text), "{pattern} {text}");
        }
        for (pattern, text) in [("a", "ab"), ("?", ""), ("a*c", "abd"), ("*a*b", "ba"), ("", "a"), ("*?x", "x")] {
            assert!(!glob(pattern, text), "{pattern} {text}");
        }
    }
}
