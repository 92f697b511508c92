//! Attacks on running servers: what strangers, other users of the machine and hostile graphs must not be able to do.
#![allow(clippy::unwrap_used)] // Helpers of tests may fail as tests do.

mod allocations;
mod claims;
mod connections;
mod local_users;
mod loops;
#[path = "../support/mod.rs"]
mod support;
mod victim;
