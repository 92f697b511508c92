//! Queues as users make them.

use kolo_core::{DType, PartialShape};
use kolo_graph::{Graph, Operation, Output};

/// In which order a queue gives out what was put in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueKind {
    /// First in, first out.
    Fifo,
    /// First in, first out; batches are padded to their largest element where a size is unknown.
    PaddingFifo,
    /// At random; while the queue is open, so many elements always stay.
    Shuffle {
        /// How many stay.
        min_after_dequeue: usize,
        /// For the same order in every run.
        seed: Option<i64>,
    },
    /// Smallest key first. The key is an int64 scalar, the first component of every element; it is not declared.
    Priority,
}

/// A queue of a graph. A plain copy, like [`Output`].
///
/// ```
/// use kolo_core::{DType, PartialShape};
/// let g = kolo_ops::graph();
/// let q = kolo_ops::queue::FifoQueue::new(&g, "numbers", &[(DType::I64, PartialShape::scalar())], Some(10));
/// let fill = q.enqueue_many(&[g.constant([1i64, 2, 3])]);
/// let next = q.dequeue()[0];
/// assert_eq!(next.shape(), PartialShape::scalar());
/// # g.check().unwrap();
/// # let _ = fill;
/// ```
#[derive(Clone, Debug)]
pub struct QueueHandle<'g> {
    handle: Output<'g>,
    dtypes: Vec<DType>,
}

/// The most common kind; the others are made by [`QueueHandle::of_kind`].
pub type FifoQueue<'g> = QueueHandle<'g>;

