//! `AddSparseToTensorsMap`, `AddManySparseToTensorsMap`: sparse tensors are kept in a map, and numbers stand for them, which queues
//! can hold. `TakeManySparseFromTensorsMap`: they are taken out again, stacked into one.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;

use kolo_core::{Error, PartialShape, Result, Shape, Tensor};
use kolo_graph::{Effects, Gradient, OpDef, Operation, Output, ShapeFn};
use parking_lot::Mutex;

use super::elements::{Triple, input, set_outputs, stack, take_apart};
use crate::holdings::{Holdings, Measured, OBJECT};
use crate::op::{Gpu, KernelDef, Op, cpu_any};
use crate::resource::Resource;
use crate::{Cost, KernelCtx};

/// Keeps the sparse tensor for each index of the first dimension, in a map that has the operation's name; the output is a vector of
/// numbers that stand for them.
#[track_caller]
pub fn add_many_sparse_to_tensors_map<'g>(indices: Output<'g>, values: Output<'g>, shape: Output<'g>) -> Operation<'g> {
    indices.graph().op("AddManySparseToTensorsMap").inputs([indices, values, shape]).build()
}

pub(crate) static ADD_SPARSE_TO_TENSORS_MAP: Op = map_op(
    "AddSparseToTensorsMap",
    "(sparse_indices:int64, sparse_values:T, sparse_shape:int64) -> (sparse_handle:int64) ; T:type, \
     container:string=\"\", shared_name:string=\"\"",
    |ctx| {
        ctx.input_of_rank(0, 2)?;
        ctx.input_of_rank(1, 1)?;
        ctx.input_of_rank(2, 1)?;
        Ok(vec![PartialShape::scalar()])
    },
    &[cpu_any(add)],
);
pub(crate) static ADD_MANY_SPARSE_TO_TENSORS_MAP: Op = map_op(
    "AddManySparseToTensorsMap",
    "(sparse_indices:int64, sparse_values:T, sparse_shape:int64) -> (sparse_handles:int64) ; T:type, \
     container:string=\"\", shared_name:string=\"\"",
    |ctx| {
        ctx.input_of_rank(0, 2)?;
        ctx.input_of_rank(1, 1)?;
        ctx.input_of_rank(2, 1)?;
        Ok(vec![PartialShape::new(&[None])])
    },
    &[cpu_any(add_many)],
);
pub(crate) static TAKE_MANY_SPARSE_FROM_TENSORS_MAP: Op = map_op(
    "TakeManySparseFromTensorsMap",
    "(sparse_handles:int64) -> (sparse_indices:int64, sparse_values:dtype, sparse_shape:int64) ; dtype:type, \
     container:string=\"\", shared_name:string=\"\"",
    |ctx| {
        ctx.input_of_rank(0, 1)?;
        Ok(vec![PartialShape::of_rank(2), PartialShape::of_rank(1), PartialShape::of_rank(1)])
    },
    &[cpu_any(take_many)],
);

const fn map_op(name: &'static str, signature: &'static str, shape: ShapeFn, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape,
            gradient: Gradient::None("what is in a map does not depend on a graph"),
            stateful: true,
            effects: Effects::Uses,
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::OBJECTS,
        cost: Cost::Elements,
    }
}

/// Sparse tensors by number.
struct TensorsMap {
    inside: Mutex<Inside>,
}

struct Inside {
    next: i64,
    tensors: HashMap<i64, Triple>,
    holdings: Holdings,
}

/// What the place of one sparse tensor takes, apart from its tensors.
const PLACE: usize = 2 * size_of::<(i64, Triple)>();

impl Resource for TensorsMap {
    fn kind(&self) -> &'static str {
        "SparseTensorsMap"
    }

    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

impl TensorsMap {
    /// The map that a node names, or that has its own name.
    fn of(ctx: &KernelCtx<'_>) -> Result<(Arc<TensorsMap>, String)> {
        let (container, shared) = (ctx.attrs().str("container")?, ctx.attrs().str("shared_name")?);
        let name = if shared.is_empty() { &ctx.node.name[..] } else { shared };
        let map = ctx.step.resources().lookup_or_create(container, name, || {
            let mut holdings = Holdings::new(ctx.device.charge(0, &name.into())?);
            holdings.grow(OBJECT)?;
            Ok(Arc::new(TensorsMap { inside: Mutex::new(Inside { next: 0, tensors: HashMap::new(), holdings }) }))
        })?;
        Ok((map, name.to_owned()))
    }

    /// Keeps all of them, or none if there is no memory.
    fn add(&self, triples: Vec<Triple>) -> Result<Vec<i64>> {
        let mut inside = self.inside.lock();
        for (i, triple) in triples.iter().enumerate() {
            if let Err(error) = inside.holdings.add(&Measured::new(PLACE, triple)) {
                triples[..i].iter().for_each(|triple| inside.holdings.remove(&Measured::new(PLACE, triple)));
                return Err(error);
            }
        }
        let mut numbers = Vec::with_capacity(triples.len());
        for triple in triples {
            let number = inside.next;
            inside.next += 1;
            inside.tensors.insert(number, triple);
            numbers.push(number);
        }
        Ok(numbers)
    }

