//! `SaveV2`: writes tensors to a checkpoint, on a file thread.

use std::sync::Arc;

use kolo_core::Result;
use kolo_graph::{Effects, Gradient, OpDef, Operation, Output};

use super::arguments::{save_arguments, save_shapes};
use super::bundle::{self, index_path};
use super::threads::IoThreads;
use crate::op::{Gpu, KernelMaker, Op, cpu_made};
use crate::{AsyncKernel, Cost, Done, KernelCtx, Outcome};

/// Writes `tensors` to the checkpoint `prefix` under these names. An entry of `shape_and_slices` is empty, or says of which
/// larger tensor, and of which part of it, the tensor is the value: `5 4 0,3:-`.
#[track_caller]
pub fn save_v2<'g>(
    prefix: Output<'g>,
    tensor_names: Output<'g>,
    shape_and_slices: Output<'g>,
    tensors: &[Output<'g>],
) -> Operation<'g> {
    let head = [prefix, tensor_names, shape_and_slices];
    prefix.graph().op("SaveV2").inputs(head).inputs(tensors.iter().copied()).build()
}

pub(crate) static SAVE_V2: Op = Op {
    def: OpDef {
        name: "SaveV2",
        signature: "(prefix:string, tensor_names:string, shape_and_slices:string, tensors:list(dtypes)) -> () ; \
                    dtypes:list(type)>=1",
        shape: save_shapes,
        gradient: Gradient::None("nothing comes out"),
        stateful: true,
        effects: Effects::Outside,
        ..OpDef::BASE
    },
    kernels: &[cpu_made(KernelMaker::Async(|init| Ok(Box::new(Save(IoThreads::of(init.resources)?)))))],
    gpu: Gpu::FILES,
    cost: Cost::Inline,
};

struct Save(Arc<IoThreads>);

impl AsyncKernel for Save {
    fn start(&self, ctx: &mut KernelCtx<'_>, done: Done) {
        let prepare = |ctx: &mut KernelCtx<'_>| -> Result<_> {
            let (prefix, items) = save_arguments(ctx)?;
            let access = ctx.step.resources().file_access();
            access.check(&index_path(&prefix))?;
            Ok((prefix, items, access))
        };
        let (prefix, items, access) = match prepare(ctx) {
            Ok(arguments) => arguments,
            Err(error) => return done.finish(Err(error)),
        };
        let cancel = ctx.step.cancel().clone();
        // A job that never runs drops its `Done`, which says so.
        let _ = self.0.run(move || {
            let saved = bundle::save_within(&prefix, &items, Some(&cancel), &access);
            drop(items);
            done.finish(saved.map(|()| Outcome::default()));
        });
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::{Code, Tensor};

    use super::*;
    use crate::io::bundle::Bundle;
    use crate::io::files::TestDir;
    use crate::testing::Evaluation;

    #[test]
    fn tensors_are_saved_under_their_names() {
        let dir = TestDir::new("save-v2");
        let g = crate::graph();
        let part = g.constant([[1.0f32, 2.0]]);
        let save = save_v2(
            g.constant(dir.text("sub/m").as_str()),
            g.constant(["w", "p"]),
            g.constant(["", "2 2 1,1:-"]),
            &[g.constant([1i64, 2]), part],
        );
        g.check().unwrap();
        Evaluation::new(g.snapshot()).run_targets(&[save], &[]).unwrap();
        let mut bundle = Bundle::open(&dir.text("sub/m")).unwrap();
        assert_eq!(bundle.read("w").unwrap(), Tensor::from([1i64, 2]));
        assert_eq!(bundle.find("p").unwrap().shape.dims(), [2, 2]);
    }

    #[test]
    fn wrong_arguments_are_refused() {
        let dir = TestDir::new("save-v2-wrong");
        let fails = |names: &[&str], specs: &[&str], text: &str| {
            let g = crate::graph();
            let strings = |list: &[&str]| {
                let list = list.iter().map(|text| bytes::Bytes::from(text.to_string())).collect::<Vec<_>>();
                g.constant(Tensor::from_strings([list.len()], list).unwrap())
            };
            let prefix = g.constant(dir.text("m").as_str());
            let save = save_v2(prefix, strings(names), strings(specs), &[g.constant([1i64, 2])]);
            let result = g.check().and_then(|()| Evaluation::new(g.snapshot()).run_targets(&[save], &[]));
            let error = result.unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument);
            assert!(error.message().contains(text), "{error}");
        };
        fails(&["a", "b"], &[""], "input 1 should have shape [1]");
        fails(&["a"], &["", ""], "input 2 should have shape [1]");
        fails(&["a"], &["5 0,3"], "does not match the shape of the tensor to save");
        fails(&["a"], &["5 0"], "'a': shape_and_slice specification '5 0'");
        fails(&[""], &[""], "empty name");
        assert_eq!(dir.names(), [] as [&str; 0]);
    }
}
