//! Captures: parts of plans that a device records once and replays with one call; on an NVIDIA GPU as a CUDA graph.
//!
//! [`slot`] captures a whole plan. If that is not possible, [`segments`] finds the nodes that can be captured and
//! [`split`] turns each segment into a node. [`replay`] is one recording and the conditions under which it can be
//! replayed. [`limits`] are the deadline and the cancellation of waits for a device.

pub(crate) mod limits;
mod replay;
mod segments;
pub(crate) mod slot;
pub(crate) mod split;
