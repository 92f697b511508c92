//! Kolo's devices: memory, threads and the kernels' inner loops.
//!
//! The only crate of the workspace that may contain `unsafe`.

pub mod cpu;
