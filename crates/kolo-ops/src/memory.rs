//! Host memory that kernels take outside of tensors: text, and the elements of lists. It is asked for before it is taken,
//! since an allocation that fails ends the process. What a small graph can make large goes through here.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use bytes::Bytes;
use kolo_core::{Buffer, Error, Result, Shape, Tensor};
use kolo_device::Charge;
use kolo_device::cpu::stop_if_asked;

use crate::KernelCtx;
use crate::holdings::{Holdings, of_text};

/// Lists and text of fewer bytes are not worth a charge, nor a block of the device's memory.
const LEAST_COUNTED: usize = 4096;

/// The bytes of a text that are copied without a look at whether the step is stopped.
const COPIED_AT_ONCE: usize = 1 << 20;

/// The elements of a list that are filled in without a look at whether the step is stopped.
const FILLED_AT_ONCE: usize = 1 << 16;

/// An empty vector with room for `n` elements; `what` names them in the error if there is no memory.
pub(crate) fn room<T>(n: usize, what: &str) -> Result<Vec<T>> {
    let mut list = Vec::new();
    match list.try_reserve_exact(n) {
        Ok(()) => Ok(list),
        Err(_) => Err(refused(n, what)),
    }
}

fn refused(n: usize, what: &str) -> Error {
    Error::resource_exhausted(format!("OOM when allocating {n} {what}: the system refused"))
}

/// `n` copies of a value.
pub(crate) fn filled<T: Clone>(n: usize, value: T, what: &str) -> Result<Vec<T>> {
    let mut list = room(n, what)?;
    list.resize(n, value);
    Ok(list)
}

/// A tensor of these strings, whose list counts as long as it lives by the charge that `charge` gives for its bytes.
pub(crate) fn string_tensor(
    shape: Shape,
    strings: Vec<Bytes>,
    charge: impl FnOnce(usize) -> Result<Charge>,
) -> Result<Tensor> {
    let n_bytes = strings.capacity() * size_of::<Bytes>();
    match n_bytes < LEAST_COUNTED {
        true => Tensor::from_strings(shape, strings),
        false => Tensor::from_counted_strings(shape, strings, charge(n_bytes)?, false),
    }
}

/// Strings that a kernel makes one after the other. List and text are asked for as they come, and count as long as the tensor
/// that is made of them lives.
pub(crate) struct StringsMade<'c> {
    ctx: &'c KernelCtx<'c>,
    list: Vec<Bytes>,
    /// What was not worth a charge so far.
    n_bytes: usize,
    holdings: Option<Holdings>,
    /// Some share text with other strings, whose it is.
    has_parts: bool,
}

impl StringsMade<'_> {
    /// Adds a string.
    pub fn push(&mut self, text: Bytes) -> Result<()> {
        self.n_bytes += of_text(&text);
        self.add(text)
    }

    /// Adds a part of another string, whose text it shares.
    pub fn push_part(&mut self, text: Bytes) -> Result<()> {
        self.has_parts = true;
        self.add(text)
    }

    /// Adds a string that [`KernelCtx::texts`] made, which counts already if it is long.
    pub fn push_made(&mut self, text: Bytes) -> Result<()> {
        if text.len() < LEAST_COUNTED { self.push(text) } else { self.add(text) }
    }

    fn add(&mut self, text: Bytes) -> Result<()> {
        stop_if_asked();
        // The list has room for up to twice as many.
        self.n_bytes += 2 * size_of::<Bytes>();
        if self.n_bytes >= LEAST_COUNTED {
            let holdings = match &mut self.holdings {
                Some(holdings) => holdings,
                none => none.insert(Holdings::new(self.ctx.device.charge(0, &self.ctx.node.name)?)),
            };
            holdings.grow(std::mem::take(&mut self.n_bytes))?;
        }
        self.list.try_reserve(1).map_err(|_| refused(self.list.len(), "strings"))?;
        self.list.push(text);
        Ok(())
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// The tensor of the strings.
    pub fn finish(self, shape: Shape) -> Result<Tensor> {
        match self.holdings {
            Some(holdings) => Tensor::from_counted_strings(shape, self.list, holdings, !self.has_parts),
            None => Tensor::from_strings(shape, self.list),
        }
    }
}

