//! What a queue holds: tuples of tensors, in the order in which they will come out; and batches made of them.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::hash::{BuildHasher, RandomState};

use bytes::Bytes;
use kolo_core::{DType, Error, PartialShape, Result, Shape, Tensor};
use kolo_device::Charge;
use smallvec::SmallVec;

use crate::holdings::{BLOCK, Measured};
use crate::memory::room;
use crate::random::philox::{Philox, Words};

/// One entry of a queue: a tensor per component.
pub(super) type Element = SmallVec<[Tensor; 2]>;

/// In which order elements come out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// First in, first out; all elements of a component have one shape.
    Fifo,
    /// First in, first out; a batch is padded to its largest element where a size is not declared.
    PaddingFifo,
    /// At random, with at least so many left to choose from while the queue is open.
    Shuffle {
        /// How many stay.
        min_after_dequeue: usize,
        /// Both 0: different every time.
        seeds: (i64, i64),
    },
    /// Smallest first component first; equal ones first in, first out.
    Priority,
}

impl Order {
    /// TensorFlow's name for such a queue.
    pub fn queue_name(&self) -> &'static str {
        match self {
            Order::Fifo => "FIFOQueue",
            Order::PaddingFifo => "PaddingFIFOQueue",
            Order::Shuffle { .. } => "RandomShuffleQueue",
            Order::Priority => "PriorityQueue",
        }
    }
}

/// The elements that are in a queue.
pub(super) enum Elements {
    Line(VecDeque<Element>),
    Bag {
        elements: Vec<Element>,
        random: Chance,
    },
    /// `arrived` is the last element's number, `first` the least number so far: below it is what was put back.
    Heap {
        elements: BinaryHeap<Reverse<Ranked>>,
        arrived: i64,
        first: i64,
    },
}

impl Elements {
    pub fn new(order: &Order) -> Elements {
        match order {
            Order::Fifo | Order::PaddingFifo => Elements::Line(VecDeque::new()),
            Order::Shuffle { seeds, .. } => Elements::Bag { elements: Vec::new(), random: Chance::new(*seeds) },
            Order::Priority => Elements::Heap { elements: BinaryHeap::new(), arrived: 0, first: 0 },
        }
    }

    pub fn len(&self) -> usize {
        match self {
            Elements::Line(elements) => elements.len(),
            Elements::Bag { elements, .. } => elements.len(),
            Elements::Heap { elements, .. } => elements.len(),
        }
    }

    /// Makes room for one more, so that adding it cannot fail; false if there is none.
    pub fn reserve(&mut self) -> bool {
        match self {
            Elements::Line(elements) => elements.try_reserve(1),
            Elements::Bag { elements, .. } => elements.try_reserve(1),
            Elements::Heap { elements, .. } => elements.try_reserve(1),
        }
        .is_ok()
    }

    /// Gives room back that many more elements once took.
    pub fn shrink(&mut self) {
        let capacity = match self {
            Elements::Line(elements) => elements.capacity(),
            Elements::Bag { elements, .. } => elements.capacity(),
            Elements::Heap { elements, .. } => elements.capacity(),
        };
        if capacity <= 64 || self.len() > capacity / 4 {
            return;
        }
        match self {
            Elements::Line(elements) => elements.shrink_to(capacity / 2),
            Elements::Bag { elements, .. } => elements.shrink_to(capacity / 2),
            Elements::Heap { elements, .. } => elements.shrink_to(capacity / 2),
        }
    }

    pub fn extend(&mut self, elements: impl IntoIterator<Item = Element>) {
        elements.into_iter().for_each(|element| self.push(element));
    }

    pub fn push(&mut self, element: Element) {
        match self {
            Elements::Line(elements) => elements.push_back(element),
            Elements::Bag { elements, .. } => elements.push(element),
            Elements::Heap { elements, arrived, .. } => {
                *arrived += 1;
                elements.push(Reverse(Ranked::new(element, *arrived)));
            }
        }
    }

    pub fn pop(&mut self) -> Option<Element> {
        match self {
            Elements::Line(elements) => elements.pop_front(),
            Elements::Bag { elements, random } => {
                (!elements.is_empty()).then(|| elements.swap_remove(random.below(elements.len())))
            }
            Elements::Heap { elements, .. } => elements.pop().map(|Reverse(ranked)| ranked.element),
        }
    }

