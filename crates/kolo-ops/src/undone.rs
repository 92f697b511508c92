//! Ops that graphs hold and that nothing here runs: they are read, printed and shape-inferred, and the placer says that no
//! kernel is registered if a step needs one. Each says why, which `docs/ops.md` repeats.

use kolo_core::{PartialShape, Result};
use kolo_graph::{Effects, Gradient, InferCtx, OpDef, OwnedState, ShapeFn, shape_fns};

use crate::{Cost, Gpu, Op};

const fn op(name: &'static str, signature: &'static str, shape: ShapeFn, why: &'static str) -> Op {
    let def = OpDef { name, signature, shape, gradient: Gradient::Refused(why), ..OpDef::BASE };
    Op { def, kernels: &[], gpu: Gpu::NOT_RUN, cost: Cost::Inline }
}

const fn stateful(name: &'static str, signature: &'static str, shape: ShapeFn, why: &'static str) -> Op {
    let op = op(name, signature, shape, why);
    Op { def: OpDef { stateful: true, effects: Effects::Outside, ..op.def }, ..op }
}

const fn owner(name: &'static str, signature: &'static str, shape: ShapeFn, why: &'static str) -> Op {
    stateful(name, signature, shape, why).effects(Effects::Owns(OwnedState::Other))
}

fn pair(_: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    Ok(vec![PartialShape::from([2usize])])
}

fn image(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    ctx.input_of_rank(0, 0)?;
    let channels = usize::try_from(ctx.attrs().int("channels")?).ok().filter(|&n| n > 0);
    Ok(vec![PartialShape::new(&[None, None, channels])])
}

macro_rules! ops {
    ($($make:ident $name:ident = $op:literal, $signature:expr, $shape:expr, $why:expr;)*) => {
        $(static $name: Op = $make($op, $signature, $shape, $why);)*
        /// The ops of this file.
        pub static OPS: &[&Op] = &[$(&$name),*];
    };
}

macro_rules! script {
    () => {
        "(input:list(Tin)) -> (output:list(Tout)) ; token:string, Tin:list(type)>=0, Tout:list(type)>=0"
    };
}

const PYTHON: &str = "the function is in the memory of the Python process that made the graph";
const OLD_FORMAT: &str = "the checkpoint format before V2; TensorFlow reads it and writes V2";
const JPEG: &str = "there is no JPEG decoder yet; PNG works";
const BARRIERS: &str = "the ops that put elements into a barrier and take them out are not on the list of ops";
const IN_PLACE: &str = "rewrites make it, to write into a buffer that others hold, which tensors here do not allow";
const HANDLES: &str = "rewrites make it of several VarHandleOps; no graph that was recorded has one";

ops! {
    // Python.
    stateful PY_FUNC = "PyFunc", script!(), shape_fns::unknown, PYTHON;
    op PY_FUNC_STATELESS = "PyFuncStateless", script!(), shape_fns::unknown, PYTHON;
    // The checkpoint format before V2.
    stateful SAVE = "Save",
        "(filename:string, tensor_names:string, data:list(T)) -> () ; T:list(type)>=1", shape_fns::unknown, OLD_FORMAT;
    stateful SAVE_SLICES = "SaveSlices",
        "(filename:string, tensor_names:string, shapes_and_slices:string, data:list(T)) -> () ; T:list(type)>=1",
        shape_fns::unknown, OLD_FORMAT;
    stateful RESTORE = "Restore",
        "(file_pattern:string, tensor_name:string) -> (tensor:dt) ; dt:type, preferred_shard:int=-1",
        shape_fns::unknown, OLD_FORMAT;
    stateful RESTORE_SLICE = "RestoreSlice",
        "(file_pattern:string, tensor_name:string, shape_and_slice:string) -> (tensor:dt) ; dt:type, \
         preferred_shard:int=-1",
        shape_fns::unknown, OLD_FORMAT;
    op DECODE_JPEG = "DecodeJpeg",
        "(contents:string) -> (image:uint8) ; channels:int=0, ratio:int=1, fancy_upscaling:bool=true, \
         try_recover_truncated:bool=false, acceptable_fraction:float=1.0, dct_method:string=\"\"",
        image, JPEG;
    owner BARRIER = "Barrier",
        "() -> (handle:Ref(string)) ; component_types:list(type)>=1, shapes:list(shape)>=0=[], capacity:int=-1, \
         container:string=\"\", shared_name:string=\"\"",
        pair, BARRIERS;
    // What TensorFlow's own rewrites make, inside of its processes.
    stateful PARALLEL_CONCAT_START = "_ParallelConcatStart",
        "() -> (output:dtype) ; shape:shape, dtype:type", shape_fns::from_shape_attr, IN_PLACE;
    op PARALLEL_CONCAT_UPDATE = "_ParallelConcatUpdate",
        "(value:T, update:T) -> (output:T) ; T:type, loc:int", shape_fns::same_as_input_0, IN_PLACE;
    stateful SCOPED_ALLOCATOR = "_ScopedAllocator",
        "() -> (output:T) ; shapes:list(shape), shape:shape, T:type, sa_name:string, id:int, expected_call_count:int",
        shape_fns::from_shape_attr, IN_PLACE;
    owner VAR_HANDLES = "_VarHandlesOp",
        "() -> (resources:N*resource) ; containers:list(string), shared_names:list(string), N:int>=0, dtypes:list(type), \
         shapes:list(shape)",
        shape_fns::scalars, HANDLES;
}

#[cfg(test)]
mod tests {
    use kolo_core::{DType, DeviceName};

    #[test]
    fn such_an_op_is_in_the_graph_but_has_no_kernel() {
        let g = crate::graph();
        let y = g.op("DecodeJpeg").input(g.placeholder_of("x", DType::Str, &[])).attr("channels", 3i64).out();
        g.check().unwrap();
        assert_eq!(y.shape().to_string(), "[?,?,3]");
        let node = y.operation().node().unwrap();
        let Err(error) = crate::find_kernel(&node, &DeviceName::local("CPU", 0)) else { panic!("it has a kernel") };
        assert!(error.message().contains("No OpKernel was registered to support Op 'DecodeJpeg'"), "{error}");
    }
}
