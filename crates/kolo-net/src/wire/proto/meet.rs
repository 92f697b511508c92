//! `KoloMeet`: what devices of several tasks compute together, where they meet. Kolo's own.

use crate::wire::tensor_wire::WireTensor;

/// A device comes to a meeting.
#[derive(Clone, PartialEq, prost::Message)]
pub struct KoloMeetRequest {
    /// The group.
    #[prost(int32, tag = "1")]
    pub group_key: i32,
    /// The collective.
    #[prost(int32, tag = "2")]
    pub instance_key: i32,
    /// The number of devices.
    #[prost(uint64, tag = "3")]
    pub size: u64,
    /// The dtype's number.
    #[prost(int32, tag = "4")]
    pub data_type: i32,
    /// How elements are combined: `sum`, `min`, `max` or `prod`; empty if they are not.
    #[prost(string, tag = "5")]
    pub reduction: String,
    /// Whether a sum is divided by the number of devices.
    #[prost(bool, tag = "6")]
    pub divide: bool,
    /// Whether one sends to all others; if not, and nothing is combined, rows are gathered.
    #[prost(bool, tag = "7")]
    pub is_broadcast: bool,
    /// The shape of what is sent to all.
    #[prost(uint64, repeated, tag = "8")]
    pub dims: Vec<u64>,
    /// The device.
    #[prost(string, tag = "9")]
    pub device: String,
    /// Its tensor; none if it only receives.
    #[prost(message, optional, tag = "10")]
    pub tensor: Option<WireTensor>,
    /// How long it waits for the others, in seconds; 0 if as long as it takes.
    #[prost(double, tag = "11")]
    pub timeout: f64,
    /// A random number; 0 is none.
    #[prost(int64, tag = "12")]
    pub request_id: i64,
}

/// What the meeting gives the device.
#[derive(Clone, PartialEq, prost::Message)]
pub struct KoloMeetResponse {
    /// The result.
    #[prost(message, optional, tag = "1")]
    pub tensor: Option<WireTensor>,
}
