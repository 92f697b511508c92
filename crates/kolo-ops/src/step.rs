//! What a kernel may ask of its step. The runtime implements these; a kernel never sees more of it.

use std::sync::Arc;

use kolo_core::{Result, Tensor};

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
    /// The frame and iteration; 0 outside of loops.
    pub frame_iteration: u64,
}

/// Where producers leave tensors and consumers pick them up, in either order. A producer never blocks.
pub trait Rendezvous: Send + Sync {
    /// Leaves a tensor. Sending twice under one key is an error.
    fn send(&self, key: RendezvousKey, value: Received) -> Result<()>;
    /// Calls `done` with the tensor, now or when it is sent; with an error if the step ends first.
    fn recv(&self, key: RendezvousKey, done: Box<dyn FnOnce(Result<Received>) + Send>);
}
