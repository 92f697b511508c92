//! `KoloClaim` and `KoloReplicate`: a task's variables, copied to another task. Kolo's own.

/// Who asks becomes the owner of its variables; whoever was that before is refused from now on.
#[derive(Clone, PartialEq, prost::Message)]
pub struct KoloClaimRequest {
    /// The asking task: `/job:ps/replica:0/task:0`.
    #[prost(string, tag = "1")]
    pub task: String,
}

/// What there is.
#[derive(Clone, PartialEq, prost::Message)]
pub struct KoloClaimResponse {
    /// To be shown with every record.
    #[prost(uint64, tag = "1")]
    pub epoch: u64,
    /// The variables as they were when the last step was acknowledged.
    #[prost(message, repeated, tag = "2")]
    pub entry: Vec<VariableEntry>,
}

/// What a step has written.
#[derive(Clone, PartialEq, prost::Message)]
pub struct KoloReplicateRequest {
    /// The owner.
    #[prost(string, tag = "1")]
    pub task: String,
    /// What it was given when it claimed them.
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
    /// Records may overtake each other; the value of the largest number counts.
    #[prost(uint64, tag = "3")]
    pub sequence: u64,
    /// These are all variables there are.
    #[prost(bool, tag = "4")]
    pub is_whole: bool,
    /// The new values.
    #[prost(message, repeated, tag = "5")]
    pub entry: Vec<VariableEntry>,
}

/// The values are kept.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct KoloReplicateResponse {}

/// A variable and its value.
#[derive(Clone, PartialEq, prost::Message)]
pub struct VariableEntry {
    /// The number of the device among the task's.
    #[prost(uint32, tag = "1")]
    pub device: u32,
    /// Where it is.
    #[prost(string, tag = "2")]
    pub container: String,
    /// What it is called there.
    #[prost(string, tag = "3")]
    pub name: String,
    /// Absent if the variable has no value any more.
    #[prost(message, optional, tag = "4")]
    pub value: Option<crate::tensor_wire::WireTensor>,
    /// The shape it was declared with; -1 is unknown.
    #[prost(int64, repeated, tag = "5")]
    pub dims: Vec<i64>,
    /// Whether `dims` means anything.
    #[prost(bool, tag = "6")]
    pub has_rank: bool,
}
