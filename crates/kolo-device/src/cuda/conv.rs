//! Convolutions by cuDNN. The algorithm or engine of each shape is chosen once, by timing the heuristic's candidates,
//! and cached. Its workspace is an ordinary tensor in the device's memory.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};

use cudarc::cudnn::result::{self, CudnnError};
use cudarc::cudnn::sys;
use kolo_core::{DType, Error, Result, Shape, Tensor};

use super::attention::Engines;
use super::backend::{ALIGNMENT, Engine};
use super::device::CudaDevice;
use super::engines;
use super::launch::cuda_buffer;
use super::library::has_cudnn;
use super::tune::{Chosen, Spending, fastest};
use crate::Device;

/// A convolution of a batch of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Conv {
    /// The element type of all tensors.
    pub dtype: DType,
    /// Channels come before height and width, in images (NCHW) and filters (KCRS); otherwise after (NHWC, KRSC).
    pub channels_first: bool,
    /// Images.
    pub batch: usize,
    /// Height, width and channels of the input.
    pub input: [usize; 3],
    /// Height and width of the filter.
    pub filter: [usize; 2],
    /// Height, width and channels of the output.
    pub output: [usize; 3],
    /// The stride between positions of the filter.
    pub stride: [usize; 2],
    /// The distance between taps of the filter.
    pub dilation: [usize; 2],
    /// Zeros around the input, as many before as after.
    pub pad: [usize; 2],
    /// Groups of channels.
    pub groups: usize,
    /// Floats may be multiplied as TF32.
    pub allow_tf32: bool,
}

/// A pass of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConvPass {
    /// The output from input and filter.
    Forward,
    /// The input's gradient from filter and the output's gradient.
    BackpropInput,
    /// The filter's gradient from input and the output's gradient.
    BackpropFilter,
}

/// The loaded library. Its handle is used by one thread at a time.
pub(super) struct Dnn {
    pub handle: sys::cudnnHandle_t,
    plans: HashMap<(Conv, ConvPass), Plan>,
    /// Compiled engines, by their rank in the heuristic's list.
    engines: HashMap<(Conv, ConvPass, usize), Engine>,
    /// The engines of attention.
    pub attention: Engines,
}

// SAFETY: a handle may be used by any thread, one at a time; `Dnn` is behind a lock.
unsafe impl Send for Dnn {}

/// The descriptors of one shape, and its algorithm. They live as long as the handle.
#[derive(Clone, Copy)]
struct Plan {
    input: sys::cudnnTensorDescriptor_t,
    output: sys::cudnnTensorDescriptor_t,
    filter: sys::cudnnFilterDescriptor_t,
    conv: sys::cudnnConvolutionDescriptor_t,
    /// The algorithm, as a number of the pass's enumeration, and its workspace. `None` until one was chosen.
    choice: Option<Choice>,
}

/// The choices of all devices.
static CHOSEN: Chosen<(Conv, ConvPass), Choice> = Chosen::new();

#[derive(Clone, Copy)]
struct Choice {
    algorithm: Algorithm,
    workspace: usize,
    math: sys::cudnnMathType_t,
}

impl Choice {
    fn describe(&self) -> String {
        let name = match self.algorithm {
            Algorithm::Forward(algorithm) => format!("{algorithm:?}"),
            Algorithm::Input(algorithm) => format!("{algorithm:?}"),
            Algorithm::Filter(algorithm) => format!("{algorithm:?}"),
            Algorithm::Engine(i) => format!("engine {i}"),
        };
        format!("{name} {:?}", self.math)
    }
}

#[derive(Clone, Copy)]
enum Algorithm {
    Forward(sys::cudnnConvolutionFwdAlgo_t),
    Input(sys::cudnnConvolutionBwdDataAlgo_t),
    Filter(sys::cudnnConvolutionBwdFilterAlgo_t),
    /// An engine's rank in the heuristic's list, which is deterministic.
    Engine(usize),
}

/// The maximum size of a workspace: beyond that a slower algorithm is the better choice.
const MOST_WORKSPACE: usize = 1 << 30;
/// The maximum number of algorithms to consider.
const MOST_CHOICES: usize = 16;

fn failed(what: &str, call: &Conv, error: CudnnError) -> Error {
    let text = format!("cuDNN, {what}, for {call:?}: {:?}", error.0);
    let status = format!("{:?}", error.0);
    match status.contains("NOT_SUPPORTED") || status.contains("BAD_PARAM") {
        true => Error::unimplemented(text),
        false => Error::internal(text),
    }
}

