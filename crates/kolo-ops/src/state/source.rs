//! How a kernel finds the variable it stands for: by container and name, once, and again only after something was removed.

use std::sync::Arc;

use kolo_core::{DType, Error, PartialShape, Result, Tensor};
use parking_lot::RwLock;

use crate::kernel::KernelInit;
use crate::{KernelCtx, ResourceStore, VariableCell};

/// A variable of the device's store, by name.
pub(super) struct Source {
    container: String,
    name: Arc<str>,
    dtype: DType,
    shape: PartialShape,
    /// The store's generation before the look-up, and what was found: a run costs one comparison and one count.
    found: RwLock<Option<(u64, Found)>>,
}

/// The variable and a handle to it.
#[derive(Clone)]
pub(super) struct Found {
    pub cell: Arc<VariableCell>,
    pub handle: Tensor,
}

impl Source {
    /// From the attributes `container`, `shared_name`, `dtype` and `shape`. Without a shared name the node's name counts, so
    /// that graphs that describe the same variable share it.
    pub fn new(init: &KernelInit<'_>, shape: PartialShape) -> Result<Source> {
        let attrs = init.attrs();
        let name: Arc<str> = match attrs.str("shared_name")? {
            "" => init.node.name.clone(),
            shared => shared.into(),
        };
        let container = attrs.str("container")?.to_owned();
        Ok(Source { container, name, dtype: attrs.dtype("dtype")?, shape, found: RwLock::new(None) })
    }

    /// The variable, made without a value if it does not exist.
    pub fn find(&self, ctx: &KernelCtx<'_>) -> Result<Found> {
        let store = ctx.step.resources();
        let generation = store.generation();
        if let Some((at, found)) = &*self.found.read()
            && *at == generation
        {
            return Ok(found.clone());
        }
        let cell = self.look_up(store)?;
        let handle = Tensor::handle(store.handle(&self.container, &self.name, cell.clone()));
        let found = Found { cell, handle };
        *self.found.write() = Some((generation, found.clone()));
        Ok(found)
    }

    fn look_up(&self, store: &ResourceStore) -> Result<Arc<VariableCell>> {
        let make = || Ok(VariableCell::new(self.name.clone(), self.dtype, self.shape.clone()));
        let cell = store.lookup_or_create(&self.container, &self.name, make)?;
        if cell.dtype() == self.dtype {
            return Ok(cell);
        }
        // Another graph named it first, with another dtype, but nobody gave it a value: as in TensorFlow, where a variable
        // exists from its first assignment, the assignment that comes first decides.
        if !cell.is_initialized() && store.remove(&self.container, &self.name) {
            return store.lookup_or_create(&self.container, &self.name, make);
        }
        Err(Error::invalid_argument(format!(
            "variable {} exists as {}, but is declared as {} here",
            self.name,
            cell.dtype(),
            self.dtype
        )))
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::DeviceName;
    use kolo_device::{CpuConfig, CpuDevice};

    use super::*;
    use crate::StepServices;
    use crate::testing::TestStep;

    #[test]
    fn a_kernel_keeps_its_variable_until_something_is_removed() {
        let g = crate::graph();
        let v = g.op("VarHandleOp").name("v").attr("dtype", DType::F32).attr("shape", PartialShape::unknown()).out();
        let node = v.operation().node().unwrap();
        let device = DeviceName::local("CPU", 0);
        let cpu = CpuDevice::new(device.clone(), &CpuConfig { intra_op_threads: 1, ..CpuConfig::default() });
        let step = TestStep::new(&device);
        let init = KernelInit { node: &node, device: &device, resources: step.resources() };
        let source = Source::new(&init, PartialShape::unknown()).unwrap();
        let ctx = KernelCtx {
            node: &node,
            device: &*cpu,
            step: &step,
            inputs: &mut [],
            outputs: &mut [],
            frame_iteration: Default::default(),
            is_dead: false,
        };
        let find = || source.find(&ctx).unwrap().cell;
        let first = find();
        assert!(Arc::ptr_eq(&first, &find()));
        step.resources().remove("", "unrelated");
        assert!(Arc::ptr_eq(&first, &find()), "its own variable is still there");
        step.resources().clear(&["localhost".to_owned()]);
        let second = find();
        assert!(!Arc::ptr_eq(&first, &second));
        assert!(Arc::ptr_eq(&second, &find()));
    }
}
