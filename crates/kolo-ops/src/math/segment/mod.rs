//! Rows brought together by segment: Segment*, UnsortedSegment*, SparseSegment*.

pub mod sorted;
pub mod sparse_grad;
pub mod unsorted;
