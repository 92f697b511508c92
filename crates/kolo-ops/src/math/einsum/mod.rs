//! `Einsum`: sums of products over labelled dimensions.
//!
//! Each operand is laid out as `[batch, kept, contracted]`: a label that occurs twice in it takes the diagonal, and one that
//! occurs nowhere else is summed. What is left is a batch of matrix products, whose result is laid out as the output says.

mod equation;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::ops::Deref;

use half::{bf16, f16};
use kolo_core::{Dim, Error, PartialShape, Result, Shape};
use kolo_device::cpu::{looking, looking_by};
use kolo_graph::{Grad, Gradient, Graph, HalfSafety, InferCtx, IntoOutput, OpDef, Operation, Output};

use crate::Gpu;
use crate::array::elements::Item;
use crate::array::view::{View, strides};
use crate::math::binary::first;
use crate::math::matmul::{MatrixElement, Sizes};
use crate::math::number::Number;
use crate::memory::Scratch;
use crate::op::{Op, cpu_kernels};
use crate::{Cost, KernelCtx};
use equation::{Equation, Label, Subscript, sizes};

/// The sum of products that `equation` describes: `einsum("ij,jk->ik", &[a, b])` is a product of matrices. Labels that the
/// output lacks are summed over; `...` stands for dimensions that broadcast. More than two operands are taken in order.
///
/// # Panics
/// If there are no operands.
#[track_caller]
pub fn einsum<'g>(equation: &str, operands: &[Output<'g>]) -> Output<'g> {
    let [first, ..] = operands else { panic!("einsum needs at least one operand") };
    let graph = first.graph();
    let equation = equation.chars().filter(|c| !c.is_whitespace()).collect::<String>();
    match pairs(&equation, operands.len()) {
        Ok(equations) => {
            let mut rest = operands[1..].iter().copied();
            let mut result = *first;
            for equation in equations {
                let operands: Vec<Output<'g>> = std::iter::once(result).chain(rest.next()).collect();
                result = graph.op("Einsum").inputs(operands).attr("equation", equation).out();
            }
            result
        }
        // The op itself says what is wrong.
        Err(_) => graph.op("Einsum").inputs(operands.iter().copied()).attr("equation", equation).out(),
    }
}

/// Equations of two operands that, one after the other, do the same as one of many.
fn pairs(text: &str, n_operands: usize) -> Result<Vec<String>> {
    let Equation { inputs, output } = Equation::parse(text, n_operands)?;
    if n_operands <= 2 {
        return Ok(vec![text.to_owned()]);
    }
    let mut equations = Vec::new();
    let mut left = inputs[0].clone();
    for (i, right) in inputs.iter().enumerate().skip(1) {
        let rest = &inputs[i + 1..];
        let result = if rest.is_empty() {
            output.clone()
        } else {
            let mut letters: Vec<char> = Vec::new();
            for letter in left.letters().chain(right.letters()) {
                let needed = output.has(letter) || rest.iter().any(|other| other.has(letter));
                if needed && !letters.contains(&letter) {
                    letters.push(letter);
                }
            }
            Subscript { before: Vec::new(), ellipsis: left.ellipsis || right.ellipsis, after: letters }
        };
        equations.push(format!("{left},{right}->{result}"));
        left = result;
    }
    Ok(equations)
}

pub(crate) static EINSUM: Op = Op {
    def: OpDef {
        name: "Einsum",
        signature: "(inputs:N*T) -> (output:T) ; equation:string, N:int>=1, T:type",
        shape: infer,
        gradient: Gradient::Rule(gradient),
        half: HalfSafety::Faster,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(forward: f32, f64, i32, i64; f16, bf16),
    gpu: Gpu::Missing,
    cost: Cost::Heavy,
};

fn infer(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let equation = Equation::parse(ctx.attrs().str("equation")?, ctx.n_inputs())?;
    let (mut labels, mut dims): (Vec<Vec<Label>>, Vec<Vec<Dim>>) = (Vec::new(), Vec::new());
    for i in 0..ctx.n_inputs() {
        let Some(shape) = ctx.input(i).dims() else { return Ok(vec![PartialShape::unknown()]) };
        labels.push(equation.inputs[i].labels(shape.len(), i)?);
        dims.push(shape.to_vec());
    }
    let sizes = sizes(labels.iter().map(Vec::as_slice).zip(dims))?;
    let out: Vec<Dim> =
        equation.output_labels(&labels)?.iter().map(|label| sizes.get(label).copied().flatten()).collect();
    Ok(vec![PartialShape::new(&out)])
}

/// The gradient of each operand is itself a sum of products: of `dy` and the other operand, labelled as the operand is. What
/// the operand alone had, and lost by a sum, comes back as ones.
fn gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let dy = first(dy)?;
    let n = op.n_inputs();
    let text = op.attrs(|attrs| attrs.str("equation").map(str::to_owned))?;
    let equation = Equation::parse(&text, n)?;
    if n > 2 {
        return Err(Error::unimplemented("the gradient of an Einsum of more than two operands"));
    }
    (0..n)
        .map(|i| {
            let (x, own) = (op.input(i), &equation.inputs[i]);
            let other = (n == 2).then(|| (op.input(1 - i), &equation.inputs[1 - i]));
            operand_gradient(x, own, other, dy, &equation.output).map(|grad| Some(grad.into()))
        })
        .collect()
}

