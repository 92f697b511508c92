//! `SparseConditionalAccumulator`: rows of gradients, and for each row the mean over the gradients that had it.

use std::collections::BTreeMap;

use kolo_core::{DType, Error, PartialShape, Result, Shape, Tensor};
use kolo_device::Charge;
use kolo_graph::{Graph, Operation, Output};

use super::accumulator::{Accumulator, AccumulatorSpec, Form, Reduction, TAKE, access, make};
use super::dense::maker;
use super::make::pair;
use super::source::object;
use crate::holdings::{Holdings, estimate};
use crate::math::number::Number;
use crate::op::{KernelDef, Op, cpu_any, cpu_made};
use crate::state::number::{NumberVisitor, visit_number};
use crate::{KernelCtx, KernelMaker};

/// A conditional accumulator for gradients of which only some rows are known. A plain copy.
#[derive(Clone, Copy, Debug)]
pub struct SparseConditionalAccumulator<'g> {
    handle: Output<'g>,
    dtype: DType,
}

impl<'g> SparseConditionalAccumulator<'g> {
    /// An accumulator for gradients of this dtype and shape, private to the session that uses it if `shared_name` is
    /// empty.
    #[track_caller]
    pub fn new(
        graph: &'g Graph,
        name: &str,
        shared_name: &str,
        dtype: DType,
        shape: impl Into<PartialShape>,
    ) -> SparseConditionalAccumulator<'g> {
        let builder = graph.op("SparseConditionalAccumulator").name(name).attr("shared_name", shared_name);
        SparseConditionalAccumulator { handle: builder.attr("dtype", dtype).attr("shape", shape.into()).out(), dtype }
    }

    /// The handle.
    pub fn handle(self) -> Output<'g> {
        self.handle
    }

    /// Adds rows `indices` (int64) of a gradient that was computed in step `local_step` (int64).
    #[track_caller]
    pub fn apply_grad(self, indices: Output<'g>, values: Output<'g>, local_step: Output<'g>) -> Operation<'g> {
        let graph = self.handle.graph();
        let unknown = graph.constant(Tensor::vector(Vec::<i64>::new()));
        let builder = graph.op("SparseAccumulatorApplyGradient");
        builder.inputs([self.handle, local_step, indices, values, unknown]).attr("has_known_shape", false).build()
    }

    /// Sets the accumulator's step (int64).
    #[track_caller]
    pub fn set_global_step(self, step: Output<'g>) -> Operation<'g> {
        self.handle.graph().op("AccumulatorSetGlobalStep").inputs([self.handle, step]).build()
    }

    /// The indices (ascending), rows and shape of the mean, once there are `n_required` (int32) gradients.
    #[track_caller]
    pub fn take_grad(self, n_required: Output<'g>) -> Vec<Output<'g>> {
        let builder = self.handle.graph().op("SparseAccumulatorTakeGradient").inputs([self.handle, n_required]);
        builder.attr("dtype", self.dtype).build().outputs()
    }
}

pub(crate) static SPARSE_CONDITIONAL_ACCUMULATOR: Op = maker(
    "SparseConditionalAccumulator",
    "() -> (handle:Ref(string)) ; dtype:type{num}, shape:shape, container:string=\"\", shared_name:string=\"\", \
     reduction_type:string{\"MEAN\",\"SUM\"}=\"MEAN\"",
    pair,
    SPARSE,
);
pub(crate) static SPARSE_ACCUMULATOR_APPLY_GRADIENT: Op = access(
    "SparseAccumulatorApplyGradient",
    "(handle:Ref(string), local_step:int64, gradient_indices:int64, gradient_values:dtype, gradient_shape:int64) -> () ; \
     dtype:type{num}, has_known_shape:bool",
    |ctx| {
        ctx.input_of_rank(2, 1)?;
        ctx.input_of_rank_at_least(3, 1)?;
        Ok(Vec::new())
    },
    APPLY,
    false,
);
pub(crate) static SPARSE_ACCUMULATOR_TAKE_GRADIENT: Op = access(
    "SparseAccumulatorTakeGradient",
    "(handle:Ref(string), num_required:int32) -> (indices:int64, values:dtype, shape:int64) ; dtype:type{num}",
    // The declared shape may be no more than the beginning of the gradients' shape, so it says nothing of the rows.
    |_| Ok(vec![PartialShape::of_rank(1), PartialShape::unknown(), PartialShape::of_rank(1)]),
    TAKE,
    false,
);

const SPARSE: &[KernelDef] = &[cpu_made(KernelMaker::Object(|init| make(init, Form::Sparse)))];
const APPLY: &[KernelDef] = &[cpu_any(apply)];

fn apply(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let accumulator = object::<Accumulator>(ctx, 0)?;
    let shape = match ctx.attrs().bool("has_known_shape")? {
        true => Some(ctx.data::<i64>(4)?),
        false => None,
    };
    let gradient = SparseGradient { indices: ctx.data::<i64>(2)?, values: ctx.input(3)?, shape };
    accumulator.apply_sparse(ctx.scalar::<i64>(1)?, &gradient)
}

/// Some rows of a gradient.
pub(super) struct SparseGradient<'a> {
    /// Which rows.
    pub indices: &'a [i64],
    /// The rows.
    pub values: &'a Tensor,
    /// The shape of the whole, if it is known.
    pub shape: Option<&'a [i64]>,
}

impl SparseGradient<'_> {
    /// The sizes of a row; an error if the parts do not fit each other or the declared shape.
    fn row_shape(&self, declared: &PartialShape) -> Result<Shape> {
        let values = self.values.shape();
        let Some((&n_rows, row)) = values.split_first() else {
            return Err(Error::invalid_argument("Values should not be a scalar"));
        };
        if n_rows != self.indices.len() {
            return Err(Error::invalid_argument(format!(
                "Number of indices and values must match: {} indices, {n_rows} rows of values",
                self.indices.len()
            )));
        }
        let mut whole = PartialShape::of_rank(1).concat(&PartialShape::from(&Shape::new(row)?));
        if let Some(shape) = self.shape {
            let dims: Vec<_> = shape.iter().map(|&dim| usize::try_from(dim).ok()).collect();
            whole = whole.merge(&PartialShape::new(&dims))?;
        }
        let mismatch = |_| Error::invalid_argument(format!("Shape mismatch: expected {declared}, got {whole}"));
        // As in TensorFlow, what is declared may be the beginning of the shape: a training program declares [].
        let open = match (declared.rank(), whole.rank()) {
            (Some(short), Some(rank)) if short < rank => declared.concat(&PartialShape::of_rank(rank - short)),
            _ => declared.clone(),
        };
        let n_all = open.merge(&whole).map_err(mismatch)?.dim(0);
        for (i, &index) in self.indices.iter().enumerate() {
            let fits = usize::try_from(index).is_ok_and(|index| n_all.is_none_or(|n| index < n));
            if !fits {
                let bound = n_all.map_or("unknown".to_owned(), |n| n.to_string());
                return Err(Error::invalid_argument(format!("indices[{i}] = {index} is not in [0, {bound})")));
            }
        }
        Shape::new(row)
    }
}

