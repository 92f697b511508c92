//! Groups of GPUs, one for each rank, that exchange data by NCCL.
//!
//! ```text
//! compute stream ──gradient──┬──▶ backward goes on ──▶ … ──▶ await ──▶ updates
//!                            ▼event                          ▲event
//! the group's stream ──▶ send and receive shares ─▶ reduce ─▶ all-gather
//! ```
//!
//! NCCL promises no order in which it sums: its results change with the number of ranks, channels and machines. So by default it only
//! moves bytes. Each rank gets its share of a vector from all others, combines them in the fixed tree over ranks with a kernel of
//! ours, and all gather the shares: the same 2 (N - 1)/N bytes for each byte of the vector as a ring, and the same bits as on CPUs.
//!
//! | state | accessed by |
//! | --- | --- |
//! | the communicator | whoever holds its lock (`communicator.rs`); an abort takes it |
//! | the exchanges that nobody has waited for yet | any thread, one lock |
//! | the scratch memory | the group's stream, on which exchanges follow each other |

mod communicator;
mod library;
mod ranks;

pub(super) use library::nccl_version;
pub(super) use ranks::{NcclRanks, hardware_of};
