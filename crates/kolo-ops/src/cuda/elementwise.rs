//! Ops that are their expression ([`Elementwise`]): the expression is all that their GPU kernel needs.

use kolo_core::{DType, Error, Result};
use kolo_graph::{Elements, ShapesFit};

use super::map::{Expression, map_inputs};
use super::{FLOATS, NUMBERS, PLAIN};
use crate::kernel::KernelInit;
use crate::math::elementwise::parameter;
use crate::op::{KernelDef, KernelMaker, gpu_made};
use crate::{Kernel, KernelCtx};

/// The kernels of an op that needs nothing but its expression.
pub(crate) const fn kernels(elements: Elements) -> &'static [KernelDef] {
    const MAKE: KernelMaker = KernelMaker::Object(|init| Ok(Box::new(Map::new(init)?)));
    const OF_FLOATS: &[KernelDef] = &[gpu_made("T", FLOATS, MAKE)];
    const OF_NUMBERS: &[KernelDef] = &[gpu_made("T", NUMBERS, MAKE)];
    const OF_PLAIN: &[KernelDef] = &[gpu_made("T", PLAIN, MAKE)];
    // The op has no choice of dtypes.
    const OF_TRUTHS: &[KernelDef] = &[gpu_made("", &[], MAKE)];
    match elements {
        Elements::Floats => OF_FLOATS,
        Elements::Numbers => OF_NUMBERS,
        Elements::Plain => OF_PLAIN,
        Elements::Truths => OF_TRUTHS,
    }
}

/// An op that is its expression.
pub(crate) struct Map {
    expression: Expression,
    out: DType,
    params: Vec<f32>,
    is_same_shape: bool,
}

impl Map {
    pub(crate) fn new(init: &KernelInit<'_>) -> Result<Map> {
        let (node, not_one) = (init.node, || Error::internal(format!("{} is not an elementwise op", init.node.op())));
        let elementwise = node.def.elementwise.ok_or_else(not_one)?;
        let text = elementwise.text(node.inputs.len()).ok_or_else(not_one)?;
        let out = node.outputs.first().ok_or_else(not_one)?.dtype;
        let params = match elementwise.parameter {
            Some(attr) => vec![parameter(init.attrs(), attr)?],
            None => Vec::new(),
        };
        let is_same_shape = elementwise.shapes == ShapesFit::Same;
        Ok(Map { expression: Expression { name: node.def.name, text }, out, params, is_same_shape })
    }
}

impl Kernel for Map {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        if self.is_same_shape && ctx.input(0)?.shape() != ctx.input(1)?.shape() {
            let (a, b) = (ctx.input(0)?.shape(), ctx.input(1)?.shape());
            return Err(Error::invalid_argument(format!("the inputs must have the same shape, found {a} and {b}")));
        }
        map_inputs(ctx, self.expression, self.out, &self.params)
    }
}

#[cfg(test)]
mod tests {
    use kolo_device::cuda::ProgramKey;

    use super::super::map::source;
    use super::*;

    #[test]
    fn sources_compile() {
        let mut all = Vec::new();
        for op in crate::TABLE.iter().copied().flatten() {
            let Some(elementwise) = op.def.elementwise else { continue };
            // Sums of any number of inputs, and choices by another type, are other kernels.
            let Some((n, text)) = (1..4).find_map(|n| Some((n, elementwise.text(n as usize)?))) else { continue };
            let p = u32::from(elementwise.parameter.is_some());
            let dtypes = match elementwise.elements {
                Elements::Floats => FLOATS,
                Elements::Numbers => NUMBERS,
                Elements::Plain => PLAIN,
                Elements::Truths => &[DType::Bool],
            };
            let is_test = op.def.signature.contains("-> (z:bool)") || op.def.signature.contains("-> (y:bool)");
            for &dtype in dtypes.iter().take(5) {
                let to = if is_test { DType::Bool } else { dtype };
                let width = 16 / dtype.size().unwrap_or(16) as u32;
                let variant = n | p << 4 | width << 8;
                let key = ProgramKey { family: "map", op: op.def.name, dtypes: [Some(dtype), Some(to), None], variant };
                all.push((key, source(text, dtype, to, variant, 0)));
            }
        }
        let strided = 2 | 1 << 24;
        let key = ProgramKey { family: "map", op: "strided", dtypes: [Some(DType::F32), None, None], variant: strided };
        all.push((key, source("x0 + x1", DType::F32, DType::F32, strided, 3)));
        let constant = 1 << 4 | 4 << 8;
        all.push((key, source("(Wide<U>::type)p0", DType::F16, DType::F16, constant, 0)));
        super::super::tests::compiles(all);
    }
}
