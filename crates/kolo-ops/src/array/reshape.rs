//! `Reshape`: the same elements under another shape. No element moves.

use kolo_core::{Dim, Error, PartialShape, Result, Shape};
use kolo_graph::{Gradient, HalfSafety, HostRule, InferCtx, OpDef, Output, Work};

use super::elements::{IntoInts, integers};
use crate::cuda::PLAIN;
use crate::math::binary::first;
use crate::op::{Gpu, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx};

/// `x` in the shape `dims`; one size may be −1 and is then worked out: `reshape(x, &[-1, 784])`.
#[track_caller]
pub fn reshape<'g>(x: Output<'g>, dims: impl IntoInts<'g>) -> Output<'g> {
    let graph = x.graph();
    graph.op("Reshape").input(x).input(dims.into_ints(graph)).out()
}

/// `dy` in the shape of input 0 of `op`: the gradient of whatever only changes the shape.
pub(crate) fn shaped_as_input<'g>(op: kolo_graph::Operation<'g>, dy: Output<'g>) -> Output<'g> {
    let graph = op.graph();
    reshape(dy, graph.op("Shape").input(op.input(0)).out())
}

pub(crate) static RESHAPE: Op = Op {
    def: OpDef {
        name: "Reshape",
        signature: "(tensor:T, shape:Tshape) -> (output:T) ; T:type, Tshape:type{int32,int64}=int32",
        shape: infer,
        gradient: Gradient::Rule(|op, dy| Ok(vec![Some(shaped_as_input(op, first(dy)?).into()), None])),
        host: HostRule::SmallIntegers,
        work: Work::Reshapes,
        half: HalfSafety::Neutral,
        host_args: &["shape"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, forward)]),
    cost: Cost::Inline,
};

fn infer(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    ctx.input_of_rank(1, 1)?;
    let n_elements = ctx.input(0).n_elements();
    if let Some(dims) = ctx.constant_integers(1) {
        if let Some(input) = ctx.input(0).known() {
            return Ok(vec![resolve(&dims, &input)?.into()]);
        }
        check(&dims)?;
    }
    let shape = ctx.constant_as_shape(1);
    let (Some(n), Some(dims)) = (n_elements, shape.dims()) else { return Ok(vec![shape]) };
    // A single size that is not known is what the others leave over.
    let known: Option<usize> = dims.iter().flatten().try_fold(1usize, |product, &dim| product.checked_mul(dim));
    let Some(known) = known.filter(|&known| known != 0) else { return Ok(vec![shape]) };
    let missing = dims.iter().filter(|dim| dim.is_none()).count();
    if (missing == 0 && known != n) || (missing == 1 && !n.is_multiple_of(known)) {
        return Err(Error::invalid_argument(format!("cannot reshape a tensor with {n} elements to shape {shape}")));
    }
    if missing != 1 {
        return Ok(vec![shape]);
    }
    let dims: Vec<Dim> = dims.iter().map(|dim| dim.or(Some(n / known))).collect();
    Ok(vec![PartialShape::new(&dims)])
}

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let sizes = ctx.input(1)?;
    if sizes.shape().rank() != 1 {
        return Err(Error::invalid_argument(format!("sizes input must be 1-D, not {}", sizes.shape())));
    }
    let shape = resolve(&integers(sizes)?, ctx.input(0)?.shape())?;
    let output = ctx.take_input(0)?.reshaped(shape)?;
    ctx.set_output(0, output);
    Ok(())
}

/// At most one size may be −1, the others not negative.
fn check(dims: &[i64]) -> Result<Option<usize>> {
    let mut unknown = None;
    for (i, &dim) in dims.iter().enumerate() {
        match dim {
            -1 => {
                if let Some(first) = unknown.replace(i) {
                    return Err(Error::invalid_argument(format!(
                        "Only one input size may be -1, not both {first} and {i}"
                    )));
                }
            }
            dim if dim < 0 => {
                return Err(Error::invalid_argument(format!("Size {i} must be non-negative, not {dim}")));
            }
            _ => {}
        }
    }
    Ok(unknown)
}

