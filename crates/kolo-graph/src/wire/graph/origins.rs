//! Where the nodes of a graph's file stand, so that messages can point at a pin.

use std::sync::Arc;

use crate::Origin;
use crate::wire::proto::{FileLineCol, GraphDebugInfo, NodeDef};
use crate::wire::text::Mark;

/// For each node of a message, by its place there, where it stands. Made by [`super::read_graph_file`].
#[derive(Clone, Debug, Default)]
pub struct GraphOrigins {
    /// Empty if the name is not known.
    file: Arc<str>,
    /// The line on which each node begins and that of its device. Binary files have none.
    lines: Vec<(usize, Option<usize>)>,
}

impl GraphOrigins {
    pub(super) fn of_binary(file: &str) -> GraphOrigins {
        GraphOrigins { file: file.into(), lines: Vec::new() }
    }

    pub(super) fn of_text(file: &str, text: &str, marks: &[Mark]) -> GraphOrigins {
        let (mut at, mut line) = (0, 1);
        // Places come in the order of the text, so one pass counts all lines.
        let mut line_of = |offset: usize| {
            line += text.as_bytes()[at..offset].iter().filter(|&&byte| byte == b'\n').count();
            at = offset;
            line
        };
        let lines = marks.iter().map(|mark| (line_of(mark.start), mark.field.map(&mut line_of)));
        GraphOrigins { file: file.into(), lines: lines.collect() }
    }

    /// Where node number `i` was made and where it asks for its device: the line of the program that wrote the graph if
    /// the graph says so, else its lines in the file, else its name there.
    pub(super) fn of(
        &self,
        i: usize,
        node: &NodeDef,
        debug_info: Option<&GraphDebugInfo>,
    ) -> (Option<Origin>, Option<Origin>) {
        let program = debug_info.and_then(|info| program_line(info, &node.name));
        if self.file.is_empty() {
            return (program.clone(), program);
        }
        match self.lines.get(i) {
            Some(&(start, device)) => {
                let in_file = |line| Origin::file(self.file.clone(), line);
                (program.or_else(|| Some(in_file(start))), Some(in_file(device.unwrap_or(start))))
            }
            None => {
                let by_name = || Origin::Graph { file: self.file.clone(), node: node.name.as_str().into() };
                let origin = Some(program.unwrap_or_else(by_name));
                (origin.clone(), origin)
            }
        }
    }
}

/// The innermost frame of a node's stack trace.
fn program_line(info: &GraphDebugInfo, node: &str) -> Option<Origin> {
    let keys = [format!("{node}@"), node.to_owned()];
    let trace = keys.iter().find_map(|key| {
        let by_id = || info.traces_by_id.get(info.name_to_trace_id.get(key)?);
        info.traces.get(key).or_else(by_id)
    })?;
    let frame: &FileLineCol =
        trace.file_line_cols.first().or_else(|| info.frames_by_id.get(trace.frame_id.first()?))?;
    let file = info.files.get(usize::try_from(frame.file_index?).ok()?)?;
    Some(Origin::file(file.as_str(), usize::try_from(frame.line?).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::graph::{read_graph_file, write_graph};
    use crate::wire::proto::StackTrace;

    const TEXT: &str = "node { name: 'a' op: 'NoOp' }\n# a comment\nnode {\n  name: 'b'\n  op: 'NoOp'\n  device: '/cpu:1'\n}\n\
                        node: [{\n name: 'c' },\n { name: 'd' device: '/cpu:0' }]\n";

    fn origins(bytes: &[u8]) -> Vec<(String, String)> {
        let (def, origins) = read_graph_file(bytes, "g.pb").unwrap();
        let of = |(i, node)| {
            let (source, device) = origins.of(i, node, def.debug_info.as_ref());
            (source.unwrap().to_string(), device.unwrap().to_string())
        };
        def.node.iter().enumerate().map(of).collect()
    }

    #[test]
    fn text_has_lines() {
        let pairs = origins(TEXT.as_bytes());
        let pairs: Vec<(&str, &str)> = pairs.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        assert_eq!(pairs, [("g.pb:1", "g.pb:1"), ("g.pb:3", "g.pb:6"), ("g.pb:8", "g.pb:8"), ("g.pb:10", "g.pb:10")]);
    }

    #[test]
    fn binary_has_names_and_the_programs_lines_where_it_says_so() {
        let (mut def, _) = read_graph_file(TEXT.as_bytes(), "").unwrap();
        assert_eq!(origins(&write_graph(&def).unwrap())[1].1, "g.pb, node 'b'");
        let frame = |file_index, line| FileLineCol { file_index, line, ..FileLineCol::default() };
        def.debug_info = Some(GraphDebugInfo {
            files: vec!["model.py".into()],
            traces: [(
                "b@".to_owned(),
                StackTrace { file_line_cols: vec![frame(Some(0), Some(17))], frame_id: vec![] },
            )]
            .into(),
            frames_by_id: [(5, frame(Some(0), Some(20)))].into(),
            name_to_trace_id: [("c".to_owned(), 9), ("d@".to_owned(), 8)].into(),
            traces_by_id: [(9, StackTrace { file_line_cols: vec![], frame_id: vec![5] })].into(),
        });
        let pairs = origins(&write_graph(&def).unwrap());
        let places: Vec<&str> = pairs.iter().map(|(_, pin)| pin.as_str()).collect();
        assert_eq!(places, ["g.pb, node 'a'", "model.py:17", "model.py:20", "g.pb, node 'd'"]);
    }
}
