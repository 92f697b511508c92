//! Matrix products by cuBLASLt. The algorithm of a shape that recurs is chosen once, by timing the heuristic's
//! candidates, and cached.
//!
//! The library is column-major and tensors are row-major: a row-major `C = A · B` is a column-major `Cᵀ = Bᵀ · Aᵀ`,
//! with the same bytes and the two inputs exchanged.

use std::collections::HashMap;
use std::ffi::c_void;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use kolo_core::{DType, Error, Result, Tensor};
use parking_lot::Mutex;

use super::device::CudaDevice;
use super::launch::cuda_buffer;
use super::library::has_cublaslt;
use super::tune::{Chosen, Spending, fastest};
use crate::Device;

/// One product, or a batch of products, of row-major matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatMul {
    /// Rows of the product.
    pub m: usize,
    /// Columns of the product.
    pub n: usize,
    /// The inner dimension.
    pub k: usize,
    /// The left matrix is stored transposed, k×m.
    pub transpose_a: bool,
    /// The right matrix is stored transposed, n×k.
    pub transpose_b: bool,
    /// The number of products; the matrices of a batch are contiguous.
    pub batch: usize,
    /// All products have this left matrix.
    pub shared_a: bool,
    /// All products have this right matrix.
    pub shared_b: bool,
    /// The element type of all three.
    pub dtype: DType,
    /// How floats are multiplied.
    pub kind: MatMulKind,
    /// A matrix of the product's size is added to it (β = 1).
    pub adds: bool,
    /// The operation on the product before it is stored.
    pub epilogue: Epilogue,
}

/// The operands of a product besides its matrices.
#[derive(Clone, Copy)]
pub struct Terms<'a> {
    /// The factor of the product before anything is added.
    pub scale: f32,
    /// The vector that the epilogue adds to every row.
    pub bias: Option<&'a Tensor>,
    /// The matrix that is added to the product; `None` is the current value of the output.
    pub plus: Option<&'a Tensor>,
}

impl Default for Terms<'_> {
    fn default() -> Self {
        Terms { scale: 1.0, bias: None, plus: None }
    }
}

/// How floats are multiplied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MatMulKind {
    /// In full precision.
    #[default]
    Full,
    /// As TF32, on the tensor cores.
    Tf32,
}

/// An operation on a product before it is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// Nothing.
    #[default]
    None,
    /// A vector is added to every row.
    Bias,
    /// A vector is added to every row, then ReLU is applied.
    BiasRelu,
}

pub(super) struct Lt {
    handle: sys::cublasLtHandle_t,
    plans: Mutex<HashMap<(MatMul, u32), Plan>>,
}

// SAFETY: cuBLASLt handles may be used by any thread; plans are behind a lock.
unsafe impl Send for Lt {}
// SAFETY: as above.
unsafe impl Sync for Lt {}

/// The descriptors of one shape, and the algorithm for it. They live as long as the handle.
#[derive(Clone, Copy)]
struct Plan {
    desc: sys::cublasLtMatmulDesc_t,
    a: sys::cublasLtMatrixLayout_t,
    b: sys::cublasLtMatrixLayout_t,
    c: sys::cublasLtMatrixLayout_t,
    choice: Choice,
    /// The choice was timed; before that it is the heuristic's first.
    is_timed: bool,
}

/// An algorithm, and the workspace it needs.
#[derive(Clone, Copy)]
struct Choice {
    algo: sys::cublasLtMatmulAlgo_t,
    workspace: usize,
}

/// The choices of all devices.
static CHOSEN: Chosen<(MatMul, u32), Choice> = Chosen::new();

/// The maximum number of algorithms to consider.
const MOST_CHOICES: usize = 24;

/// The descriptors of the call and of its matrices, column-major.
type Descriptors =
    (sys::cublasLtMatmulDesc_t, sys::cublasLtMatrixLayout_t, sys::cublasLtMatrixLayout_t, sys::cublasLtMatrixLayout_t);

/// What the library recommends for Hopper.
pub(super) const WORKSPACE: usize = 32 << 20;

fn lt<T>(what: &str, call: &MatMul, result: std::result::Result<T, CublasError>) -> Result<T> {
    result.map_err(|error| {
        Error::internal(format!(
            "cuBLASLt, {what}, for a product of {}x{}x{} of {}: {:?}",
            call.m, call.n, call.k, call.dtype, error.0
        ))
    })
}

