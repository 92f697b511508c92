//! What objects hold that outlive kernel calls: queues, tables, stacks, accumulators. A graph decides how much that becomes, so it
//! is asked for before it is taken, and counted against the limit of the object's device until it goes.
//!
//! | what | counted as |
//! | --- | --- |
//! | numbers in a device's memory | nothing: their device counts them, whoever holds them |
//! | numbers elsewhere, such as a fed value | their buffer, once per object that holds it |
//! | text | its list and its bytes, unless a device counts them, once per object that holds it |
//! | an element of the object | what its place in the object's lists takes, and one block per tensor that has one |

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use kolo_core::{Buffer, DType, Error, Memory, ResourceHandle, Result, Strings, Tensor, TensorData};
use kolo_device::Charge;
use smallvec::SmallVec;

/// What the allocator and reference counts add to each block of memory.
pub(crate) const BLOCK: usize = 64;

/// From this size on, a buffer or a list that several elements share is looked up, to be counted once.
const LEAST_SHARED: usize = 4096;

/// At least so many bytes are charged more than are held, so that few elements cost the device's lock.
const SLACK: usize = 4096;

/// What an object takes of which a loop makes one in every iteration: itself, its locks, its name, its place in a store.
pub(crate) const OBJECT: usize = 1024;

/// What one object holds.
pub(crate) struct Holdings {
    charge: Charge,
    charged: usize,
    held: usize,
    /// Large buffers and lists by their address, with the number of times they are held.
    shared: HashMap<usize, usize>,
}

impl Holdings {
    /// Nothing yet. The charge names the object and counts nothing.
    pub fn new(charge: Charge) -> Holdings {
        Holdings { charge, charged: 0, held: 0, shared: HashMap::new() }
    }

    /// Adds a part of the object. An error, and nothing is added, if the device has no memory for it.
    pub fn add(&mut self, part: &Measured) -> Result<()> {
        let total = self.weigh(part);
        self.grow(total)?;
        self.enter(part);
        Ok(())
    }

    /// Adds a part that was just removed and is still there, so it counts in any case: if others took the memory meanwhile, the
    /// next part that comes is refused.
    pub fn put_back(&mut self, part: &Measured) {
        let total = self.weigh(part);
        self.put_back_bytes(total);
        self.enter(part);
    }

    /// What a part adds to what is held.
    fn weigh(&self, part: &Measured) -> usize {
        let mut total = part.n_bytes;
        for (i, tensor) in part.tensors.iter().enumerate() {
            // What occurs twice here is only looked up, since it is entered later.
            let is_known = tensor.address.is_some_and(|address| {
                self.shared.contains_key(&address) || part.tensors[..i].iter().any(|t| t.address == Some(address))
            });
            total = total.saturating_add(if is_known { BLOCK } else { tensor.n_bytes });
        }
        total
    }

    fn enter(&mut self, part: &Measured) {
        for address in part.tensors.iter().filter_map(|tensor| tensor.address) {
            *self.shared.entry(address).or_insert(0) += 1;
        }
    }

    /// The part goes, with the tensors that came with it.
    pub fn remove(&mut self, part: &Measured) {
        let mut total = part.n_bytes;
        for tensor in &part.tensors {
            let is_last = tensor.address.is_none_or(|address| match self.shared.get_mut(&address) {
                Some(n) if *n > 1 => {
                    *n -= 1;
                    false
                }
                _ => {
                    self.shared.remove(&address);
                    true
                }
            });
            total = total.saturating_add(if is_last { tensor.n_bytes } else { BLOCK });
        }
        self.shrink(total);
    }

    /// Adds bytes that are in no tensor.
    pub fn grow(&mut self, n_bytes: usize) -> Result<()> {
        let held = self.held.saturating_add(n_bytes);
        if held > self.charged {
            let ample = held.saturating_add((held / 16).max(SLACK));
            if self.charge.try_resize(ample) {
                self.charged = ample;
            } else {
                self.charge.resize(held)?;
                self.charged = held;
            }
        }
        self.held = held;
        Ok(())
    }

    /// As [`Holdings::put_back`], for bytes that are in no tensor.
    pub fn put_back_bytes(&mut self, n_bytes: usize) {
        if self.grow(n_bytes).is_err() {
            self.held = self.held.saturating_add(n_bytes);
        }
    }

    /// Bytes that are in no tensor go.
    pub fn shrink(&mut self, n_bytes: usize) {
        self.held = self.held.saturating_sub(n_bytes);
        let ample = self.held + (self.held / 16).max(SLACK);
        // Not at once, and a little stays, so that what goes and comes again costs nothing.
        if self.charged > 2 * ample && self.charge.try_resize(ample) {
            self.charged = ample;
        }
    }

    /// Everything goes.
    pub fn clear(&mut self) {
        self.shared = HashMap::new();
        self.held = 0;
        if self.charged > 0 && self.charge.try_resize(0) {
            self.charged = 0;
        }
    }

