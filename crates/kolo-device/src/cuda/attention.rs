//! Attention by cuDNN, or by the caller's own kernels if these are faster: both are timed once for each shape, and the
//! choice is cached.
//!
//! The library sums the gradient of the queries in no fixed order, so the last bits of a gradient may differ from run
//! to run.

use std::collections::HashMap;
use std::ffi::c_void;

use cudarc::cudnn::result;
use kolo_core::{DType, Error, Result, Shape, Tensor};

use super::attention_graph::{graph, id};
use super::backend::{ALIGNMENT, Engine};
use super::conv::Dnn;
use super::device::CudaDevice;
use super::launch::cuda_buffer;
use super::library::has_cudnn;
use super::tune::{Chosen, Spending, fastest};
use crate::Device;

/// Self-attention of several heads, `softmax(q · kᵀ / √size) · v`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Attention {
    /// The element type of all tensors but `lse`, which has floats.
    pub dtype: DType,
    /// The number of sequences.
    pub batch: usize,
    /// The length of a sequence.
    pub length: usize,
    /// The number of heads.
    pub heads: usize,
    /// The size of a head.
    pub size: usize,
    /// A position attends only to positions up to itself; otherwise to all.
    pub causal: bool,
}

/// A pass of an attention. Queries, keys and values, and their gradients, are one tensor, `[batch, length, 3, heads,
/// size]`; `y` is `[batch, length, heads, size]`; `lse`, the logarithm of each query's sum of exponentials, is `[batch,
/// heads, length]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttentionPass {
    /// `y` and `lse` from `qkv`.
    Forward,
    /// `dqkv` from `dy`, `qkv`, `y` and `lse`.
    Backward,
}

/// The implementation of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    /// The caller's own kernels.
    Caller,
    /// An engine of the library, by its rank in the heuristic's list, which is deterministic.
    Engine(usize),
}

/// The choices of all devices.
static CHOSEN: Chosen<(Attention, AttentionPass), Choice> = Chosen::new();

/// Compiled engines, by their rank in the heuristic's list.
pub(super) type Engines = HashMap<(Attention, AttentionPass, usize), Engine>;

/// The number of engines to time: compiling one takes up to a second, and engines of lower rank took twice as long to
/// run.
const MOST_TRIED: usize = 2;
/// The maximum size of a workspace, in bytes.
const MOST_WORKSPACE: usize = 1 << 30;
/// The first version of the library that clears the memory of its sums.
const LEAST_VERSION: usize = 90_600;
/// Bytes of an element of the queries, keys and values.
const HALF: usize = 2;
/// The largest head that the library supports.
const LARGEST_HEAD: usize = 256;

impl Attention {
    /// The number of elements of `y`.
    fn n_elements(&self) -> Option<usize> {
        let sizes = [self.batch, self.length, self.heads, self.size];
        sizes.iter().try_fold(1usize, |n, &size| n.checked_mul(size))
    }

    /// Whether the library may have an engine for it.
    fn is_taken(&self) -> bool {
        // The library also computes indices of scores, though they are not stored.
        let n_scores = [self.batch, self.heads, self.length, self.length];
        let n_scores = n_scores.iter().try_fold(1i64, |n, &size| n.checked_mul(i64::try_from(size).ok()?));
        let fits = self.n_elements().and_then(|n| n.checked_mul(3)).is_some_and(|n| n > 0 && n <= i32::MAX as usize);
        matches!(self.dtype, DType::F16 | DType::BF16)
            && self.size.is_multiple_of(8)
            && self.size <= LARGEST_HEAD
            && fits
            && n_scores.is_some()
    }
}

impl CudaDevice {
    /// Enqueues a pass of an attention by cuDNN. `Unimplemented` if the library has no engine for it. No tensor may be
    /// empty.
    pub fn attend(
        &self,
        call: &Attention,
        pass: AttentionPass,
        inputs: &[&Tensor],
        outputs: &mut [Tensor],
    ) -> Result<()> {
        let Some(addresses) = self.attention_addresses(call, pass, inputs, outputs)? else {
            return Err(Error::unimplemented(format!("cuDNN does not take {call:?}")));
        };
        self.bind()?;
        let mut guard = self.dnn()?;
        let Some(dnn) = guard.as_mut() else { return Err(Error::internal("cuDNN was not opened")) };
        let of_this = |key: &&(Attention, AttentionPass, usize)| (key.0, key.1) == (*call, pass);
        let known = dnn.attention.keys().filter(of_this).map(|key| key.2).min();
        let i = match known {
            None => self.set_up(dnn, call, pass, 1)?.first().copied(),
            known => known,
        };
        let i = i.ok_or_else(|| Error::unimplemented(format!("cuDNN has no engine for {pass:?} of {call:?}")))?;
        self.enqueue_attention(dnn, call, pass, i, &addresses)
    }