/// The sum of rows.
#[derive(Default)]
pub(super) struct SparseSum {
    rows: BTreeMap<i64, Row>,
    row_shape: Option<Shape>,
    n_gradients: usize,
}

struct Row {
    sum: Tensor,
    /// How many gradients had this row.
    count: usize,
    /// The last of them, so that one that has a row twice counts once.
    last: usize,
}

impl SparseSum {
    /// Adds a gradient, which must fit the declared shape and what was added before.
    pub fn add(
        &mut self,
        gradient: &SparseGradient<'_>,
        declared: &PartialShape,
        holdings: &mut Holdings,
    ) -> Result<()> {
        let row_shape = gradient.row_shape(declared)?;
        if let Some(expected) = self.row_shape.as_ref().filter(|expected| **expected != row_shape) {
            return Err(Error::invalid_argument(format!("Shape mismatch: expected rows {expected}, got {row_shape}")));
        }
        // All at once, so that no half of a gradient is added. An index that comes twice makes one row.
        let row_bytes = 2 * size_of::<(i64, Row)>() + estimate(gradient.values.dtype(), row_shape.n_elements(), 0);
        let n_before = self.rows.len();
        let n_new = gradient.indices.iter().filter(|index| !self.rows.contains_key(index)).count();
        holdings.grow(n_new.saturating_mul(row_bytes))?;
        self.row_shape = Some(row_shape.clone());
        self.n_gradients += 1;
        let added =
            visit_number(gradient.values.dtype(), "accumulating", AddRows { sum: &mut *self, gradient, row_shape });
        holdings.shrink((n_new + n_before).saturating_sub(self.rows.len()).saturating_mul(row_bytes));
        added
    }