fn sizes<const N: usize>(sizes: [usize; N]) -> Result<[c_int; N]> {
    let mut ints = [0; N];
    for (int, &size) in ints.iter_mut().zip(&sizes) {
        *int = c_int::try_from(size)
            .map_err(|_| Error::invalid_argument(format!("a convolution over a dimension of {size} is too large")))?;
    }
    Ok(ints)
}

impl Dnn {
    /// Opens the library. The context must be current.
    pub fn new() -> Result<Dnn> {
        if !has_cudnn() {
            return Err(Error::failed_precondition(
                "convolutions on a GPU need cuDNN, which is not here (libcudnn.so.9 was not found)",
            ));
        }
        let handle =
            result::create_handle().map_err(|error| Error::internal(format!("cuDNN does not start: {:?}", error.0)))?;
        Ok(Dnn { handle, plans: HashMap::new(), engines: HashMap::new(), attention: Engines::new() })
    }

    fn plan(&mut self, call: &Conv, pass: ConvPass) -> Result<Plan> {
        if let Some(plan) = self.plans.get(&(*call, pass)) {
            return Ok(*plan);
        }
        let plan = describe(call).map_err(|error| match error {
            Described::Ours(error) => error,
            Described::Library(error) => failed("describing it", call, error),
        })?;
        self.plans.insert((*call, pass), plan);
        Ok(plan)
    }

    /// Compiles engines of a pass, all or one, unless they are compiled; returns those that can be used.
    fn set_up(&mut self, call: &Conv, pass: ConvPass, only: Option<usize>) -> Result<Vec<Choice>> {
        // Engines may round floats to TF32, and we do not query whether they do.
        if call.dtype == DType::F32 && !call.allow_tf32 {
            return Ok(Vec::new());
        }
        let graph = engines::graph(self.handle, call, pass)?;
        let mut choices = Vec::new();
        for i in (0..graph.n_engines()).filter(|i| only.is_none_or(|only| only == *i)) {
            let Ok(engine) = graph.engine(self.handle, i) else { continue };
            if engine.workspace <= MOST_WORKSPACE {
                let math = sys::cudnnMathType_t::CUDNN_DEFAULT_MATH;
                choices.push(Choice { algorithm: Algorithm::Engine(i), workspace: engine.workspace, math });
                self.engines.insert((*call, pass, i), engine);
            }
        }
        Ok(choices)
    }

    /// Drops the engines of a pass that were not chosen.
    fn keep(&mut self, call: &Conv, pass: ConvPass, choice: Choice) {
        let is_it = |i: usize| matches!(choice.algorithm, Algorithm::Engine(chosen) if chosen == i);
        self.engines.retain(|(other, other_pass, i), _| (other, *other_pass) != (call, pass) || is_it(*i));
    }

    /// The heuristic's algorithms, best first.
    fn choices(&self, call: &Conv, pass: ConvPass, plan: &Plan) -> Result<Vec<Choice>> {
        let Plan { input, output, filter, conv, .. } = *plan;
        let mut n: c_int = 0;
        let mut choices = Vec::new();
        macro_rules! ask {
            ($ask:ident, $a:expr, $b:expr, $c:expr, $wrap:path) => {{
                // SAFETY: zeros are valid values of all fields of these plain structures.
                let mut found = [unsafe { std::mem::zeroed() }; MOST_CHOICES];
                // SAFETY: the descriptors are alive, and `found` has room for as many as are asked for.
                let asked = unsafe {
                    result::$ask(self.handle, $a, $b, conv, $c, MOST_CHOICES as c_int, &mut n, found.as_mut_ptr())
                };
                asked.map_err(|error| failed("choosing an algorithm", call, error))?;
                for found in found.iter().take(n.max(0) as usize) {
                    if found.status == sys::cudnnStatus_t::CUDNN_STATUS_SUCCESS && found.memory <= MOST_WORKSPACE {
                        choices.push(Choice {
                            algorithm: $wrap(found.algo),
                            workspace: found.memory,
                            math: found.mathType,
                        });
                    }
                }
            }};
        }
        match pass {
            ConvPass::Forward => {
                ask!(get_convolution_forward_algorithm, input, filter, output, Algorithm::Forward)
            }
            ConvPass::BackpropInput => {
                ask!(get_convolution_backward_data_algorithm, filter, output, input, Algorithm::Input)
            }
            ConvPass::BackpropFilter => {
                ask!(get_convolution_backward_filter_algorithm, input, output, filter, Algorithm::Filter)
            }
        }
        if call.dtype == DType::F32 && !call.allow_tf32 {
            // Any other math type may round to TF32.
            choices.iter_mut().for_each(|choice| choice.math = sys::cudnnMathType_t::CUDNN_FMA_MATH);
        }
        Ok(choices)
    }
}

