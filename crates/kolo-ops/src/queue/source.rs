//! Kernels that give out handles to queues and accumulators, and how their consumers find the object again.
//!
//! With a `shared_name` the object is the device's: every session that names it uses the same one, and it stays until its
//! container is cleared; so with `use_node_name_sharing`. Without, it belongs to the kernel, and goes with it.
//!
//! A handle is a resource scalar, or, for the older ops, a reference to a string vector `[container, name]`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kolo_core::{DType, Error, PartialShape, Result, Tensor};
use kolo_device::{Charge, Device};
use parking_lot::RwLock;

use crate::kernel::KernelInit;
use crate::{Kernel, KernelCtx, Resource, ResourceStore, Value, VariableCell};

/// Gives out a handle to one object.
pub(crate) struct Source<R: Described> {
    container: String,
    name: Arc<str>,
    /// What the object's memory is counted as.
    tag: Arc<str>,
    is_private: bool,
    is_ref: bool,
    spec: R::Spec,
    store: Arc<ResourceStore>,
    /// The store's generation before the look-up, and the handle that was made then.
    found: RwLock<Option<(u64, Value)>>,
}

/// An object that is made from a description, on which all who share it must agree.
pub(crate) trait Described: Resource {
    /// The description.
    type Spec: Clone + Send + Sync;
    /// A new one. What it holds counts against the memory that `memory` does.
    fn make(name: &Arc<str>, spec: &Self::Spec, memory: Charge) -> Result<Arc<Self>>;
    /// An error if this one, which exists under `name`, is not what `spec` says.
    fn agree(&self, name: &str, spec: &Self::Spec) -> Result<()>;
}

impl<R: Described> Source<R> {
    /// For a node with attributes `container` and `shared_name`.
    pub fn make(init: &KernelInit<'_>, spec: R::Spec) -> Result<Box<dyn Kernel>> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let attrs = init.attrs();
        let container = attrs.str("container")?.to_owned();
        check_container(&container)?;
        let (name, is_private): (Arc<str>, bool) = match attrs.str("shared_name")? {
            "" if attrs.find("use_node_name_sharing").is_some() && attrs.bool("use_node_name_sharing")? => {
                (init.node.name.clone(), false)
            }
            "" => (format!("_{}_{}", NEXT.fetch_add(1, Ordering::Relaxed), init.node.name).into(), true),
            shared if shared.starts_with('_') => {
                return Err(Error::invalid_argument(format!("shared_name cannot start with '_':{shared}")));
            }
            shared => (shared.into(), false),
        };
        let is_ref = init.node.outputs.first().is_some_and(|output| output.is_ref);
        let store = init.resources.clone();
        let shown = if is_private { &init.node.name } else { &name };
        let tag = format!("{} {shown}", init.node.op()).into();
        Ok(Box::new(Source::<R> { container, name, tag, is_private, is_ref, spec, store, found: RwLock::new(None) }))
    }

    fn find(&self, device: &dyn Device) -> Result<Value> {
        let generation = self.store.generation();
        if let Some((at, found)) = &*self.found.read()
            && *at == generation
        {
            return Ok(found.clone());
        }
        let object = self.store.lookup_or_create(&self.container, &self.name, || {
            R::make(&self.name, &self.spec, device.charge(0, &self.tag)?)
        })?;
        object.agree(&self.name, &self.spec)?;
        let handle = match self.is_ref {
            true => {
                let text = |text: &str| bytes::Bytes::copy_from_slice(text.as_bytes());
                let pair = vec![text(self.store.container(&self.container)), text(&self.name)];
                let cell = VariableCell::new(self.name.clone(), DType::Str, PartialShape::from([2usize]));
                cell.assign(Tensor::from_strings([2], pair)?)?;
                Value::Reference(cell)
            }
            false => Value::Tensor(Tensor::handle(self.store.handle(&self.container, &self.name, object))),
        };
        *self.found.write() = Some((generation, handle.clone()));
        Ok(handle)
    }
}

impl<R: Described> Kernel for Source<R> {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        ctx.outputs[0] = self.find(ctx.device)?;
        Ok(())
    }
}

impl<R: Described> Drop for Source<R> {
    fn drop(&mut self) {
        if self.is_private {
            self.store.remove(&self.container, &self.name);
        }
    }
}

/// `[A-Za-z0-9.][A-Za-z0-9.\-/]*`, or nothing; underscores too, since jobs' names have them.
fn check_container(container: &str) -> Result<()> {
    let ok = |c: char| c.is_ascii_alphanumeric() || "._-/".contains(c);
    if container.chars().all(ok) && !container.starts_with(['-', '/', '_']) {
        return Ok(());
    }
    Err(Error::invalid_argument(format!("container contains invalid characters: {container}")))
}

/// The object that handle input `i` names, of either handle kind.
pub(crate) fn object<R: Resource>(ctx: &KernelCtx<'_>, i: usize) -> Result<Arc<R>> {
    let by_name = |pair: &Tensor| -> Result<Arc<R>> {
        let [container, name] = pair.strings()? else {
            return Err(Error::invalid_argument(format!("a handle is [container, name], found {pair:?}")));
        };
        let (container, name) = (String::from_utf8_lossy(container), String::from_utf8_lossy(name));
        ctx.step
            .resources()
            .lookup(&container, &name)?
            .ok_or_else(|| Error::not_found(format!("Resource {container}/{name} does not exist.")))
    };
    match &ctx.inputs[i] {
        Value::Reference(cell) => by_name(&cell.value()?),
        Value::Tensor(tensor) if tensor.dtype() == DType::Str => by_name(tensor),
        Value::Tensor(tensor) => ctx.step.resources().resolve(tensor.resource()?),
        Value::Empty => Err(Error::internal(format!("input {i} was taken already"))),
    }
}