fn operand_gradient<'g>(
    x: Output<'g>,
    own: &Subscript,
    other: Option<(Output<'g>, &Subscript)>,
    dy: Output<'g>,
    output: &Subscript,
) -> Result<Output<'g>> {
    let graph = dy.graph();
    // An ellipsis is put first, where dimensions that were broadcast are easily summed. Even if this operand has none.
    let front = Subscript { before: Vec::new(), ellipsis: output.ellipsis, after: own.letters().collect() };
    let is_found = |letter: char| output.has(letter) || other.is_some_and(|(_, subscript)| subscript.has(letter));
    let mut lost: Vec<char> = Vec::new();
    own.letters().filter(|&letter| !is_found(letter)).for_each(|letter| {
        if !lost.contains(&letter) {
            lost.push(letter);
        }
    });
    let add = |equation: String, operands: &[Output<'g>]| {
        graph.op("Einsum").inputs(operands.iter().copied()).attr("equation", equation).out()
    };
    let from_others = |to: &Subscript| match other {
        Some((value, subscript)) => add(format!("{output},{subscript}->{to}"), &[dy, value]),
        None => add(format!("{output}->{to}"), &[dy]),
    };
    let grad = if lost.is_empty() {
        from_others(&front)
    } else {
        let mut kept: Vec<char> = Vec::new();
        own.letters().filter(|letter| !lost.contains(letter)).for_each(|letter| {
            if !kept.contains(&letter) {
                kept.push(letter);
            }
        });
        let kept = Subscript { before: Vec::new(), ellipsis: output.ellipsis, after: kept };
        let ones = ones_of(x, own, &lost)?;
        let lost: String = lost.iter().collect();
        add(format!("{kept},{lost}->{front}"), &[from_others(&kept), ones])
    };
    if !output.ellipsis {
        return Ok(grad);
    }
    put_back(graph, x, own, other.is_some(), grad)
}

/// Ones with the sizes that these labels have in `x`.
fn ones_of<'g>(x: Output<'g>, own: &Subscript, labels: &[char]) -> Result<Output<'g>> {
    let graph = x.graph();
    let shape = graph.op("Shape").input(x).out();
    let axes: Vec<i32> = labels
        .iter()
        .filter_map(|label| match own.before.iter().position(|other| other == label) {
            Some(at) => Some(at as i32),
            // Counted from the end, since an ellipsis may hide any number.
            None => own.after.iter().position(|other| other == label).map(|at| at as i32 - own.after.len() as i32),
        })
        .collect();
    let rank = graph.op("Rank").input(x).out();
    let axes = graph.constant(axes);
    let axes = graph.op("FloorMod").input(axes + rank).input(rank).out();
    let dims = graph.op("GatherV2").inputs([shape, axes, graph.constant(0i32)]).out();
    Ok(graph.op("Fill").input(dims).input(1.0.into_output(graph, x.dtype())).out())
}