enum Described {
    Ours(Error),
    Library(CudnnError),
}

impl From<CudnnError> for Described {
    fn from(error: CudnnError) -> Described {
        Described::Library(error)
    }
}

impl From<Error> for Described {
    fn from(error: Error) -> Described {
        Described::Ours(error)
    }
}

fn describe(call: &Conv) -> std::result::Result<Plan, Described> {
    use sys::cudnnDataType_t as Type;
    let (data, compute) = match call.dtype {
        DType::F32 => (Type::CUDNN_DATA_FLOAT, Type::CUDNN_DATA_FLOAT),
        DType::F64 => (Type::CUDNN_DATA_DOUBLE, Type::CUDNN_DATA_DOUBLE),
        DType::F16 => (Type::CUDNN_DATA_HALF, Type::CUDNN_DATA_FLOAT),
        DType::BF16 => (Type::CUDNN_DATA_BFLOAT16, Type::CUDNN_DATA_FLOAT),
        other => return Err(Error::unimplemented(format!("cuDNN does not convolve {other}")).into()),
    };
    let format = match call.channels_first {
        true => sys::cudnnTensorFormat_t::CUDNN_TENSOR_NCHW,
        false => sys::cudnnTensorFormat_t::CUDNN_TENSOR_NHWC,
    };
    let [h, w, c] = call.input;
    let [out_h, out_w, k] = call.output;
    let per_group = c.checked_div(call.groups).unwrap_or(0);
    let input_sizes = sizes([call.batch, c, h, w])?;
    let output_sizes = sizes([call.batch, k, out_h, out_w])?;
    let filter_sizes = sizes([k, per_group, call.filter[0], call.filter[1]])?;
    let [pad_h, pad_w] = sizes(call.pad)?;
    let [stride_h, stride_w] = sizes(call.stride)?;
    let [dilation_h, dilation_w] = sizes(call.dilation)?;
    let [groups] = sizes([call.groups])?;
    let (input, output) = (result::create_tensor_descriptor()?, result::create_tensor_descriptor()?);
    let (filter, conv) = (result::create_filter_descriptor()?, result::create_convolution_descriptor()?);
    let mode = sys::cudnnConvolutionMode_t::CUDNN_CROSS_CORRELATION;
    // SAFETY: all four were just made.
    unsafe {
        result::set_tensor4d_descriptor(input, format, data, input_sizes)?;
        result::set_tensor4d_descriptor(output, format, data, output_sizes)?;
        result::set_filter4d_descriptor(filter, data, format, filter_sizes)?;
        result::set_convolution2d_descriptor(
            conv, pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w, mode, compute,
        )?;
        result::set_convolution_group_count(conv, groups)?;
        let math = match call.dtype {
            DType::F32 if !call.allow_tf32 => sys::cudnnMathType_t::CUDNN_FMA_MATH,
            DType::F16 | DType::BF16 => sys::cudnnMathType_t::CUDNN_TENSOR_OP_MATH,
            _ => sys::cudnnMathType_t::CUDNN_DEFAULT_MATH,
        };
        result::set_convolution_math_type(conv, math)?;
    }
    Ok(Plan { input, output, filter, conv, choice: None })
}

