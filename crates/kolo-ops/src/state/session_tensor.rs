//! `GetSessionHandle`, `GetSessionHandleV2`, `GetSessionTensor`, `DeleteSessionTensor`: values that stay on their device
//! between steps, known to the client by a name only.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kolo_core::{Error, ResourceHandle, Result, Tensor};
use kolo_graph::{Effects, Gradient, OpDef, shape_fns};
use parking_lot::Mutex;

use crate::holdings::{Holdings, Measured};
use crate::op::{Gpu, Op, cpu_any};
use crate::resource::Resource;
use crate::{Cost, KernelCtx};

pub(crate) static GET_SESSION_HANDLE: Op = Op {
    def: OpDef {
        name: "GetSessionHandle",
        signature: "(value:T) -> (handle:string) ; T:type",
        shape: shape_fns::scalars,
        gradient: Gradient::None("a name is no number"),
        stateful: true,
        effects: Effects::Uses,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| {
        let name = keep(ctx)?;
        ctx.set_output(0, Tensor::string(name));
        Ok(())
    })],
    gpu: Gpu::Missing,
    cost: Cost::Inline,
};

pub(crate) static GET_SESSION_HANDLE_V2: Op = Op {
    def: OpDef {
        name: "GetSessionHandleV2",
        signature: "(value:T) -> (handle:resource) ; T:type",
        ..GET_SESSION_HANDLE.def
    },
    kernels: &[cpu_any(|ctx| {
        let device = ctx.device.attributes().name.to_string();
        let name = keep(ctx)?;
        let handle = ResourceHandle { device: device.into(), container: "".into(), name: name.into(), object: None };
        ctx.set_output(0, Tensor::handle(handle));
        Ok(())
    })],
    gpu: Gpu::Missing,
    cost: Cost::Inline,
};

pub(crate) static GET_SESSION_TENSOR: Op = Op {
    def: OpDef {
        name: "GetSessionTensor",
        signature: "(handle:string) -> (value:dtype) ; dtype:type",
        gradient: Gradient::None("a value of another step is a constant"),
        stateful: true,
        effects: Effects::Uses,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(get)],
    gpu: Gpu::Missing,
    cost: Cost::Inline,
};

pub(crate) static DELETE_SESSION_TENSOR: Op = Op {
    def: OpDef {
        name: "DeleteSessionTensor",
        signature: "(handle:string) -> ()",
        gradient: Gradient::None("nothing comes out"),
        stateful: true,
        effects: Effects::Uses,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(delete)],
    gpu: Gpu::Missing,
    cost: Cost::Inline,
};

/// The values that are kept on a device.
struct Kept(Mutex<KeptTensors>);

struct KeptTensors {
    tensors: HashMap<String, Tensor>,
    holdings: Holdings,
}

impl Kept {
    fn of(ctx: &KernelCtx<'_>) -> Result<Arc<Kept>> {
        ctx.step.resources().lookup_or_create("", "kolo_session_tensors", || {
            let holdings = Holdings::new(ctx.device.charge(0, &"session tensors".into())?);
            Ok(Arc::new(Kept(Mutex::new(KeptTensors { tensors: HashMap::new(), holdings }))))
        })
    }
}

/// What the place of a value takes: in the map, less than half of whose places may be taken, and its name.
fn place_bytes(name: &str) -> usize {
    3 * size_of::<(String, Tensor)>() + name.len()
}

impl Resource for Kept {
    fn kind(&self) -> &'static str {
        "store of session tensors"
    }
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

/// Keeps input 0 and says under which name: `NODE;NUMBER;DEVICE`, as TensorFlow's clients expect it.
fn keep(ctx: &mut KernelCtx<'_>) -> Result<String> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let kept = Kept::of(ctx)?;
    let device = &ctx.device.attributes().name;
    let name = format!("{};{};{device}", ctx.node.name, NEXT.fetch_add(1, Ordering::Relaxed));
    let value = ctx.take_input(0)?;
    let part = Measured::new(place_bytes(&name), std::slice::from_ref(&value));
    let mut kept = kept.0.lock();
    kept.holdings.add(&part)?;
    if kept.tensors.try_reserve(1).is_err() {
        kept.holdings.remove(&part);
        return Err(kept.holdings.no_room());
    }
    kept.tensors.insert(name.clone(), value);
    Ok(name)
}

fn name(ctx: &KernelCtx<'_>) -> Result<String> {
    match ctx.input(0)?.strings()? {
        [name] => Ok(String::from_utf8_lossy(name).into_owned()),
        other => Err(Error::invalid_argument(format!("handle should be one string, found {}", other.len()))),
    }
}

fn missing(name: &str) -> Error {
    Error::invalid_argument(format!("The tensor with handle '{name}' is not in the session store."))
}

fn get(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (name, dtype) = (name(ctx)?, ctx.attrs().dtype("dtype")?);
    let value = Kept::of(ctx)?.0.lock().tensors.get(&name).cloned().ok_or_else(|| missing(&name))?;
    if value.dtype() != dtype {
        return Err(Error::invalid_argument(format!("The tensor '{name}' is {}, not {dtype}", value.dtype())));
    }
    ctx.set_output(0, value);
    Ok(())
}

fn delete(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let name = name(ctx)?;
    let kept = Kept::of(ctx)?;
    let gone = {
        let mut kept = kept.0.lock();
        let gone = kept.tensors.remove(&name);
        if let Some(gone) = &gone {
            kept.holdings.remove(&Measured::new(place_bytes(&name), std::slice::from_ref(gone)));
        }
        gone
    };
    // The value itself goes away without the lock.
    gone.map(drop).ok_or_else(|| missing(&name))
}

#[cfg(test)]
mod tests {
    use kolo_core::DType;

    use super::*;
    use crate::testing::Evaluation;

    #[test]
    fn a_value_is_kept_until_it_is_deleted() {
        let g = crate::graph();
        let handle = g.op("GetSessionHandle").input(g.constant([1.0f32, 2.0])).out();
        let by_resource = g.op("GetSessionHandleV2").input(g.constant(7i32)).out();
        let name = g.placeholder::<f32>("unused", [0usize]);
        let text = g.op("Placeholder").attr("dtype", DType::Str).out();
        let value = g.op("GetSessionTensor").input(text).attr("dtype", DType::F32).out();
        let wrong = g.op("GetSessionTensor").input(text).attr("dtype", DType::I32).out();
        let delete = g.op("DeleteSessionTensor").input(text).build();
        g.check().unwrap();
        assert!(name.is_valid());
        let run = Evaluation::new(g.snapshot());
        let found = run.run(&[handle, by_resource], &[]).unwrap();
        let feed = [(text, found[0].clone())];
        assert_eq!(run.run(&[value], &feed).unwrap(), [Tensor::from([1.0f32, 2.0])]);
        assert!(run.run(&[wrong], &feed).unwrap_err().message().contains("is float, not int32"));
        let resource = Tensor::string(found[1].resource().unwrap().name.to_string());
        assert_eq!(run.run(&[wrong], &[(text, resource)]).unwrap(), [Tensor::scalar(7i32)]);
        run.run_targets(&[delete], &feed).unwrap();
        let error = run.run(&[value], &feed).unwrap_err();
        assert!(error.message().contains("is not in the session store"), "{error}");
        assert!(run.run_targets(&[delete], &feed).is_err());
    }
}