/// Sums a gradient that has the ellipsis in front over what `x` was broadcast along, and moves the ellipsis to its place.
fn put_back<'g>(
    graph: &'g Graph,
    x: Output<'g>,
    own: &Subscript,
    may_broadcast: bool,
    grad: Output<'g>,
) -> Result<Output<'g>> {
    let Some(rank) = x.shape().rank() else {
        return Err(Error::unimplemented("the gradient of an Einsum with an ellipsis needs operands of known rank"));
    };
    let (before, after) = (own.before.len(), own.after.len());
    let hidden = rank - before - after;
    let shape = |of: Output<'g>| graph.op("Shape").input(of).out();
    // The axes of `x` in the order ellipsis, before, after.
    let order: Vec<i32> =
        (before..before + hidden).chain(0..before).chain(before + hidden..rank).map(|i| i as i32).collect();
    let front = graph.op("GatherV2").inputs([shape(x), graph.constant(order.clone()), graph.constant(0i32)]).out();
    let mut grad = grad;
    if may_broadcast {
        let axes = graph.op("BroadcastGradientArgs").inputs([front, shape(grad)]).build().output(0);
        let sum = graph.op("Sum").input(grad).input(axes).out();
        grad = graph.op("Reshape").input(sum).input(front).out();
    }
    if before == 0 {
        return Ok(grad);
    }
    let mut back = vec![0i32; rank];
    order.iter().enumerate().for_each(|(to, &from)| back[from as usize] = to as i32);
    Ok(graph.op("Transpose").input(grad).input(graph.constant(back)).out())
}

/// What becomes of an operand's labels, in the order in which they are laid out.
struct Layout<'a> {
    batch: &'a [Label],
    kept: Vec<Label>,
    contracted: &'a [Label],
    /// Labels that it alone has and the output lacks.
    summed: Vec<Label>,
}

/// An operand's values, or what was made of them.
enum LaidOut<'a, T> {
    Given(&'a [T]),
    Own(Scratch<T>),
}

impl<T> Deref for LaidOut<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        match self {
            LaidOut::Given(values) => values,
            LaidOut::Own(values) => values,
        }
    }
}

fn forward<T: MatrixElement + Item>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let n = ctx.n_inputs();
    let equation = Equation::parse(ctx.attrs().str("equation")?, n)?;
    if n > 2 {
        return Err(Error::invalid_argument(format!("Expecting 1 or 2 input subscripts but got: {n}")));
    }
    let mut labels = Vec::new();
    for i in 0..n {
        labels.push(equation.inputs[i].labels(ctx.input(i)?.shape().rank(), i)?);
    }
    let mut operands: Vec<(&[Label], Vec<Dim>)> = Vec::new();
    for (i, labels) in labels.iter().enumerate() {
        operands.push((labels, ctx.input(i)?.shape().iter().map(|&dim| Some(dim)).collect()));
    }
    let sizes: HashMap<Label, usize> =
        sizes(operands)?.into_iter().map(|(label, dim)| (label, dim.unwrap_or(1))).collect();
    let size = |list: &[Label]| -> usize { list.iter().map(|label| sizes[label]).product() };
    let output = equation.output_labels(&labels)?;
    let shape = Shape::new(&output.iter().map(|label| sizes[label]).collect::<Vec<_>>())?;

    // All sizes together must be countable, since parts of them are multiplied below.
    let every: Vec<usize> = sizes.values().copied().collect();
    Shape::new(&every)?;
    let (a, none) = (&labels[0], Vec::new());
    let b = labels.get(1).unwrap_or(&none);
    let select = |from: &[Label], keep: &dyn Fn(&Label) -> bool| {
        let mut list: Vec<Label> = Vec::new();
        from.iter().filter(|label| keep(label)).for_each(|label| {
            if !list.contains(label) {
                list.push(*label);
            }
        });
        list
    };
    let batch = select(a, &|label| b.contains(label) && output.contains(label));
    let contracted = select(a, &|label| b.contains(label) && !output.contains(label));
    let layout = |own: &[Label], other: &[Label]| Layout {
        batch: &batch,
        kept: select(own, &|label| !other.contains(label) && output.contains(label)),
        contracted: &contracted,
        summed: select(own, &|label| !other.contains(label) && !output.contains(label)),
    };
    let left = layout(a, b);
    let values = lay_out::<T>(ctx, 0, a, &left, &sizes)?;
    let (result, order): (LaidOut<'_, T>, Vec<Label>) = if n == 1 {
        (values, left.kept)
    } else {
        let right = layout(b, a);
        let others = lay_out::<T>(ctx, 1, b, &right, &sizes)?;
        let call = Sizes {
            m: size(&left.kept),
            n: size(&right.kept),
            k: size(&contracted),
            transpose_a: false,
            transpose_b: true,
        };
        let n = size(&batch).saturating_mul(call.m).saturating_mul(call.n);
        let mut product = ctx.scratch(n, T::ZERO, "products")?;
        multiply(ctx, call, &values, &others, &mut product)?;
        (LaidOut::Own(product), [batch.clone(), left.kept, right.kept].concat())
    };
    // A label that the output has twice moves along both: the diagonal is written, the rest stays zero.
    let mut out = ctx.allocate_zeroed(T::DTYPE, shape.clone())?;
    let steps = strides(&shape);
    let step =
        |label: &Label| output.iter().zip(&steps).filter(|(other, _)| *other == label).map(|(_, step)| step).sum();
    let view = View::new(0, order.iter().map(|label| (sizes[label], step(label))));
    view.write(out.data_mut::<T>()?, &result);
    ctx.set_output(0, out);
    Ok(())
}

