//! `ClusterDef` and `ServerDef`: the tasks of a cluster, and the task of a server.

use std::collections::BTreeMap;

use super::ConfigProto;

/// `tensorflow.ClusterDef`: the tasks of a cluster.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ClusterDef {
    /// The jobs.
    #[prost(message, repeated, tag = "1")]
    pub job: Vec<JobDef>,
}

/// `tensorflow.JobDef`: the tasks of one job.
#[derive(Clone, PartialEq, prost::Message)]
pub struct JobDef {
    /// The job's name, such as `ps`.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Addresses by task index; there may be gaps.
    #[prost(btree_map = "int32, string", tag = "2")]
    pub tasks: BTreeMap<i32, String>,
}

/// `tensorflow.ServerDef`: one server of a cluster.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ServerDef {
    /// The cluster.
    #[prost(message, optional, tag = "1")]
    pub cluster: Option<ClusterDef>,
    /// The server's job.
    #[prost(string, tag = "2")]
    pub job_name: String,
    /// Its task.
    #[prost(int32, tag = "3")]
    pub task_index: i32,
    /// The default options of sessions.
    #[prost(message, optional, tag = "4")]
    pub default_session_config: Option<ConfigProto>,
    /// `grpc`.
    #[prost(string, tag = "5")]
    pub protocol: String,
    /// The port to listen on, if not that of its address.
    #[prost(int32, tag = "6")]
    pub port: i32,
    /// Which tasks each task talks to.
    #[prost(message, optional, tag = "7")]
    pub cluster_device_filters: Option<ClusterDeviceFilters>,
    /// Always 0.
    #[prost(int32, tag = "8")]
    pub replica: i32,
}

/// `tensorflow.ClusterDeviceFilters`: which tasks each task talks to.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ClusterDeviceFilters {
    /// The jobs.
    #[prost(message, repeated, tag = "1")]
    pub jobs: Vec<JobDeviceFilters>,
}

/// `tensorflow.JobDeviceFilters`: which tasks each task of a job talks to.
#[derive(Clone, PartialEq, prost::Message)]
pub struct JobDeviceFilters {
    /// The job.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Filters by task index.
    #[prost(btree_map = "int32, message", tag = "2")]
    pub tasks: BTreeMap<i32, TaskDeviceFilters>,
}

/// `tensorflow.TaskDeviceFilters`: which tasks one task talks to.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TaskDeviceFilters {
    /// Partial device names.
    #[prost(string, repeated, tag = "1")]
    pub device_filters: Vec<String>,
}