/// Memory that a kernel needs while it runs, counted as its device's meanwhile.
pub(crate) struct Scratch<T> {
    values: Vec<T>,
    _charge: Charge,
}

impl<T> Deref for Scratch<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.values
    }
}

impl<T> DerefMut for Scratch<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.values
    }
}

impl KernelCtx<'_> {
    /// `n` copies of a value that the kernel needs while it runs; `what` names them. Whatever may become much larger than inputs
    /// and outputs is asked for like this: a list with a place for each value of a shape may, since a shape with a size of 0 costs
    /// nothing however large its other sizes are.
    pub(crate) fn scratch<T: Clone>(&self, n: usize, value: T, what: &str) -> Result<Scratch<T>> {
        let n_bytes = n.saturating_mul(size_of::<T>());
        let charge =
            if n_bytes < LEAST_COUNTED { Charge::NONE } else { self.device.charge(n_bytes, &self.node.name)? };
        let mut values = room(n, what)?;
        while values.len() < n {
            stop_if_asked();
            values.resize(n.min(values.len() + FILLED_AT_ONCE), value.clone());
        }
        Ok(Scratch { values, _charge: charge })
    }

    /// No strings yet.
    pub(crate) fn strings_made(&self) -> StringsMade<'_> {
        StringsMade { ctx: self, list: Vec::new(), n_bytes: 0, holdings: None, has_parts: false }
    }

    /// Room for `n` strings, which the device has, too.
    pub(crate) fn strings(&self, n: usize) -> Result<Vec<Bytes>> {
        self.list(n, "strings")
    }

    /// A tensor of these strings, whose list counts as the device's memory as long as it lives.
    pub(crate) fn string_tensor(&self, shape: Shape, strings: Vec<Bytes>) -> Result<Tensor> {
        string_tensor(shape, strings, |n_bytes| self.device.charge(n_bytes, &self.node.name))
    }

    /// A tensor of `n` texts as [`KernelCtx::texts`] makes them, all of which count as the device's memory.
    pub(crate) fn text_tensor<'p, I: Iterator<Item = &'p [u8]>>(
        &self,
        shape: Shape,
        pieces: impl Fn(usize) -> I,
    ) -> Result<Tensor> {
        let texts = self.texts(shape.n_elements(), pieces)?;
        let (n_bytes, n_text) = (texts.capacity() * size_of::<Bytes>(), texts.iter().map(Bytes::len).sum::<usize>());
        if n_bytes + n_text < LEAST_COUNTED {
            return Tensor::from_strings(shape, texts);
        }
        // Shorter ones are not in the device's memory.
        let charge = self.device.charge(n_bytes + if n_text < LEAST_COUNTED { n_text } else { 0 }, &self.node.name)?;
        Tensor::from_counted_strings(shape, texts, charge, true)
    }

    /// Room for `n` of something that lies in a list of its own, which the device has, too.
    pub(crate) fn list<T>(&self, n: usize, what: &str) -> Result<Vec<T>> {
        let n_bytes = n.saturating_mul(size_of::<T>());
        if n_bytes >= LEAST_COUNTED {
            // Only asked for: the charge is the tensor's that is made of it.
            drop(self.device.charge(n_bytes, &self.node.name)?);
        }
        room(n, what)
    }

    /// `n` strings, each of the pieces that `pieces` gives for it, one after the other; it is asked twice. Long texts lie
    /// in the device's memory, so they are subject to its limit and appear in its report.
    pub(crate) fn texts<'p, I: Iterator<Item = &'p [u8]>>(
        &self,
        n: usize,
        pieces: impl Fn(usize) -> I,
    ) -> Result<Vec<Bytes>> {
        let mut strings = self.strings(n)?;
        let mut ends: Vec<usize> = room(n, "positions of strings")?;
        let mut total = 0usize;
        for i in 0..n {
            stop_if_asked();
            total = pieces(i).try_fold(total, |sum, piece| sum.checked_add(piece.len())).ok_or_else(|| {
                Error::resource_exhausted(format!("the {n} strings of '{}' are too long", self.node.name))
            })?;
            ends.push(total);
        }
        let all_pieces = (0..n).flat_map(pieces);
        let all = if total < LEAST_COUNTED {
            let mut all = vec![0; total];
            fill(&mut all, all_pieces);
            Bytes::from(all)
        } else {
            let mut buffer = self.device.allocate(total, &self.node.name)?;
            let bytes = Arc::get_mut(&mut buffer).and_then(|buffer| buffer.host_mut());
            fill(bytes.ok_or_else(|| Error::internal("text is made in the host's memory"))?, all_pieces);
            Bytes::from_owner(Text(buffer))
        };
        let mut start = 0;
        for end in ends {
            strings.push(all.slice(start..end));
            start = end;
        }
        Ok(strings)
    }
}

