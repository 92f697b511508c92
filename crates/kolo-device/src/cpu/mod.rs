//! The inner loops of the CPU device, over plain slices.
//!
//! Nothing here knows tensors, graphs or sessions. A kernel brings slices, sizes and a pool:
//!
//! ```text
//! pool    IntraPool: splits one kernel's work over a few threads
//! gemm    matrix products: packing, blocking, micro-kernels per instruction set
//! conv    convolutions, as products that never store their patch matrix
//! vmath   exp, log, tanh, sigmoid and reductions over slices
//! pages   large blocks of memory, in huge pages
//! topology which cores belong to which memory, and binding threads to cores
//! stream  stores that go past the caches
//! transpose rows and columns exchanged
//! isa     runs plain loops compiled for the best instruction set present
//! ```
//!
//! Every result is the same bit for bit whatever the number of threads: work is cut by the shape
//! of the problem, and threads only decide who computes which piece.

pub mod conv;
pub mod device;
pub mod gemm;
pub mod halves;
mod isa;
pub(crate) mod pages;
pub mod pool;
mod scratch;
pub mod stream;
pub mod topology;
mod transpose;
pub mod vmath;

pub use isa::{Isa, vectorize, vectorize_256, vectorize_on};
pub use pages::prefer_huge_pages;
pub use pool::IntraPool;
pub use transpose::transpose_words;