impl Drop for Dnn {
    fn drop(&mut self) {
        // They refer to the handle.
        self.engines.clear();
        self.attention.clear();
        for plan in self.plans.values() {
            // SAFETY: made once per plan and destroyed here. There is nothing to do about a failure.
            unsafe {
                let _ = result::destroy_tensor_descriptor(plan.input);
                let _ = result::destroy_tensor_descriptor(plan.output);
                let _ = result::destroy_filter_descriptor(plan.filter);
                let _ = result::destroy_convolution_descriptor(plan.conv);
            }
        }
        // SAFETY: the handle is ours and this is its last use.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

impl CudaDevice {
    /// Enqueues one pass of a convolution; `a` and `b` are the inputs that [`ConvPass`] names, in that order.
    /// `Unimplemented` if the library has no algorithm for it. No tensor may be empty.
    pub fn convolve(&self, call: &Conv, pass: ConvPass, a: &Tensor, b: &Tensor, out: &mut Tensor) -> Result<()> {
        let [h, w, c] = call.input;
        let [out_h, out_w, k] = call.output;
        let product = |sizes: &[usize]| sizes.iter().try_fold(1usize, |n, &size| n.checked_mul(size));
        let input = product(&[call.batch, h, w, c]);
        let output = product(&[call.batch, out_h, out_w, k]);
        let filter = product(&[call.filter[0], call.filter[1], c.checked_div(call.groups).unwrap_or(0), k]);
        let expected = match pass {
            ConvPass::Forward => [input, filter, output],
            ConvPass::BackpropInput => [filter, output, input],
            ConvPass::BackpropFilter => [input, output, filter],
        };
        let fits = |tensor: &Tensor, n: Option<usize>| {
            tensor.dtype() == call.dtype && Some(tensor.n_elements()) == n && tensor.n_elements() > 0
        };
        if !fits(a, expected[0]) || !fits(b, expected[1]) || !fits(out, expected[2]) || !out.is_unique() {
            return Err(Error::internal(format!("{call:?} does not fit its tensors")));
        }
        let address = |tensor: &Tensor| -> Result<*mut c_void> {
            let (buffer, offset) = cuda_buffer(tensor)?;
            match buffer.arena_id() == self.arena_id() {
                true => Ok((buffer.address() + offset as u64) as *mut c_void),
                false => Err(Error::internal("images are in memory of another device; a copy is missing")),
            }
        };
        let tensors = [address(a)?, address(b)?, address(out)?];
        self.bind()?;
        let mut guard = self.dnn()?;
        let Some(dnn) = guard.as_mut() else { return Err(Error::internal("cuDNN was not opened")) };
        // SAFETY: the handle is alive and so is the stream.
        unsafe { result::set_stream(dnn.handle, self.compute_stream().cast()) }
            .map_err(|error| failed("choosing a stream", call, error))?;
        let plan = dnn.plan(call, pass)?;
        let is_aligned = tensors.iter().all(|at| (*at as usize).is_multiple_of(ALIGNMENT));
        if is_aligned {
            let choice = match (plan.choice, CHOSEN.get(self, (*call, pass))) {
                (Some(choice), _) => Some(choice),
                // Chosen on another device of the GPU, or in a session that has ended.
                (None, Some(choice)) => {
                    let choice = self.can_use(dnn, call, pass, choice).then_some(choice);
                    dnn.plans.insert((*call, pass), Plan { choice, ..plan });
                    choice
                }
                (None, None) => self.time_choices(dnn, call, pass, &plan, tensors)?,
            };
            if let Some(choice) = choice {
                return self.enqueue(dnn, call, pass, &plan, choice, tensors);
            }
        }
        let mut last = Error::unimplemented(format!("cuDNN has no algorithm for {call:?}"));
        for choice in dnn.choices(call, pass, &plan)? {
            match self.enqueue(dnn, call, pass, &plan, choice, tensors) {
                Ok(()) => return Ok(()),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Whether a choice can be used now: an engine must be compiled, which is done here unless a step is being
    /// captured. The library fails to compile while the thread captures, and invalidates the capture; then the best
    /// algorithm that needs no compilation is used.
    fn can_use(&self, dnn: &mut Dnn, call: &Conv, pass: ConvPass, choice: Choice) -> bool {
        let Algorithm::Engine(i) = choice.algorithm else { return true };
        if dnn.engines.contains_key(&(*call, pass, i)) {
            return true;
        }
        if self.is_capturing() {
            return false;
        }
        if let Err(error) = dnn.set_up(call, pass, Some(i)) {
            tracing::debug!(target: "kolo::tune", "engine {i} for {pass:?} {call:?} cannot be set up again: {error}");
        }
        dnn.engines.contains_key(&(*call, pass, i))
    }

    /// Chooses the fastest algorithm or engine, and caches it. `None` until the shape has been used a few times, while
    /// a step is being captured, and if all fail.
    fn time_choices(
        &self,
        dnn: &mut Dnn,
        call: &Conv,
        pass: ConvPass,
        plan: &Plan,
        tensors: [*mut c_void; 3],
    ) -> Result<Option<Choice>> {
        if self.is_capturing() || !CHOSEN.is_due(self, (*call, pass)) {
            return Ok(None);
        }
        let _spending = Spending::begin();
        let mut choices = dnn.set_up(call, pass, None).unwrap_or_default();
        choices.extend(dnn.choices(call, pass, plan)?);
        let stream = |dnn: &Dnn| {
            // SAFETY: the handle is alive and so is the stream.
            unsafe { result::set_stream(dnn.handle, self.compute_stream().cast()) }
                .map_err(|error| failed("choosing a stream", call, error))
        };
        let timed = fastest(self, &choices, |choice| {
            stream(dnn)?;
            self.enqueue(dnn, call, pass, plan, choice, tensors)
        });
        stream(dnn)?;
        let Some((choice, seconds)) = timed else { return Ok(None) };
        tracing::debug!(
            target: "kolo::tune",
            "{pass:?} {call:?}: {:.2} us, {} the best of {}, {} bytes of workspace",
            seconds * 1e6, choice.describe(), choices.len(), choice.workspace
        );
        let choice = CHOSEN.insert(self, (*call, pass), choice);
        if !self.can_use(dnn, call, pass, choice) {
            return Ok(None);
        }
        dnn.keep(call, pass, choice);
        dnn.plans.insert((*call, pass), Plan { choice: Some(choice), ..*plan });
        Ok(Some(choice))
    }

    fn enqueue(
        &self,
        dnn: &Dnn,
        call: &Conv,
        pass: ConvPass,
        plan: &Plan,
        choice: Choice,
        tensors: [*mut c_void; 3],
    ) -> Result<()> {
        // Freed on return: its next use is enqueued later on the same stream.
        let workspace = match choice.workspace {
            0 => None,
            n => Some(self.allocate_tensor(DType::U8, Shape::new(&[n])?, &"the workspace of a convolution".into())?),
        };
        let space = match &workspace {
            Some(tensor) => {
                let (buffer, offset) = cuda_buffer(tensor)?;
                (buffer.address() + offset as u64) as *mut c_void
            }
            None => std::ptr::null_mut(),
        };
        let (one, zero, one64, zero64) = (1f32, 0f32, 1f64, 0f64);
        let (alpha, beta): (*const c_void, *const c_void) = match call.dtype {
            DType::F64 => ((&raw const one64).cast(), (&raw const zero64).cast()),
            _ => ((&raw const one).cast(), (&raw const zero).cast()),
        };
        let [a, b, out] = tensors;
        if let Algorithm::Engine(i) = choice.algorithm {
            let engine = dnn.engines.get(&(*call, pass, i));
            let engine = engine.ok_or_else(|| Error::internal("an engine of cuDNN that was not set up"))?;
            // In the engine's order: image, filter, output.
            let known = match pass {
                ConvPass::Forward => [a, b, out],
                ConvPass::BackpropInput => [out, a, b],
                ConvPass::BackpropFilter => [a, out, b],
            };
            // SAFETY: the engine is for this call and was set up with this handle. The tensors have its sizes (checked
            // by the caller), are of this device, and are alive until the compute stream has passed this call; so is
            // the workspace.
            return unsafe { engine.enqueue(dnn.handle, &engines::IDS, &known, space) };
        }
        let (handle, n) = (dnn.handle, choice.workspace);
        let &Plan { input, output, filter, conv, .. } = plan;
        // SAFETY: descriptors and handle are alive. The tensors have the sizes of the descriptors (checked by the
        // caller), are of this device, and are alive until the compute stream has passed this call; so is the
        // workspace.
        let done = unsafe {
            result::set_convolution_math_type(conv, choice.math).and_then(|()| match choice.algorithm {
                Algorithm::Forward(algorithm) => result::convolution_forward(
                    handle, alpha, input, a, filter, b, conv, algorithm, space, n, beta, output, out,
                ),
                Algorithm::Input(algorithm) => result::convolution_backward_data(
                    handle, alpha, filter, a, output, b, conv, algorithm, space, n, beta, input, out,
                ),
                Algorithm::Filter(algorithm) => result::convolution_backward_filter(
                    handle, alpha, input, a, output, b, conv, algorithm, space, n, beta, filter, out,
                ),
                Algorithm::Engine(_) => Ok(()),
            })
        };
        done.map_err(|error| failed("convolving", call, error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_the_library_cannot_hold_are_refused() {
        assert_eq!(sizes([1, 28]).unwrap(), [1, 28]);
        assert!(sizes([1 << 40]).is_err());
    }
}