/// Pieces with a separator between them.
pub(crate) fn joined<'p>(
    pieces: impl Iterator<Item = &'p [u8]>,
    separator: &'p [u8],
) -> impl Iterator<Item = &'p [u8]> {
    pieces.enumerate().flat_map(move |(i, piece)| [if i == 0 { &[] } else { separator }, piece])
}

fn fill<'p>(mut rest: &mut [u8], pieces: impl Iterator<Item = &'p [u8]>) {
    for piece in pieces {
        let (to, after) = rest.split_at_mut(piece.len());
        for (to, piece) in to.chunks_mut(COPIED_AT_ONCE).zip(piece.chunks(COPIED_AT_ONCE)) {
            stop_if_asked();
            to.copy_from_slice(piece);
        }
        rest = after;
    }
}

/// Text in a device's memory.
struct Text(Arc<dyn Buffer>);

impl AsRef<[u8]> for Text {
    fn as_ref(&self) -> &[u8] {
        self.0.host().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::DType;
    use kolo_graph::{Graph, Output};

    use super::*;
    use crate::testing::Evaluation;

    /// The most memory that is in use while the node runs which the graph is for.
    fn peak(node: impl for<'g> Fn(&'g Graph) -> Output<'g>) -> usize {
        let g = crate::graph();
        let fetch = node(&g);
        let run = Evaluation::new(g.snapshot());
        run.run(&[fetch], &[]).unwrap();
        run.memory().peak as usize
    }

    #[test]
    fn what_a_kernel_needs_meanwhile_counts_beside_its_output() {
        const N: usize = 100_000;
        let zeros = |dtype, dims: &[usize]| Tensor::zeros(dtype, Shape::new(dims).unwrap()).unwrap();
        let found = peak(|g| {
            let (a, b) = (g.constant(zeros(DType::F32, &[1000, 1])), g.constant(zeros(DType::F32, &[100, 1])));
            g.op("Einsum").inputs([a, b]).attr("equation", "ij,kj->ki").out()
        });
        assert!(found >= 2 * N * 4, "products and their order: {found}");
        let found = peak(|g| {
            let inputs = [g.constant(zeros(DType::F32, &[1])), g.constant(zeros(DType::I32, &[N, 1]))];
            g.op("GatherNd").inputs(inputs).out()
        });
        assert!(found >= N * (8 + 4), "rows and what is gathered: {found}");
        let found = peak(|g| {
            let at = g.constant((0..N as i32).collect::<Vec<i32>>());
            let inputs = [at, g.constant([N as i32]), g.constant(1.0f32), g.constant(0.0f32)];
            g.op("SparseToDense").inputs(inputs).out()
        });
        assert!(found >= N * (8 + 4), "positions and values: {found}");
        let found = peak(|g| {
            let texts = g.constant(Tensor::from_strings([N], vec![Bytes::from_static(&[b'a'; 100]); N]).unwrap());
            g.op("ReduceJoin").inputs([texts, g.constant([0i32])]).out()
        });
        assert!(found >= N * (8 + 100), "positions and text: {found}");
    }

    #[test]
    fn what_cannot_be_had_is_refused() {
        let error = filled(usize::MAX / 64, 0u64, "places").unwrap_err();
        assert!(error.message().contains("places"), "{error}");
        assert_eq!(filled(2, 7u8, "places"), Ok(vec![7, 7]));
    }

    #[test]
    fn pieces_are_separated() {
        let join = |pieces: &[&'static str]| -> Vec<u8> {
            joined(pieces.iter().map(|piece| piece.as_bytes()), b", ").flatten().copied().collect()
        };
        assert_eq!(join(&["a", "b", "c"]), b"a, b, c");
        assert_eq!(join(&["a"]), b"a");
        assert_eq!(join(&[]), b"");
    }
}