    /// Enqueues a pass of an attention by cuDNN or by `ours`, which gets the outputs, whichever is faster. They are
    /// timed when a shape has been used a few times; until then, and if the library fails, `ours` is used. No tensor
    /// may be empty.
    pub fn attend_or(
        &self,
        call: &Attention,
        pass: AttentionPass,
        inputs: &[&Tensor],
        outputs: &mut [Tensor],
        ours: &mut dyn FnMut(&mut [Tensor]) -> Result<()>,
    ) -> Result<()> {
        let Some(addresses) = self.attention_addresses(call, pass, inputs, outputs)? else { return ours(outputs) };
        let choice = CHOSEN.get(self, (*call, pass));
        let is_due = || !self.is_capturing() && CHOSEN.is_due(self, (*call, pass));
        if choice == Some(Choice::Caller) || (choice.is_none() && !is_due()) {
            return ours(outputs);
        }
        match self.attend_as_chosen(call, pass, choice, &addresses, outputs, ours) {
            Ok(true) => Ok(()),
            Ok(false) => ours(outputs),
            Err(error) => {
                tracing::debug!(target: "kolo::tune", "{pass:?} {call:?}: from now on by kernels of ours: {error}");
                CHOSEN.replace(self, (*call, pass), Choice::Caller);
                ours(outputs)
            }
        }
    }

    /// Enqueues a pass by the chosen engine, choosing one if needed. False if none was chosen.
    fn attend_as_chosen(
        &self,
        call: &Attention,
        pass: AttentionPass,
        choice: Option<Choice>,
        addresses: &Addresses,
        outputs: &mut [Tensor],
        ours: &mut dyn FnMut(&mut [Tensor]) -> Result<()>,
    ) -> Result<bool> {
        self.bind()?;
        let mut guard = self.dnn()?;
        let Some(dnn) = guard.as_mut() else { return Err(Error::internal("cuDNN was not opened")) };
        let choice = match choice {
            Some(choice) => choice,
            None => self.time_attention(dnn, call, pass, addresses, outputs, ours)?,
        };
        let Choice::Engine(i) = choice else { return Ok(false) };
        if !dnn.attention.contains_key(&(*call, pass, i)) {
            // Chosen on another device of the GPU, or in a session that has ended.
            if self.is_capturing() {
                return Ok(false);
            }
            self.choose_stream(dnn)?;
            let engine = graph(dnn.handle, call, pass)?.engine(dnn.handle, i)?;
            dnn.attention.insert((*call, pass, i), engine);
        }
        self.enqueue_attention(dnn, call, pass, i, addresses)?;
        Ok(true)
    }

    /// Times the library's engines and `ours`, and caches the choice.
    fn time_attention(
        &self,
        dnn: &mut Dnn,
        call: &Attention,
        pass: AttentionPass,
        addresses: &Addresses,
        outputs: &mut [Tensor],
        ours: &mut dyn FnMut(&mut [Tensor]) -> Result<()>,
    ) -> Result<Choice> {
        let _spending = Spending::begin();
        let mut choices = vec![Choice::Caller];
        match self.set_up(dnn, call, pass, MOST_TRIED) {
            Ok(engines) => choices.extend(engines.into_iter().map(Choice::Engine)),
            Err(error) => tracing::debug!(target: "kolo::tune", "{pass:?} {call:?}: {error}"),
        }
        let timed = match choices.len() {
            1 => None,
            _ => fastest(self, &choices, |choice| match choice {
                Choice::Caller => ours(outputs),
                Choice::Engine(i) => self.enqueue_attention(dnn, call, pass, i, addresses),
            }),
        };
        let (choice, seconds) = timed.unwrap_or((Choice::Caller, f64::NAN));
        tracing::debug!(
            target: "kolo::tune",
            "{pass:?} {call:?}: {:.2} us, {choice:?} the best of {}", seconds * 1e6, choices.len()
        );
        let choice = CHOSEN.insert(self, (*call, pass), choice);
        dnn.attention
            .retain(|(other, other_pass, i), _| (other, *other_pass) != (call, pass) || choice == Choice::Engine(*i));
        Ok(choice)
    }

