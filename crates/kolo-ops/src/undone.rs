//! Ops that graphs hold and that nothing here runs: they are read, printed and shape-inferred, and the placer says that no
//! kernel is registered if a step needs one.

use kolo_core::{PartialShape, Result};
use kolo_graph::{Gradient, InferCtx, OpDef, ShapeFn, shape_fns};

use crate::{Cost, Op};

const WHY: &str = "this op has no kernel, and so no gradient";

const fn op(name: &'static str, signature: &'static str, shape: ShapeFn) -> Op {
    let def = OpDef { name, signature, shape, gradient: Gradient::Refused(WHY), ..OpDef::BASE };
    Op { def, kernels: &[], cost: Cost::Inline }
}

const fn stateful(name: &'static str, signature: &'static str, shape: ShapeFn) -> Op {
    let op = op(name, signature, shape);
    Op { def: OpDef { stateful: true, ..op.def }, ..op }
}

/// The product of two matrices.
fn product(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let side = |i: usize, attr: &str| -> Result<[Option<usize>; 2]> {
        let shape = ctx.input_of_rank(i, 2)?;
        let dims = [shape.dim(0), shape.dim(1)];
        Ok(if ctx.attrs().bool(attr)? { [dims[1], dims[0]] } else { dims })
    };
    let ([m, _], [_, n]) = (side(0, "transpose_a")?, side(1, "transpose_b")?);
    Ok(vec![PartialShape::new(&[m, n])])
}

/// As many rows from every member of the group.
fn gathered(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let mut dims = match ctx.input(0).dims() {
        Some(dims) => dims.to_vec(),
        None => return shape_fns::unknown(ctx),
    };
    if let Some(rows) = dims.first_mut() {
        *rows = None;
    }
    Ok(vec![PartialShape::new(&dims)])
}

/// A batch norm's output is as its input; the rest is one number per channel.
fn normed(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let mut shapes = vec![PartialShape::of_rank(1); ctx.n_outputs()];
    shapes[0] = ctx.input(0).clone();
    shapes[5] = PartialShape::unknown();
    Ok(shapes)
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
    ($($make:ident $name:ident = $op:literal, $signature:expr, $shape:expr;)*) => {
        $(static $name: Op = $make($op, $signature, $shape);)*
        /// The ops of this file.
        pub static OPS: &[&Op] = &[$(&$name),*];
    };
}

macro_rules! script {
    () => {
        "(input:list(Tin)) -> (output:list(Tout)) ; token:string, Tin:list(type)>=0, Tout:list(type)>=0"
    };
}

