//! Variables: values that outlive steps, in TensorFlow's two families, and the ops that change them in place.
//!
//! A resource variable is reached through a handle (`VarHandleOp`), a reference variable through the reference that
//! `VariableV2` gives out. Both are a [`crate::VariableCell`] in the device's [`crate::ResourceStore`], so everything here is
//! written once for the cell. A read is a snapshot in either family, and costs no copy: whoever writes next copies first if
//! a reader still holds the value.

use crate::Op;

pub mod assign;
pub mod count_up_to;
pub mod gather;
pub mod handle;
pub mod mutex;
pub(crate) mod number;
pub mod read;
pub mod reference;
pub mod scatter;
pub mod scatter_nd;
pub mod session_tensor;
mod source;
pub mod strided_slice_assign;
pub mod temporary;

/// The ops of this area.
pub static OPS: &[&Op] = &[
    &assign::ASSIGN,
    &assign::ASSIGN_ADD,
    &assign::ASSIGN_ADD_VARIABLE,
    &assign::ASSIGN_SUB,
    &assign::ASSIGN_SUB_VARIABLE,
    &assign::ASSIGN_VARIABLE,
    &count_up_to::COUNT_UP_TO,
    &count_up_to::RESOURCE_COUNT_UP_TO,
    &gather::RESOURCE_GATHER,
    &gather::RESOURCE_GATHER_ND,
    &handle::DESTROY_RESOURCE,
    &handle::DISABLE_COPY_ON_READ,
    &handle::VAR_HANDLE,
    &handle::VAR_IS_INITIALIZED,
    &handle::VARIABLE_SHAPE,
    &mutex::CONSUME_MUTEX_LOCK,
    &mutex::MUTEX_LOCK,
    &mutex::MUTEX_V2,
    &read::READ_VARIABLE,
    &read::READ_VARIABLES,
    &reference::IS_VARIABLE_INITIALIZED,
    &reference::VARIABLE,
    &reference::VARIABLE_V2,
    &scatter::RESOURCE_SCATTER_ADD,
    &scatter::RESOURCE_SCATTER_DIV,
    &scatter::RESOURCE_SCATTER_MAX,
    &scatter::RESOURCE_SCATTER_MIN,
    &scatter::RESOURCE_SCATTER_MUL,
    &scatter::RESOURCE_SCATTER_SUB,
    &scatter::RESOURCE_SCATTER_UPDATE,
    &scatter::SCATTER_ADD,
    &scatter::SCATTER_DIV,
    &scatter::SCATTER_MAX,
    &scatter::SCATTER_MIN,
    &scatter::SCATTER_MUL,
    &scatter::SCATTER_SUB,
    &scatter::SCATTER_UPDATE,
    &scatter_nd::RESOURCE_SCATTER_ND_ADD,
    &scatter_nd::RESOURCE_SCATTER_ND_SUB,
    &scatter_nd::RESOURCE_SCATTER_ND_UPDATE,
    &scatter_nd::SCATTER_ND_ADD,
    &scatter_nd::SCATTER_ND_SUB,
    &scatter_nd::SCATTER_ND_UPDATE,
    &session_tensor::DELETE_SESSION_TENSOR,
    &session_tensor::GET_SESSION_HANDLE,
    &session_tensor::GET_SESSION_HANDLE_V2,
    &session_tensor::GET_SESSION_TENSOR,
    &strided_slice_assign::RESOURCE_STRIDED_SLICE_ASSIGN,
    &strided_slice_assign::STRIDED_SLICE_ASSIGN,
    &temporary::DESTROY_TEMPORARY_VARIABLE,
    &temporary::TEMPORARY_VARIABLE,
];