    /// The error of the object's lists if they cannot grow.
    pub fn no_room(&self) -> Error {
        Error::resource_exhausted(format!("OOM when adding to '{}': the system refused", self.charge.tag()))
    }

    /// What it is charged by.
    pub fn charge(&self) -> &Charge {
        &self.charge
    }

    /// How many bytes are held now.
    pub fn held(&self) -> usize {
        self.held
    }
}

/// What a part of an object takes. Text is walked for it, so whoever can measures before taking the object's lock.
pub(crate) struct Measured {
    n_bytes: usize,
    tensors: SmallVec<[MeasuredTensor; 2]>,
}

struct MeasuredTensor {
    n_bytes: usize,
    /// Where a large buffer or list lies that no device counts, and that others may hold, too.
    address: Option<usize>,
}

impl Measured {
    /// These tensors, and `n_bytes` for their place in lists.
    pub fn new(n_bytes: usize, tensors: &[Tensor]) -> Measured {
        let measure = |tensor| {
            let n_bytes = footprint(tensor);
            MeasuredTensor { n_bytes, address: address(tensor).filter(|_| n_bytes >= LEAST_SHARED) }
        };
        Measured { n_bytes, tensors: tensors.iter().map(measure).collect() }
    }
}

fn address(tensor: &Tensor) -> Option<usize> {
    match tensor.storage() {
        TensorData::Inline(_) => None,
        TensorData::Buffer { buffer, .. } => Some(Arc::as_ptr(buffer).cast::<()>().addr()),
        TensorData::Strings(strings) => Some(Arc::as_ptr(strings).addr()),
        TensorData::Handles(handles) => Some(Arc::as_ptr(handles).addr()),
    }
}

/// What a tensor takes besides its place in a list, as far as no device counts it.
pub(crate) fn footprint(tensor: &Tensor) -> usize {
    let elements = match tensor.storage() {
        TensorData::Inline(_) => 0,
        TensorData::Buffer { buffer, .. } => BLOCK + uncounted(&**buffer),
        TensorData::Strings(strings) => BLOCK.saturating_add(text(strings)),
        TensorData::Handles(handles) => BLOCK + size_of_val(&handles[..]).max(size_of::<ResourceHandle>()),
    };
    // Longer shapes are in a block of their own.
    let shape = if tensor.shape().len() > 4 { BLOCK + size_of_val(tensor.shape().dims()) } else { 0 };
    elements + shape
}

fn uncounted(buffer: &dyn Buffer) -> usize {
    // What is pinned, or lies in a device's memory, is that device's.
    if buffer.is_counted() || buffer.memory() != Memory::Host { 0 } else { buffer.n_bytes() }
}

fn text(strings: &Strings) -> usize {
    let list = if strings.is_list_counted() { 0 } else { size_of_val(&strings[..]) };
    match strings.is_text_counted() {
        true => list,
        false => strings.iter().map(of_text).fold(list, usize::saturating_add),
    }
}

/// What a text takes besides its place in a list.
pub(crate) fn of_text(text: &Bytes) -> usize {
    if text.is_empty() { 0 } else { BLOCK + text.len() }
}

/// The tensor in memory that a device counts: copied if it lies elsewhere.
pub(crate) fn counted(tensor: Tensor, memory: &Charge) -> Result<Tensor> {
    match tensor.storage() {
        TensorData::Buffer { buffer, .. } if uncounted(&**buffer) > 0 => copied(&tensor, memory),
        _ => Ok(tensor),
    }
}

/// Copies numbers unless this is the only handle to them.
pub(crate) fn make_unique(tensor: &mut Tensor, memory: &Charge) -> Result<()> {
    if !tensor.is_unique() && tensor.dtype().size().is_some() {
        *tensor = copied(tensor, memory)?;
    }
    Ok(())
}

fn copied(tensor: &Tensor, memory: &Charge) -> Result<Tensor> {
    let mut copy = memory.tensor(tensor.dtype(), tensor.shape().clone())?;
    copy.host_bytes_mut()?.copy_from_slice(tensor.host_bytes()?);
    Ok(copy)
}

