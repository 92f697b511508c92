//! Rows brought together by segment: Segment*, UnsortedSegment*, SparseSegment*.

pub mod unsorted;
