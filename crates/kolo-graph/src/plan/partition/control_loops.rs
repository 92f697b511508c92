//! Control loops: what lets a loop span devices.
//!
//! A receive has no inputs, so inside of a loop it would not know when to run. For each loop and each device that one of
//! its edges leads to, a small loop is added there which does nothing but go round as often as the real one:
//!
//! ```text
//! Const -> Enter -> Merge <- NextIteration <- Switch:1        Switch(Merge, the loop's LoopCond, sent across)
//! ```
//!
//! The loop's receives on that device wait for this `Merge`, once in every iteration. In a nested loop the inner `Enter`
//! takes the outer `Merge` instead of a constant. In the last iteration the senders send dead values.
//!
//! A device that only sends into a loop (from loop invariants) gets one too: without it, it would stop after the first
//! iteration while the receivers wait for the second.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use kolo_core::{DType, Error, PartialShape, Result};

use super::draft::{Draft, NodeBuilder, Source, signal};
use crate::rewrite::frames::{FrameId, Frames};
use crate::{Flow, Node, NodeId, OutputInfo};

/// The control loops of a step, by loop and device.
#[derive(Default)]
pub(crate) struct ControlLoops(HashMap<(FrameId, usize), usize>);

impl ControlLoops {
    /// The draft that runs once in every iteration of `frame` on `device`.
    pub(crate) fn merge(&self, frame: Option<FrameId>, device: usize) -> Option<usize> {
        self.0.get(&(frame?, device)).copied()
    }
}

/// The names of control loops begin with this; TensorFlow's workers know them by it.
const PREFIX: &str = "_cloop";

/// True for the `Merge` of a control loop, whoever added it.
pub(crate) fn is_control_loop(node: &Node) -> bool {
    node.def.flow == Flow::Merge && node.name.starts_with(PREFIX)
}

/// Adds a control loop wherever an edge inside of a loop crosses devices. `ids` are the nodes of the first drafts.
/// `InvalidArgument` if such a loop has no predicate, or if the edge leaves a node that does not run in every iteration.
pub(crate) fn add_control_loops(
    drafts: &mut Vec<Draft>,
    frames: &Frames,
    ids: &[NodeId],
    builder: &mut NodeBuilder<'_>,
) -> Result<ControlLoops> {
    let mut wanted = Vec::new();
    let iterating: HashSet<(FrameId, usize)> = drafts
        .iter()
        .filter(|draft| draft.node.def.flow == Flow::NextIteration)
        .filter_map(|draft| Some((draft.output_frame?, draft.device)))
        .collect();
    for target in drafts.iter() {
        for source in target.input_drafts().map(|from| &drafts[from]) {
            let Some(frame) = source.output_frame.filter(|_| source.device != target.device) else { continue };
            check_every_iteration(source, target, builder)?;
            wanted.push((frame, target.device));
            if !iterating.contains(&(frame, source.device)) {
                wanted.push((frame, source.device));
            }
        }
    }
    let mut adder = Adder { drafts, frames, ids, builder, iterating, loops: ControlLoops::default() };
    for (frame, device) in wanted {
        adder.ensure(frame, device)?;
    }
    Ok(adder.loops)
}

/// A receive would wait for ever for a value that only one iteration, or all but one, send.
fn check_every_iteration(source: &Draft, target: &Draft, builder: &NodeBuilder<'_>) -> Result<()> {
    let partial = match source.node.def.flow {
        Flow::NextIteration => true,
        Flow::Enter => !source.node.attrs.bool("is_constant")?,
        Flow::Plain
        | Flow::Switch
        | Flow::Merge
        | Flow::Exit
        | Flow::LoopCond
        | Flow::ControlTrigger
        | Flow::Transfer => false,
    };
    if !partial {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "{} on {} does not run in every iteration of its loop, so {} on {} cannot receive from it: put them on one device, or \
         make the Enter a loop constant",
        source.node.describe(),
        builder.devices[source.device].name,
        target.node.describe(),
        builder.devices[target.device].name
    )))
}

struct Adder<'a, 'b> {
    drafts: &'a mut Vec<Draft>,
    frames: &'a Frames,
    ids: &'a [NodeId],
    builder: &'a mut NodeBuilder<'b>,
    /// Where the real loops go round.
    iterating: HashSet<(FrameId, usize)>,
    loops: ControlLoops,
}

impl Adder<'_, '_> {
    /// The merge of the control loop for `frame` on `device`, added if there is none yet.
    fn ensure(&mut self, frame: FrameId, device: usize) -> Result<usize> {
        if let Some(merge) = self.loops.merge(Some(frame), device) {
            return Ok(merge);
        }
        let shape = self.frames.frame(frame);
        let predicate = shape.loop_cond.and_then(|id| self.ids.binary_search(&id).ok()).ok_or_else(|| {
            Error::invalid_argument(format!("A cross-device loop must have a pivot predicate: {}", shape.name))
        })?;
        let leader = self.drafts[predicate].device;
        if leader != device && !self.iterating.contains(&(frame, leader)) {
            self.ensure(frame, leader)?;
        }
        let around = match shape.parent {
            Some(parent) => self.ensure(parent, device)?,
            None => {
                let name = self.builder.unique(|n| format!("{PREFIX}{n}"));
                let empty = self.builder.empty(name, device)?;
                self.push(empty, vec![], device, None, None)
            }
        };
        let prefix = self.builder.unique(|n| format!("{PREFIX}{n}/Merge"));
        let prefix = prefix.trim_end_matches("Merge");
        let name = |op: &str| format!("{prefix}{op}");
        let (outer, inner) = (shape.parent, Some(frame));
        let data = || ("T", DType::F32.into());
        let of = |draft: usize, index: u32| Source::Draft { draft, index };

        let attrs = vec![
            data(),
            ("frame_name", (&*shape.name).into()),
            ("is_constant", false.into()),
            ("parallel_iterations", shape.parallel_iterations.into()),
        ];
        let enter = self.builder.node("Enter", name("Enter"), device, attrs, vec![signal()], 1)?;
        let enter = self.push(enter, vec![of(around, 0)], device, outer, inner);
        let index = OutputInfo { dtype: DType::I32, is_ref: false, shape: PartialShape::scalar(), handle: None };
        let merge = vec![data(), ("N", 2i64.into())];
        let merge = self.builder.node("Merge", name("Merge"), device, merge, vec![signal(), index], 2)?;
        let merge = self.push(merge, vec![of(enter, 0)], device, inner, inner);
        // Registered before the switch, whose predicate may itself be received once in every iteration.
        self.loops.0.insert((frame, device), merge);
        let switch = self.builder.node("Switch", name("Switch"), device, vec![data()], vec![signal(), signal()], 2)?;
        let switch = self.push(switch, vec![of(merge, 0), of(predicate, 0)], device, inner, inner);
        let next = self.builder.node("NextIteration", name("Next"), device, vec![data()], vec![signal()], 1)?;
        let next = self.push(next, vec![of(switch, 1)], device, inner, inner);
        self.drafts[merge].inputs.push(of(next, 0));
        Ok(merge)
    }

    fn push(
        &mut self,
        node: Node,
        inputs: Vec<Source>,
        device: usize,
        input_frame: Option<FrameId>,
        output_frame: Option<FrameId>,
    ) -> usize {
        let node = Arc::new(node);
        self.drafts.push(Draft { node, inputs, control: vec![], device, origin: None, input_frame, output_frame });
        self.drafts.len() - 1
    }
}