impl Lt {
    /// Opens the library. The context must be current.
    pub fn new() -> Result<Lt> {
        if !has_cublaslt() {
            return Err(Error::failed_precondition(
                "matrix products on a GPU need cuBLASLt, which is not here (libcublasLt.so.13 was not found)",
            ));
        }
        let handle = result::create_handle()
            .map_err(|error| Error::internal(format!("cuBLASLt does not start: {:?}", error.0)))?;
        Ok(Lt { handle, plans: Mutex::default() })
    }

    fn plan(&self, call: &MatMul, alignment: u32) -> Result<Plan> {
        if let Some(plan) = self.plans.lock().get(&(*call, alignment)) {
            return Ok(*plan);
        }
        let plan = self.make_plan(call, alignment)?;
        Ok(*self.plans.lock().entry((*call, alignment)).or_insert(plan))
    }

    /// Replaces the heuristic's first choice by the fastest candidate, once the shape has been used a few times.
    /// `enqueue` runs one.
    fn time_choices(
        &self,
        device: &CudaDevice,
        call: &MatMul,
        alignment: u32,
        mut enqueue: impl FnMut(Choice) -> Result<()>,
    ) -> Result<Choice> {
        let key = (*call, alignment);
        let choice = match CHOSEN.get(device, key) {
            Some(choice) => choice,
            None if !CHOSEN.is_due(device, key) => return Ok(self.plan(call, alignment)?.choice),
            None => {
                let _spending = Spending::begin();
                let plan = self.plan(call, alignment)?;
                let advice = self.advice(call, alignment, (plan.desc, plan.a, plan.b, plan.c))?;
                match fastest(device, &advice, &mut enqueue) {
                    Some((choice, seconds)) => {
                        tracing::debug!(
                            target: "kolo::tune",
                            "{call:?}: {:.2} us, the best of {}, {} bytes of workspace",
                            seconds * 1e6, advice.len(), choice.workspace
                        );
                        CHOSEN.insert(device, key, choice)
                    }
                    None => plan.choice,
                }
            }
        };
        if let Some(plan) = self.plans.lock().get_mut(&key) {
            (plan.choice, plan.is_timed) = (choice, true);
        }
        Ok(choice)
    }

