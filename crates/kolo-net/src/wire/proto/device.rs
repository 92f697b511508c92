//! `DeviceAttributes`: the description of a task's devices.

/// `tensorflow.DeviceAttributes`: one device.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DeviceAttributes {
    /// The full name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// `CPU`, `GPU`, or an unknown type.
    #[prost(string, tag = "2")]
    pub device_type: String,
    /// Bytes of memory.
    #[prost(int64, tag = "4")]
    pub memory_limit: i64,
    /// Where in the machine it is.
    #[prost(message, optional, tag = "5")]
    pub locality: Option<DeviceLocality>,
    /// A random number, never 0, that is new whenever the process starts.
    #[prost(fixed64, tag = "6")]
    pub incarnation: u64,
    /// A description of the physical device.
    #[prost(string, tag = "7")]
    pub physical_device_desc: String,
    /// XLA's number, or -1.
    #[prost(int64, tag = "8")]
    pub xla_global_id: i64,
}

/// `tensorflow.DeviceLocality`: where in its machine a device is.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DeviceLocality {
    /// The bus; 0 is unknown.
    #[prost(int32, tag = "1")]
    pub bus_id: i32,
    /// The NUMA node.
    #[prost(int32, tag = "2")]
    pub numa_node: i32,
    /// Direct links to other devices.
    #[prost(message, optional, tag = "3")]
    pub links: Option<LocalLinks>,
}

/// `tensorflow.LocalLinks`: direct links to other devices.
#[derive(Clone, PartialEq, prost::Message)]
pub struct LocalLinks {
    /// The links.
    #[prost(message, repeated, tag = "1")]
    pub link: Vec<InterconnectLink>,
}

/// `tensorflow.InterconnectLink`: a direct link to another device.
#[derive(Clone, PartialEq, prost::Message)]
pub struct InterconnectLink {
    /// The other device.
    #[prost(int32, tag = "1")]
    pub device_id: i32,
    /// The kind of link.
    #[prost(string, tag = "2")]
    pub r#type: String,
    /// Larger is faster.
    #[prost(int32, tag = "3")]
    pub strength: i32,
}
