//! TensorFlow's event messages, with TensorFlow's names and field numbers.

use std::collections::BTreeMap;
use std::time::Duration;

use kolo_ops::summary::proto::Summary;
use kolo_runtime::RunMetadata;
use prost::Message as _;
use prost::bytes::Bytes;

/// `tensorflow.Event`: one record of an event file.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Event {
    /// When it happened, in seconds since 1970.
    #[prost(double, tag = "1")]
    pub wall_time: f64,
    /// In which step.
    #[prost(int64, tag = "2")]
    pub step: i64,
    /// What happened.
    #[prost(oneof = "EventContent", tags = "3, 4, 5, 7, 8, 9")]
    pub what: Option<EventContent>,
}

/// The kinds of event.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum EventContent {
    /// The first event of a file.
    #[prost(string, tag = "3")]
    FileVersion(String),
    /// A `GraphDef`, as bytes.
    #[prost(bytes = "vec", tag = "4")]
    GraphDef(Vec<u8>),
    /// Values of a step.
    #[prost(message, tag = "5")]
    Summary(Summary),
    /// A training began, stopped or saved.
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
    /// What a run told besides its results.
    #[prost(message, tag = "8")]
    TaggedRunMetadata(TaggedRunMetadata),
    /// A `MetaGraphDef`, as bytes.
    #[prost(bytes = "vec", tag = "9")]
    MetaGraphDef(Vec<u8>),
}

/// `tensorflow.SessionLog`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SessionLog {
    /// What happened.
    #[prost(enumeration = "SessionStatus", tag = "1")]
    pub status: i32,
    /// The checkpoint, if one was written.
    #[prost(string, tag = "2")]
    pub checkpoint_path: String,
    /// More, for people.
    #[prost(string, tag = "3")]
    pub msg: String,
}

/// What happened to a training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum SessionStatus {
    /// Nothing is said.
    Unspecified = 0,
    /// It began, or began again at this step: TensorBoard forgets what an earlier run wrote about later steps.
    Start = 1,
    /// It stopped.
    Stop = 2,
    /// It saved a checkpoint.
    Checkpoint = 3,
}

/// `tensorflow.TaggedRunMetadata`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TaggedRunMetadata {
    /// Its name.
    #[prost(string, tag = "1")]
    pub tag: String,
    /// A `RunMetadata`, as bytes.
    #[prost(bytes = "vec", tag = "2")]
    pub run_metadata: Vec<u8>,
}

/// An event whose summary is bytes already.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct SummaryEvent {
    #[prost(double, tag = "1")]
    pub wall_time: f64,
    #[prost(int64, tag = "2")]
    pub step: i64,
    #[prost(bytes = "bytes", tag = "5")]
    pub summary: Bytes,
}

/// The trace of a step as the bytes of a `tensorflow.RunMetadata`.
pub(super) fn run_metadata_bytes(metadata: &RunMetadata) -> Vec<u8> {
    let mut devices: BTreeMap<&str, DeviceStepStats> = BTreeMap::new();
    let micros = |time: Duration| i64::try_from(time.as_micros()).unwrap_or(i64::MAX);
    let nanos = |time: Duration| i64::try_from(time.as_nanos()).unwrap_or(i64::MAX);
    for node in &metadata.trace.nodes {
        let device = devices.entry(&node.device).or_default();
        device.device = node.device.to_string();
        let known = device.thread_names.iter().find(|(_, name)| **name == node.thread).map(|(id, _)| *id);
        let thread_id = known.unwrap_or(device.thread_names.len() as u32);
        device.thread_names.insert(thread_id, node.thread.clone());
        device.node_stats.push(NodeExecStats {
            node_name: node.node.to_string(),
            all_start_micros: micros(node.start),
            op_end_rel_micros: micros(node.duration),
            all_end_rel_micros: micros(node.duration),
            timeline_label: format!("{} = {}", node.node, node.op),
            scheduled_micros: micros(node.start),
            thread_id,
            all_start_nanos: nanos(node.start),
            op_end_rel_nanos: nanos(node.duration),
            all_end_rel_nanos: nanos(node.duration),
        });
    }
    let step_stats = StepStats { dev_stats: devices.into_values().collect() };
    RunMetadataProto { step_stats: Some(step_stats) }.encode_to_vec()
}

#[derive(Clone, PartialEq, prost::Message)]
struct RunMetadataProto {
    #[prost(message, optional, tag = "1")]
    step_stats: Option<StepStats>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct StepStats {
    #[prost(message, repeated, tag = "1")]
    dev_stats: Vec<DeviceStepStats>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct DeviceStepStats {
    #[prost(string, tag = "1")]
    device: String,
    #[prost(message, repeated, tag = "2")]
    node_stats: Vec<NodeExecStats>,
    #[prost(btree_map = "uint32, string", tag = "3")]
    thread_names: BTreeMap<u32, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct NodeExecStats {
    #[prost(string, tag = "1")]
    node_name: String,
    #[prost(int64, tag = "2")]
    all_start_micros: i64,
    #[prost(int64, tag = "4")]
    op_end_rel_micros: i64,
    #[prost(int64, tag = "5")]
    all_end_rel_micros: i64,
    #[prost(string, tag = "8")]
    timeline_label: String,
    #[prost(int64, tag = "9")]
    scheduled_micros: i64,
    #[prost(uint32, tag = "10")]
    thread_id: u32,
    #[prost(int64, tag = "13")]
    all_start_nanos: i64,
    #[prost(int64, tag = "15")]
    op_end_rel_nanos: i64,
    #[prost(int64, tag = "16")]
    all_end_rel_nanos: i64,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_runtime::{RunOptions, Session};

    use super::*;

    #[test]
    fn a_trace_is_told_by_device_and_node() {
        let g = kolo_ops::graph();
        let sum = g.placeholder::<f32>("x", kolo_core::PartialShape::scalar()) + 1.0;
        let options = RunOptions { trace: true, ..RunOptions::default() };
        let feeds = [(g.output("x").unwrap(), kolo_core::Tensor::scalar(1.0f32))];
        let (_, metadata) = Session::new(&g).unwrap().run_with(&options, &[sum], &feeds, &[]).unwrap();
        let proto = RunMetadataProto::decode(&run_metadata_bytes(&metadata)[..]).unwrap();
        let devices = proto.step_stats.unwrap().dev_stats;
        assert_eq!(devices[0].device, "/job:localhost/replica:0/task:0/device:CPU:0");
        let is_sum = |node: &&NodeExecStats| node.timeline_label == format!("{} = AddV2", sum.operation().name());
        let node = devices[0].node_stats.iter().find(is_sum).unwrap_or_else(|| panic!("{devices:?}"));
        assert!(devices[0].thread_names.contains_key(&node.thread_id));
    }
}
