//! Control flow, and ops that are there for their effects on it.

use crate::Op;

pub mod abort;
pub mod assert;
pub mod call;
pub mod control_trigger;
pub mod frame;
pub mod merge;
pub mod no_op;
pub mod print;
pub mod ref_select;
pub mod stack;
pub mod switch;
pub mod tensor_array;
pub mod timestamp;

/// The ops of this area.
pub static OPS: &[&Op] = &[
    &abort::ABORT,
    &assert::ASSERT,
    &call::ARG,
    &call::RETVAL,
    &call::PARTITIONED_CALL,
    &call::STATEFUL_PARTITIONED_CALL,
    &call::IF,
    &call::STATELESS_IF,
    &call::WHILE,
    &call::STATELESS_WHILE,
    &call::CASE,
    &call::STATELESS_CASE,
    &call::SYMBOLIC_GRADIENT,
    &control_trigger::CONTROL_TRIGGER,
    &frame::ENTER,
    &frame::REF_ENTER,
    &frame::EXIT,
    &frame::REF_EXIT,
    &frame::NEXT_ITERATION,
    &frame::REF_NEXT_ITERATION,
    &frame::LOOP_COND,
    &merge::MERGE,
    &merge::REF_MERGE,
    &no_op::NO_OP,
    &print::PRINT,
    &print::PRINT_V2,
    &print::STRING_FORMAT,
    &ref_select::REF_SELECT,
    &stack::STACK_V2,
    &stack::STACK_PUSH_V2,
    &stack::STACK_POP_V2,
    &stack::STACK_CLOSE_V2,
    &switch::SWITCH,
    &switch::REF_SWITCH,
    &tensor_array::access::TENSOR_ARRAY_READ_V3,
    &tensor_array::access::TENSOR_ARRAY_WRITE_V3,
    &tensor_array::bulk::TENSOR_ARRAY_GATHER_V3,
    &tensor_array::bulk::TENSOR_ARRAY_SCATTER_V3,
    &tensor_array::bulk::TENSOR_ARRAY_CONCAT_V3,
    &tensor_array::bulk::TENSOR_ARRAY_SPLIT_V3,
    &tensor_array::create::TENSOR_ARRAY_V3,
    &tensor_array::create::TENSOR_ARRAY_GRAD_V3,
    &tensor_array::create::TENSOR_ARRAY_SIZE_V3,
    &tensor_array::create::TENSOR_ARRAY_CLOSE_V3,
    &timestamp::TIMESTAMP,
];

#[cfg(test)]
mod tests;