    /// Memory for what is made of the sum, which is asked for before the sum leaves its accumulator.
    pub fn room(&self, spec: &AccumulatorSpec, memory: &Charge) -> Result<SparseRoom> {
        let row_shape = self.row_shape.as_ref().ok_or_else(|| Error::internal("there is no gradient to take"))?;
        let dims: Vec<usize> = [&[self.rows.len()], row_shape.dims()].concat();
        Ok(SparseRoom {
            indices: memory.tensor(DType::I64, [self.rows.len()].into())?,
            values: memory.tensor(spec.dtype, Shape::new(&dims)?)?,
        })
    }

    /// Indices, rows and shape.
    pub fn finish(self, spec: &AccumulatorSpec, room: SparseRoom) -> Result<Vec<Tensor>> {
        let row_shape = self.row_shape.ok_or_else(|| Error::internal("there is no gradient to take"))?;
        let mut shape = vec![spec.shape.dim(0).map_or(-1, |n| n as i64)];
        shape.extend(row_shape.iter().map(|&dim| dim as i64));
        let SparseRoom { mut indices, values } = room;
        indices.data_mut::<i64>()?.iter_mut().zip(self.rows.keys()).for_each(|(to, &index)| *to = index);
        let row = row_shape.n_elements();
        let write = WriteRows { rows: self.rows, values, row, reduction: spec.reduction };
        let values = visit_number(spec.dtype, "accumulating", write)?;
        Ok(vec![indices, values, Tensor::vector(shape)])
    }
}

/// Memory for the rows of a sum and their indices.
pub(super) struct SparseRoom {
    indices: Tensor,
    values: Tensor,
}

struct AddRows<'a, 'b> {
    sum: &'a mut SparseSum,
    gradient: &'a SparseGradient<'b>,
    row_shape: Shape,
}

impl NumberVisitor for AddRows<'_, '_> {
    type Out = ();
    fn visit<T: Number>(self) -> Result<()> {
        let (values, row) = (self.gradient.values.data::<T>()?, self.row_shape.n_elements());
        let number = self.sum.n_gradients;
        for (i, &index) in self.gradient.indices.iter().enumerate() {
            let values = &values[i * row..(i + 1) * row];
            match self.sum.rows.get_mut(&index) {
                Some(found) => {
                    found.sum.data_mut::<T>()?.iter_mut().zip(values).for_each(|(x, &y)| *x = x.add(y));
                    found.count += usize::from(found.last != number);
                    found.last = number;
                }
                None => {
                    let sum = Tensor::from_vec(self.row_shape.clone(), values.to_vec())?;
                    self.sum.rows.insert(index, Row { sum, count: 1, last: number });
                }
            }
        }
        Ok(())
    }
}

struct WriteRows {
    rows: BTreeMap<i64, Row>,
    values: Tensor,
    row: usize,
    reduction: Reduction,
}

