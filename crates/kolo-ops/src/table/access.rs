//! What is done with a table: `LookupTableFindV2`, `InsertV2`, `ImportV2`, `ExportV2`, `SizeV2`.

use kolo_core::{Error, PartialShape, Result, Tensor};
use kolo_graph::{Effects, Gradient, OpDef, Operation, Output, ShapeFn, shape_fns};

use super::core::Table;
use crate::op::{Gpu, KernelDef, Op, cpu_any};
use crate::queue::source::object;
use crate::{Cost, KernelCtx};

/// The values of `keys` in a table, and `default` for keys that it does not have.
#[track_caller]
pub fn lookup_table_find<'g>(table: Output<'g>, keys: Output<'g>, default: Output<'g>) -> Output<'g> {
    table.graph().op("LookupTableFindV2").inputs([table, keys, default]).out()
}

/// Adds keys to a table that changes, or changes their values.
#[track_caller]
pub fn lookup_table_insert<'g>(table: Output<'g>, keys: Output<'g>, values: Output<'g>) -> Operation<'g> {
    table.graph().op("LookupTableInsertV2").inputs([table, keys, values]).build()
}

/// How many keys a table has.
#[track_caller]
pub fn lookup_table_size(table: Output<'_>) -> Output<'_> {
    table.graph().op("LookupTableSizeV2").input(table).out()
}

macro_rules! access_ops {
    ($($op:ident, $name:literal, $signature:literal, $shape:expr, $kernels:expr;)*) => {
        $(pub(crate) static $op: Op = access($name, $signature, $shape, $kernels);)*
    };
}

access_ops! {
    LOOKUP_TABLE_FIND_V2, "LookupTableFindV2",
        "(table_handle:resource, keys:Tin, default_value:Tout) -> (values:Tout) ; Tin:type, Tout:type",
        shape_fns::same_as_input_1, &[cpu_any(find)];
    LOOKUP_TABLE_INSERT_V2, "LookupTableInsertV2",
        "(table_handle:resource, keys:Tin, values:Tout) -> () ; Tin:type, Tout:type",
        shape_fns::unknown, &[cpu_any(|ctx| object::<Table>(ctx, 0)?.insert(ctx.input(1)?, ctx.input(2)?))];
    LOOKUP_TABLE_IMPORT_V2, "LookupTableImportV2",
        "(table_handle:resource, keys:Tin, values:Tout) -> () ; Tin:type, Tout:type",
        shape_fns::unknown, &[cpu_any(|ctx| object::<Table>(ctx, 0)?.import(ctx.input(1)?, ctx.input(2)?))];
    LOOKUP_TABLE_EXPORT_V2, "LookupTableExportV2",
        "(table_handle:resource) -> (keys:Tkeys, values:Tvalues) ; Tkeys:type, Tvalues:type",
        |_| Ok(vec![PartialShape::of_rank(1); 2]), &[cpu_any(export)];
    LOOKUP_TABLE_SIZE_V2, "LookupTableSizeV2", "(table_handle:resource) -> (size:int64)",
        shape_fns::scalars, &[cpu_any(|ctx| {
            let n = object::<Table>(ctx, 0)?.len() as i64;
            ctx.set_output(0, Tensor::scalar(n));
            Ok(())
        })];
}

const fn access(name: &'static str, signature: &'static str, shape: ShapeFn, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape,
            gradient: Gradient::None("what is in a table does not depend on a graph"),
            stateful: true,
            effects: Effects::Uses,
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::OBJECTS,
        cost: Cost::Elements,
    }
}

fn find(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let values = object::<Table>(ctx, 0)?.find(ctx.input(1)?, ctx.input(2)?)?;
    ctx.set_output(0, values);
    Ok(())
}

