//! `RestoreV2`: reads tensors from a checkpoint, on a file thread, straight into their buffers.

use std::sync::Arc;

use kolo_core::{DType, Error, PartialShape, Result, Tensor};
use kolo_device::Charge;
use kolo_graph::{Effects, Gradient, InferCtx, OpDef, Output};

use super::FileAccess;
use super::arguments::{text, texts};
use super::bundle::{Bundle, parse_shape_and_slice};
use super::threads::IoThreads;
use crate::op::{Gpu, KernelMaker, Op, cpu_made};
use crate::{AsyncKernel, CancelToken, Cost, Done, KernelCtx, KernelInit};

/// Reads tensors of these names and dtypes from the checkpoint `prefix`; see [`super::save_v2::save_v2`] for
/// `shape_and_slices`.
#[track_caller]
pub fn restore_v2<'g>(
    prefix: Output<'g>,
    tensor_names: Output<'g>,
    shape_and_slices: Output<'g>,
    dtypes: &[DType],
) -> Vec<Output<'g>> {
    let inputs = [prefix, tensor_names, shape_and_slices];
    prefix.graph().op("RestoreV2").inputs(inputs).attr("dtypes", dtypes.to_vec()).build().outputs()
}

pub(crate) static RESTORE_V2: Op = Op {
    def: OpDef {
        name: "RestoreV2",
        signature: "(prefix:string, tensor_names:string, shape_and_slices:string) -> (tensors:list(dtypes)) ; \
                    dtypes:list(type)>=1",
        shape: shapes,
        gradient: Gradient::None("a file does not depend on a graph"),
        stateful: true,
        effects: Effects::Outside,
        ..OpDef::BASE
    },
    kernels: &[cpu_made(KernelMaker::Async(Restore::make))],
    gpu: Gpu::FILES,
    cost: Cost::Inline,
};

/// Known where `shape_and_slices` is a constant that says it.
fn shapes(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    ctx.input_of_rank(0, 0)?;
    let n = PartialShape::from([ctx.n_outputs()]);
    for i in [1, 2] {
        ctx.input(i)
            .merge(&n)
            .map_err(|_| Error::invalid_argument(format!("input {i} should have shape {n}, found {}", ctx.input(i))))?;
    }
    let Some(specs) = ctx.constant(2) else { return Ok(vec![PartialShape::unknown(); ctx.n_outputs()]) };
    let shape = |spec: &bytes::Bytes| match std::str::from_utf8(spec) {
        Ok("") | Err(_) => Ok(PartialShape::unknown()),
        Ok(spec) => {
            let (full, slice) = parse_shape_and_slice(spec)?;
            Ok(PartialShape::from(&slice.shape_in(&full)?))
        }
    };
    specs.strings()?.iter().map(shape).collect()
}

struct Restore {
    threads: Arc<IoThreads>,
    dtypes: Vec<DType>,
}

impl Restore {
    fn make(init: &KernelInit<'_>) -> Result<Box<dyn AsyncKernel>> {
        let dtypes = init.node.outputs.iter().map(|output| output.dtype).collect();
        Ok(Box::new(Restore { threads: IoThreads::of(init.resources)?, dtypes }))
    }

    fn arguments(&self, ctx: &KernelCtx<'_>) -> Result<Request> {
        let prefix = text(ctx, 0, "prefix")?;
        let (names, specs) = (texts(ctx, 1, "tensor_names")?, texts(ctx, 2, "shape_and_slices")?);
        if names.len() != self.dtypes.len() || specs.len() != self.dtypes.len() {
            return Err(Error::invalid_argument(format!(
                "{} names and {} shape_and_slices for {} tensors",
                names.len(),
                specs.len(),
                self.dtypes.len()
            )));
        }
        let access = ctx.step.resources().file_access();
        let memory = ctx.device.charge(0, &ctx.node.name)?;
        Ok(Request { prefix, names, specs, dtypes: self.dtypes.clone(), access, memory })
    }
}

impl AsyncKernel for Restore {
    fn start(&self, ctx: &mut KernelCtx<'_>, done: Done) {
        let request = match self.arguments(ctx) {
            Ok(request) => request,
            Err(error) => return done.finish(Err(error)),
        };
        let cancel = ctx.step.cancel().clone();
        let _ = self.threads.run(move || done.finish(request.read(cancel).map(Into::into)));
    }
}