impl NumberVisitor for WriteRows {
    type Out = Tensor;
    fn visit<T: Number>(mut self) -> Result<Tensor> {
        let values = self.values.data_mut::<T>()?;
        for (i, row) in self.rows.values().enumerate() {
            let to = &mut values[i * self.row..(i + 1) * self.row];
            to.copy_from_slice(row.sum.data::<T>()?);
            if self.reduction == Reduction::Mean && row.count > 1 {
                let n = T::from_count(row.count);
                to.iter_mut().for_each(|x| *x = x.div(n));
            }
        }
        Ok(self.values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Evaluation, tensor};

    #[test]
    fn each_row_is_divided_by_how_many_had_it() {
        let g = crate::graph();
        let a = SparseConditionalAccumulator::new(&g, "a", "a", DType::F32, [None, Some(2)]);
        let step = g.constant(0i64);
        let first = a.apply_grad(g.constant([0i64, 3]), g.constant([[1.0f32, 2.0], [3.0, 4.0]]), step);
        let second = a.apply_grad(g.constant([2i64, 3]), g.constant([[10.0f32, 20.0], [5.0, 6.0]]), step);
        let taken = a.take_grad(g.constant(2i32));
        let n = g.op("AccumulatorNumAccumulated").input(a.handle()).out();
        let set = g.op("AccumulatorSetGlobalStep").inputs([a.handle(), g.constant(1i64)]).build();
        g.check().unwrap();
        assert_eq!(taken[1].shape(), PartialShape::unknown());
        let run = Evaluation::new(g.snapshot());
        run.run_targets(&[first], &[]).unwrap();
        run.run_targets(&[second], &[]).unwrap();
        assert_eq!(run.run(&[n], &[]).unwrap(), [Tensor::scalar(2i32)]);
        let found = run.run(&taken, &[]).unwrap();
        let rows = tensor([3, 2], [1.0f32, 2.0, 10.0, 20.0, 4.0, 5.0]);
        assert_eq!(found, [Tensor::from([0i64, 2, 3]), rows, Tensor::from([-1i64, 2])]);
        run.run_targets(&[set], &[]).unwrap();
        run.run_targets(&[first], &[]).unwrap();
        assert_eq!(run.run(&[n], &[]).unwrap(), [Tensor::scalar(0i32)]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let values = tensor([2, 1], [1i32, 2]);
        let check = |indices: &[i64], shape: Option<&[i64]>, declared: &PartialShape| {
            SparseGradient { indices, values: &values, shape }.row_shape(declared).map_err(|e| e.message().to_owned())
        };
        let any = PartialShape::unknown();
        assert_eq!(check(&[0, 1], None, &any), Ok(Shape::from([1])));
        let fails = |result: Result<Shape, String>, text: &str| {
            let error = result.unwrap_err();
            assert!(error.contains(text), "{error}");
        };
        assert_eq!(check(&[0, 1], None, &PartialShape::scalar()), Ok(Shape::from([1])));
        assert_eq!(check(&[0, 1], None, &[2usize].into()), Ok(Shape::from([1])));
        fails(check(&[0, 2], None, &[2usize].into()), "indices[1] = 2 is not in [0, 2)");
        fails(check(&[0, 1], None, &[2usize, 1, 1].into()), "Shape mismatch: expected [2,1,1], got [?,1]");
        fails(check(&[0], None, &any), "1 indices, 2 rows");
        fails(check(&[0, -1], None, &any), "indices[1] = -1 is not in [0, unknown)");
        fails(check(&[0, 3], Some(&[3, 1]), &any), "indices[1] = 3 is not in [0, 3)");
        fails(check(&[0, 3], None, &[2usize, 1].into()), "indices[1] = 3 is not in [0, 2)");
        fails(check(&[0, 1], None, &[2usize, 2].into()), "Shape mismatch: expected [2,2], got [?,1]");
        fails(check(&[0, 1], Some(&[2, 2]), &any), "not compatible");
        let scalar = Tensor::scalar(1i32);
        let gradient = SparseGradient { indices: &[0], values: &scalar, shape: None };
        assert!(gradient.row_shape(&any).is_err());
    }

    #[test]
    fn a_gradient_without_rows_counts_and_a_row_twice_counts_once() {
        let (mut sum, mut none_held) = (SparseSum::default(), Holdings::new(Charge::NONE));
        let spec = AccumulatorSpec {
            form: Form::Sparse,
            dtype: DType::F64,
            shape: PartialShape::from([5usize, 1]),
            reduction: Reduction::Mean,
        };
        let none = tensor::<f64, 2>([0, 1], []);
        sum.add(&SparseGradient { indices: &[], values: &none, shape: None }, &spec.shape, &mut none_held).unwrap();
        let twice = tensor([2, 1], [1.0f64, 2.0]);
        sum.add(&SparseGradient { indices: &[4, 4], values: &twice, shape: None }, &spec.shape, &mut none_held)
            .unwrap();
        let room = sum.room(&spec, &Charge::NONE).unwrap();
        let found = sum.finish(&spec, room).unwrap();
        assert_eq!(found, [Tensor::from([4i64]), tensor([1, 1], [3.0f64]), Tensor::from([5i64, 1])]);
    }
}
