//! `KoloClaim` and `KoloReplicate`: a task's variables, copied to another task. Kolo's own.

/// Claims ownership of the calling task's variables; records of the previous owner are refused from now on.
#[derive(Clone, PartialEq, prost::Message)]
pub struct KoloClaimRequest {
    /// The calling task: `/job:ps/replica:0/task:0`.
    #[prost(string, tag = "1")]
    pub task: String,
    /// A secret of the calling process. The process at the task's address is asked whether it is its own.
    #[prost(bytes = "vec", tag = "2")]
    pub nonce: Vec<u8>,
}

/// Asks a task whether a claim is its own.
#[derive(Clone, PartialEq, prost::Message)]
pub struct KoloConfirmRequest {
    /// The nonce of the claim.
    #[prost(bytes = "vec", tag = "1")]
    pub nonce: Vec<u8>,
}

/// Whether it is.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct KoloConfirmResponse {
    /// True if this process has made the claim.
    #[prost(bool, tag = "1")]
    pub is_own: bool,
}

/// The stored variables, and the epoch of the new owner.
#[derive(Clone, PartialEq, prost::Message)]
pub struct KoloClaimResponse {
    /// Must be sent with every record.
    #[prost(uint64, tag = "1")]
    pub epoch: u64,
    /// The variables as they were when the last step was acknowledged.
    #[prost(message, repeated, tag = "2")]
    pub entry: Vec<VariableEntry>,
    /// The process that counted the epoch. Must be sent with every record.
    #[prost(fixed64, tag = "3")]
    pub granted_by: u64,
}

/// A record: the variables that a step has written.
#[derive(Clone, PartialEq, prost::Message)]
pub struct KoloReplicateRequest {
    /// The owner.
    #[prost(string, tag = "1")]
    pub task: String,
    /// The epoch of its claim.
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
    /// Records may overtake each other; the value with the largest number wins.
    #[prost(uint64, tag = "3")]
    pub sequence: u64,
    /// Whether the record holds all variables.
    #[prost(bool, tag = "4")]
    pub is_whole: bool,
    /// The new values.
    #[prost(message, repeated, tag = "5")]
    pub entry: Vec<VariableEntry>,
    /// The process that counted the epoch.
    #[prost(fixed64, tag = "6")]
    pub granted_by: u64,
    /// The nonce of the owner's claim.
    #[prost(bytes = "vec", tag = "7")]
    pub nonce: Vec<u8>,
}

/// The record is stored.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct KoloReplicateResponse {}

/// A variable and its value.
#[derive(Clone, PartialEq, prost::Message)]
pub struct VariableEntry {
    /// The index of the device in the task.
    #[prost(uint32, tag = "1")]
    pub device: u32,
    /// Its container.
    #[prost(string, tag = "2")]
    pub container: String,
    /// Its name in the container.
    #[prost(string, tag = "3")]
    pub name: String,
    /// Absent if the variable was removed.
    #[prost(message, optional, tag = "4")]
    pub value: Option<crate::wire::tensor_wire::WireTensor>,
    /// The shape it was declared with; -1 is unknown.
    #[prost(int64, repeated, tag = "5")]
    pub dims: Vec<i64>,
    /// Whether the rank is known; if not, `dims` is ignored.
    #[prost(bool, tag = "6")]
    pub has_rank: bool,
}
