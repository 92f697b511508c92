//! `_KoloApplyAll`: one optimizer's updates of many variables in as few launches as their addresses fit into.

use std::sync::Arc;

use kolo_core::{DType, Error, Result, Tensor};
use kolo_device::cuda::{Args, CudaDevice, Grid, ProgramKey};
use kolo_graph::{Update, UpdateRule};

use super::fused;
use crate::Cost;
use crate::cuda::FLOATS;
use crate::cuda::{c_type, gpu};
use crate::kernel::KernelInit;
use crate::op::{KernelMaker, Op, gpu_made};
use crate::optim::update::gpu::{head, starts_aligned, step};
use crate::{Kernel, KernelCtx, VariableCell, find_op};
use kolo_graph::Effects;

/// One optimizer's dense updates of many variables: all handles (of each variable and then of its slots), the scalars that all
/// of them share, and all gradients, which may be of a narrower type. `rule` is the op of a single update, `flag` its boolean attribute.
pub static APPLY_ALL: Op = fused(
    "_KoloApplyAll",
    "(handles:M*resource, scalars:S*T, grads:N*Tgrad) -> () ; \
     rule:string, flag:bool=false, M:int>=1, S:int>=1, N:int>=1, T:type, Tgrad:type",
    Cost::Elements,
)
.effects(Effects::Writes)
.gpu(&[gpu_made("T", FLOATS, KernelMaker::Object(ApplyAll::make))]);

/// Where the inputs of an optimizer's dense update of resource variables are.
pub struct UpdateLayout {
    /// The variable and its slots come first, so many.
    pub n_handles: usize,
    /// The gradient.
    pub grad: usize,
    /// Scalars.
    pub scalars: &'static [usize],
    /// A boolean attribute; empty if there is none.
    pub flag: &'static str,
}

/// The layout of an op, if it is an update that `_KoloApplyAll` can do together with others of its kind.
pub fn update_layout(op: &str) -> Option<UpdateLayout> {
    let def = &find_op(op).ok()?.def;
    let Update { rule, is_sparse } = def.update?;
    // Only the forms with handles are stateful. Scalars that are no numbers of the variables' type are not passed on.
    if is_sparse || !def.stateful || !rule.integers.is_empty() {
        return None;
    }
    Some(UpdateLayout { n_handles: rule.slots + 1, grad: rule.grad, scalars: rule.scalars, flag: rule.flag })
}

/// Variables of one launch: with five addresses each and two sizes they fit into the four kilobytes that arguments may take.
const MOST: usize = 64;
/// Elements of a block.
const SPAN: usize = 4096;

pub(crate) struct ApplyAll {
    rule: &'static UpdateRule,
    flag: bool,
    n: usize,
}

impl ApplyAll {
    pub(crate) fn make(init: &KernelInit<'_>) -> Result<Box<dyn Kernel>> {
        let attrs = init.attrs();
        let op = attrs.str("rule")?;
        let bad = || Error::invalid_argument(format!("{op} is not an update that is done for many variables at once"));
        let layout = update_layout(op).ok_or_else(bad)?;
        let rule = find_op(op)?.def.update.ok_or_else(bad)?.rule;
        let count = |name: &str| Ok::<usize, Error>(usize::try_from(attrs.int(name)?).unwrap_or(0));
        let n = count("N")?;
        if count("M")? != n * layout.n_handles || count("S")? != layout.scalars.len() {
            return Err(bad());
        }
        Ok(Box::new(ApplyAll { rule, flag: attrs.bool("flag")?, n }))
    }

    /// Addresses of one variable: its own, its slots', its gradient's.
    fn n_pointers(&self) -> usize {
        self.rule.slots + 2
    }

