//! Ranks that come and go: a process is a member of a training for its whole life, and a rank of one world after the other.
//!
//! ```text
//! Membership (agent.rs)     listens and calls, on threads
//!   Protocol (protocol.rs)  decides with the other members who is in the next world: a state machine
//!   connect (mesh.rs)       connects the members of a world, which is then a group as any other (../link.rs, ../watch.rs)
//! ```
//!
//! A world is over when one of its members is lost. Those who are left leave it, agree on the next one without the lost, and are
//! connected within milliseconds. Nobody is needed for that in particular: the member that proposes is the first one that lives.

mod agent;
#[cfg(test)]
mod agent_tests;
mod mesh;
mod messages;
mod protocol;
#[cfg(test)]
mod protocol_tests;
mod sizes;

pub use agent::{ElasticConfig, Membership, NextWorld};
pub use sizes::Sizes;
