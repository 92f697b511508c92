//! Embeddings: a row of a table for each number.

use kolo_core::DType;
use kolo_graph::{Graph, Initializer, Output, Variable};

use super::layer::{as_matrix, last_dim, read_as, shaped_like, weights};
use crate::ops;

/// A table with one trained row for each index. The gradient is that of the rows that were looked up.
#[derive(Clone, Debug)]
pub struct Embedding {
    rows: usize,
    size: usize,
    name: String,
    dtype: DType,
    initial: Initializer,
}

/// The variable of an [`Embedding`].
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingTable<'g> {
    /// `[rows, size]`.
    pub table: Variable<'g>,
}

/// For each of `ids` its row of a new table, called `name`.
#[track_caller]
pub fn embedding<'g>(ids: Output<'g>, rows: usize, size: usize, name: &str) -> Output<'g> {
    Embedding::new(rows, size).name(name).apply(ids)
}

impl Embedding {
    /// So many rows of this size.
    pub fn new(rows: usize, size: usize) -> Embedding {
        let initial = Initializer::Uniform { low: -0.05, high: 0.05 };
        Embedding { rows, size, name: "embedding".to_owned(), dtype: DType::F32, initial }
    }

    /// Its name: `embedding` otherwise.
    #[must_use]
    pub fn name(mut self, name: &str) -> Embedding {
        self.name = name.to_owned();
        self
    }

    /// How the table begins.
    #[must_use]
    pub fn initial(mut self, initial: impl Into<Initializer>) -> Embedding {
        self.initial = initial.into();
        self
    }

    /// The element type, `float` otherwise.
    #[must_use]
    pub fn dtype(mut self, dtype: DType) -> Embedding {
        self.dtype = dtype;
        self
    }

    /// Adds a table and looks `ids` up in it.
    #[track_caller]
    pub fn apply<'g>(&self, ids: Output<'g>) -> Output<'g> {
        self.build(ids.graph()).lookup(ids)
    }

    /// Adds the table.
    #[track_caller]
    pub fn build<'g>(&self, graph: &'g Graph) -> EmbeddingTable<'g> {
        graph.name_scope(&self.name, || EmbeddingTable {
            table: weights(graph, "embeddings", &[self.rows, self.size], self.dtype, &self.initial),
        })
    }
}

impl<'g> EmbeddingTable<'g> {
    /// The rows of `ids`, an integer tensor of any shape.
    #[track_caller]
    pub fn lookup(&self, ids: Output<'g>) -> Output<'g> {
        // A gather through the handle does not take the whole table along.
        ids.graph().colocate_with(self.table.handle().operation(), || ops::resource_gather(self.table.handle(), ids))
    }

    /// The product of `x` with each row: logits over the rows, with the table as weights.
    #[track_caller]
    pub fn logits(&self, x: Output<'g>) -> Output<'g> {
        let rows = self.table.shape().dim(0).unwrap_or(0);
        match last_dim(x, "Embedding", &self.table.name()) {
            Some(size) => {
                let product = ops::matmul_with(as_matrix(x, size), read_as(self.table, x.dtype()), false, true);
                shaped_like(product, x, rows)
            }
            None => Output::invalid(x.graph()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_graph::{Grad, gradients};

    use super::*;
    use crate::nn::testing::{close, run};

    #[test]
    fn rows_are_looked_up_and_get_sparse_gradients() {
        let g = kolo_ops::graph();
        let ids = g.constant([[2i32, 0], [0, 1]]);
        let layer = Embedding::new(3, 2).initial([[1.0f32, 2.0], [3.0, 4.0], [5.0, 6.0]]).build(&g);
        let y = layer.lookup(ids);
        assert_eq!(y.shape().to_string(), "[2,2,2]");
        assert_eq!(layer.table.name(), "embedding/embeddings");
        let logits = layer.logits(y);
        let grad = gradients(&[ops::sum_all(ops::square(y))], &[layer.table.handle()]).unwrap()[0].unwrap();
        assert!(matches!(grad, Grad::Slices(_)));
        let found = run(&g, &[y, logits, grad.dense().unwrap()], &[]);
        close(&found[0], &[5.0, 6.0, 1.0, 2.0, 1.0, 2.0, 3.0, 4.0]);
        close(&found[1], &[17.0, 39.0, 61.0, 5.0, 11.0, 17.0, 5.0, 11.0, 17.0, 11.0, 25.0, 39.0]);
        close(&found[2], &[4.0, 8.0, 6.0, 8.0, 10.0, 12.0]);
    }
}