struct Request {
    prefix: String,
    names: Vec<String>,
    specs: Vec<String>,
    dtypes: Vec<DType>,
    access: FileAccess,
    /// Where the tensors will lie.
    memory: Charge,
}

impl Request {
    fn read(self, cancel: Arc<CancelToken>) -> Result<Vec<Tensor>> {
        let mut bundle = Bundle::open_within(&self.prefix, &self.access)?.with_cancel(cancel).with_memory(self.memory);
        // All names are looked up before anything is read: a wrong one should not cost minutes.
        for (name, dtype) in self.names.iter().zip(&self.dtypes) {
            let stored = bundle.find(name)?;
            if stored.dtype != *dtype as i32 {
                let original = stored.dtype().map_or_else(|_| format!("number {}", stored.dtype), |d| d.to_string());
                return Err(Error::invalid_argument(format!(
                    "tensor_name = {name}; expected dtype {dtype} does not equal original dtype {original}"
                )));
            }
        }
        let read = |(name, spec): (&String, &String)| match spec.as_str() {
            "" => bundle.read(name),
            spec => {
                let (full, slice) = parse_shape_and_slice(spec)?;
                bundle.read_slice(name, &full, &slice)
            }
        };
        self.names.iter().zip(&self.specs).map(read).collect()
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::Code;

    use super::*;
    use crate::io::bundle::{Item, save};
    use crate::io::files::TestDir;
    use crate::testing::check_op;

    fn saved() -> (TestDir, String) {
        let dir = TestDir::new("restore-v2");
        let item = |name: &str, tensor: Tensor| Item { name: name.into(), slice: None, tensor };
        let items = [item("w", Tensor::from([[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]])), item("n", Tensor::scalar(3i64))];
        let prefix = dir.text("m");
        save(&prefix, &items, None).unwrap();
        (dir, prefix)
    }

    #[test]
    fn tensors_and_slices_come_back_in_order() {
        let (_dir, prefix) = saved();
        check_op("RestoreV2")
            .attr("dtypes", vec![DType::I64, DType::F32, DType::F32])
            .input(prefix.as_str())
            .input(["n", "w", "w"])
            .input(["", "", "2 3 1,1:-"])
            .gives_all([
                Tensor::scalar(3i64),
                Tensor::from([[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]]),
                Tensor::from([[4.0f32, 5.0, 6.0]]),
            ]);
    }

    #[test]
    fn the_texts_of_errors_are_tensorflow_s() {
        let (_dir, prefix) = saved();
        let check = |prefix: &str, name: &str, spec: &str, dtype: DType, code: Code, text: &str| {
            let op = check_op("RestoreV2").attr("dtypes", vec![dtype]).input(prefix).input([name]).input([spec]);
            let error = op.run(false).unwrap_err();
            assert_eq!(error.code(), code, "{error}");
            assert!(error.message().contains(text), "{error}");
        };
        let missing = format!("{prefix}x");
        let text =
            format!("Unsuccessful TensorSliceReader constructor: Failed to find any matching files for {missing}");
        check(&missing, "w", "", DType::F32, Code::NotFound, &text);
        check(&prefix, "v", "", DType::F32, Code::NotFound, "Key v not found in checkpoint");
        let text = "tensor_name = w; expected dtype int32 does not equal original dtype float";
        check(&prefix, "w", "", DType::I32, Code::InvalidArgument, text);
        let text =
            "tensor_name = w; shape in shape_and_slice spec [2,4] does not match the shape stored in checkpoint: [2,3]";
        check(&prefix, "w", "2 4 0,1:-", DType::F32, Code::InvalidArgument, text);
    }

    #[test]
    fn shapes_are_known_from_constant_slices() {
        let g = crate::graph();
        let specs = g.constant(["", "2 3 1,1:-"]);
        let outputs = restore_v2(g.constant("p"), g.constant(["a", "b"]), specs, &[DType::F32, DType::F32]);
        assert_eq!(outputs[0].shape(), PartialShape::unknown());
        assert_eq!(outputs[1].shape(), [1usize, 3].into());
        restore_v2(g.constant("p"), g.constant(["a"]), g.constant(["", ""]), &[DType::F32]);
        assert!(g.check().unwrap_err().message().contains("input 2 should have shape [1], found [2]"));
    }
}
