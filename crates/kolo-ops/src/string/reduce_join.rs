//! `ReduceJoin`: strings put together along axes.

use kolo_core::{Dim, Error, PartialShape, Result, Shape};
use kolo_device::cpu::looking_by;
use kolo_graph::{OpDef, Output};

use super::NO_GRADIENT;
use crate::array::view::strides;
use crate::memory::Scratch;
use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// Strings joined along `axes`, in the order in which those are given, with `separator` between them.
#[track_caller]
pub fn reduce_join<'g>(strings: Output<'g>, axes: &[i32], separator: &str) -> Output<'g> {
    let graph = strings.graph();
    graph.op("ReduceJoin").input(strings).input(graph.constant(axes)).attr("separator", separator).out()
}

pub(crate) static REDUCE_JOIN: Op = Op {
    def: OpDef {
        name: "ReduceJoin",
        signature: "(inputs:string, reduction_indices:int32) -> (output:string) ; keep_dims:bool=false, \
                    separator:string=\"\"",
        shape: |ctx| {
            let (Some(dims), Some(axes)) = (ctx.input(0).dims(), ctx.constant_integers(1)) else {
                return Ok(vec![PartialShape::unknown()]);
            };
            let (axes, keep) = (resolved(&axes, dims.len())?, ctx.attrs().bool("keep_dims")?);
            let left = dims.iter().enumerate().filter_map(|(d, dim)| match axes.contains(&d) {
                false => Some(*dim),
                true => keep.then_some(Some(1)),
            });
            Ok(vec![PartialShape::new(&left.collect::<Vec<Dim>>())])
        },
        gradient: NO_GRADIENT,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::STRINGS,
    cost: Cost::Elements,
};

/// Axes counted from the start, in their order.
fn resolved(axes: &[i64], rank: usize) -> Result<Vec<usize>> {
    let mut list = Vec::new();
    for &axis in axes {
        let from_start = if axis < 0 { axis.saturating_add(rank as i64) } else { axis };
        let at = usize::try_from(from_start).ok().filter(|&at| at < rank).ok_or_else(|| {
            Error::out_of_range(format!("Invalid reduction dimension {axis} for input with {rank} dimension(s)"))
        })?;
        if list.contains(&at) {
            return Err(Error::invalid_argument(format!("Duplicate reduction dimension {axis}")));
        }
        list.push(at);
    }
    Ok(list)
}

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let input = ctx.input(0)?;
    let shape = input.shape();
    let axes = resolved(&ctx.integers(1)?, shape.rank())?;
    let (keep, separator) = (ctx.attrs().bool("keep_dims")?, ctx.attrs().str("separator")?.as_bytes());
    let steps = strides(shape);
    let kept: Vec<usize> = (0..shape.rank()).filter(|d| !axes.contains(d)).collect();
    // Positions of all elements along some dimensions, the last of them moving fastest. They are asked for: a shape with a size
    // of 0 has no elements, but there may be many along its other dimensions.
    let places = |dims: &[usize]| -> Result<Scratch<usize>> {
        let n = dims.iter().fold(1usize, |n, &d| n.saturating_mul(shape[d]));
        let mut places = ctx.scratch(n, 0usize, "positions of strings")?;
        // Each dimension moves on from one run of the later ones to the next.
        let mut n_later = n;
        for &d in dims.iter().filter(|_| n > 0) {
            n_later /= shape[d];
            let step = steps[d] as usize;
            for (i, part) in looking_by(n_later * size_of::<usize>(), places.chunks_mut(n_later).enumerate()) {
                part.iter_mut().for_each(|at| *at += i % shape[d] * step);
            }
        }
        Ok(places)
    };
    // The first axis that is named is joined first, and so moves fastest.
    let (strings, joined) = (input.strings()?, places(&axes.iter().rev().copied().collect::<Vec<_>>())?);
    let starts = places(&kept)?;
    let dims: Vec<usize> =
        (0..shape.rank()).filter_map(|d| if axes.contains(&d) { keep.then_some(1) } else { Some(shape[d]) }).collect();
    let out = ctx.text_tensor(Shape::new(&dims)?, |i| {
        let start = starts[i];
        crate::memory::joined(joined.iter().map(move |at| &strings[start + at][..]), separator)
    })?;
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::string::words;
    use crate::testing::check_op;

    #[test]
    fn strings_are_joined_along_axes() {
        let grid = || words(["a", "b", "c", "d", "e", "f"]).reshaped([2, 3].into()).unwrap();
        let test = |axes: &[i32]| check_op("ReduceJoin").attr("separator", ".").input(grid()).input(axes.to_vec());
        test(&[0]).gives(words(["a.d", "b.e", "c.f"]));
        test(&[-1]).gives(words(["a.b.c", "d.e.f"]));
        test(&[0, 1]).gives("a.d.b.e.c.f");
        test(&[1, 0]).gives("a.b.c.d.e.f");
        test(&[]).gives(grid());
        test(&[1]).attr("keep_dims", true).gives(words(["a.b.c", "d.e.f"]).reshaped([2, 1].into()).unwrap());
        check_op("ReduceJoin").input(grid()).input(0i32).gives(words(["ad", "be", "cf"]));
        test(&[2]).fails("Invalid reduction dimension 2 for input with 2 dimension(s)");
        test(&[0, 0]).fails("Duplicate reduction dimension 0");
        let none = Tensor::from_strings([0, 2], vec![]).unwrap();
        check_op("ReduceJoin").input(none).input([0i32]).gives(words(["", ""]));
    }
}
