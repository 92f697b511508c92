//! Optimizer updates: one generated kernel for each rule, in all its forms.
//!
//! The rules are stated beside the ops ([`UpdateRule`]). Scalars stay on the GPU. The sparse forms walk the indices in order,
//! each thread down one column, so a row named twice is updated twice.

use std::sync::Arc;

use kolo_core::{DType, Error, Result, Tensor, TensorData};
use kolo_device::cuda::{Args, CudaDevice, Grid, ProgramKey};
use kolo_graph::{Update, UpdateRule};
use smallvec::SmallVec;

use crate::cuda::{c_type, gpu};
use crate::kernel::KernelInit;
use crate::{Kernel, KernelCtx, VariableCell};

pub(crate) struct UpdateKernel {
    rule: &'static UpdateRule,
    sparse: bool,
    flag: bool,
}

impl UpdateKernel {
    pub(crate) fn make(init: &KernelInit<'_>) -> Result<Box<dyn Kernel>> {
        let node = init.node;
        let not_one = || Error::internal(format!("{} is not an optimizer's update", node.op()));
        let Update { rule, is_sparse: sparse } = node.def.update.ok_or_else(not_one)?;
        let flag = if rule.flag.is_empty() { false } else { init.attrs().bool(rule.flag)? };
        Ok(Box::new(UpdateKernel { rule, sparse, flag }))
    }

    /// Where an input of the dense form is in this one.
    fn input(&self, i: usize) -> usize {
        i + usize::from(self.sparse && i > self.rule.grad)
    }
}

impl Kernel for UpdateKernel {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        let device = gpu(ctx)?;
        let n = self.rule.slots + 1;
        let cells = (0..n).map(|i| ctx.variable(i)).collect::<Result<SmallVec<[Arc<VariableCell>; 4]>>>()?;
        for (i, cell) in cells.iter().enumerate() {
            if cells[..i].iter().any(|other| Arc::ptr_eq(cell, other)) {
                return Err(Error::invalid_argument(format!("{cell:?} cannot be variable and slot of one update")));
            }
        }
        let mut order: SmallVec<[usize; 4]> = (0..n).collect();
        order.sort_by_key(|&i| Arc::as_ptr(&cells[i]));
        lock_next(device, &cells, &order, [const { None }; 4], &mut |values| self.enqueue(ctx, device, values))?;
        if !ctx.outputs.is_empty()
            && let Some(var) = cells.into_iter().next()
        {
            ctx.set_reference(0, var);
        }
        Ok(())
    }
}

type Locked<'a> = [Option<&'a mut Tensor>; 4];

/// Locks the cells that `order` names one inside the other, always in the order of their addresses, and calls `f`.
fn lock_next(
    device: &CudaDevice,
    cells: &[Arc<VariableCell>],
    order: &[usize],
    locked: Locked<'_>,
    f: &mut dyn FnMut(SmallVec<[&mut Tensor; 4]>) -> Result<()>,
) -> Result<()> {
    let Some((&i, rest)) = order.split_first() else { return f(locked.into_iter().flatten().collect()) };
    cells[i].update_on(device, |tensor| {
        let mut locked: Locked<'_> = locked;
        locked[i] = Some(tensor);
        lock_next(device, cells, rest, locked, f)
    })
}