    fn make_plan(&self, call: &MatMul, alignment: u32) -> Result<Plan> {
        use sys::cublasComputeType_t as Compute;
        use sys::cudaDataType_t as Type;
        let (data, compute, scale) = match (call.dtype, call.kind) {
            (DType::F32, MatMulKind::Full) => (Type::CUDA_R_32F, Compute::CUBLAS_COMPUTE_32F, Type::CUDA_R_32F),
            (DType::F32, MatMulKind::Tf32) => {
                (Type::CUDA_R_32F, Compute::CUBLAS_COMPUTE_32F_FAST_TF32, Type::CUDA_R_32F)
            }
            (DType::F16, _) => (Type::CUDA_R_16F, Compute::CUBLAS_COMPUTE_32F, Type::CUDA_R_32F),
            (DType::BF16, _) => (Type::CUDA_R_16BF, Compute::CUBLAS_COMPUTE_32F, Type::CUDA_R_32F),
            (DType::F64, _) => (Type::CUDA_R_64F, Compute::CUBLAS_COMPUTE_64F, Type::CUDA_R_64F),
            (other, _) => return Err(Error::unimplemented(format!("cuBLASLt does not multiply {other}"))),
        };
        let desc = lt("describing it", call, result::create_matmul_desc(compute, scale))?;
        let set = |attr, value: i32| {
            // SAFETY: the descriptor was just made; the attribute is an int, of which the library takes a copy.
            let set = unsafe { result::set_matmul_desc_attribute(desc, attr, (&raw const value).cast(), 4) };
            lt("describing it", call, set)
        };
        // Column-major, the two inputs are exchanged.
        set(sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA, i32::from(call.transpose_b))?;
        set(sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSB, i32::from(call.transpose_a))?;
        let epilogue = match call.epilogue {
            Epilogue::None => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
            Epilogue::Bias => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            Epilogue::BiasRelu => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_RELU_BIAS,
        };
        set(sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue as i32)?;
        let layout = |rows: usize, cols: usize, shared: bool| -> Result<sys::cublasLtMatrixLayout_t> {
            let made = result::create_matrix_layout(data, rows as u64, cols as u64, rows.max(1) as i64);
            let layout = lt("describing a matrix", call, made)?;
            if call.batch > 1 {
                let count = i32::try_from(call.batch)
                    .map_err(|_| Error::invalid_argument(format!("a batch of {} products", call.batch)))?;
                let step = if shared { 0i64 } else { (rows * cols) as i64 };
                // SAFETY: the layout was just made; the library copies an int and a long.
                let set = unsafe {
                    result::set_matrix_layout_attribute(
                        layout,
                        sys::cublasLtMatrixLayoutAttribute_t::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                        (&raw const count).cast(),
                        4,
                    )
                    .and_then(|()| {
                        result::set_matrix_layout_attribute(
                            layout,
                            sys::cublasLtMatrixLayoutAttribute_t::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                            (&raw const step).cast(),
                            8,
                        )
                    })
                };
                lt("describing a batch", call, set)?;
            }
            Ok(layout)
        };
        // Column-major rows and columns.
        let a = if call.transpose_b {
            layout(call.k, call.n, call.shared_b)?
        } else {
            layout(call.n, call.k, call.shared_b)?
        };
        let b = if call.transpose_a {
            layout(call.m, call.k, call.shared_a)?
        } else {
            layout(call.k, call.m, call.shared_a)?
        };
        let c = layout(call.n, call.m, false)?;
        let advice = self.advice(call, alignment, (desc, a, b, c))?;
        let Some(&choice) = advice.first() else {
            let none = CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED);
            return lt("choosing an algorithm", call, Err(none));
        };
        Ok(Plan { desc, a, b, c, choice, is_timed: false })
    }

    /// The heuristic's algorithms for these descriptors, best first.
    fn advice(&self, call: &MatMul, alignment: u32, (desc, a, b, c): Descriptors) -> Result<Vec<Choice>> {
        let preference = lt("choosing", call, result::create_matmul_pref())?;
        use sys::cublasLtMatmulPreferenceAttributes_t as Wish;
        let wishes: [(Wish, u64, usize); 5] = [
            (Wish::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, WORKSPACE as u64, 8),
            (Wish::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, u64::from(alignment), 4),
            (Wish::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, u64::from(alignment), 4),
            (Wish::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, u64::from(alignment), 4),
            (Wish::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, u64::from(alignment), 4),
        ];
        for (attr, value, n_bytes) in wishes {
            // SAFETY: the preference was just made; the library copies `n_bytes` of the value, its low end.
            let set =
                unsafe { result::set_matmul_pref_attribute(preference, attr, (&raw const value).cast(), n_bytes) };
            lt("choosing", call, set)?;
        }
        // SAFETY: zeros are valid values of all fields of this plain structure.
        let mut found: [sys::cublasLtMatmulHeuristicResult_t; MOST_CHOICES] = unsafe { std::mem::zeroed() };
        let mut n = 0;
        // SAFETY: all descriptors are alive, and there is room for as many answers as are asked for.
        let asked = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                desc,
                a,
                b,
                c,
                c,
                preference,
                MOST_CHOICES as i32,
                found.as_mut_ptr(),
                &mut n,
            )
        };
        // SAFETY: made above, not used again. There is nothing to do about a failure.
        let _ = unsafe { result::destroy_matmul_pref(preference) };
        lt("choosing an algorithm", call, asked.result())?;
        let good = |found: &&sys::cublasLtMatmulHeuristicResult_t| {
            found.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS && found.workspaceSize <= WORKSPACE
        };
        let found = found.iter().take(n.max(0) as usize).filter(good);
        Ok(found.map(|found| Choice { algo: found.algo, workspace: found.workspaceSize }).collect())
    }
}