fn export(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let table = object::<Table>(ctx, 0)?;
    table.check_dtypes(ctx.attrs().dtype("Tkeys")?, ctx.attrs().dtype("Tvalues")?)?;
    if !table.spec().mutable && !table.is_initialized() {
        return Err(Error::failed_precondition("Table not initialized"));
    }
    let (keys, values) = table.export()?;
    ctx.set_output(0, keys);
    ctx.set_output(1, values);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::{Code, DType};

    use super::super::make::{hash_table, mutable_hash_table};
    use super::*;
    use crate::string::words;
    use crate::testing::Evaluation;

    #[test]
    fn a_table_is_filled_once() {
        let g = crate::graph();
        let (table, fill) = hash_table(g.constant(words(["a", "b"])), g.constant([1i64, 2]));
        let other = g.op("InitializeTableV2").inputs([table, g.constant(words(["c"])), g.constant([9i64])]).build();
        let keys = words(["a", "z", "b", "a"]).reshaped([2, 2].into()).unwrap();
        let find = lookup_table_find(table, g.constant(keys), g.constant(-1i64));
        assert_eq!(find.shape().known().unwrap().dims(), [2, 2]);
        let insert = lookup_table_insert(table, g.constant(words(["q"])), g.constant([5i64]));
        let import = g.op("LookupTableImportV2").inputs([table, g.constant(words(["q"])), g.constant([5i64])]).build();
        let size = lookup_table_size(table);
        let wrong = lookup_table_find(table, g.constant([1i64]), g.constant(1i64));
        let export = g.op("LookupTableExportV2").input(table).attr("Tkeys", DType::Str).attr("Tvalues", DType::I64);
        let export = export.build().outputs();
        g.check().unwrap();
        let run = Evaluation::new(g.snapshot());
        let code = |result: Result<Vec<Tensor>>| result.unwrap_err().code();
        assert_eq!(code(run.run(&[find], &[])), Code::FailedPrecondition);
        assert_eq!(code(run.run(&export, &[])), Code::FailedPrecondition);
        let both = |first: kolo_graph::Operation<'_>| run.run_targets(&[first], &[]);
        both(fill).unwrap();
        both(other).unwrap();
        assert_eq!(run.run(&[find, size], &[]).unwrap(), [Tensor::from([[1i64, -1], [2, 1]]), Tensor::scalar(2i64)]);
        assert_eq!(run.run(&export, &[]).unwrap(), [words(["a", "b"]), Tensor::from([1i64, 2])]);
        assert_eq!(both(insert).unwrap_err().code(), Code::Unimplemented);
        // TensorFlow 2 fills tables by importing; a table that is full stays as it is.
        both(import).unwrap();
        assert_eq!(run.run(&[size], &[]).unwrap(), [Tensor::scalar(2i64)]);
        assert_eq!(code(run.run(&[wrong], &[])), Code::InvalidArgument);
    }

    #[test]
    fn a_key_with_two_values_is_refused() {
        let g = crate::graph();
        let (_, twice) = hash_table(g.constant([1i64, 1]), g.constant(words(["a", "b"])));
        let error = Evaluation::new(g.snapshot()).run_targets(&[twice], &[]).unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition);
        assert!(error.message().contains("Key 1 occurs twice"), "{error}");
    }

    #[test]
    fn a_mutable_table_changes() {
        let g = crate::graph();
        let table = mutable_hash_table(&g, DType::Str, DType::F32);
        let insert = lookup_table_insert(table, g.constant(words(["a", "b", "a"])), g.constant([1.0f32, 2.0, 3.0]));
        let keys = g.constant(words(["a", "b", "c"]));
        let find = lookup_table_find(table, keys, g.constant(9.0f32));
        let each = lookup_table_find(table, keys, g.constant([7.0f32, 8.0, 9.5]));
        let size = lookup_table_size(table);
        let import =
            g.op("LookupTableImportV2").inputs([table, g.constant(words(["z"])), g.constant([1.0f32])]).build();
        let init = g.op("InitializeTableV2").inputs([table, g.constant(words(["z"])), g.constant([1.0f32])]).build();
        g.check().unwrap();
        let run = Evaluation::new(g.snapshot());
        run.run_targets(&[insert], &[]).unwrap();
        let found = run.run(&[find, each, size], &[]).unwrap();
        assert_eq!(found[0], Tensor::from([3.0f32, 2.0, 9.0]));
        assert_eq!(found[1], Tensor::from([3.0f32, 2.0, 9.5]));
        assert_eq!(found[2], Tensor::scalar(2i64));
        run.run_targets(&[import], &[]).unwrap();
        assert_eq!(run.run(&[size], &[]).unwrap(), [Tensor::scalar(1i64)]);
        assert_eq!(run.run_targets(&[init], &[]).unwrap_err().code(), Code::InvalidArgument);
    }
}