    /// Undoes pops: `elements` are again the next to come, in this order.
    pub fn put_back(&mut self, elements: Vec<Element>) {
        match self {
            Elements::Line(line) => elements.into_iter().rev().for_each(|element| line.push_front(element)),
            Elements::Bag { elements: bag, .. } => bag.extend(elements),
            Elements::Heap { elements: heap, first, .. } => {
                for element in elements.into_iter().rev() {
                    *first -= 1;
                    heap.push(Reverse(Ranked::new(element, *first)));
                }
            }
        }
    }
}

/// An element with its place in a heap.
pub(super) struct Ranked {
    key: i64,
    arrived: i64,
    element: Element,
}

impl Ranked {
    fn new(element: Element, arrived: i64) -> Ranked {
        // Components were checked when the element came: the first is an int64 scalar.
        let key = element.first().and_then(|key| key.scalar_value::<i64>().ok()).unwrap_or(i64::MAX);
        Ranked { key, arrived, element }
    }
}

impl PartialEq for Ranked {
    fn eq(&self, other: &Ranked) -> bool {
        (self.key, self.arrived) == (other.key, other.arrived)
    }
}

impl Eq for Ranked {}

impl PartialOrd for Ranked {
    fn partial_cmp(&self, other: &Ranked) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Ranked {
    fn cmp(&self, other: &Ranked) -> std::cmp::Ordering {
        (self.key, self.arrived).cmp(&(other.key, other.arrived))
    }
}

/// Which element comes next: the same as TensorFlow's choice for the same seeds.
pub(super) struct Chance(Words);

impl Chance {
    fn new((seed, seed2): (i64, i64)) -> Chance {
        let (seed, seed2) = match (seed, seed2) {
            (0, 0) => (RandomState::new().hash_one(0), RandomState::new().hash_one(1)),
            (seed, seed2) => (seed as u64, seed2 as u64),
        };
        Chance(Words::new(Philox::from_seeds(seed, seed2)))
    }

    /// A number below `n`, which is not 0.
    fn below(&mut self, n: usize) -> usize {
        self.0.draw() as usize % n
    }
}

/// An element as a queue counts it; its lists have room for up to twice as many.
pub(super) fn measured(element: &Element) -> Measured {
    let place = 2 * size_of::<Ranked>() + if element.spilled() { size_of_val(&element[..]) } else { 0 };
    Measured::new(place, element)
}

/// About what the `n` elements take that are made of the rows of these components: places, and blocks with lists of text. The
/// rows' numbers are copied to a device's memory, which is asked for as they are, and text is not copied.
pub(super) fn rows_bytes(components: &[Tensor], n: usize) -> usize {
    let of_component = |tensor: &Tensor| {
        let n_listed = if tensor.dtype().size().is_none() { tensor.n_elements() / n.max(1) } else { 0 };
        let row = size_of::<Tensor>() + BLOCK;
        n.saturating_mul(row.saturating_add(n_listed.saturating_mul(size_of::<Bytes>())))
    };
    let tensors: usize = components.iter().map(of_component).fold(0, usize::saturating_add);
    n.saturating_mul(2 * size_of::<Ranked>() + size_of::<Measured>()).saturating_add(tensors)
}

/// Row `i` of every component, copied: an element must not keep the batch it came in alive.
pub(super) fn split(components: &[Tensor], i: usize, memory: &Charge) -> Result<Element> {
    components
        .iter()
        .map(|tensor| {
            let row = tensor.rows(i, 1)?;
            let shape = Shape::new(&row.shape()[1..])?;
            let row = row.reshaped(shape)?;
            if row.dtype().size().is_none() || tensor.shape().first() == Some(&1) {
                return Ok(row);
            }
            let mut copy = memory.tensor(row.dtype(), row.shape().clone())?;
            copy.host_bytes_mut()?.copy_from_slice(row.host_bytes()?);
            Ok(copy)
        })
        .collect()
}

/// Memory for a batch: one tensor per component, the elements side by side along a new first dimension. Where the declared shape
/// leaves a size open, elements are padded with zeros or empty strings to the largest.
///
/// It is asked for before the elements leave their queue, since there may be none; then nothing can fail for lack of memory.
pub(super) struct BatchRoom(Vec<ComponentRoom>);

struct ComponentRoom {
    /// The largest element's shape.
    inner: Shape,
    /// The batch's.
    shape: Shape,
    values: RoomForValues,
}

enum RoomForValues {
    Numbers(Tensor),
    Strings(Vec<Bytes>, Charge),
}

impl BatchRoom {
    pub fn new(elements: &[Element], dtypes: &[DType], shapes: &[PartialShape], memory: &Charge) -> Result<BatchRoom> {
        let mut rooms = Vec::with_capacity(dtypes.len());
        for (i, (&dtype, declared)) in dtypes.iter().zip(shapes).enumerate() {
            let open = || Error::internal(format!("the rank of component {i} is not known: {declared}"));
            let mut dims: Vec<usize> = declared.dims().ok_or_else(open)?.iter().map(|dim| dim.unwrap_or(0)).collect();
            for part in elements.iter().filter_map(|element| element.get(i)) {
                dims.iter_mut().zip(part.shape().iter()).for_each(|(dim, &size)| *dim = (*dim).max(size));
            }
            let inner = Shape::new(&dims)?;
            dims.insert(0, elements.len());
            let shape = Shape::new(&dims)?;
            let values = RoomForValues::new(dtype, &shape, memory)?;
            rooms.push(ComponentRoom { inner, shape, values });
        }
        Ok(BatchRoom(rooms))
    }