    /// Compiles the first `most` engines that can be used, and returns their ranks.
    fn set_up(&self, dnn: &mut Dnn, call: &Attention, pass: AttentionPass, most: usize) -> Result<Vec<usize>> {
        // The library fails to compile while the thread captures, and invalidates the capture.
        if self.is_capturing() {
            return Err(Error::unimplemented("engines of cuDNN are not set up while a step is captured"));
        }
        self.choose_stream(dnn)?;
        let graph = graph(dnn.handle, call, pass)?;
        let mut found = Vec::new();
        for i in 0..graph.n_engines() {
            if found.len() == most {
                break;
            }
            let Ok(engine) = graph.engine(dnn.handle, i) else { continue };
            if engine.workspace <= MOST_WORKSPACE {
                dnn.attention.insert((*call, pass, i), engine);
                found.push(i);
            }
        }
        Ok(found)
    }

    fn choose_stream(&self, dnn: &Dnn) -> Result<()> {
        // SAFETY: the handle is alive and so is the stream.
        unsafe { result::set_stream(dnn.handle, self.compute_stream().cast()) }
            .map_err(|error| Error::internal(format!("cuDNN, choosing a stream: {:?}", error.0)))
    }

    /// The addresses of a pass's tensors, inputs before outputs. `None` if the library is missing or does not support
    /// them.
    fn attention_addresses(
        &self,
        call: &Attention,
        pass: AttentionPass,
        inputs: &[&Tensor],
        outputs: &mut [Tensor],
    ) -> Result<Option<Addresses>> {
        if !call.is_taken() || !has_cudnn() || result::get_version() < LEAST_VERSION || self.capability() < (8, 0) {
            return Ok(None);
        }
        let n = call.n_elements().unwrap_or(0);
        let (half, float) = (call.dtype, DType::F32);
        let (qkv, y, lse) = ((half, n.saturating_mul(3)), (half, n), (float, n / call.size.max(1)));
        let (expected_in, expected_out): (&[_], &[_]) = match pass {
            AttentionPass::Forward => (&[qkv], &[y, lse]),
            AttentionPass::Backward => (&[y, qkv, y, lse], &[qkv]),
        };
        let fits = |tensor: &Tensor, expected: &(DType, usize)| (tensor.dtype(), tensor.n_elements()) == *expected;
        let fit = inputs.len() == expected_in.len()
            && outputs.len() == expected_out.len()
            && inputs.iter().zip(expected_in).all(|(tensor, expected)| fits(tensor, expected))
            && outputs
                .iter_mut()
                .zip(expected_out)
                .all(|(tensor, expected)| fits(tensor, expected) && tensor.is_unique());
        if !fit {
            return Err(Error::internal(format!("{pass:?} of {call:?} does not fit its tensors")));
        }
        let mut addresses = Addresses::default();
        for (at, tensor) in addresses.0.iter_mut().zip(inputs.iter().copied().chain(outputs.iter())) {
            let (buffer, offset) = cuda_buffer(tensor)?;
            if buffer.arena_id() != self.arena_id() {
                return Err(Error::internal("an attention's tensor is memory of another device; a copy is missing"));
            }
            *at = buffer.address() + offset as u64;
            if !at.is_multiple_of(ALIGNMENT as u64) {
                return Ok(None);
            }
        }
        Ok(Some(addresses))
    }

