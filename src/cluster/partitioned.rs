//! Variables that are too large for one device: cut along the first dimension into parts, read and looked up as one.

use kolo_core::{DType, Error, Result, Shape};
use kolo_graph::{Graph, Initializer, Operation, Output, Variable};

use crate::ops::{self, IntoInts};
use crate::train::SaveSlice;

/// The collection of parts: lines of part, whole, first row and rows of the whole.
const COLLECTION: &str = "kolo_partitioned_variables";

/// How ids find their part in [`PartitionedVariable::lookup_by`]. The words are TensorFlow's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LookupStrategy {
    /// Ids that follow each other are in one part, so that the table is what [`PartitionedVariable::read`] gives.
    #[default]
    Div,
    /// Id `i` is row `i / n` of part `i % n`. Ids are spread evenly even if the small ones are frequent.
    Mod,
}

/// A variable in parts, each a variable of its own (`name/part_0`, …) that goes where the device scope puts it. In a
/// checkpoint it is one tensor called `name`, slots included, so the number of parts may change from run to run.
///
/// ```
/// use kolo::cluster::PartitionedVariable;
/// use kolo::{DType, Session, Tensor};
///
/// let g = kolo::graph();
/// let table = Tensor::from([[1.0f32, 2.0], [3.0, 4.0], [5.0, 6.0]]);
/// let table = PartitionedVariable::new(&g, "table", &[3, 2], DType::F32, table, 2)?;
/// let rows = table.lookup(g.constant([2i64, 0, 2]));
/// let init = g.global_variables_initializer();
///
/// let session = Session::new(&g)?;
/// session.run_op(init)?;
/// assert_eq!(session.fetch(rows)?, Tensor::from([[5.0f32, 6.0], [1.0, 2.0], [5.0, 6.0]]));
/// # Ok::<(), kolo::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct PartitionedVariable<'g> {
    name: String,
    shape: Shape,
    parts: Vec<Variable<'g>>,
}

impl<'g> PartitionedVariable<'g> {
    /// A variable in `n_parts` parts, or fewer if it has fewer rows. The first parts have a row more where the rows do not
    /// come out even, as in TensorFlow. In one part it is a plain variable called `name`.
    #[track_caller]
    pub fn new(
        graph: &'g Graph,
        name: &str,
        shape: &[usize],
        dtype: DType,
        initial: impl Into<Initializer>,
        n_parts: usize,
    ) -> Result<PartitionedVariable<'g>> {
        let shape = Shape::new(shape)?;
        let initial = initial.into();
        let Some((&n_rows, row)) = shape.dims().split_first() else {
            return Err(Error::invalid_argument(format!("variable '{name}' is a scalar, which cannot be split")));
        };
        let n_parts = n_parts.clamp(1, n_rows.max(1));
        let new = |name: &str, initial: Initializer, shape: Shape| {
            graph.new_variable(name, initial).shape(shape).dtype(dtype).build()
        };
        if n_parts == 1 {
            let variable = new(name, initial, shape.clone());
            graph.check()?;
            return Ok(PartitionedVariable { name: variable.name(), shape, parts: vec![variable] });
        }
        if let Initializer::Value(value) = &initial
            && *value.shape() != shape
        {
            return Err(Error::invalid_argument(format!(
                "variable '{name}' is {shape}, its initial value {}",
                value.shape()
            )));
        }
        // The scale of an initial value follows from the whole, not from the part.
        let initial = initial.resolved(&shape);
        let parts = graph.name_scope(name, || {
            // One constant for all parts, not one for each.
            let initial = match initial {
                Initializer::Value(value) => Initializer::Output(graph.named_constant("initial", value).endpoint()),
                other => other,
            };
            let mut parts = Vec::with_capacity(n_parts);
            let mut first = 0;
            for part in 0..n_parts {
                let rows = rows_of(n_rows, n_parts, part);
                let own = part_of(graph, &initial, first, rows, shape.rank())?;
                let dims: Vec<usize> = [&[rows], row].concat();
                let variable = new(&format!("part_{part}"), own, Shape::new(&dims)?);
                parts.push((variable, first));
                first += rows;
            }
            graph.check()?;
            Ok(parts)
        })?;
        let whole = match parts.first() {
            Some((variable, _)) => variable.name().trim_end_matches("/part_0").to_owned(),
            None => name.to_owned(),
        };
        for (variable, first) in &parts {
            graph.add_to_collection(COLLECTION, &format!("{} {whole} {first} {n_rows}", variable.name()));
        }
        let parts = parts.into_iter().map(|(variable, _)| variable).collect();
        Ok(PartitionedVariable { name: whole, shape, parts })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The shape of the whole.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The parts, in order.
    pub fn parts(&self) -> &[Variable<'g>] {
        &self.parts
    }