    /// The batch of the elements for which the room was made.
    pub fn fill(self, elements: &[Element]) -> Result<Vec<Tensor>> {
        let fill = |(i, room): (usize, ComponentRoom)| {
            let parts: Vec<&Tensor> = elements.iter().filter_map(|element| element.get(i)).collect();
            room.fill(&parts)
        };
        self.0.into_iter().enumerate().map(fill).collect()
    }
}

impl RoomForValues {
    fn new(dtype: DType, shape: &Shape, memory: &Charge) -> Result<RoomForValues> {
        match dtype {
            DType::Str => {
                let n = shape.n_elements();
                let charge = memory.another(n.saturating_mul(size_of::<Bytes>()))?;
                Ok(RoomForValues::Strings(room(n, "strings")?, charge))
            }
            _ if dtype.size().is_some() => Ok(RoomForValues::Numbers(memory.tensor(dtype, shape.clone())?)),
            _ => Err(Error::unimplemented(format!("batches of {dtype}"))),
        }
    }
}

impl ComponentRoom {
    fn fill(self, parts: &[&Tensor]) -> Result<Tensor> {
        let ComponentRoom { inner, shape, values } = self;
        let n = inner.n_elements();
        match values {
            RoomForValues::Strings(mut strings, charge) => {
                strings.resize(shape.n_elements(), Bytes::new());
                for (k, part) in parts.iter().enumerate() {
                    place(part.strings()?, part.shape(), &mut strings[k * n..(k + 1) * n], &inner, 1);
                }
                Tensor::from_counted_strings(shape, strings, charge, false)
            }
            RoomForValues::Numbers(mut tensor) => {
                let size = tensor.dtype().size().unwrap_or(1);
                let n = n * size;
                let bytes = tensor.host_bytes_mut()?;
                if parts.iter().any(|part| *part.shape() != inner) {
                    bytes.fill(0);
                }
                for (k, part) in parts.iter().enumerate() {
                    place(part.host_bytes()?, part.shape(), &mut bytes[k * n..(k + 1) * n], &inner, size);
                }
                Ok(tensor)
            }
        }
    }
}

/// Copies a tensor of shape `small` into the corner of one of shape `large`; an element takes `unit` entries.
fn place<T: Clone>(from: &[T], small: &Shape, to: &mut [T], large: &Shape, unit: usize) {
    if small == large {
        to.clone_from_slice(from);
        return;
    }
    let (Some((&rows, small)), Some((_, large))) = (small.split_first(), large.split_first()) else { return };
    let size = |dims: &[usize]| dims.iter().product::<usize>() * unit;
    let (step, large_step) = (size(small), size(large));
    let shape = |dims: &[usize]| Shape::new(dims).unwrap_or_default();
    let (small, large) = (shape(small), shape(large));
    for row in 0..rows {
        let (from, to) = (&from[row * step..(row + 1) * step], &mut to[row * large_step..(row + 1) * large_step]);
        place(from, &small, to, &large, unit);
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;
    use crate::testing::tensor;

    fn number(element: Option<Element>) -> i64 {
        element.unwrap()[0].scalar_value::<i64>().unwrap()
    }

    fn filled(order: &Order, values: &[i64]) -> Elements {
        let mut elements = Elements::new(order);
        values.iter().for_each(|&value| elements.push(smallvec![Tensor::scalar(value)]));
        elements
    }

    #[test]
    fn each_order_is_its_own() {
        let values = [5i64, 1, 3, 1];
        let drain =
            |mut elements: Elements| -> Vec<i64> { (0..elements.len()).map(|_| number(elements.pop())).collect() };
        assert_eq!(drain(filled(&Order::Fifo, &values)), values);
        assert_eq!(drain(filled(&Order::Priority, &values)), [1, 1, 3, 5]);
        let many: Vec<i64> = (0..100).collect();
        let shuffle = |seeds| drain(filled(&Order::Shuffle { min_after_dequeue: 0, seeds }, &many));
        let first = shuffle((1, 2));
        assert_ne!(first, many);
        assert_eq!(first, shuffle((1, 2)));
        assert_ne!(first, shuffle((1, 3)));
        let mut sorted = shuffle((0, 0));
        sorted.sort_unstable();
        assert_eq!(sorted, many);
    }

    #[test]
    fn what_is_put_back_comes_next() {
        let mut elements = filled(&Order::Fifo, &[1, 2, 3]);
        let taken = vec![elements.pop().unwrap(), elements.pop().unwrap()];
        elements.put_back(taken);
        assert_eq!([(); 3].map(|()| number(elements.pop())), [1, 2, 3]);
    }

    /// Those that were put back come before equal ones that came later.
    #[test]
    fn what_is_put_back_into_a_priority_queue_keeps_its_place() {
        let mut elements = Elements::new(&Order::Priority);
        for (key, value) in [(1i64, 10i64), (1, 11), (0, 12), (1, 13)] {
            elements.push(smallvec![Tensor::scalar(key), Tensor::scalar(value)]);
        }
        for _ in 0..2 {
            let taken: Vec<Element> = (0..3).filter_map(|_| elements.pop()).collect();
            elements.put_back(taken);
        }
        let values = [(); 4].map(|()| elements.pop().unwrap()[1].scalar_value::<i64>().unwrap());
        assert_eq!(values, [12, 10, 11, 13]);
    }

    fn batch(elements: &[Element], dtype: DType, shape: PartialShape) -> Vec<Tensor> {
        let room = BatchRoom::new(elements, &[dtype], &[shape], &Charge::NONE).unwrap();
        room.fill(elements).unwrap()
    }

    #[test]
    fn a_batch_is_padded_to_the_largest() {
        let open = PartialShape::new(&[None, Some(2), None]);
        let elements: Vec<Element> = vec![
            smallvec![tensor([1, 2, 1], [1.0f32, 2.0])],
            smallvec![tensor([2, 2, 2], [3.0f32, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0])],
            smallvec![tensor::<f32, 3>([0, 2, 1], [])],
        ];
        let expected = tensor(
            [3, 2, 2, 2],
            [[1.0f32, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0], [3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0], [0.0; 8]].concat(),
        );
        assert_eq!(batch(&elements, DType::F32, open), [expected]);
        let words = |n: usize| Tensor::from_strings([n], vec![Bytes::from_static(b"a"); n]).unwrap();
        let elements: Vec<Element> = vec![smallvec![words(1)], smallvec![words(2)]];
        let found = batch(&elements, DType::Str, PartialShape::of_rank(1));
        assert_eq!(found[0].strings().unwrap(), [&b"a"[..], b"", b"a", b"a"]);
        let none = batch(&[], DType::I32, [Some(3usize)].into());
        assert_eq!(none, [tensor::<i32, 2>([0, 3], [])]);
    }

    #[test]
    fn an_element_does_not_keep_its_batch() {
        let mut whole = Tensor::zeros(DType::F32, [10, 10]).unwrap();
        let row = split(std::slice::from_ref(&whole), 3, &Charge::NONE).unwrap();
        assert_eq!(row[0].shape(), &Shape::from([10]));
        assert!(whole.is_unique());
    }
}
