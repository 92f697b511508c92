//! What a kernel may ask of its step. The runtime implements these; a kernel never sees more of it.

use std::fmt;
use std::sync::Arc;

use kolo_core::{Error, Result, Tensor};

use crate::cancel::CancelToken;
use crate::resource::ResourceStore;

/// The step a kernel runs in.
pub trait StepServices: Send + Sync {
    /// A number no other step of this process has now.
    fn step_id(&self) -> u64;
    /// The objects of this node's device that outlive the step.
    fn resources(&self) -> &Arc<ResourceStore>;
    /// The objects that live as long as the step: tensor arrays, stacks.
    fn step_resources(&self) -> &Arc<ResourceStore>;
    /// Where tensors cross from one device to another.
    fn rendezvous(&self) -> &Arc<dyn Rendezvous>;
    /// Tells when the step is cancelled.
    fn cancel(&self) -> &Arc<CancelToken>;
}

/// A tensor that was sent, and whether it is dead.
#[derive(Clone, Debug)]
pub struct Received {
    /// The value; meaningless if dead.
    pub tensor: Tensor,
    /// It comes from a branch that was not taken.
    pub is_dead: bool,
}

/// Names one transfer of one step.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RendezvousKey {
    /// `SEND_DEVICE;INCARNATION;RECV_DEVICE;EDGE`, shared by all iterations.
    pub edge: Arc<str>,
    /// The frame and iteration.
    pub frame_iteration: FrameIteration,
}

impl RendezvousKey {
    /// The key of a transfer outside of all loops, or, if the text ends in `;FRAME:ITERATION`, inside of one.
    pub fn parse(text: &str) -> Result<RendezvousKey> {
        let invalid = || Error::invalid_argument(format!("Invalid  rendezvous key: {text}"));
        let (edge, loops) = text.rsplit_once(';').ok_or_else(invalid)?;
        let (frame, iteration) = loops.split_once(':').ok_or_else(invalid)?;
        let parts: Vec<&str> = edge.split(';').collect();
        if parts.len() != 4 || parts.iter().any(|part| part.is_empty()) {
            return Err(invalid());
        }
        let number = |text: &str| text.parse::<u64>().map_err(|_| invalid());
        let frame_iteration = FrameIteration { frame: number(frame)?, iteration: number(iteration)? };
        Ok(RendezvousKey { edge: edge.into(), frame_iteration })
    }

    /// Part `index` of the edge: the sending device, its incarnation, the receiving device, the name.
    pub fn part(&self, index: usize) -> &str {
        self.edge.split(';').nth(index).unwrap_or("")
    }
}

/// As TensorFlow's workers spell it.
impl fmt::Display for RendezvousKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{};{}", self.edge, self.frame_iteration)
    }
}

/// An iteration of an instance of a loop; zeros outside of all loops. The same in every process of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FrameIteration {
    /// Which instance of which loop.
    pub frame: u64,
    /// Its iteration, from 0.
    pub iteration: u64,
}

impl fmt::Display for FrameIteration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.frame, self.iteration)
    }
}

/// Where producers leave tensors and consumers pick them up, in either order. A producer never blocks.
pub trait Rendezvous: Send + Sync {
    /// Leaves a tensor. Sending twice under one key is an error.
    fn send(&self, key: RendezvousKey, value: Received) -> Result<()>;
    /// Calls `done` with the tensor, now or when it is sent; with an error if the step ends first.
    fn recv(&self, key: RendezvousKey, done: Box<dyn FnOnce(Result<Received>) + Send>);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_as_they_are_written() {
        let text = "/job:ps/replica:0/task:0/device:CPU:0;4c6821f8cba4139b;/job:w/replica:0/task:1/device:CPU:0;edge_4_v/read;7:3";
        let key = RendezvousKey::parse(text).unwrap();
        assert_eq!(key.to_string(), text);
        assert_eq!((key.part(1), key.part(3)), ("4c6821f8cba4139b", "edge_4_v/read"));
        assert_eq!(key.frame_iteration, FrameIteration { frame: 7, iteration: 3 });
        for wrong in ["", "a;b;c;d", "a;b;c;d;0", "a;b;;d;0:0", "a;b;c;d;x:0", "a;b;c;d;e;0:0"] {
            let error = RendezvousKey::parse(wrong).unwrap_err();
            assert_eq!(error.message(), format!("Invalid  rendezvous key: {wrong}"));
        }
    }
}
