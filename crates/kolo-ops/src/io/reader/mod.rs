//! Readers: `TFRecordReaderV2`, `TextLineReaderV2`, `WholeFileReaderV2`, `FixedLengthRecordReaderV2`, `IdentityReaderV2`,
//! and what is done with them. They take names of files from a queue.

mod core;
#[cfg(test)]
mod tests;
mod work;

use std::sync::Arc;

use kolo_core::{DType, Error, PartialShape, Result, Tensor};
use kolo_graph::{Attrs, Effects, Gradient, OpDef, OwnedState, ShapeFn, shape_fns};

use self::core::{Reader, Request, Wanted};
use self::work::{Compression, FixedLength, Format};
use super::threads::IoThreads;
use crate::Gpu;
use crate::kernel::KernelInit;
use crate::op::{KernelDef, Op, cpu_any, cpu_made};
use crate::queue::Queue;
use crate::queue::source::{Source, object};
use crate::{AsyncKernel, Cost, Done, KernelCtx, KernelMaker};

macro_rules! reader_ops {
    ($($op:ident, $name:literal, $attrs:literal, $format:expr;)*) => {
        $(pub(crate) static $op: Op = reader_op(
            $name,
            concat!("() -> (reader_handle:resource) ; ", $attrs),
            shape_fns::scalars,
            &[cpu_made(KernelMaker::Object(|init| {
                let format: fn(&Attrs) -> Result<Format> = $format;
                Source::<Reader>::make(init, format(init.attrs())?)
            }))],
        )
        .effects(Effects::Owns(OwnedState::Other));)*
    };
}

reader_ops! {
    TF_RECORD_READER_V2, "TFRecordReaderV2",
        "container:string=\"\", shared_name:string=\"\", compression_type:string=\"\"",
        |attrs| Ok(Format::TfRecord(Compression::parse(attrs.str("compression_type")?)?));
    TEXT_LINE_READER_V2, "TextLineReaderV2",
        "skip_header_lines:int=0, container:string=\"\", shared_name:string=\"\"",
        |attrs| Ok(Format::Lines(size(attrs, "skip_header_lines", 0)? as usize));
    WHOLE_FILE_READER_V2, "WholeFileReaderV2", "container:string=\"\", shared_name:string=\"\"",
        |_| Ok(Format::WholeFiles);
    FIXED_LENGTH_RECORD_READER_V2, "FixedLengthRecordReaderV2",
        "header_bytes:int=0, record_bytes:int, footer_bytes:int=0, hop_bytes:int=0, container:string=\"\", \
         shared_name:string=\"\", encoding:string=\"\"",
        |attrs| {
            let record = size(attrs, "record_bytes", 1)?;
            let hop = match size(attrs, "hop_bytes", 0)? {
                0 => record,
                hop => hop,
            };
            let (header, footer) = (size(attrs, "header_bytes", 0)?, size(attrs, "footer_bytes", 0)?);
            let compression = Compression::parse(attrs.str("encoding")?)?;
            Ok(Format::Fixed(FixedLength { header, record, footer, hop, compression }))
        };
    IDENTITY_READER_V2, "IdentityReaderV2", "container:string=\"\", shared_name:string=\"\"",
        |_| Ok(Format::Identity);
}

fn size(attrs: &Attrs, name: &str, least: u64) -> Result<u64> {
    let value = attrs.int(name)?;
    u64::try_from(value)
        .ok()
        .filter(|&value| value >= least)
        .ok_or_else(|| Error::invalid_argument(format!("{name} must be >= {least} not {value}")))
}

pub(crate) static READER_READ_V2: Op = reader_op(
    "ReaderReadV2",
    "(reader_handle:resource, queue_handle:resource) -> (key:string, value:string)",
    shape_fns::scalars,
    &[cpu_made(KernelMaker::Async(|init| Read::make(init, false)))],
);

pub(crate) static READER_READ_UP_TO_V2: Op = reader_op(
    "ReaderReadUpToV2",
    "(reader_handle:resource, queue_handle:resource, num_records:int64) -> (keys:string, values:string)",
    |ctx| {
        ctx.input_of_rank(2, 0)?;
        Ok(vec![PartialShape::of_rank(1); 2])
    },
    &[cpu_made(KernelMaker::Async(|init| Read::make(init, true)))],
);

pub(crate) static READER_NUM_RECORDS_PRODUCED_V2: Op = reader_op(
    "ReaderNumRecordsProducedV2",
    "(reader_handle:resource) -> (records_produced:int64)",
    shape_fns::scalars,
    &[cpu_any(|ctx| {
        let n = object::<Reader>(ctx, 0)?.n_records();
        ctx.set_output(0, Tensor::scalar(n));
        Ok(())
    })],
);

pub(crate) static READER_RESET_V2: Op = reader_op(
    "ReaderResetV2",
    "(reader_handle:resource) -> ()",
    shape_fns::unknown,
    &[cpu_any(|ctx| {
        object::<Reader>(ctx, 0)?.reset();
        Ok(())
    })],
);

const fn reader_op(name: &'static str, signature: &'static str, shape: ShapeFn, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape,
            gradient: Gradient::None("a file does not depend on a graph"),
            stateful: true,
            effects: Effects::Uses,
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::FILES,
        cost: Cost::Inline,
    }
}

struct Read {
    threads: Arc<IoThreads>,
    many: bool,
}

impl Read {
    fn make(init: &KernelInit<'_>, many: bool) -> Result<Box<dyn AsyncKernel>> {
        Ok(Box::new(Read { threads: IoThreads::of(init.resources)?, many }))
    }

    fn request(&self, ctx: &KernelCtx<'_>) -> Result<(Arc<Reader>, Request)> {
        let (reader, queue) = (object::<Reader>(ctx, 0)?, object::<Queue>(ctx, 1)?);
        if queue.spec().dtypes != [DType::Str] {
            return Err(Error::invalid_argument("the queue of a reader holds names of files: single strings"));
        }
        let wanted = match self.many {
            false => Wanted::One,
            true => {
                let shape = ctx.input(2)?.shape();
                if shape.rank() != 0 {
                    return Err(Error::invalid_argument(format!("num_records must be a scalar, found shape {shape}")));
                }
                let n = ctx.scalar::<i64>(2)?;
                let n = usize::try_from(n).ok().filter(|&n| n > 0);
                Wanted::UpTo(n.ok_or_else(|| Error::invalid_argument("num_records must be positive"))?)
            }
        };
        let request = Request {
            wanted,
            queue,
            access: ctx.step.resources().file_access(),
            threads: self.threads.clone(),
            cancel: ctx.step.cancel().clone(),
        };
        Ok((reader, request))
    }
}

impl AsyncKernel for Read {
    fn start(&self, ctx: &mut KernelCtx<'_>, done: Done) {
        match self.request(ctx) {
            Ok((reader, request)) => reader.read(request, done),
            Err(error) => done.finish(Err(error)),
        }
    }
}
