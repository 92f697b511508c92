//! Captures: parts of plans that a device records once and replays as one call; on an NVIDIA GPU as a CUDA graph.
//!
//! [`slot`] captures a plan whole. [`segments`] finds what can be captured of a plan that cannot, [`split`] makes nodes of
//! those segments, [`replay`] is one recording and what must be unchanged for a replay, and [`limits`] are the deadline and
//! the cancellation of waits for a device.

pub(crate) mod limits;
mod replay;
mod segments;
pub(crate) mod slot;
pub(crate) mod split;
