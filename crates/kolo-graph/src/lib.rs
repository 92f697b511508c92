//! Kolo's graphs: describing, differentiating, placing and partitioning them.

pub mod wire;