impl Drop for Lt {
    fn drop(&mut self) {
        for plan in self.plans.get_mut().values() {
            // SAFETY: descriptors are made once per plan and destroyed here. There is nothing to do about a failure.
            unsafe {
                let _ = result::destroy_matmul_desc(plan.desc);
                let _ = result::destroy_matrix_layout(plan.a);
                let _ = result::destroy_matrix_layout(plan.b);
                let _ = result::destroy_matrix_layout(plan.c);
            }
        }
        // SAFETY: the handle is ours and this is its last use.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

impl CudaDevice {
    /// Enqueues `c = a · b`. The tensors must have the call's sizes; an empty product is not allowed. A bias is
    /// required if the epilogue adds one. If `call.adds` and `terms.plus` is `None`, the product is added to `c`.
    pub fn matmul(&self, call: &MatMul, a: &Tensor, b: &Tensor, terms: Terms<'_>, c: &mut Tensor) -> Result<()> {
        let Terms { scale, bias, plus } = terms;
        let MatMul { m, n, k, batch, .. } = *call;
        let count = |rows: usize, cols: usize, shared: bool| {
            let batch = if shared { 1 } else { batch };
            rows.checked_mul(cols).and_then(|n| n.checked_mul(batch))
        };
        let fits = |tensor: &Tensor, n: Option<usize>| tensor.dtype() == call.dtype && Some(tensor.n_elements()) == n;
        let sizes = [m, n, k, batch];
        if sizes.contains(&0)
            || !fits(a, count(m, k, call.shared_a))
            || !fits(b, count(k, n, call.shared_b))
            || !fits(c, count(m, n, false))
            || (call.epilogue == Epilogue::None) != bias.is_none()
            || bias.is_some_and(|bias| !fits(bias, Some(n)))
            || plus.is_some_and(|plus| !call.adds || !fits(plus, count(m, n, false)))
            || !c.is_unique()
        {
            return Err(Error::internal(format!("{call:?} does not fit its tensors")));
        }
        let address = |tensor: &Tensor| -> Result<u64> {
            let (buffer, offset) = cuda_buffer(tensor)?;
            match buffer.arena_id() == self.arena_id() {
                true => Ok(buffer.address() + offset as u64),
                false => Err(Error::internal("a matrix is in memory of another device; a copy is missing")),
            }
        };
        let (at_a, at_b, at_c) = (address(a)?, address(b)?, address(c)?);
        // Tensors such as rows of an embedding may have any alignment; fast algorithms need 16 bytes.
        let at_plus = plus.map_or(Ok(at_c), address)?;
        let alignment = 1u32 << (at_a | at_b | at_c | at_plus | 16).trailing_zeros();
        let lt_handle = self.lt()?;
        let plan = lt_handle.plan(call, alignment)?;
        let workspace = self.workspace()?;
        self.bind()?;
        // A call may enqueue two kernels that share the workspace, and the bias is part of the descriptor: calls of
        // other threads must not interleave.
        let calls = self.matmul_lock();
        if let Some(bias) = bias {
            let at_bias = address(bias)?;
            // SAFETY: the descriptor is alive; the library copies a pointer.
            let set = unsafe {
                result::set_matmul_desc_attribute(
                    plan.desc,
                    sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                    (&raw const at_bias).cast(),
                    8,
                )
            };
            lt("setting the bias", call, set)?;
        }
        let scale64 = f64::from(scale);
        let (beta, beta64) = (f32::from(u8::from(call.adds)), f64::from(u8::from(call.adds)));
        let (alpha, beta): (*const c_void, *const c_void) = match call.dtype {
            DType::F64 => ((&raw const scale64).cast(), (&raw const beta64).cast()),
            _ => ((&raw const scale).cast(), (&raw const beta).cast()),
        };
        let enqueue = |choice: Choice, at_c: u64| {
            // SAFETY: the tensors have the sizes of the plan and are alive until the compute stream has passed this
            // call; the workspace is as large as the choice may need, and ordered by the same stream.
            let done = unsafe {
                result::matmul(
                    lt_handle.handle,
                    plan.desc,
                    alpha,
                    beta,
                    at_b as *const c_void,
                    plan.a,
                    at_a as *const c_void,
                    plan.b,
                    at_plus as *const c_void,
                    plan.c,
                    at_c as *mut c_void,
                    plan.c,
                    &raw const choice.algo,
                    workspace as *mut c_void,
                    choice.workspace,
                    self.compute_stream().cast(),
                )
            };
            lt("multiplying", call, done)
        };
        let choice = match plan.is_timed || self.is_capturing() {
            true => plan.choice,
            false => {
                // Timing runs the product many times, which must not accumulate into the output.
                let spare =
                    (call.adds && at_plus == at_c).then(|| self.duplicate(c, &"a product that is timed".into()));
                let spare = spare.transpose()?;
                let at = spare.as_ref().map_or(Ok(at_c), address)?;
                lt_handle.time_choices(self, call, alignment, |choice| enqueue(choice, at))?
            }
        };
        let done = enqueue(choice, at_c);
        drop(calls);
        done
    }
}