/// What `n_elements` values of a dtype take in a device's memory, or as text with so many bytes.
pub(crate) fn estimate(dtype: DType, n_elements: usize, n_text: usize) -> usize {
    match dtype.size() {
        Some(size) => BLOCK.saturating_add(n_elements.saturating_mul(size)),
        None => n_elements.saturating_mul(size_of::<Bytes>() + BLOCK).saturating_add(n_text).saturating_add(BLOCK),
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::Code;
    use kolo_device::Arena;

    use super::*;
    use crate::memory::string_tensor;

    fn holdings(limit: u64) -> (Arc<Arena>, Holdings) {
        let arena = Arena::new("cpu", Some(limit));
        let charge = arena.charge(0, &"FIFOQueue q".into()).unwrap();
        (arena, Holdings::new(charge))
    }

    #[test]
    fn what_is_added_is_given_back_when_it_is_removed() {
        let (arena, mut holdings) = holdings(1 << 20);
        let text = Tensor::from_strings([2], vec![Bytes::from_static(b"abc"), Bytes::new()]).unwrap();
        let tensors = [Tensor::scalar(1i64), text, Tensor::zeros(DType::F32, [100]).unwrap()];
        holdings.add(&Measured::new(100, &tensors)).unwrap();
        // The text's list, the text, and the numbers, with a block each.
        assert_eq!(holdings.held(), 100 + (BLOCK + 64) + (BLOCK + 3) + (BLOCK + 400));
        assert!(arena.stats().in_use >= holdings.held() as u64);
        holdings.remove(&Measured::new(100, &tensors));
        assert_eq!(holdings.held(), 0);
        assert!(arena.stats().in_use <= 2 * SLACK as u64, "{}", arena.stats().in_use);
        let error = (0..).map(|_| holdings.add(&Measured::new(1000, &tensors))).find_map(Result::err).unwrap();
        assert_eq!(error.code(), Code::ResourceExhausted);
        assert!(error.message().contains("'FIFOQueue q'"), "{error}");
        assert!(arena.stats().in_use <= 1 << 20);
        holdings.clear();
        assert_eq!(arena.stats().in_use, 0);
    }

    #[test]
    fn what_a_device_counts_is_not_counted_again_and_what_is_shared_once() {
        let (arena, mut holdings) = holdings(1 << 20);
        let counted = arena.charge(0, &"a".into()).unwrap().tensor(DType::F32, [10_000].into()).unwrap();
        holdings.add(&Measured::new(0, std::slice::from_ref(&counted))).unwrap();
        assert_eq!(holdings.held(), BLOCK);
        let shared = Tensor::zeros(DType::F32, [10_000]).unwrap();
        let both = [shared.rows(0, 1).unwrap(), shared.clone()];
        holdings.add(&Measured::new(0, &both)).unwrap();
        holdings.add(&Measured::new(0, std::slice::from_ref(&shared))).unwrap();
        assert_eq!(holdings.held(), 4 * BLOCK + 40_000);
        holdings.remove(&Measured::new(0, &both));
        assert_eq!(holdings.held(), 2 * BLOCK + 40_000);
        holdings.remove(&Measured::new(0, &[shared]));
        holdings.remove(&Measured::new(0, &[counted]));
        assert_eq!(holdings.held(), 0);
    }

    #[test]
    fn what_is_put_back_counts_even_if_others_took_its_memory() {
        let (arena, mut holdings) = holdings(1 << 20);
        let numbers = Tensor::zeros(DType::F32, [150_000]).unwrap();
        let part = Measured::new(100, std::slice::from_ref(&numbers));
        holdings.add(&part).unwrap();
        let held = holdings.held();
        holdings.remove(&part);
        let others = arena.charge((1 << 20) - arena.stats().in_use as usize, &"others".into()).unwrap();
        holdings.put_back(&part);
        assert_eq!(holdings.held(), held);
        assert!(holdings.grow(1).is_err(), "nothing is added to what does not fit");
        drop(others);
        holdings.grow(1).unwrap();
        assert!(arena.stats().in_use > held as u64);
        holdings.remove(&part);
        holdings.shrink(1);
        assert_eq!(holdings.held(), 0);
        assert!(arena.stats().in_use <= 2 * SLACK as u64, "{}", arena.stats().in_use);
        drop(holdings);
        assert_eq!(arena.stats().in_use, 0);
    }

    /// As in a queue that hands one token to and fro.
    #[test]
    fn what_comes_and_goes_costs_the_device_nothing() {
        let (arena, mut holdings) = holdings(1 << 20);
        holdings.grow(100).unwrap();
        let stats = arena.stats();
        for _ in 0..10 {
            holdings.shrink(100);
            assert_eq!(arena.stats(), stats);
            holdings.grow(100).unwrap();
            assert_eq!(arena.stats(), stats);
        }
        holdings.clear();
        assert_eq!(arena.stats().in_use, 0);
    }

    #[test]
    fn a_list_of_strings_counts_as_long_as_it_lives() {
        let (arena, holdings) = holdings(1 << 20);
        let listed =
            |n: usize| string_tensor([n].into(), vec![Bytes::new(); n], |n_bytes| holdings.charge.another(n_bytes));
        let list = listed(1000).unwrap();
        let kept = list.clone();
        assert_eq!((arena.stats().in_use, footprint(&list)), (32_000, BLOCK));
        drop(list);
        assert_eq!(arena.stats().in_use, 32_000);
        drop(kept);
        assert_eq!(arena.stats().in_use, 0);
        let error = listed(40_000).unwrap_err();
        assert_eq!(error.code(), Code::ResourceExhausted);
    }
}