/// The shape that `dims` means for what has shape `input`. Beside a size of 0, the missing one is what the sizes of
/// `input` other than 0 leave over, as in TensorFlow.
fn resolve(dims: &[i64], input: &Shape) -> Result<Shape> {
    let (unknown, n) = (check(dims)?, input.n_elements());
    let mut sizes = dims.to_vec();
    if let Some(unknown) = unknown {
        let has_zero = dims.contains(&0);
        let rest: Vec<i64> = dims.iter().copied().filter(|&dim| dim > 0).collect();
        let rest = Shape::from_signed(&rest)?.n_elements();
        let counted: usize = input.iter().filter(|&&dim| dim > 0 || !has_zero).product();
        if !(counted.is_multiple_of(rest) || has_zero && n == 0) {
            return Err(Error::invalid_argument(format!(
                "Input to reshape is a tensor with {n} values, but the requested shape requires a multiple of {rest}"
            )));
        }
        sizes[unknown] = (counted / rest) as i64;
    }
    let shape = Shape::from_signed(&sizes)?;
    if shape.n_elements() != n {
        return Err(Error::invalid_argument(format!(
            "Input to reshape is a tensor with {n} values, but the requested shape has {}",
            shape.n_elements()
        )));
    }
    Ok(shape)
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn reshape() {
        let six = || Tensor::from([1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0]);
        check_op("Reshape").input(six()).input([2i32, 3]).gives([[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]]);
        check_op("Reshape").input(six()).input([3i64, -1]).gives([[1.0f32, 2.0], [3.0, 4.0], [5.0, 6.0]]);
        check_op("Reshape").input([7i32]).input(tensor::<i32, 1>([0], [])).gives(7i32);
        check_op("Reshape").input("a").input([1i32, -1]).gives(Tensor::from_strings([1, 1], vec!["a".into()]).unwrap());
        let empty = || tensor::<f32, 2>([0, 3], []);
        check_op("Reshape").input(empty()).input([3i32, 0]).gives(tensor::<f32, 2>([3, 0], []));
        check_op("Reshape").input(empty()).input([-1i32, 3]).gives(empty());
        check_op("Reshape").input(wavy([2, 3], 0)).input([3i32, -1]).gradient();
    }

    #[test]
    fn bad_shapes_are_named() {
        let case = |dims: &[i64]| check_op("Reshape").input([1.0f32; 6]).input(dims);
        case(&[4]).fails("Input to reshape is a tensor with 6 values, but the requested shape has 4");
        case(&[4, -1]).fails("requires a multiple of 4");
        case(&[-1, -1]).fails("Only one input size may be -1, not both 0 and 1");
        case(&[-2, 3]).fails("Size 0 must be non-negative, not -2");
        case(&[-1, 0]).fails("the requested shape has 0");
        case(&[1 << 62, 1 << 62]).fails("too many elements");
        check_op("Reshape").input([1.0f32]).input(1i32).fails("rank 1");
    }

    #[test]
    fn sizes_are_worked_out_while_building() {
        let g = crate::graph();
        let x = g.placeholder_of("x", kolo_core::DType::F32, &[None, Some(28), Some(28)]);
        assert_eq!(super::reshape(x, &[-1, 784]).shape().to_string(), "[?,784]");
        let y = g.placeholder::<f32>("y", [4usize, 6]);
        let batch = g.op("StridedSlice").inputs([
            g.op("Shape").input(y).out(),
            g.constant([0i32]),
            g.constant([1i32]),
            g.constant([1i32]),
        ]);
        let batch = batch.attr("shrink_axis_mask", 1i64).out();
        let dims = g.op("Pack").inputs([batch, g.constant(-1i32)]).out();
        assert_eq!(super::reshape(y, dims).shape().to_string(), "[4,6]");
        assert!(g.check().is_ok());
    }
}
