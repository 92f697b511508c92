//! The protobuf messages for a task's devices and for traced steps.

use std::collections::BTreeMap;
use std::time::SystemTime;

use kolo_device::DeviceAttributes;
use kolo_runtime::NodeTrace;

use crate::wire::proto;

/// What TensorFlow's CPU devices report; clients display it and do not use it otherwise.
const CPU_MEMORY_LIMIT: i64 = 268_435_456;

/// A device as a message.
pub(crate) fn device_attributes(device: &DeviceAttributes) -> proto::DeviceAttributes {
    proto::DeviceAttributes {
        name: device.name.to_string(),
        device_type: device.name.kind.to_string(),
        memory_limit: device.memory_limit.map_or(CPU_MEMORY_LIMIT, |limit| i64::try_from(limit).unwrap_or(i64::MAX)),
        locality: Some(proto::DeviceLocality::default()),
        incarnation: device.incarnation,
        physical_device_desc: device.description.clone(),
        xla_global_id: -1,
    }
}

/// A step's trace as a message, with times since 1970 as in TensorFlow.
pub(crate) fn step_stats(nodes: &[NodeTrace], started: SystemTime) -> proto::StepStats {
    let start = started.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let mut threads: BTreeMap<&str, u32> = BTreeMap::new();
    let mut devices: BTreeMap<&str, proto::DeviceStepStats> = BTreeMap::new();
    // As in TensorFlow's traces, a receive appears under the name of the call, and a send, which takes no time, does
    // not appear.
    for node in nodes.iter().filter(|node| !["_Send", "_HostSend"].contains(&node.op)) {
        let is_receive = ["_Recv", "_HostRecv"].contains(&node.op);
        let n_threads = threads.len() as u32;
        let thread_id = *threads.entry(&node.thread).or_insert(n_threads);
        let device = devices.entry(&node.device).or_insert_with(|| proto::DeviceStepStats {
            device: node.device.to_string(),
            ..proto::DeviceStepStats::default()
        });
        device.thread_names.insert(thread_id, node.thread.clone());
        let begin = start + node.start;
        device.node_stats.push(proto::NodeExecStats {
            node_name: if is_receive { "RecvTensor".to_owned() } else { node.node.to_string() },
            all_start_micros: begin.as_micros() as i64,
            all_start_nanos: begin.as_nanos() as i64,
            op_end_rel_micros: node.duration.as_micros() as i64,
            op_end_rel_nanos: node.duration.as_nanos() as i64,
            all_end_rel_micros: node.duration.as_micros() as i64,
            all_end_rel_nanos: node.duration.as_nanos() as i64,
            scheduled_micros: begin.as_micros() as i64,
            scheduled_nanos: begin.as_nanos() as i64,
            timeline_label: match is_receive {
                true => format!("[{}B] {}", node.n_bytes, node.node),
                false => format!("{} = {}()", node.node, node.op),
            },
            thread_id,
            output: vec![proto::NodeOutput {
                slot: 0,
                tensor_description: Some(proto::TensorDescription {
                    allocation_description: Some(proto::AllocationDescription {
                        requested_bytes: node.n_bytes as i64,
                        allocated_bytes: node.n_bytes as i64,
                        allocator_name: "cpu".to_owned(),
                        ..proto::AllocationDescription::default()
                    }),
                    ..proto::TensorDescription::default()
                }),
            }],
            ..proto::NodeExecStats::default()
        });
    }
    proto::StepStats { dev_stats: devices.into_values().collect() }
}