    fn source(&self, dtype: DType, grad: DType, width: usize) -> String {
        let rule = self.rule;
        let slots = 0..rule.slots;
        let list = |f: &dyn Fn(usize) -> String| slots.clone().map(f).collect::<String>();
        let scalars: String = rule.scalars.iter().map(|i| format!(", const T* in{i}")).collect();
        let read: String = rule.scalars.iter().map(|i| format!("    const W c{i} = (W)widen(*in{i});\n")).collect();
        let call_slots = list(&|i| format!(", s{i}"));
        let call_scalars: String = rule.scalars.iter().map(|i| format!(", c{i}")).collect();
        let pack = format!("Pack<T, {width}>");
        format!(
            "{}{}typedef {} G;\nstruct Table {{ T* at[{MOST}][{}]; i64 n[{MOST}]; i64 first[{MOST}]; }};\n\
             extern \"C\" __global__ void __launch_bounds__(256) KOLO_ENTRY(const __grid_constant__ Table table, i64 n_variables{scalars}) {{\n\
             \x20   int k = 0;\n\
             \x20   while (k + 1 < n_variables && blockIdx.x >= table.first[k + 1]) k++;\n{read}\
             \x20   const i64 from = (blockIdx.x - table.first[k]) * {SPAN};\n\
             \x20   const i64 to = from + {SPAN} < table.n[k] ? from + {SPAN} : table.n[k];\n\
             \x20   T* var = table.at[k][0];\n{}\
             \x20   const G* grad = (const G*)table.at[k][{}];\n\
             \x20   const i64 packs = to / {width};\n\
             \x20   for (i64 i = from / {width} + threadIdx.x; i < packs; i += 256) {{\n\
             \x20       {pack} pv = (({pack}*)var)[i];\n\
             \x20       const Pack<G, {width}> pg = ((const Pack<G, {width}>*)grad)[i];\n{}\
             \x20       #pragma unroll\n        for (int j = 0; j < {width}; j++) {{\n\
             \x20           W v = widen(pv.at[j]);{}\n\
             \x20           step(v{call_slots}, (W)widen(pg.at[j]){call_scalars});\n\
             \x20           pv.at[j] = Narrow<T>::from(v);{}\n        }}\n\
             \x20       (({pack}*)var)[i] = pv;\n{}    }}\n\
             \x20   for (i64 i = packs * {width} + threadIdx.x; i < to; i += 256) {{\n\
             \x20       W v = widen(var[i]);{}\n\
             \x20       step(v{call_slots}, (W)widen(grad[i]){call_scalars});\n\
             \x20       var[i] = Narrow<T>::from(v);{}\n    }}\n}}\n",
            head(dtype, self.flag),
            step(rule),
            c_type(grad),
            self.n_pointers(),
            list(&|i| format!("    T* slot{i} = table.at[k][{}];\n", i + 1)),
            self.n_pointers() - 1,
            list(&|i| format!("        {pack} p{i} = (({pack}*)slot{i})[i];\n")),
            list(&|i| format!(" W s{i} = widen(p{i}.at[j]);")),
            list(&|i| format!(" p{i}.at[j] = Narrow<T>::from(s{i});")),
            list(&|i| format!("        (({pack}*)slot{i})[i] = p{i};\n")),
            list(&|i| format!(" W s{i} = widen(slot{i}[i]);")),
            list(&|i| format!(" slot{i}[i] = Narrow<T>::from(s{i});")),
        )
    }