    fn take(&self, name: &str, numbers: &[i64]) -> Result<Vec<Triple>> {
        let mut inside = self.inside.lock();
        // All must be there before any is taken.
        if let Some(missing) = numbers.iter().find(|number| !inside.tensors.contains_key(number)) {
            return Err(Error::invalid_argument(format!("Unable to find SparseTensor: {missing} in map: {name}")));
        }
        let mut taken = Vec::with_capacity(numbers.len());
        for number in numbers {
            let Some(triple) = inside.tensors.remove(number) else {
                return Err(Error::invalid_argument(format!("SparseTensor {number} is taken twice from map: {name}")));
            };
            inside.holdings.remove(&Measured::new(PLACE, &triple));
            taken.push(triple);
        }
        Ok(taken)
    }
}

fn add(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let triple = input(ctx, 0)?;
    let (map, _) = TensorsMap::of(ctx)?;
    let numbers = map.add(vec![triple])?;
    ctx.set_output(0, Tensor::scalar(numbers[0]));
    Ok(())
}

fn add_many(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let triples = take_apart(ctx, &input(ctx, 0)?)?;
    let (map, _) = TensorsMap::of(ctx)?;
    // As in TensorFlow, those without elements come last; a program may see the numbers.
    let mut places: Vec<usize> = (0..triples.len()).collect();
    places.sort_by_key(|&i| triples[i][1].n_elements() == 0);
    let mut rows: Vec<Option<Triple>> = triples.into_iter().map(Some).collect();
    let added = map.add(places.iter().filter_map(|&i| rows[i].take()).collect())?;
    let mut numbers = vec![0i64; added.len()];
    places.into_iter().zip(added).for_each(|(i, number)| numbers[i] = number);
    ctx.set_output(0, Tensor::from(numbers));
    Ok(())
}

fn take_many(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let numbers = ctx.input(0)?;
    let &[n] = numbers.shape().dims() else {
        return Err(Error::invalid_argument(format!(
            "sparse_handles should be a vector but received shape {}",
            numbers.shape()
        )));
    };
    if n == 0 {
        return Err(Error::invalid_argument(
            "Must have at least 1 serialized SparseTensor, but input matrix has 0 rows",
        ));
    }
    let (map, name) = TensorsMap::of(ctx)?;
    let triples = map.take(&name, numbers.data::<i64>()?)?;
    let out = stack(ctx, ctx.attrs().dtype("dtype")?, Shape::new(&[n])?.dims(), &triples)?;
    set_outputs(ctx, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::{DType, Tensor};
    use kolo_graph::Output;

    use crate::testing::{Evaluation, tensor};

    fn take<'g>(g: &'g kolo_graph::Graph, handles: Output<'g>) -> [Output<'g>; 3] {
        let op = g.op("TakeManySparseFromTensorsMap").input(handles).attr("dtype", DType::F32);
        let op = op.attr("shared_name", "map").build();
        [0, 1, 2].map(|i| op.output(i))
    }

    #[test]
    fn tensors_come_back_stacked() {
        let g = crate::graph();
        let one = [g.constant(tensor([1, 1], [2i64])), g.constant([7.0f32]), g.constant([4i64])];
        let many = [g.constant([[0i64, 1], [2, 0]]), g.constant([1.0f32, 2.0]), g.constant([3i64, 2])];
        fn add<'g>(g: &'g kolo_graph::Graph, op: &str, from: [Output<'g>; 3]) -> Output<'g> {
            g.op(op).inputs(from).attr("shared_name", "map").out()
        }
        let (first, others) = (add(&g, "AddSparseToTensorsMap", one), add(&g, "AddManySparseToTensorsMap", many));
        let handles = g.op("Placeholder").attr("dtype", DType::I64).out();
        let taken = take(&g, handles);
        g.check().unwrap();
        let evaluation = Evaluation::new(g.snapshot());
        let first = evaluation.run(&[first], &[]).unwrap()[0].scalar_value::<i64>().unwrap();
        let others = evaluation.run(&[others], &[]).unwrap()[0].data::<i64>().unwrap().to_vec();
        // The row without elements has the last number.
        assert_eq!(others, [1, 3, 2]);
        let error = evaluation.run(&taken[..1], &[(handles, Tensor::from([first, 99]))]).unwrap_err();
        assert!(error.message().contains("Unable to find SparseTensor: 99 in map: map"), "{error}");
        let found = evaluation.run(&taken, &[(handles, Tensor::from([others[2], first]))]).unwrap();
        assert_eq!(found, [Tensor::from([[0i64, 0], [1, 2]]), Tensor::from([2.0f32, 7.0]), Tensor::from([2i64, 4])]);
        // They are gone now.
        assert!(evaluation.run(&taken[..1], &[(handles, Tensor::from([first]))]).is_err());
    }
}
