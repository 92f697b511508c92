//! `ShardedFilename`, `ShardedFilespec`: the names of the files of a checkpoint that several devices write.

use kolo_core::Tensor;
use kolo_graph::{Gradient, OpDef, Output, shape_fns};

use super::arguments::text;
use crate::Cost;
use crate::op::{Gpu, Op, cpu_any};

/// `basename-00001-of-00004`, for scalars `shard` and `n_shards` of int32.
#[track_caller]
pub fn sharded_filename<'g>(basename: Output<'g>, shard: Output<'g>, n_shards: Output<'g>) -> Output<'g> {
    basename.graph().op("ShardedFilename").inputs([basename, shard, n_shards]).out()
}

/// `basename-?????-of-00004`, which matches all of them.
#[track_caller]
pub fn sharded_filespec<'g>(basename: Output<'g>, n_shards: Output<'g>) -> Output<'g> {
    basename.graph().op("ShardedFilespec").inputs([basename, n_shards]).out()
}

pub(crate) static SHARDED_FILENAME: Op = Op {
    def: OpDef {
        name: "ShardedFilename",
        signature: "(basename:string, shard:int32, num_shards:int32) -> (filename:string)",
        shape: |ctx| {
            (0..3).try_for_each(|i| ctx.input_of_rank(i, 0).map(drop))?;
            shape_fns::scalars(ctx)
        },
        gradient: Gradient::None("names are not numbers"),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| {
        let (shard, n_shards) = (ctx.scalar::<i32>(1)?, ctx.scalar::<i32>(2)?);
        let name = format!("{}-{shard:05}-of-{n_shards:05}", text(ctx, 0, "basename")?);
        ctx.set_output(0, Tensor::string(name));
        Ok(())
    })],
    gpu: Gpu::FILES,
    cost: Cost::Inline,
};

pub(crate) static SHARDED_FILESPEC: Op = Op {
    def: OpDef {
        name: "ShardedFilespec",
        signature: "(basename:string, num_shards:int32) -> (filename:string)",
        shape: |ctx| {
            (0..2).try_for_each(|i| ctx.input_of_rank(i, 0).map(drop))?;
            shape_fns::scalars(ctx)
        },
        gradient: Gradient::None("names are not numbers"),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| {
        let name = format!("{}-?????-of-{:05}", text(ctx, 0, "basename")?, ctx.scalar::<i32>(1)?);
        ctx.set_output(0, Tensor::string(name));
        Ok(())
    })],
    gpu: Gpu::FILES,
    cost: Cost::Inline,
};

#[cfg(test)]
mod tests {
    use crate::testing::check_op;

    #[test]
    fn names_have_five_digits() {
        check_op("ShardedFilename").input("m").input(1i32).input(4i32).gives("m-00001-of-00004");
        check_op("ShardedFilename").input("").input(123456i32).input(999999i32).gives("-123456-of-999999");
        check_op("ShardedFilespec").input("a/m").input(4i32).gives("a/m-?????-of-00004");
        check_op("ShardedFilename").input(["m"]).input(1i32).input(4i32).fails("rank 0");
    }
}
