//! Sets in the last dimension, one for every place in the others: `DenseToDenseSetOperation`, `DenseToSparseSetOperation`,
//! `SparseToSparseSetOperation`, and how many elements each has, `SetSize`.

use bytes::Bytes;
use kolo_core::{DType, Element, Error, PartialShape, Result, Shape, Tensor};
use kolo_device::cpu::looking;
use kolo_graph::{Gradient, InferCtx, OpDef, Output, ShapeFn};

use super::reorder::sizes;
use super::to_dense::positions;
use crate::op::{Gpu, KernelDef, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// The sets in the rows of `a` and `b` joined by `operation`: `a-b`, `b-a`, `intersection` or `union`. Outputs: coordinates, values and
/// shape of a sparse tensor.
#[track_caller]
pub fn set_operation<'g>(a: Output<'g>, b: Output<'g>, operation: &str) -> [Output<'g>; 3] {
    let op = a.graph().op("DenseToDenseSetOperation").inputs([a, b]).attr("set_operation", operation).build();
    [0, 1, 2].map(|i| op.output(i))
}

macro_rules! signature {
    ($inputs:literal) => {
        concat!(
            "(",
            $inputs,
            ") -> (result_indices:int64, result_values:T, result_shape:int64) ; set_operation:string, \
             validate_indices:bool=true, T:type{int8,int16,int32,int64,uint8,uint16,string}"
        )
    };
}

pub(crate) static DENSE_TO_DENSE_SET_OPERATION: Op = sets(
    "DenseToDenseSetOperation",
    signature!("set1:T, set2:T"),
    |ctx| {
        let (a, b) = (ctx.input(0), ctx.input(1));
        infer(ctx, a.rank().or(b.rank()))
    },
    &[cpu_any(dense_to_dense)],
);
pub(crate) static DENSE_TO_SPARSE_SET_OPERATION: Op = sets(
    "DenseToSparseSetOperation",
    signature!("set1:T, set2_indices:int64, set2_values:T, set2_shape:int64"),
    |ctx| infer(ctx, ctx.input(0).rank().or(ctx.input(3).dim(0))),
    &[cpu_any(dense_to_sparse)],
);
pub(crate) static SPARSE_TO_SPARSE_SET_OPERATION: Op = sets(
    "SparseToSparseSetOperation",
    signature!(
        "set1_indices:int64, set1_values:T, set1_shape:int64, set2_indices:int64, set2_values:T, set2_shape:int64"
    ),
    |ctx| infer(ctx, ctx.input(2).dim(0).or(ctx.input(5).dim(0))),
    &[cpu_any(sparse_to_sparse)],
);
pub(crate) static SET_SIZE: Op = sets(
    "SetSize",
    "(set_indices:int64, set_values:T, set_shape:int64) -> (size:int32) ; validate_indices:bool=true, \
     T:type{int8,int16,int32,int64,uint8,uint16,string}",
    |ctx| {
        let dims = ctx.constant_as_shape(2);
        Ok(vec![match dims.dims() {
            Some([outer @ .., _]) => PartialShape::new(outer),
            _ => PartialShape::unknown(),
        }])
    },
    &[cpu_any(size)],
);

const fn sets(name: &'static str, signature: &'static str, shape: ShapeFn, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef { name, signature, shape, gradient: Gradient::None("sets are not differentiable"), ..OpDef::BASE },
        kernels,
        gpu: Gpu::Missing,
        cost: Cost::Elements,
    }
}

fn infer(_: &InferCtx<'_>, rank: Option<usize>) -> Result<Vec<PartialShape>> {
    if rank.is_some_and(|rank| rank < 2) {
        return Err(Error::invalid_argument(format!("Input rank {} is less than 2.", rank.unwrap_or(0))));
    }
    Ok(vec![PartialShape::new(&[None, rank]), PartialShape::new(&[None]), PartialShape::new(&[rank])])
}