    /// Enqueues the updates. `values` are the variables' and slots' own, in the order of the handles.
    fn enqueue(&self, ctx: &KernelCtx<'_>, device: &CudaDevice, values: &[&mut Tensor]) -> Result<()> {
        let n_handles = self.rule.slots + 1;
        let (first_scalar, n_scalars) = (self.n * n_handles, self.rule.scalars.len());
        let first_grad = first_scalar + n_scalars;
        let dtype = values[0].dtype();
        for (i, rule) in self.rule.scalars.iter().enumerate() {
            let scalar = ctx.input(first_scalar + i)?;
            if scalar.n_elements() != 1 {
                return Err(Error::invalid_argument(format!("input {rule} is not a scalar: {}", scalar.shape())));
            }
        }
        let mut all: Vec<(&[&mut Tensor], &Tensor)> = Vec::with_capacity(self.n);
        let mut is_aligned = true;
        for (k, group) in values.chunks(n_handles).enumerate() {
            let grad = ctx.input(first_grad + k)?;
            let shape = group[0].shape();
            for other in group.iter().map(|slot| slot.shape()).chain([grad.shape()]) {
                if other != shape {
                    return Err(Error::invalid_argument(format!(
                        "var and its slots and gradient do not have the same shape: {shape} {other}"
                    )));
                }
            }
            is_aligned &= group.iter().all(|value| starts_aligned(value)) && starts_aligned(grad);
            if grad.n_elements() > 0 {
                all.push((group, grad));
            }
        }
        let grad_dtype = ctx.input(first_grad)?.dtype();
        let width = if is_aligned { 16 / dtype.size().unwrap_or(16) } else { 1 };
        let key = ProgramKey {
            family: "apply_all",
            op: self.rule.name,
            dtypes: [Some(dtype), Some(grad_dtype), None],
            variant: width as u32 | u32::from(self.flag) << 8,
        };
        let kernel = device.function(&key, || self.source(dtype, grad_dtype, width))?;
        for some in all.chunks(MOST) {
            let mut tensors: Vec<&Tensor> = Vec::with_capacity(some.len() * self.n_pointers());
            let (mut sizes, mut firsts, mut n_blocks) = ([0i64; MOST], [0i64; MOST], 0usize);
            for (k, (group, grad)) in some.iter().enumerate() {
                tensors.extend(group.iter().map(|value| &**value));
                tensors.push(grad);
                sizes[k] = grad.n_elements() as i64;
                firsts[k] = n_blocks as i64;
                n_blocks += grad.n_elements().div_ceil(SPAN);
            }
            let words: Vec<u64> = sizes.iter().chain(&firsts).map(|&word| word as u64).collect();
            let mut args = Args::new().table(&tensors, MOST * self.n_pointers(), &words).size(some.len());
            for i in 0..n_scalars {
                args = args.input(ctx.input(first_scalar + i)?);
            }
            device.launch(kernel, Grid::blocks(n_blocks, 256)?, &args)?;
        }
        Ok(())
    }
}

impl Kernel for ApplyAll {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        let device = gpu(ctx)?;
        let n = self.n * (self.rule.slots + 1);
        let cells = (0..n).map(|i| ctx.variable(i)).collect::<Result<Vec<Arc<VariableCell>>>>()?;
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by_key(|&i| Arc::as_ptr(&cells[i]));
        if let Some(pair) = order.windows(2).find(|pair| Arc::ptr_eq(&cells[pair[0]], &cells[pair[1]])) {
            return Err(Error::invalid_argument(format!("{:?} is updated twice at once", cells[pair[0]])));
        }
        lock_all(device, &cells, &order, Vec::with_capacity(n), &mut |values| self.enqueue(ctx, device, values))
    }
}

/// Locks the cells one inside the other, always in the order of their addresses, and calls `f` with the values in the order of
/// the cells.
fn lock_all(
    device: &CudaDevice,
    cells: &[Arc<VariableCell>],
    order: &[usize],
    locked: Vec<(usize, &mut Tensor)>,
    f: &mut dyn FnMut(&[&mut Tensor]) -> Result<()>,
) -> Result<()> {
    let Some((&i, rest)) = order.split_first() else {
        let mut locked = locked;
        locked.sort_by_key(|(i, _)| *i);
        let values: Vec<&mut Tensor> = locked.into_iter().map(|(_, tensor)| tensor).collect();
        return f(&values);
    };
    cells[i].update_on(device, |tensor| {
        let mut locked: Vec<(usize, &mut Tensor)> = locked;
        locked.push((i, tensor));
        lock_all(device, cells, rest, locked, f)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_compile() {
        let mut all = Vec::new();
        for op in crate::optim::OPS {
            let name = op.def.name;
            if update_layout(name).is_none() {
                continue;
            }
            let rule = find_op(name).unwrap().def.update.unwrap().rule;
            for (dtype, grad, width) in
                [(DType::F32, DType::BF16, 4), (DType::BF16, DType::BF16, 8), (DType::F64, DType::F64, 1)]
            {
                let update = ApplyAll { rule, flag: true, n: 1 };
                let key = ProgramKey {
                    family: "apply_all",
                    op: rule.name,
                    dtypes: [Some(dtype), Some(grad), None],
                    variant: 0,
                };
                all.push((key, update.source(dtype, grad, width)));
            }
        }
        assert!(all.len() > 20);
        crate::cuda::tests::compiles(all);
    }

    #[test]
    fn tables_fit_into_the_arguments_of_a_kernel() {
        let most =
            crate::optim::OPS.iter().filter_map(|op| update_layout(op.def.name)).map(|at| at.n_handles + 1).max();
        assert!(MOST * (most.unwrap() + 2) * 8 + 8 * 16 <= 4096);
    }
}
