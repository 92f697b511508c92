//! Where something was said: a line of the program, a line of a file, or a node of a binary graph.

use std::fmt;
use std::sync::Arc;

use crate::Location;

/// Where a node was made or a device was asked for, so that messages can point there.
///
/// `{}` prints `model.rs:12`, `pins.txt:3` or `graph.pb, node 'x'`; `{:#}` adds the column where one is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A line of the program that is running.
    Program(Location),
    /// A line of a file: rules, a graph as text, or the program that wrote a graph.
    File {
        /// The file's name.
        file: Arc<str>,
        /// The line, from 1.
        line: usize,
    },
    /// A node of a graph that has no lines.
    Graph {
        /// The file's name.
        file: Arc<str>,
        /// The node's name there.
        node: Arc<str>,
    },
    /// A call of the session, such as `move_node`.
    Call(&'static str),
}

impl Origin {
    /// A line of a file.
    pub fn file(file: impl Into<Arc<str>>, line: usize) -> Origin {
        Origin::File { file: file.into(), line }
    }
}

impl From<Location> for Origin {
    fn from(location: Location) -> Origin {
        Origin::Program(location)
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Program(line) if f.alternate() => write!(f, "{line}"),
            Origin::Program(line) => write!(f, "{}:{}", line.file(), line.line()),
            Origin::File { file, line } => write!(f, "{file}:{line}"),
            Origin::Graph { file, node } => write!(f, "{file}, node '{node}'"),
            Origin::Call(call) => f.write_str(call),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_print_as_people_look_them_up() {
        assert_eq!(Origin::file("pins.txt", 3).to_string(), "pins.txt:3");
        let node = Origin::Graph { file: "g.pb".into(), node: "x".into() };
        assert_eq!(node.to_string(), "g.pb, node 'x'");
        let here = Origin::from(std::panic::Location::caller());
        assert!(here.to_string().ends_with("origin.rs:67"), "{here}");
        assert!(format!("{here:#}").contains("origin.rs:67:"), "{here:#}");
    }
}
