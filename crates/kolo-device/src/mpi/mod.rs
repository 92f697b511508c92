//! MPI, for ranks that `mpirun` has started: messages between them over whatever network its library knows.
//!
//! The library is opened at run time, so the same binary runs with Open MPI, with MPICH, and without either. The two have different
//! handles (addresses of objects, numbers), of which `library.rs` has a table each. [`MpiEnd`] is one rank's end: messages whose
//! memory it owns until MPI has let go of it, whatever becomes of the call that they were for.

mod end;
mod library;

pub use end::{MpiEnd, Receiving, Sending};
pub use library::MpiKind;
