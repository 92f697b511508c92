//! The inner loops of the CPU device, over plain slices.
//!
//! Nothing here depends on tensors, graphs or sessions. A kernel passes slices, sizes and a pool:
//!
//! ```text
//! pool    IntraPool: splits one kernel's work over a few threads
//! stop    stops those loops in the middle
//! gemm    matrix products: packing, blocking, micro-kernels per instruction set
//! conv    convolutions, as products that never store their patch matrix
//! vmath   exp, log, tanh, sigmoid and reductions over slices
//! pages   large blocks of memory, in huge pages
//! topology NUMA nodes, and binding threads to cores
//! stream  stores that bypass the caches
//! transpose transposition of elements of four bytes
//! isa     runs plain loops compiled for the best instruction set present
//! ```
//!
//! Every result is the same bit for bit for any number of threads: work is split by the shape of
//! the problem, and threads only determine which core computes which part.

pub mod conv;
pub mod device;
pub mod gemm;
pub mod halves;
mod isa;
pub(crate) mod machine_memory;
pub(crate) mod pages;
pub mod pool;
pub mod reduce;
mod scratch;
mod stop;
pub mod stream;
pub mod topology;
mod transpose;
pub mod vmath;

pub use isa::{Isa, vectorize, vectorize_256, vectorize_on};
pub use pages::prefer_huge_pages;
pub use pool::IntraPool;
pub use stop::{Looking, Stopped, looking, looking_by, stop_if_asked, stoppable};
pub use transpose::transpose_words;