/// Operand `i` as `[batch, kept, contracted]`, in row-major order.
fn lay_out<'a, T: Number + Item>(
    ctx: &'a KernelCtx<'_>,
    i: usize,
    labels: &[Label],
    layout: &Layout<'_>,
    sizes: &HashMap<Label, usize>,
) -> Result<LaidOut<'a, T>> {
    let tensor = ctx.input(i)?;
    let values = tensor.data::<T>()?;
    let steps = strides(tensor.shape());
    let walk = |label: &Label| -> (usize, isize) {
        let own = || labels.iter().zip(tensor.shape().iter().zip(&steps)).filter(|(other, _)| *other == label);
        // A size of 1 that is broadcast does not move.
        let is_broadcast = own().any(|(_, (&dim, _))| dim != sizes[label]);
        (sizes[label], if is_broadcast { 0 } else { own().map(|(_, (_, &step))| step).sum() })
    };
    let kept = layout.batch.iter().chain(&layout.kept).chain(layout.contracted);
    let order: Vec<(usize, isize)> = kept.chain(&layout.summed).map(walk).collect();
    let n: usize = order.iter().map(|(n, _)| n).product();
    let n_summed: usize = layout.summed.iter().map(|label| sizes[label]).product();
    let view = View::new(0, order);
    let laid = if n == values.len() && (n == 0 || view.contiguous() == Some(0)) {
        LaidOut::Given(values)
    } else {
        let mut laid = ctx.scratch(n, T::ZERO, "values of an operand")?;
        view.read(ctx.pool(), &mut laid, values);
        LaidOut::Own(laid)
    };
    if layout.summed.is_empty() {
        return Ok(laid);
    }
    let kept = layout.batch.iter().chain(&layout.kept).chain(layout.contracted);
    let n_rows: usize = kept.map(|label| sizes[label]).product();
    let sum = |row: &[T]| looking(row).fold(T::ZERO, |sum, &x| sum.add(x));
    let mut sums = ctx.scratch(n_rows, T::ZERO, "sums of an operand")?;
    for (row, to) in looking_by(n_summed * size_of::<T>(), sums.iter_mut().enumerate()) {
        *to = sum(&laid[row * n_summed..(row + 1) * n_summed]);
    }
    Ok(LaidOut::Own(sums))
}

/// Products of fewer multiplications than this are worth a task only together with others.
const SMALL: usize = 1 << 20;

fn multiply<T: MatrixElement>(ctx: &KernelCtx<'_>, sizes: Sizes, a: &[T], b: &[T], c: &mut [T]) -> Result<()> {
    let (size_a, size_b, size_c) = (sizes.m * sizes.k, sizes.n * sizes.k, sizes.m * sizes.n);
    if c.is_empty() || sizes.k == 0 {
        return Ok(());
    }
    let one = |i: usize, c: &mut [T]| {
        T::multiply(ctx.pool(), sizes, &a[i * size_a..(i + 1) * size_a], &b[i * size_b..(i + 1) * size_b], c)
    };
    let work = size_c.saturating_mul(sizes.k);
    if work >= SMALL {
        return c.chunks_exact_mut(size_c).enumerate().try_for_each(|(i, c)| one(i, c));
    }
    let per_task = (SMALL / 4 / work).max(1);
    let failed = parking_lot::Mutex::new(None);
    ctx.pool().for_each_chunk(c, per_task * size_c, |task, c| {
        for (i, c) in c.chunks_exact_mut(size_c).enumerate() {
            if let Err(error) = one(task * per_task + i, c) {
                *failed.lock() = Some(error);
            }
        }
    });
    failed.into_inner().map_or(Ok(()), Err)
}
