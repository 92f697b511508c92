//! `HashTableV2` and `MutableHashTableV2`: handles to tables.

use std::sync::Arc;

use kolo_core::{DType, Error, Result};
use kolo_device::Charge;
use kolo_graph::{Effects, Gradient, Graph, OpDef, Operation, Output, OwnedState, shape_fns};

use super::core::{Table, TableSpec};
use crate::kernel::KernelInit;
use crate::op::{Gpu, KernelDef, Op, cpu_made};
use crate::queue::source::{Described, Source};
use crate::{Cost, Kernel, KernelMaker};

/// A table of a graph, that is filled once: the handle, and the operation that fills it.
#[track_caller]
pub fn hash_table<'g>(keys: Output<'g>, values: Output<'g>) -> (Output<'g>, Operation<'g>) {
    let graph = keys.graph();
    let table = graph.op("HashTableV2").attr("key_dtype", keys.dtype()).attr("value_dtype", values.dtype());
    let table = table.attr("use_node_name_sharing", true).out();
    let fill = graph.op("InitializeTableV2").inputs([table, keys, values]).build();
    (table, fill)
}

/// A handle to a table that changes.
#[track_caller]
pub fn mutable_hash_table(graph: &Graph, key: DType, value: DType) -> Output<'_> {
    let table = graph.op("MutableHashTableV2").attr("key_dtype", key).attr("value_dtype", value);
    table.attr("use_node_name_sharing", true).out()
}

pub(crate) static HASH_TABLE_V2: Op = make("HashTableV2", FIXED);
pub(crate) static MUTABLE_HASH_TABLE_V2: Op = make("MutableHashTableV2", MUTABLE);

const fn make(name: &'static str, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef {
            name,
            signature: "() -> (table_handle:resource) ; container:string=\"\", shared_name:string=\"\", \
                        use_node_name_sharing:bool=false, key_dtype:type, value_dtype:type",
            shape: shape_fns::scalars,
            gradient: Gradient::None("a handle has no inputs"),
            stateful: true,
            effects: Effects::Owns(OwnedState::Other),
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::OBJECTS,
        cost: Cost::Inline,
    }
}

const FIXED: &[KernelDef] = &[cpu_made(KernelMaker::Object(|init| kernel(init, false)))];
const MUTABLE: &[KernelDef] = &[cpu_made(KernelMaker::Object(|init| kernel(init, true)))];

fn kernel(init: &KernelInit<'_>, mutable: bool) -> Result<Box<dyn Kernel>> {
    let (key, value) = (init.attrs().dtype("key_dtype")?, init.attrs().dtype("value_dtype")?);
    let good_key = key == DType::Str || (key.is_integer() && key != DType::U64);
    if !good_key || (value != DType::Str && value.size().is_none()) {
        return Err(Error::unimplemented(format!("tables from {key} to {value}; keys are strings or integers")));
    }
    Source::<Table>::make(init, TableSpec { key, value, mutable })
}

impl Described for Table {
    type Spec = TableSpec;

    fn make(name: &Arc<str>, spec: &TableSpec, memory: Charge) -> Result<Arc<Table>> {
        Table::new(name.clone(), spec.clone(), memory)
    }

    fn agree(&self, name: &str, spec: &TableSpec) -> Result<()> {
        self.check_dtypes(spec.key, spec.value)?;
        if self.spec().mutable == spec.mutable {
            return Ok(());
        }
        Err(Error::invalid_argument(format!("table {name} exists, and is not of the kind that is asked for")))
    }
}