/// What sets are made of.
trait Member: Ord + Clone {
    fn of(tensor: &Tensor) -> Result<&[Self]>;
    fn tensor(ctx: &KernelCtx<'_>, values: Vec<Self>) -> Result<Tensor>;
}

macro_rules! members {
    ($($ty:ty),*) => {
        $(impl Member for $ty {
            fn of(tensor: &Tensor) -> Result<&[$ty]> {
                tensor.data()
            }
            fn tensor(_: &KernelCtx<'_>, values: Vec<$ty>) -> Result<Tensor> {
                Tensor::from_vec([values.len()], values)
            }
        })*
    };
}

members!(i8, i16, i32, i64, u8, u16);

impl Member for Bytes {
    fn of(tensor: &Tensor) -> Result<&[Bytes]> {
        tensor.strings()
    }

    fn tensor(ctx: &KernelCtx<'_>, values: Vec<Bytes>) -> Result<Tensor> {
        ctx.string_tensor(Shape::new(&[values.len()])?, values)
    }
}

/// Runs `$function` for the type of the members, which `$input` has.
macro_rules! by_type {
    ($ctx:ident, $input:literal, $function:ident) => {
        match $ctx.input($input)?.dtype() {
            DType::I8 => $function::<i8>($ctx),
            DType::I16 => $function::<i16>($ctx),
            DType::I32 => $function::<i32>($ctx),
            DType::I64 => $function::<i64>($ctx),
            DType::U8 => $function::<u8>($ctx),
            DType::U16 => $function::<u16>($ctx),
            DType::Str => $function::<Bytes>($ctx),
            other => Err(Error::unimplemented(format!("there are no sets of {other}"))),
        }
    };
}

/// Sets by the number of their group, each in order and without repetition, and the sizes of the dimensions that groups are in.
struct Groups<T> {
    members: Vec<(usize, T)>,
    outer: Shape,
}

impl<T: Member> Groups<T> {
    fn new(mut members: Vec<(usize, T)>, outer: &[usize]) -> Result<Groups<T>> {
        members.sort();
        members.dedup();
        Ok(Groups { members, outer: Shape::new(outer)? })
    }

    fn dense(ctx: &KernelCtx<'_>, i: usize) -> Result<Groups<T>> {
        let tensor = ctx.input(i)?;
        let [outer @ .., n] = tensor.shape().dims() else { return Err(too_flat(tensor.shape().rank())) };
        if outer.is_empty() {
            return Err(too_flat(1));
        }
        let values = T::of(tensor)?;
        let mut members = ctx.list(values.len(), "members of sets")?;
        members.extend(looking(values.iter().enumerate()).map(|(at, value)| (at / n, value.clone())));
        Groups::new(members, outer)
    }

    /// Of coordinates, values and shape in inputs `i` and after.
    fn sparse(ctx: &KernelCtx<'_>, i: usize) -> Result<Groups<T>> {
        let (indices, values, shape) = (ctx.input(i)?, ctx.input(i + 1)?, ctx.input(i + 2)?);
        let (n, depth) = sizes(indices, values, shape)?;
        if depth < 2 {
            return Err(too_flat(depth));
        }
        let whole = Shape::from_signed(shape.data::<i64>()?)?;
        let validate = ctx.attrs().bool("validate_indices")?;
        let positions = positions(ctx, indices.data::<i64>()?, n, &whole, validate)?;
        let (outer, row) = (&whole[..depth - 1], whole[depth - 1]);
        let values = T::of(values)?;
        Groups::new(positions.iter().zip(values).map(|(at, value)| (at / row, value.clone())).collect(), outer)
    }
}

fn too_flat(rank: usize) -> Error {
    Error::invalid_argument(format!("Invalid rank {rank} of a set's tensor: it must be at least 2"))
}

#[derive(Clone, Copy)]
enum Operation {
    AMinusB,
    BMinusA,
    Intersection,
    Union,
}

impl Operation {
    fn of(ctx: &KernelCtx<'_>) -> Result<Operation> {
        // In any case, as TensorFlow takes it.
        match &ctx.attrs().str("set_operation")?.to_ascii_lowercase()[..] {
            "a-b" => Ok(Operation::AMinusB),
            "b-a" => Ok(Operation::BMinusA),
            "intersection" => Ok(Operation::Intersection),
            "union" => Ok(Operation::Union),
            other => Err(Error::invalid_argument(format!(
                "Invalid set_operation {other}; there are a-b, b-a, intersection and union"
            ))),
        }
    }