    /// The whole value, put together where this is called.
    #[track_caller]
    pub fn read(&self) -> Output<'g> {
        match self.parts.as_slice() {
            [one] => one.read(),
            parts => ops::concat(&parts.iter().map(|part| part.read()).collect::<Vec<_>>(), 0),
        }
    }

    /// Assigns rows of `value` to the parts.
    #[track_caller]
    pub fn assign(&self, value: Output<'g>) -> Operation<'g> {
        let graph = value.graph();
        if let [one] = self.parts.as_slice() {
            return one.assign(value);
        }
        let rows: Vec<usize> = (0..self.parts.len()).map(|part| self.rows_of(part)).collect();
        let pieces = ops::split_sizes(value, rows.as_slice(), self.parts.len(), 0);
        let assign = |(part, piece): (&Variable<'g>, Output<'g>)| part.assign(piece);
        graph.group("assign", &self.parts.iter().zip(pieces).map(assign).collect::<Vec<_>>())
    }

    /// For each of `ids`, an integer tensor of any shape, its row. Each part is looked up where it is, so only the rows
    /// that are wanted travel, and so do gradients.
    #[track_caller]
    pub fn lookup(&self, ids: Output<'g>) -> Output<'g> {
        self.lookup_by(ids, LookupStrategy::Div)
    }

    /// [`PartitionedVariable::lookup`] by either strategy.
    #[track_caller]
    pub fn lookup_by(&self, ids: Output<'g>, strategy: LookupStrategy) -> Output<'g> {
        let graph = ids.graph();
        let gather = |part: &Variable<'g>, ids: Output<'g>| {
            graph.colocate_with(part.handle().operation(), || ops::resource_gather(part.handle(), ids))
        };
        if let [one] = self.parts.as_slice() {
            return gather(one, ids);
        }
        graph.name_scope("embedding_lookup", || {
            let n_parts = self.parts.len();
            let flat = ops::reshape(ids, &[-1i32]);
            let (part, row) = self.place(flat, strategy);
            let part = ops::cast(part, DType::I32);
            let places = ops::range_by(graph.constant(0i32), ops::size(flat), graph.constant(1i32));
            let places = ops::dynamic_partition(places, part, n_parts);
            let rows = ops::dynamic_partition(row, part, n_parts);
            let found: Vec<Output<'g>> = self.parts.iter().zip(rows).map(|(part, rows)| gather(part, rows)).collect();
            let together = ops::dynamic_stitch(&places, &found);
            let row_shape: Vec<usize> = self.shape.iter().skip(1).copied().collect();
            let shape = match row_shape.is_empty() {
                true => ops::shape(ids),
                false => ops::concat(&[ops::shape(ids), row_shape.as_slice().into_ints(graph)], 0),
            };
            ops::reshape(together, shape)
        })
    }

    /// The part of each id, and its row there.
    fn place(&self, ids: Output<'g>, strategy: LookupStrategy) -> (Output<'g>, Output<'g>) {
        let graph = ids.graph();
        let number = |n: usize| kolo_graph::IntoOutput::into_output(n as f64, graph, ids.dtype());
        let n_parts = self.parts.len();
        let (each, extra) = (self.n_rows() / n_parts, self.n_rows() % n_parts);
        match strategy {
            LookupStrategy::Mod => (ops::floor_mod(ids, number(n_parts)), ops::floor_div(ids, number(n_parts))),
            LookupStrategy::Div => {
                // The first `extra` parts have `each + 1` rows, the others `each`, which is not 0.
                let part = ops::maximum(
                    ops::floor_div(ids, number(each + 1)),
                    ops::floor_div(ids - number(extra), number(each)),
                );
                let is_long = ops::less(part, number(extra));
                let row = ops::select(
                    is_long,
                    ops::floor_mod(ids, number(each + 1)),
                    ops::floor_mod(ids - number(extra), number(each)),
                );
                (part, row)
            }
        }
    }

    fn n_rows(&self) -> usize {
        self.shape.dims().first().copied().unwrap_or(0)
    }

    fn rows_of(&self, part: usize) -> usize {
        rows_of(self.n_rows(), self.parts.len(), part)
    }
}

/// The rows of a part: as equal as can be, the first ones larger.
fn rows_of(n_rows: usize, n_parts: usize, part: usize) -> usize {
    n_rows / n_parts + usize::from(part < n_rows % n_parts)
}

/// The initial value of a part.
fn part_of(graph: &Graph, whole: &Initializer, first: usize, rows: usize, rank: usize) -> Result<Initializer> {
    let Initializer::Output(at) = whole else { return Ok(whole.clone()) };
    let name = graph.nodes().endpoint_name(*at);
    let mut begin = vec![0i64; rank];
    let mut size = vec![-1i64; rank];
    if let (Some(begin), Some(size)) = (begin.first_mut(), size.first_mut()) {
        (*begin, *size) = (first as i64, rows as i64);
    }
    let cut = ops::slice(graph.output(&name)?, begin.as_slice(), size.as_slice());
    Ok(Initializer::Output(cut.endpoint()))
}

/// Which part of which whole a variable is in checkpoints, if it is a part or a slot of one.
pub(crate) fn save_slice(graph: &Graph, variable: Variable<'_>) -> Option<SaveSlice> {
    let name = variable.name();
    let shape = variable.shape().known()?;
    for line in graph.collection(COLLECTION) {
        let mut words = line.split(' ');
        let (part, whole) = (words.next()?, words.next()?);
        let (first, n_rows): (usize, usize) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let Some(rest) = name.strip_prefix(part).filter(|rest| rest.is_empty() || rest.starts_with('/')) else {
            continue;
        };
        let of_part = graph.find_variable(part).ok()?.shape().known()?;
        // A slot of another shape, such as a scalar, is no part of anything.
        if of_part != shape {
            return None;
        }
        let mut full_shape = shape.dims().to_vec();
        *full_shape.first_mut()? = n_rows;
        let mut offset = vec![0; full_shape.len()];
        *offset.first_mut()? = first;
        return Some(SaveSlice { full_name: format!("{whole}{rest}"), full_shape, offset });
    }
    None
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_core::Tensor;
    use kolo_graph::{Grad, gradients};
    use kolo_runtime::Session;

    use super::*;
    use crate::optim::{Adam, Optimizer, Sgd};
    use crate::train::Saver;

    fn numbers(rows: usize) -> Tensor {
        let values: Vec<f32> = (0..rows * 2).map(|i| i as f32).collect();
        Tensor::from_vec(Shape::new(&[rows, 2]).unwrap(), values).unwrap()
    }

    #[test]
    fn reading_and_looking_up_by_div_see_one_table() {
        for (rows, n_parts) in [(7, 3), (4, 4), (2, 5), (9, 2), (5, 1)] {
            let g = kolo_ops::graph();
            let table = PartitionedVariable::new(&g, "t", &[rows, 2], DType::F32, numbers(rows), n_parts).unwrap();
            assert_eq!(table.parts().len(), n_parts.min(rows));
            let ids: Vec<i32> = (0..rows as i32).rev().collect();
            let (all, found) = (table.read(), table.lookup(g.constant(Tensor::vector(ids))));
            let shaped = table.lookup(g.constant([[1i64], [0]]));
            let doubled = table.assign(table.read() * 2.0);
            let init = g.global_variables_initializer();
            let session = Session::new(&g).unwrap();
            session.run_op(init).unwrap();
            assert_eq!(session.fetch(all).unwrap(), numbers(rows));
            let expected: Vec<f32> = (0..rows).rev().flat_map(|r| [2.0 * r as f32, 2.0 * r as f32 + 1.0]).collect();
            assert_eq!(session.fetch(found).unwrap().data::<f32>().unwrap(), expected);
            assert_eq!(session.fetch(shaped).unwrap().shape().dims(), [2, 1, 2]);
            session.run_op(doubled).unwrap();
            assert_eq!(session.fetch(all).unwrap().data::<f32>().unwrap()[3], 6.0);
        }
    }

    #[test]
    fn by_mod_ids_are_dealt_out() {
        let g = kolo_ops::graph();
        let table = PartitionedVariable::new(&g, "t", &[5, 2], DType::F32, numbers(5), 2).unwrap();
        let found = table.lookup_by(g.constant([0i64, 1, 2, 3, 4]), LookupStrategy::Mod);
        let init = g.global_variables_initializer();
        let session = Session::new(&g).unwrap();
        session.run_op(init).unwrap();
        let found = session.fetch(found).unwrap();
        let firsts: Vec<f32> = found.data::<f32>().unwrap().iter().step_by(2).copied().collect();
        // Parts hold rows 0, 1, 2 and 3, 4; ids 0, 2, 4 are in the first.
        assert_eq!(firsts, [0.0, 6.0, 2.0, 8.0, 4.0]);
    }

    #[test]
    fn parts_train_by_their_rows_and_are_one_tensor_in_checkpoints() {
        let dir = std::env::temp_dir().join(format!("kolo-parts-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let prefix = dir.join("model").to_string_lossy().into_owned();
        let build = |n_parts: usize, restore: bool| {
            let g = kolo_ops::graph();
            let table = PartitionedVariable::new(&g, "t", &[5, 2], DType::F32, numbers(5), n_parts).unwrap();
            let loss = ops::sum_all(table.lookup(g.constant([4i64, 1, 1])));
            let handles: Vec<Output<'_>> = table.parts().iter().map(|part| part.handle()).collect();
            let grads = gradients(&[loss], &handles).unwrap();
            assert!(grads.iter().all(|grad| matches!(grad, Some(Grad::Slices(_)))));
            let adam = Adam::new(0.5);
            let slots = adam.minimize(loss, None).unwrap();
            let train = Sgd::new(1.0).minimize(loss, None).unwrap();
            let init = g.global_variables_initializer();
            let read = table.read();
            let saver = Saver::new(&g).unwrap();
            let session = Session::new(&g).unwrap();
            match restore {
                true => saver.restore(&session, &prefix).unwrap(),
                false => {
                    session.run_op(init).unwrap();
                    session.run_op(train).unwrap();
                    saver.save(&session, &prefix, None).unwrap();
                }
            }
            let _ = slots;
            session.fetch(read).unwrap()
        };
        let saved = build(3, false);
        assert_eq!(saved.data::<f32>().unwrap(), [0.0, 1.0, 0.0, 1.0, 4.0, 5.0, 6.0, 7.0, 7.0, 8.0]);
        assert_eq!(build(2, true), saved, "read in other parts");
        assert_eq!(build(1, true), saved, "read in one");
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn what_cannot_be_split_is_refused() {
        let g = kolo_ops::graph();
        assert!(PartitionedVariable::new(&g, "s", &[], DType::F32, 1.0f32, 2).is_err());
        assert!(PartitionedVariable::new(&g, "s", &[3, 2], DType::F32, numbers(2), 2).is_err());
        let scaled = PartitionedVariable::new(&g, "w", &[6, 4], DType::F32, Initializer::GlorotUniform, 3).unwrap();
        assert_eq!(scaled.parts().len(), 3);
    }
}
