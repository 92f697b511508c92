//! `MergeV2Checkpoints`: makes one checkpoint of those that several devices wrote, on a file thread.

use std::sync::Arc;

use kolo_core::Result;
use kolo_graph::{Effects, Gradient, OpDef, Operation, Output};

use super::arguments::{text, texts};
use super::bundle::{MergeOptions, merge};
use super::threads::IoThreads;
use crate::op::{Gpu, KernelMaker, Op, cpu_made};
use crate::{AsyncKernel, Cost, Done, KernelCtx, Outcome};

/// Moves the checkpoints `prefixes` into one called `destination`, and removes what is then empty.
#[track_caller]
pub fn merge_v2_checkpoints<'g>(prefixes: Output<'g>, destination: Output<'g>) -> Operation<'g> {
    prefixes.graph().op("MergeV2Checkpoints").inputs([prefixes, destination]).build()
}

pub(crate) static MERGE_V2_CHECKPOINTS: Op = Op {
    def: OpDef {
        name: "MergeV2Checkpoints",
        signature: "(checkpoint_prefixes:string, destination_prefix:string) -> () ; delete_old_dirs:bool=true, \
                    allow_missing_files:bool=false",
        shape: |ctx| {
            ctx.input_of_rank(0, 1)?;
            ctx.input_of_rank(1, 0)?;
            Ok(Vec::new())
        },
        gradient: Gradient::None("nothing comes out"),
        stateful: true,
        effects: Effects::Outside,
        ..OpDef::BASE
    },
    kernels: &[cpu_made(KernelMaker::Async(|init| Ok(Box::new(Merge(IoThreads::of(init.resources)?)))))],
    gpu: Gpu::FILES,
    cost: Cost::Inline,
};

struct Merge(Arc<IoThreads>);

impl AsyncKernel for Merge {
    fn start(&self, ctx: &mut KernelCtx<'_>, done: Done) {
        let prepare = |ctx: &KernelCtx<'_>| -> Result<_> {
            let options = MergeOptions {
                delete_old_dirs: ctx.attrs().bool("delete_old_dirs")?,
                allow_missing_files: ctx.attrs().bool("allow_missing_files")?,
                access: ctx.step.resources().file_access(),
            };
            Ok((texts(ctx, 0, "checkpoint_prefixes")?, text(ctx, 1, "destination_prefix")?, options))
        };
        let (sources, destination, options) = match prepare(ctx) {
            Ok(arguments) => arguments,
            Err(error) => return done.finish(Err(error)),
        };
        let _ = self.0.run(move || {
            let merged = merge(&sources, &destination, &options);
            done.finish(merged.map(|()| Outcome::default()));
        });
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use super::*;
    use crate::io::bundle::{Bundle, Item, save};
    use crate::io::files::TestDir;
    use crate::testing::Evaluation;

    #[test]
    fn two_become_one() {
        let dir = TestDir::new("merge-v2");
        let item = |name: &str, tensor: Tensor| Item { name: name.into(), slice: None, tensor };
        let (first, second) = (dir.text("t/part-0"), dir.text("t/part-1"));
        save(&first, &[item("a", Tensor::scalar(1i32))], None).unwrap();
        save(&second, &[item("b", Tensor::scalar(2i32))], None).unwrap();
        let g = crate::graph();
        let merge =
            merge_v2_checkpoints(g.constant([first.as_str(), second.as_str()]), g.constant(dir.text("m").as_str()));
        g.check().unwrap();
        let run = Evaluation::new(g.snapshot());
        run.run_targets(&[merge], &[]).unwrap();
        let all = Bundle::open(&dir.text("m")).unwrap().read_all().unwrap();
        assert_eq!(all.into_values().collect::<Vec<_>>(), [Tensor::scalar(1i32), Tensor::scalar(2i32)]);
        assert_eq!(dir.names(), ["m.data-00000-of-00002", "m.data-00001-of-00002", "m.index"]);
        assert!(run.run_targets(&[merge], &[]).unwrap_err().message().contains("part-0"));
    }
}
