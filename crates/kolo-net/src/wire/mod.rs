//! What crosses the network: TensorFlow's messages, tensors inside them, and how much a peer may send.

pub mod limits;
pub mod proto;
pub mod tensor_wire;