impl<'g> QueueHandle<'g> {
    /// A first-in, first-out queue of elements with these components. Without a capacity it never fills up. It belongs to
    /// the session that uses it.
    #[track_caller]
    pub fn new(
        graph: &'g Graph,
        name: &str,
        components: &[(DType, PartialShape)],
        capacity: Option<usize>,
    ) -> QueueHandle<'g> {
        QueueHandle::of_kind(graph, QueueKind::Fifo, name, "", components, capacity)
    }

    /// As [`QueueHandle::new`], shared under `name` by all sessions that use this device.
    #[track_caller]
    pub fn shared(
        graph: &'g Graph,
        name: &str,
        components: &[(DType, PartialShape)],
        capacity: Option<usize>,
    ) -> QueueHandle<'g> {
        QueueHandle::of_kind(graph, QueueKind::Fifo, name, name, components, capacity)
    }

    /// A queue of any kind. Private to a session if `shared_name` is empty.
    #[track_caller]
    pub fn of_kind(
        graph: &'g Graph,
        kind: QueueKind,
        name: &str,
        shared_name: &str,
        components: &[(DType, PartialShape)],
        capacity: Option<usize>,
    ) -> QueueHandle<'g> {
        let (dtypes, shapes): (Vec<DType>, Vec<PartialShape>) = components.iter().cloned().unzip();
        let mut all_dtypes = dtypes.clone();
        let builder = match kind {
            QueueKind::Fifo => graph.op("FIFOQueueV2"),
            QueueKind::PaddingFifo => graph.op("PaddingFIFOQueueV2"),
            QueueKind::Shuffle { min_after_dequeue, seed } => {
                let (seed, seed2) = graph.op_seeds(seed);
                graph
                    .op("RandomShuffleQueueV2")
                    .attr("min_after_dequeue", min_after_dequeue)
                    .attr("seed", seed)
                    .attr("seed2", seed2)
            }
            QueueKind::Priority => {
                all_dtypes.insert(0, DType::I64);
                graph.op("PriorityQueueV2")
            }
        };
        let handle = builder
            .name(name)
            .attr("component_types", dtypes)
            .attr("shapes", shapes)
            .attr("capacity", capacity.map_or(-1, |capacity| capacity as i64))
            .attr("shared_name", shared_name)
            .out();
        QueueHandle { handle, dtypes: all_dtypes }
    }

    /// The handle.
    pub fn handle(&self) -> Output<'g> {
        self.handle
    }

    /// Adds one element; waits while the queue is full.
    #[track_caller]
    pub fn enqueue(&self, components: &[Output<'g>]) -> Operation<'g> {
        self.graph().op("QueueEnqueueV2").input(self.handle).inputs(components.iter().copied()).build()
    }

    /// Adds one element per row of the components; waits while the queue is full.
    #[track_caller]
    pub fn enqueue_many(&self, components: &[Output<'g>]) -> Operation<'g> {
        self.graph().op("QueueEnqueueManyV2").input(self.handle).inputs(components.iter().copied()).build()
    }

    /// Takes one element; waits while the queue is empty.
    #[track_caller]
    pub fn dequeue(&self) -> Vec<Output<'g>> {
        let builder = self.graph().op("QueueDequeueV2").input(self.handle);
        builder.attr("component_types", self.dtypes.clone()).build().outputs()
    }

    /// Takes `n` elements as one batch; waits until there are so many.
    #[track_caller]
    pub fn dequeue_many(&self, n: usize) -> Vec<Output<'g>> {
        self.batch("QueueDequeueManyV2", n)
    }

    /// Takes `n` elements as one batch, or what is left once the queue is closed.
    #[track_caller]
    pub fn dequeue_up_to(&self, n: usize) -> Vec<Output<'g>> {
        self.batch("QueueDequeueUpToV2", n)
    }

    /// No more elements may be added; those who wait to add some still do.
    #[track_caller]
    pub fn close(&self) -> Operation<'g> {
        self.graph().op("QueueCloseV2").input(self.handle).build()
    }

    /// No more elements may be added, not even by those who wait to.
    #[track_caller]
    pub fn close_and_cancel(&self) -> Operation<'g> {
        self.graph().op("QueueCloseV2").input(self.handle).attr("cancel_pending_enqueues", true).build()
    }

    /// How many elements are in it, as an int32.
    #[track_caller]
    pub fn size(&self) -> Output<'g> {
        self.graph().op("QueueSizeV2").input(self.handle).out()
    }

    /// Whether it is closed.
    #[track_caller]
    pub fn is_closed(&self) -> Output<'g> {
        self.graph().op("QueueIsClosedV2").input(self.handle).out()
    }

    fn graph(&self) -> &'g Graph {
        self.handle.graph()
    }

    #[track_caller]
    fn batch(&self, op: &str, n: usize) -> Vec<Output<'g>> {
        let n = self.graph().constant(i32::try_from(n).unwrap_or(i32::MAX));
        let builder = self.graph().op(op).input(self.handle).input(n);
        builder.attr("component_types", self.dtypes.clone()).build().outputs()
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::{Code, Error, Result, Tensor};

    use super::*;
    use crate::testing::{Evaluation, tensor};

    fn one(dtype: DType, shape: impl Into<PartialShape>) -> Vec<(DType, PartialShape)> {
        vec![(dtype, shape.into())]
    }

    #[test]
    fn a_queue_in_a_graph() {
        let g = crate::graph();
        let components = [(DType::I64, PartialShape::scalar()), (DType::F32, PartialShape::from([2usize]))];
        let q = FifoQueue::shared(&g, "q", &components, Some(10));
        let fill = q.enqueue_many(&[g.constant([1i64, 2, 3]), g.constant([[1.0f32, 2.0], [3.0, 4.0], [5.0, 6.0]])]);
        let add = q.enqueue(&[g.constant(4i64), g.constant([7.0f32, 8.0])]);
        let (next, many, rest) = (q.dequeue(), q.dequeue_many(2), q.dequeue_up_to(5));
        let (size, close, is_closed) = (q.size(), q.close(), q.is_closed());
        g.check().unwrap();
        assert_eq!(next[1].shape(), [2usize].into());
        assert_eq!(many[1].shape(), [2usize, 2].into());
        assert_eq!(rest[0].shape(), [None].into());
        let run = Evaluation::new(g.snapshot());
        run.run_targets(&[fill], &[]).unwrap();
        run.run_targets(&[add], &[]).unwrap();
        assert_eq!(run.run(&[size, is_closed], &[]).unwrap(), [Tensor::scalar(4i32), Tensor::scalar(false)]);
        assert_eq!(run.run(&next, &[]).unwrap(), [Tensor::scalar(1i64), Tensor::from([1.0f32, 2.0])]);
        let found = run.run(&many, &[]).unwrap();
        assert_eq!(found, [Tensor::from([2i64, 3]), tensor([2, 2], [3.0f32, 4.0, 5.0, 6.0])]);
        run.run_targets(&[close], &[]).unwrap();
        assert_eq!(run.run(&rest, &[]).unwrap(), [Tensor::from([4i64]), tensor([1, 2], [7.0f32, 8.0])]);
        let error = run.run(&next, &[]).unwrap_err();
        assert_eq!(error.code(), Code::OutOfRange);
        let text = "FIFOQueue 'q' is closed and has insufficient elements (requested 1, current size 0)";
        assert!(error.message().contains(text), "{error}");
        assert_eq!(run.run_targets(&[add], &[]).unwrap_err().message(), "FIFOQueue 'q' is closed.");
    }

    #[test]
    fn the_other_kinds() {
        let g = crate::graph();
        let kind = |kind, name: &str, components: &[(DType, PartialShape)]| {
            QueueHandle::of_kind(&g, kind, name, name, components, None)
        };
        let padding = kind(QueueKind::PaddingFifo, "padding", &one(DType::I32, [None]));
        let priority = kind(QueueKind::Priority, "priority", &one(DType::F32, PartialShape::scalar()));
        let shuffle = QueueKind::Shuffle { min_after_dequeue: 1, seed: Some(1) };
        let shuffle = kind(shuffle, "shuffle", &one(DType::I32, PartialShape::scalar()));
        let fill = [
            padding.enqueue(&[g.constant([1i32])]),
            padding.enqueue(&[g.constant([2i32, 3])]),
            priority.enqueue_many(&[g.constant([5i64, 1, 3]), g.constant([0.5f32, 0.1, 0.3])]),
            shuffle.enqueue_many(&[g.constant([1i32, 2, 3])]),
        ];
        let taken = [padding.dequeue_many(2), priority.dequeue_many(3), shuffle.dequeue_many(2)].concat();
        g.check().unwrap();
        assert_eq!(taken[0].shape(), [Some(2), None].into());
        assert_eq!(taken[1].shape(), [3usize].into());
        let run = Evaluation::new(g.snapshot());
        run.run_targets(&fill, &[]).unwrap();
        let found = run.run(&taken, &[]).unwrap();
        assert_eq!(found[0], tensor([2, 2], [1i32, 0, 2, 3]));
        assert_eq!(found[1..3], [Tensor::from([1i64, 3, 5]), Tensor::from([0.1f32, 0.3, 0.5])]);
        assert_eq!(found[3].n_elements(), 2);
    }

    #[test]
    fn old_handles_reach_the_same_queue() {
        let g = crate::graph();
        let dtypes = vec![DType::I32];
        let make = |op: &str| g.op(op).attr("component_types", dtypes.clone()).attr("shared_name", "both").out();
        let (old, new) = (make("FIFOQueue"), make("FIFOQueueV2"));
        let add = g.op("QueueEnqueue").input(old).input(g.constant(5i32)).build();
        let next = g.op("QueueDequeueV2").input(new).attr("component_types", dtypes.clone()).out();
        let size = g.op("QueueSize").input(old).out();
        g.check().unwrap();
        let run = Evaluation::new(g.snapshot());
        run.run_targets(&[add], &[]).unwrap();
        assert_eq!(run.run(&[size, next], &[]).unwrap(), [Tensor::scalar(1i32), Tensor::scalar(5i32)]);
    }

    #[test]
    fn those_who_share_a_queue_must_agree() {
        let check = |build: &dyn for<'g> Fn(&'g Graph) -> Output<'g>, text: &str| {
            let g = crate::graph();
            let first = FifoQueue::shared(&g, "q", &one(DType::I32, PartialShape::scalar()), Some(2)).size();
            let second = build(&g);
            g.check().unwrap();
            let run = Evaluation::new(g.snapshot());
            run.run(&[first], &[]).unwrap();
            let error: Error = run.run(&[second], &[]).unwrap_err();
            assert!(error.message().contains(text), "{error}");
        };
        let int = one(DType::I32, PartialShape::scalar());
        check(&|g| FifoQueue::shared(g, "q", &int, Some(3)).size(), "has capacity 2 but requested capacity was 3");
        let long = one(DType::I64, PartialShape::scalar());
        check(&|g| FifoQueue::shared(g, "q", &long, Some(2)).size(), "component types int32 but");
        let vector = one(DType::I32, [2usize]);
        check(&|g| FifoQueue::shared(g, "q", &vector, Some(2)).size(), "has component shapes [[]] but");
    }

    /// As `QueueBase.from_list` does: the handles are stacked, and one is gathered.
    #[test]
    fn a_queue_may_be_chosen_from_a_list() {
        let g = crate::graph();
        let int = one(DType::I32, PartialShape::scalar());
        let queues = ["a", "b"].map(|name| FifoQueue::shared(&g, name, &int, None));
        let all = g.op("Pack").inputs(queues.iter().map(|q| q.handle())).out();
        let index = g.placeholder::<i32>("index", PartialShape::scalar());
        let chosen = g.op("GatherV2").inputs([all, index, g.constant(0i32)]).out();
        let add = g.op("QueueEnqueueV2").input(chosen).input(g.constant(7i32)).build();
        let next = g.op("QueueDequeueV2").input(chosen).attr("component_types", vec![DType::I32]).out();
        let sizes = [queues[0].size(), queues[1].size()];
        g.check().unwrap();
        let run = Evaluation::new(g.snapshot());
        run.run_targets(&[add], &[(index, Tensor::scalar(1i32))]).unwrap();
        assert_eq!(run.run(&sizes, &[]).unwrap(), [Tensor::scalar(0i32), Tensor::scalar(1i32)]);
        assert_eq!(run.run(&[next], &[(index, Tensor::scalar(1i32))]).unwrap(), [Tensor::scalar(7i32)]);
        let error = run.run(&[next], &[(index, Tensor::scalar(2i32))]).unwrap_err();
        assert_eq!(error.code(), kolo_core::Code::InvalidArgument, "{error}");
    }

    /// A program that finds a queue which another made does not know its seeds.
    #[test]
    fn seeds_of_a_shared_queue_count_only_where_some_are_asked_for() {
        let int = one(DType::I32, PartialShape::scalar());
        let ask = |least: usize, seed: Option<i64>| {
            let g = crate::graph();
            let shuffle = |min_after_dequeue, seed| QueueKind::Shuffle { min_after_dequeue, seed };
            let first = QueueHandle::of_kind(&g, shuffle(1, Some(4)), "first", "q", &int, Some(9)).size();
            let second = QueueHandle::of_kind(&g, shuffle(least, seed), "second", "q", &int, Some(9)).size();
            g.check().unwrap();
            let run = Evaluation::new(g.snapshot());
            run.run(&[first], &[]).unwrap();
            run.run(&[second], &[])
        };
        assert_eq!(ask(1, None).unwrap(), [Tensor::scalar(0i32)]);
        assert_eq!(ask(1, Some(4)).unwrap(), [Tensor::scalar(0i32)]);
        let error = ask(1, Some(5)).unwrap_err();
        assert!(
            error.message().contains("has random seeds (87654321, 4) but requested random seeds was (87654321, 5)"),
            "{error}"
        );
        let error = ask(2, None).unwrap_err();
        assert!(error.message().contains("has min_after_dequeue 1 but requested min_after_dequeue was 2"), "{error}");
    }

    #[test]
    fn bad_attributes_and_counts_are_refused() -> Result<()> {
        let fails = |build: &dyn for<'g> Fn(&'g Graph) -> Output<'g>, text: &str| {
            let g = crate::graph();
            let output = build(&g);
            let error = g.check().and_then(|()| Evaluation::new(g.snapshot()).run(&[output], &[])).unwrap_err();
            assert!(error.message().contains(text), "{error}");
        };
        let int = one(DType::I32, PartialShape::scalar());
        fails(&|g| FifoQueue::shared(g, "_q", &int, None).size(), "shared_name cannot start with '_':_q");
        let shuffle = QueueKind::Shuffle { min_after_dequeue: 2, seed: None };
        fails(&|g| QueueHandle::of_kind(g, shuffle, "q", "q", &int, Some(2)).size(), "must be < capacity 2");
        fails(
            &|g| {
                let q = FifoQueue::shared(g, "q", &int, None);
                let n = g.constant(-1i32);
                g.op("QueueDequeueManyV2").inputs([q.handle(), n]).attr("component_types", vec![DType::I32]).out()
            },
            "DequeueManyOp requested -1 < 0 elements",
        );
        fails(
            &|g| {
                let q = FifoQueue::shared(g, "q", &int, None);
                g.op("QueueDequeueV2").input(q.handle()).attr("component_types", vec![DType::F32]).out()
            },
            "Signature mismatch",
        );
        fails(
            &|g| {
                let q = FifoQueue::shared(g, "q", &int, None);
                let builder = g.op("QueueDequeueV2").input(q.handle()).attr("timeout_ms", 5i64);
                builder.attr("component_types", vec![DType::I32]).out()
            },
            "Timeout not supported yet.",
        );
        Ok(())
    }
}