ops! {
    // Python.
    stateful PY_FUNC = "PyFunc", script!(), shape_fns::unknown;
    op PY_FUNC_STATELESS = "PyFuncStateless", script!(), shape_fns::unknown;
    // Between machines.
    stateful COLLECTIVE_REDUCE = "CollectiveReduce",
        "(input:T) -> (data:T) ; T:type{bfloat16,float,half,double,int32,int64}, group_size:int, group_key:int, \
         instance_key:int, merge_op:string{Min|Max|Mul|Add}, final_op:string{Id|Div}, subdiv_offsets:list(int), \
         wait_for:list(int)=[], communication_hint:string=\"auto\", timeout_seconds:float=0.0",
        shape_fns::same_as_input_0;
    stateful COLLECTIVE_GATHER = "CollectiveGather",
        "(input:T) -> (data:T) ; T:type{float,half,double,int32,int64}, group_size:int, group_key:int, instance_key:int, \
         shape:shape, communication_hint:string=\"auto\", timeout_seconds:float=0.0",
        shape_fns::from_shape_attr;
    stateful COLLECTIVE_BCAST_SEND = "CollectiveBcastSend",
        "(input:T) -> (data:T) ; T:type{bool,float,half,double,int32,int64}, group_size:int, group_key:int, \
         instance_key:int, shape:shape, communication_hint:string=\"auto\", timeout_seconds:float=0.0",
        shape_fns::from_shape_attr;
    stateful COLLECTIVE_BCAST_RECV = "CollectiveBcastRecv",
        "() -> (data:T) ; T:type{bool,float,half,double,int32,int64}, group_size:int, group_key:int, instance_key:int, \
         shape:shape, communication_hint:string=\"auto\", timeout_seconds:float=0.0",
        shape_fns::from_shape_attr;
    stateful COLLECTIVE_REDUCE_V2 = "CollectiveReduceV2",
        "(input:T, group_size:int32, group_key:int32, instance_key:int32, ordering_token:Nordering_token*resource) -> \
         (data:T) ; T:type{bfloat16,float,half,double,int32,int64}, merge_op:string{Min|Max|Mul|Add}, \
         final_op:string{Id|Div}, communication_hint:string=\"auto\", timeout_seconds:float=0.0, \
         is_stateless:bool=false, Nordering_token:int>=0=0, max_subdivs_per_device:int=-1",
        shape_fns::same_as_input_0;
    stateful COLLECTIVE_GATHER_V2 = "CollectiveGatherV2",
        "(input:T, group_size:int32, group_key:int32, instance_key:int32, ordering_token:Nordering_token*resource) -> \
         (data:T) ; T:type{float,half,double,int32,int64}, communication_hint:string=\"auto\", \
         timeout_seconds:float=0.0, is_stateless:bool=false, Nordering_token:int>=0=0",
        gathered;
    // The checkpoint format before V2.
    stateful SAVE = "Save",
        "(filename:string, tensor_names:string, data:list(T)) -> () ; T:list(type)>=1", shape_fns::unknown;
    stateful SAVE_SLICES = "SaveSlices",
        "(filename:string, tensor_names:string, shapes_and_slices:string, data:list(T)) -> () ; T:list(type)>=1",
        shape_fns::unknown;
    stateful RESTORE = "Restore",
        "(file_pattern:string, tensor_name:string) -> (tensor:dt) ; dt:type, preferred_shard:int=-1",
        shape_fns::unknown;
    stateful RESTORE_SLICE = "RestoreSlice",
        "(file_pattern:string, tensor_name:string, shape_and_slice:string) -> (tensor:dt) ; dt:type, \
         preferred_shard:int=-1",
        shape_fns::unknown;
    op AUDIO_SUMMARY_V2 = "AudioSummaryV2",
        "(tag:string, tensor:float, sample_rate:float) -> (summary:string) ; max_outputs:int>=1=3", shape_fns::scalars;
    op TENSOR_SUMMARY = "TensorSummary",
        "(tensor:T) -> (summary:string) ; T:type, description:string=\"\", labels:list(string)=[], \
         display_name:string=\"\"",
        shape_fns::scalars;
    op DECODE_JPEG = "DecodeJpeg",
        "(contents:string) -> (image:uint8) ; channels:int=0, ratio:int=1, fancy_upscaling:bool=true, \
         try_recover_truncated:bool=false, acceptable_fraction:float=1.0, dct_method:string=\"\"",
        image;
    stateful BARRIER = "Barrier",
        "() -> (handle:Ref(string)) ; component_types:list(type)>=1, shapes:list(shape)>=0=[], capacity:int=-1, \
         container:string=\"\", shared_name:string=\"\"",
        pair;
    // What TensorFlow's own rewrites make, inside of its processes.
    op FUSED_MAT_MUL = "_FusedMatMul",
        "(a:T, b:T, args:num_args*T) -> (product:T) ; transpose_a:bool=false, transpose_b:bool=false, \
         T:type{bfloat16,half,float}, num_args:int>=0, fused_ops:list(string)=[], \
         epsilon:float=9.999999747378752e-05, leakyrelu_alpha:float=0.20000000298023224",
        product;
    op FUSED_CONV2D = "_FusedConv2D",
        "(input:T, filter:T, args:list(TArgs), host_args:num_host_args*float) -> (output:T) ; \
         T:type{half,float,double,int8,qint8}, TArgs:list(type)>=1, num_args:int>=0, num_host_args:int>=0=0, \
         strides:list(int), padding:string{SAME|VALID|EXPLICIT}, explicit_paddings:list(int)=[], \
         data_format:string{NHWC|NCHW|NCHW_VECT_C}=\"NHWC\", filter_format:string{HWIO|OIHW|OIHW_VECT_I}=\"HWIO\", \
         dilations:list(int)=[1,1,1,1], use_cudnn_on_gpu:bool=true, fused_ops:list(string)=[], \
         epsilon:float=9.999999747378752e-05, leakyrelu_alpha:float=0.20000000298023224",
        |_| Ok(vec![PartialShape::of_rank(4)]);
    op FUSED_BATCH_NORM_EX = "_FusedBatchNormEx",
        "(x:T, scale:U, offset:U, mean:U, variance:U, side_input:num_side_inputs*T) -> (y:T, batch_mean:U, \
         batch_variance:U, reserve_space_1:U, reserve_space_2:U, reserve_space_3:U) ; T:type{half,float,bfloat16}, \
         U:type{float}, epsilon:float=9.999999747378752e-05, exponential_avg_factor:float=1.0, \
         num_side_inputs:int>=0=0, activation_mode:string=\"Identity\", data_format:string{NHWC|NCHW}=\"NHWC\", \
         is_training:bool=true",
        normed;
    op UNARY_OPS_COMPOSITION = "_UnaryOpsComposition",
        "(x:T) -> (y:T) ; T:type{float,half,double}, op_names:list(string)", shape_fns::same_as_input_0;
    stateful PARALLEL_CONCAT_START = "_ParallelConcatStart",
        "() -> (output:dtype) ; shape:shape, dtype:type", shape_fns::from_shape_attr;
    op PARALLEL_CONCAT_UPDATE = "_ParallelConcatUpdate",
        "(value:T, update:T) -> (output:T) ; T:type, loc:int", shape_fns::same_as_input_0;
    stateful SCOPED_ALLOCATOR = "_ScopedAllocator",
        "() -> (output:T) ; shapes:list(shape), shape:shape, T:type, sa_name:string, id:int, expected_call_count:int",
        shape_fns::from_shape_attr;
    stateful VAR_HANDLES = "_VarHandlesOp",
        "() -> (resources:N*resource) ; containers:list(string), shared_names:list(string), N:int>=0, dtypes:list(type), \
         shapes:list(shape)",
        shape_fns::scalars;
}

#[cfg(test)]
mod tests {
    use kolo_core::DeviceName;

    #[test]
    fn such_an_op_is_in_the_graph_but_has_no_kernel() {
        let g = crate::graph();
        let x = g.placeholder::<f32>("x", [None, Some(3)]);
        let y = g
            .op("CollectiveGatherV2")
            .inputs([x, g.constant(2i32), g.constant(1i32), g.constant(1i32)])
            .attr("Nordering_token", 0i64)
            .out();
        g.check().unwrap();
        assert_eq!(y.shape().to_string(), "[?,3]");
        let node = y.operation().node().unwrap();
        let Err(error) = crate::find_kernel(&node, &DeviceName::local("CPU", 0)) else { panic!("it has a kernel") };
        assert!(error.message().contains("No OpKernel was registered to support Op 'CollectiveGatherV2'"), "{error}");
    }
}