impl UpdateKernel {
    fn enqueue(&self, ctx: &KernelCtx<'_>, device: &CudaDevice, mut values: SmallVec<[&mut Tensor; 4]>) -> Result<()> {
        let rule = self.rule;
        let shape = values[0].shape().clone();
        let dtype = values[0].dtype();
        let grad = ctx.input(rule.grad)?;
        for (i, slot) in values.iter().enumerate().skip(1) {
            if *slot.shape() != shape {
                return Err(Error::invalid_argument(format!(
                    "var and input {i} do not have the same shape{shape} {}",
                    slot.shape()
                )));
            }
        }
        let mut row = 1;
        if self.sparse {
            let indices = ctx.input(rule.grad + 1)?;
            let (Some((_, inner)), Some((&n, grad_inner))) = (shape.split_first(), grad.shape().split_first()) else {
                return Err(Error::invalid_argument("var and grad must be at least 1 dimensional"));
            };
            if inner != grad_inner || indices.shape().rank() != 1 || n != indices.n_elements() {
                return Err(Error::invalid_argument(format!(
                    "var {shape}, grad {} and indices {} do not fit",
                    grad.shape(),
                    indices.shape()
                )));
            }
            row = inner.iter().product();
        } else if *grad.shape() != shape {
            return Err(Error::invalid_argument(format!(
                "var and delta do not have the same shape{shape} {}",
                grad.shape()
            )));
        }
        for &i in rule.scalars {
            let scalar = ctx.input(self.input(i))?;
            if scalar.n_elements() != 1 {
                return Err(Error::invalid_argument(format!("input {i} is not a scalar: {}", scalar.shape())));
            }
        }
        if grad.n_elements() == 0 {
            return Ok(());
        }
        let indices = if self.sparse { Some(ctx.input(rule.grad + 1)?) } else { None };
        let aligned = !self.sparse && values.iter().all(|value| starts_aligned(value)) && starts_aligned(grad);
        let width = if aligned { 16 / dtype.size().unwrap_or(16) } else { 1 };
        let variant = u32::from(self.sparse) | u32::from(self.flag) << 1 | (width as u32) << 4;
        let key = ProgramKey {
            family: "update",
            op: rule.name,
            dtypes: [Some(dtype), indices.map(Tensor::dtype), None],
            variant,
        };
        let kernel = device.function(&key, || self.source(dtype, indices.map(Tensor::dtype), width))?;
        let n = values[0].n_elements();
        let n_rows = if self.sparse { shape[0] } else { 0 };
        let mut args = Args::new();
        for value in &mut values {
            args = args.output(value);
        }
        args = args.input(grad);
        for &i in rule.scalars {
            args = args.input(ctx.input(self.input(i))?);
        }
        match indices {
            Some(indices) => {
                args = args.input(indices).size(indices.n_elements()).size(row).size(n_rows);
                device.launch(kernel, Grid::over(row), &args)
            }
            None => device.launch(kernel, Grid::over(n.div_ceil(width)), &args.size(n)),
        }
    }