    fn enqueue_attention(
        &self,
        dnn: &Dnn,
        call: &Attention,
        pass: AttentionPass,
        i: usize,
        addresses: &Addresses,
    ) -> Result<()> {
        let engine = dnn.attention.get(&(*call, pass, i));
        let engine = engine.ok_or_else(|| Error::internal("an engine of cuDNN that was not set up"))?;
        self.choose_stream(dnn)?;
        // After the engine's workspace come a float for each query and one for each element of the queries.
        let n = call.n_elements().unwrap_or(0);
        let up = |n: usize| n.checked_next_multiple_of(256);
        let (space, floats) = (up(engine.workspace), up(n / call.size.max(1) * 4));
        let (sums_at, sums) = match pass {
            AttentionPass::Forward => (space, Some(0)),
            AttentionPass::Backward => (space.zip(floats).and_then(|(a, b)| a.checked_add(b)), n.checked_mul(4)),
        };
        let total = sums_at.zip(sums).and_then(|(a, b)| a.checked_add(b));
        let (Some(space), Some(sums_at), Some(total)) = (space, sums_at, total) else {
            return Err(Error::resource_exhausted(format!("the workspace of {call:?} is too large")));
        };
        // Freed on return: its next use is enqueued later on the same stream.
        let workspace = match total {
            0 => None,
            n => Some(self.allocate_tensor(DType::U8, Shape::new(&[n])?, &"the workspace of an attention".into())?),
        };
        let workspace = match &workspace {
            Some(tensor) => cuda_buffer(tensor).map(|(buffer, offset)| buffer.address() + offset as u64)?,
            None => 0,
        };
        let (scale, unseen, one) = ((call.size as f32).powf(-0.5), f32::NEG_INFINITY, 1f32);
        let number = |number: &f32| std::ptr::from_ref(number).cast_mut().cast::<c_void>();
        let pointer = |address: u64| address as *mut c_void;
        // Queries, keys and values share rows.
        let width = call.heads * call.size * HALF;
        let part = |address: u64, i: usize| pointer(address + (i * width) as u64);
        let mut tensors = vec![(id::SCALE, number(&scale))];
        if call.causal {
            tensors.push((id::UNSEEN, number(&unseen)));
        }
        match pass {
            AttentionPass::Forward => {
                let [qkv, y, lse, ..] = addresses.0;
                tensors.extend([(id::QUERIES, part(qkv, 0)), (id::KEYS, part(qkv, 1)), (id::VALUES, part(qkv, 2))]);
                tensors.extend([(id::Y, pointer(y)), (id::LSE, pointer(lse))]);
            }
            AttentionPass::Backward => {
                let [dy, qkv, y, lse, dqkv] = addresses.0;
                tensors.extend([(id::QUERIES, part(qkv, 0)), (id::KEYS, part(qkv, 1)), (id::VALUES, part(qkv, 2))]);
                tensors.extend([(id::Y, pointer(y)), (id::DY, pointer(dy)), (id::LSE, pointer(lse))]);
                tensors.extend([(id::D_QUERIES, part(dqkv, 0)), (id::D_KEYS, part(dqkv, 1))]);
                tensors.extend([(id::D_VALUES, part(dqkv, 2)), (id::ONE, number(&one))]);
                tensors.push((id::DELTA, pointer(workspace + space as u64)));
                tensors.push((id::D_QUERIES_SUM, pointer(workspace + sums_at as u64)));
            }
        }
        let (ids, pointers): (Vec<i64>, Vec<*mut c_void>) = tensors.into_iter().unzip();
        // SAFETY: the engine is for this pass and was set up with this handle. The tensors have its sizes (checked by
        // `attention_addresses`), are of this device, and are alive until the compute stream has passed this call; so
        // is the workspace, which is large enough for all of its contents. The numbers outlive the call.
        unsafe { engine.enqueue(dnn.handle, &ids, &pointers, pointer(workspace)) }
    }
}

/// The addresses of a pass's tensors.
#[derive(Clone, Copy, Default)]
struct Addresses([u64; 5]);

#[cfg(test)]
mod tests {
    use super::*;

    const CALL: Attention = Attention { dtype: DType::BF16, batch: 2, length: 100, heads: 3, size: 64, causal: true };

    #[test]
    fn only_what_the_library_may_have_is_asked_of_it() {
        assert!(CALL.is_taken());
        assert!(Attention { size: 128, dtype: DType::F16, causal: false, ..CALL }.is_taken());
        assert!(!Attention { dtype: DType::F32, ..CALL }.is_taken());
        assert!(!Attention { size: 20, ..CALL }.is_taken());
        assert!(!Attention { size: 512, ..CALL }.is_taken());
        assert!(!Attention { batch: 0, ..CALL }.is_taken());
        assert!(!Attention { batch: 1 << 40, ..CALL }.is_taken());
        assert!(!Attention { batch: usize::MAX, length: usize::MAX, ..CALL }.is_taken());
    }
}
