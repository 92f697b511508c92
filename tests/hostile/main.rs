//! Attacks on a server that runs, by clients that may run graphs. Each must end with an error for the attacker and leave
//! the server to everybody else.
#![allow(clippy::unwrap_used)] // Helpers of tests may fail as tests do.

#[path = "../support/mod.rs"]
mod support;

mod allocations;
mod loops;
mod victim;