    fn source(&self, dtype: DType, index: Option<DType>, width: usize) -> String {
        let rule = self.rule;
        let slots = 0..rule.slots;
        let mut pointers: Vec<String> = vec!["T* var".to_owned()];
        pointers.extend(slots.clone().map(|i| format!("T* slot{i}")));
        pointers.push("const T* grad".to_owned());
        let scalar_type = |i: usize| if rule.integers.contains(&i) { "i64" } else { "T" };
        pointers.extend(rule.scalars.iter().map(|&i| format!("const {}* in{i}", scalar_type(i))));
        let scalars: String = rule.scalars.iter().map(|i| format!("    const W c{i} = (W)widen(*in{i});\n")).collect();
        let (head, step) = (head(dtype, self.flag), step(rule));
        let call_slots: String = slots.clone().map(|i| format!(", s{i}")).collect();
        let call_scalars: String = rule.scalars.iter().map(|i| format!(", c{i}")).collect();
        let load = |at: &str| -> String {
            slots.clone().map(|i| format!(" W s{i} = widen(slot{i}[{at}]);")).collect::<String>()
        };
        let store = |at: &str| -> String {
            slots.clone().map(|i| format!(" slot{i}[{at}] = Narrow<T>::from(s{i});")).collect::<String>()
        };
        let one = |at: &str, grad: &str| {
            format!(
                "W v = widen(var[{at}]);{} step(v{call_slots}, widen(grad[{grad}]){call_scalars}); \
                 var[{at}] = Narrow<T>::from(v);{}",
                load(at),
                store(at)
            )
        };
        let list = pointers.join(", ");
        if let Some(index) = index {
            return format!(
                "{head}{step}extern \"C\" __global__ void KOLO_ENTRY({list}, const {}* indices, i64 n, i64 row, i64 rows) {{\n\
                 {scalars}    for (i64 j = thread_number(); j < row; j += n_threads())\n\
                 \x20       for (i64 i = 0; i < n; i++) {{\n\
                 \x20           const i64 at_row = (i64)indices[i];\n\
                 \x20           if (at_row < 0 || at_row >= rows) continue;\n\
                 \x20           const i64 at = at_row * row + j, from = i * row + j;\n\
                 \x20           {}\n        }}\n}}\n",
                c_type(index),
                one("at", "from")
            );
        }
        let packs: String = slots
            .clone()
            .map(|i| format!("        Pack<T, {width}> p{i} = ((Pack<T, {width}>*)slot{i})[i];\n"))
            .collect();
        let unpack: String = slots.clone().map(|i| format!(" W s{i} = widen(p{i}.at[j]);")).collect();
        let pack: String = slots.clone().map(|i| format!(" p{i}.at[j] = Narrow<T>::from(s{i});")).collect();
        let back: String =
            slots.clone().map(|i| format!("        ((Pack<T, {width}>*)slot{i})[i] = p{i};\n")).collect();
        format!(
            "{head}{step}extern \"C\" __global__ void KOLO_ENTRY({list}, i64 n) {{\n{scalars}\
             \x20   const i64 packs = n / {width};\n\
             \x20   for (i64 i = thread_number(); i < packs; i += n_threads()) {{\n\
             \x20       Pack<T, {width}> pv = ((Pack<T, {width}>*)var)[i], pg = ((const Pack<T, {width}>*)grad)[i];\n{packs}\
             \x20       #pragma unroll\n        for (int j = 0; j < {width}; j++) {{\n\
             \x20           W v = widen(pv.at[j]);{unpack}\n\
             \x20           step(v{call_slots}, widen(pg.at[j]){call_scalars});\n\
             \x20           pv.at[j] = Narrow<T>::from(v);{pack}\n        }}\n\
             \x20       ((Pack<T, {width}>*)var)[i] = pv;\n{back}    }}\n\
             \x20   for (i64 i = packs * {width} + thread_number(); i < n; i += n_threads()) {{ {} }}\n}}\n",
            one("i", "i")
        )
    }
}

/// The types of a kernel that updates.
pub(crate) fn head(dtype: DType, flag: bool) -> String {
    format!("typedef {} T;\ntypedef Wide<T>::type W;\n#define FLAG {}\n", c_type(dtype), u32::from(flag))
}

/// The rule as a function of one element.
pub(crate) fn step(rule: &UpdateRule) -> String {
    let parameters: String = (0..rule.slots).map(|i| format!(", W& s{i}")).collect();
    let constants: String = rule.scalars.iter().map(|i| format!(", const W c{i}")).collect();
    format!(
        "static __device__ __forceinline__ void step(W& v{parameters}, const W g{constants}) {{\n    {}\n    {}\n}}\n",
        rule.before, rule.text
    )
}

/// Whether a tensor begins where 16 bytes can be loaded at once.
pub(crate) fn starts_aligned(tensor: &Tensor) -> bool {
    matches!(tensor.storage(), TensorData::Buffer { offset, .. } if offset % 16 == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_compile() {
        let mut all = Vec::new();
        for rule in crate::optim::OPS.iter().filter_map(|op| Some(op.def.update?.rule)) {
            for (dtype, index, flag) in [
                (DType::F32, None, false),
                (DType::BF16, None, true),
                (DType::F64, None, true),
                (DType::F32, Some(DType::I64), false),
            ] {
                let update = UpdateKernel { rule, sparse: index.is_some(), flag };
                let key =
                    ProgramKey { family: "update", op: rule.name, dtypes: [Some(dtype), index, None], variant: 0 };
                let width = if index.is_some() { 1 } else { 16 / dtype.size().unwrap_or(16) };
                all.push((key, update.source(dtype, index, width)));
            }
        }
        crate::cuda::tests::compiles(all);
    }

    #[test]
    fn every_optimizer_has_a_rule() {
        for op in crate::optim::OPS {
            assert!(op.def.update.is_some(), "{} has no rule on a GPU", op.def.name);
        }
    }
}