    /// Whether a member of a alone, of b alone, or of both is in the result.
    fn keeps(self, in_a: bool, in_b: bool) -> bool {
        match self {
            Operation::AMinusB => in_a && !in_b,
            Operation::BMinusA => in_b && !in_a,
            Operation::Intersection => in_a && in_b,
            Operation::Union => true,
        }
    }
}

fn dense_to_dense(ctx: &mut KernelCtx<'_>) -> Result<()> {
    fn run<T: Member>(ctx: &mut KernelCtx<'_>) -> Result<()> {
        let (a, b) = (Groups::<T>::dense(ctx, 0)?, Groups::dense(ctx, 1)?);
        combine(ctx, a, b)
    }
    by_type!(ctx, 0, run)
}

fn dense_to_sparse(ctx: &mut KernelCtx<'_>) -> Result<()> {
    fn run<T: Member>(ctx: &mut KernelCtx<'_>) -> Result<()> {
        let (a, b) = (Groups::<T>::dense(ctx, 0)?, Groups::sparse(ctx, 1)?);
        combine(ctx, a, b)
    }
    by_type!(ctx, 0, run)
}

fn sparse_to_sparse(ctx: &mut KernelCtx<'_>) -> Result<()> {
    fn run<T: Member>(ctx: &mut KernelCtx<'_>) -> Result<()> {
        let (a, b) = (Groups::<T>::sparse(ctx, 0)?, Groups::sparse(ctx, 3)?);
        combine(ctx, a, b)
    }
    by_type!(ctx, 1, run)
}

fn combine<T: Member>(ctx: &mut KernelCtx<'_>, a: Groups<T>, b: Groups<T>) -> Result<()> {
    let operation = Operation::of(ctx)?;
    if a.outer != b.outer {
        return Err(Error::invalid_argument(format!("Mismatched group shapes {} vs {}.", a.outer, b.outer)));
    }
    let (outer, mut result) = (a.outer, ctx.list(a.members.len() + b.members.len(), "members of sets")?);
    let (mut left, mut right) = (a.members.into_iter().peekable(), b.members.into_iter().peekable());
    loop {
        let order = match (left.peek(), right.peek()) {
            (Some(a), Some(b)) => a.cmp(b),
            (Some(_), None) => std::cmp::Ordering::Less,
            (None, Some(_)) => std::cmp::Ordering::Greater,
            (None, None) => break,
        };
        let a = if order.is_le() { left.next() } else { None };
        let b = if order.is_ge() { right.next() } else { None };
        let keeps = operation.keeps(a.is_some(), b.is_some());
        if let (true, Some(member)) = (keeps, a.or(b)) {
            result.push(member);
        }
    }
    let (n, depth) = (result.len(), outer.rank() + 1);
    let mut indices = ctx.allocate(DType::I64, Shape::new(&[n, depth])?)?;
    let (mut group, mut place, mut longest) = (None, 0i64, 0i64);
    for (row, (at, _)) in looking(indices.data_mut::<i64>()?.chunks_exact_mut(depth).zip(&result)) {
        place = if group == Some(*at) { place + 1 } else { 0 };
        group = Some(*at);
        longest = longest.max(place + 1);
        let mut rest = *at;
        for (i, &size) in outer.iter().enumerate().rev() {
            row[i] = (rest % size) as i64;
            rest /= size;
        }
        row[depth - 1] = place;
    }
    let shape: Vec<i64> = outer.iter().map(|&size| size as i64).chain([longest]).collect();
    let values = T::tensor(ctx, result.into_iter().map(|(_, value)| value).collect())?;
    ctx.set_output(0, indices);
    ctx.set_output(1, values);
    ctx.set_output(2, Tensor::from(shape));
    Ok(())
}

fn size(ctx: &mut KernelCtx<'_>) -> Result<()> {
    fn run<T: Member>(ctx: &mut KernelCtx<'_>) -> Result<()> {
        let groups = Groups::<T>::sparse(ctx, 0)?;
        let mut out = ctx.allocate_zeroed(i32::DTYPE, groups.outer)?;
        let sizes = out.data_mut::<i32>()?;
        looking(groups.members).for_each(|(at, _)| sizes[at] += 1);
        ctx.set_output(0, out);
        Ok(())
    }
    by_type!(ctx, 1, run)
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{OpTest, check_op, tensor};

    fn dense(operation: &str) -> OpTest {
        check_op("DenseToDenseSetOperation")
            .attr("set_operation", operation)
            .input([[3i32, 1, 3], [5, 5, 5]])
            .input([[1i32, 9], [7, 5]])
    }

    fn sparse(indices: Tensor, values: Tensor, shape: [i64; 2]) -> [Tensor; 3] {
        [indices, values, Tensor::from(shape)]
    }

    #[test]
    fn rows_are_sets() {
        dense("union").gives_all(sparse(
            Tensor::from([[0i64, 0], [0, 1], [0, 2], [1, 0], [1, 1]]),
            Tensor::from([1i32, 3, 9, 5, 7]),
            [2, 3],
        ));
        dense("intersection").gives_all(sparse(Tensor::from([[0i64, 0], [1, 0]]), Tensor::from([1i32, 5]), [2, 1]));
        dense("a-b").gives_all(sparse(Tensor::from([[0i64, 0]]), Tensor::from([3i32]), [2, 1]));
        dense("b-a").gives_all(sparse(Tensor::from([[0i64, 0], [1, 0]]), Tensor::from([9i32, 7]), [2, 1]));
        dense("a+b").fails("Invalid set_operation");
        check_op("DenseToDenseSetOperation")
            .attr("set_operation", "union")
            .input(tensor::<i64, 2>([2, 0], []))
            .input(tensor::<i64, 2>([2, 0], []))
            .gives_all(sparse(tensor::<i64, 2>([0, 2], []), tensor::<i64, 1>([0], []), [2, 0]));
        check_op("DenseToDenseSetOperation").attr("set_operation", "union").input([1i32]).input([1i32]).fails("rank");
        check_op("DenseToDenseSetOperation")
            .attr("set_operation", "union")
            .input([[1i32]])
            .input([[1i32], [2]])
            .fails("Mismatched group shapes [1] vs [2].");
    }

    #[test]
    fn sparse_rows_are_sets_too() {
        let words = |list: &[&'static str]| {
            Tensor::from_strings([list.len()], list.iter().map(|word| (*word).into()).collect()).unwrap()
        };
        let set = |test: OpTest, values: &[&'static str]| {
            test.input([[0i64, 0], [2, 1]]).input(words(values)).input([3i64, 2])
        };
        let both = || check_op("SparseToSparseSetOperation").attr("set_operation", "union");
        set(set(both(), &["b", "c"]), &["a", "c"]).gives_all(sparse(
            Tensor::from([[0i64, 0], [0, 1], [2, 0]]),
            words(&["a", "b", "c"]),
            [3, 2],
        ));
        let size = || check_op("SetSize").input([[0i64, 0], [0, 1], [2, 1]]);
        size().input([7i16, 7, 1]).input([3i64, 2]).gives([1i32, 0, 1]);
        size().input([7i16, 7, 1]).input([2i64, 2]).fails("out of bounds");
        let backwards = || check_op("SetSize").input([[1i64, 0], [0, 1]]).input([7i16, 7]).input([2i64, 2]);
        backwards().fails("out of order");
        backwards().attr("validate_indices", false).gives([1i32, 1]);
        let mixed = check_op("DenseToSparseSetOperation").attr("set_operation", "a-b").input([[1u8, 2], [3, 4]]);
        let mixed = mixed.input([[0i64, 0], [1, 0]]).input([2u8, 9]).input([2i64, 5]);
        mixed.gives_all(sparse(Tensor::from([[0i64, 0], [1, 0], [1, 1]]), Tensor::from([1u8, 3, 4]), [2, 2]));
    }
}
