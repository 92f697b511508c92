//! `InitializeTableV2` and `InitializeTableFromTextFileV2`: fill a table from tensors, or from the lines of a file.

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use kolo_core::{DType, Error, Result, Tensor};
use kolo_graph::{Effects, Gradient, OpDef, shape_fns};

use super::core::Table;
use crate::io::files::file_error;
use crate::io::threads::IoThreads;
use crate::kernel::KernelInit;
use crate::op::{Gpu, KernelMaker, Op, cpu_any, cpu_made};
use crate::queue::source::object;
use crate::string::to_number::FromText;
use crate::{AsyncKernel, Cost, Done, KernelCtx, Outcome};

pub(crate) static INITIALIZE_TABLE_V2: Op = Op {
    def: OpDef {
        name: "InitializeTableV2",
        signature: "(table_handle:resource, keys:Tkey, values:Tval) -> () ; Tkey:type, Tval:type",
        shape: |ctx| {
            ctx.input(1).merge(ctx.input(2))?;
            Ok(Vec::new())
        },
        gradient: Gradient::None("nothing comes out"),
        stateful: true,
        effects: Effects::Uses,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| object::<Table>(ctx, 0)?.initialize(ctx.input(1)?, ctx.input(2)?))],
    gpu: Gpu::OBJECTS,
    cost: Cost::Elements,
};

pub(crate) static INITIALIZE_TABLE_FROM_TEXT_FILE_V2: Op = Op {
    def: OpDef {
        name: "InitializeTableFromTextFileV2",
        signature: "(table_handle:resource, filename:string) -> () ; key_index:int>=-2, value_index:int>=-2, \
                    vocab_size:int>=-1=-1, delimiter:string=\"\t\", offset:int=0",
        shape: shape_fns::unknown,
        gradient: Gradient::None("nothing comes out"),
        stateful: true,
        effects: Effects::Uses,
        ..OpDef::BASE
    },
    kernels: &[cpu_made(KernelMaker::Async(FromFile::make))],
    gpu: Gpu::OBJECTS,
    cost: Cost::Inline,
};

/// What of a line is a key or a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Column {
    /// All of it, as a text; or as a number, if it is the key.
    Line,
    /// Its number, counted from 0.
    Number,
    /// One of its parts between delimiters.
    Part(usize),
}

impl Column {
    fn new(index: i64) -> Column {
        match index {
            -2 => Column::Line,
            -1 => Column::Number,
            part => Column::Part(part.max(0) as usize),
        }
    }

    fn check(self, dtype: DType, what: &str) -> Result<()> {
        let good = match self {
            Column::Line => dtype == DType::Str || what == KEY && matches!(dtype, DType::I32 | DType::I64),
            Column::Number => dtype == DType::I64,
            Column::Part(_) => true,
        };
        if good {
            return Ok(());
        }
        let needs = match (self, what) {
            (Column::Line, KEY) => "the whole line needs string or an integer",
            (Column::Line, _) => "the whole line needs string",
            _ => "the line's number needs int64",
        };
        Err(Error::invalid_argument(format!("the {what} of the table is {dtype}, but {needs}")))
    }
}

const KEY: &str = "key";

struct FromFile {
    threads: Arc<IoThreads>,
    columns: Columns,
}

/// How to read a file.
#[derive(Clone)]
struct Columns {
    key: Column,
    value: Column,
    delimiter: u8,
    n_lines: Option<usize>,
    offset: i64,
}

impl FromFile {
    fn make(init: &KernelInit<'_>) -> Result<Box<dyn AsyncKernel>> {
        let attrs = init.attrs();
        let &[delimiter] = attrs.str("delimiter")?.as_bytes() else {
            return Err(Error::invalid_argument("delimiter should be only 1 char"));
        };
        let columns = Columns {
            key: Column::new(attrs.int("key_index")?),
            value: Column::new(attrs.int("value_index")?),
            delimiter,
            n_lines: usize::try_from(attrs.int("vocab_size")?).ok(),
            offset: attrs.int("offset")?,
        };
        Ok(Box::new(FromFile { threads: IoThreads::of(init.resources)?, columns }))
    }
}

impl AsyncKernel for FromFile {
    fn start(&self, ctx: &mut KernelCtx<'_>, done: Done) {
        let arguments = || -> Result<(Arc<Table>, String)> {
            let table = object::<Table>(ctx, 0)?;
            let [name] = ctx.input(1)?.strings()? else {
                return Err(Error::invalid_argument("filename should be one string"));
            };
            let name =
                String::from_utf8(name.to_vec()).map_err(|_| Error::invalid_argument("filename is not valid UTF-8"))?;
            if name.is_empty() {
                return Err(Error::invalid_argument("filename cannot be empty."));
            }
            ctx.step.resources().file_access().check(Path::new(&name))?;
            Ok((table, name))
        };
        match arguments() {
            Ok((table, name)) => {
                let columns = self.columns.clone();
                // If there is no thread, the dropped `Done` ends the work with an error.
                let _ = self.threads.run(move || done.finish(columns.fill(&table, &name).map(|()| Outcome::default())));
            }
            Err(error) => done.finish(Err(error)),
        }
    }
}

impl Columns {
    fn fill(&self, table: &Table, name: &str) -> Result<()> {
        let spec = table.spec();
        self.key.check(spec.key, KEY)?;
        self.value.check(spec.value, "value")?;
        let text = std::fs::read(name).map_err(|error| file_error("cannot read", Path::new(name), &error))?;
        let text = Bytes::from(text);
        let mut lines: Vec<Bytes> = text.split(|&byte| byte == b'\n').map(|line| text.slice_ref(line)).collect();
        if lines.last().is_some_and(Bytes::is_empty) {
            lines.pop();
        }
        if let Some(n) = self.n_lines {
            if lines.len() < n {
                return Err(Error::invalid_argument(format!(
                    "Invalid vocab_size in {name}: expected {n} but got {}",
                    lines.len()
                )));
            }
            lines.truncate(n);
        }
        let (mut keys, mut values) = (Vec::with_capacity(lines.len()), Vec::with_capacity(lines.len()));
        for (i, line) in lines.iter().enumerate() {
            let line = line.strip_suffix(b"\r").map_or(line.clone(), |short| line.slice_ref(short));
            if line.is_empty() {
                return Err(Error::invalid_argument(format!(
                    "Invalid content in {name}: empty line found at position {i}."
                )));
            }
            keys.push(self.part(self.key, &line, i, name)?);
            values.push(self.part(self.value, &line, i, name)?);
        }
        table.initialize(&column(spec.key, keys, name)?, &column(spec.value, values, name)?)
    }

    fn part(&self, column: Column, line: &Bytes, number: usize, name: &str) -> Result<Bytes> {
        match column {
            Column::Line => Ok(line.clone()),
            Column::Number => Ok((number as i64).wrapping_add(self.offset).to_string().into()),
            Column::Part(part) => match line.split(|&byte| byte == self.delimiter).nth(part) {
                Some(text) => Ok(line.slice_ref(text)),
                None => Err(Error::invalid_argument(format!(
                    "Invalid number of columns in {name} line {number} ({}) : expected at least {} got {}",
                    String::from_utf8_lossy(line),
                    part + 1,
                    line.split(|&byte| byte == self.delimiter).count()
                ))),
            },
        }
    }
}

/// Texts as elements of `dtype`.
fn column(dtype: DType, texts: Vec<Bytes>, name: &str) -> Result<Tensor> {
    fn numbers<T: FromText>(texts: &[Bytes], name: &str) -> Result<Tensor> {
        let number = |(i, text): (usize, &Bytes)| {
            T::from_text(text).ok_or_else(|| {
                Error::invalid_argument(format!(
                    "Field {} in line {i} is not a valid {}: {name}",
                    String::from_utf8_lossy(text),
                    T::DTYPE
                ))
            })
        };
        Ok(Tensor::vector(texts.iter().enumerate().map(number).collect::<Result<Vec<T>>>()?))
    }
    match dtype {
        DType::Str => Tensor::from_strings([texts.len()], texts),
        DType::I32 => numbers::<i32>(&texts, name),
        DType::I64 => numbers::<i64>(&texts, name),
        DType::F32 => numbers::<f32>(&texts, name),
        DType::F64 => numbers::<f64>(&texts, name),
        other => Err(Error::invalid_argument(format!("Data type {other} not supported."))),
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::Code;

    use super::super::access::{lookup_table_find, lookup_table_size};
    use super::*;
    use crate::io::files::TestDir;
    use crate::string::words;
    use crate::testing::Evaluation;

    struct Case<'a> {
        contents: Option<&'a str>,
        dtypes: [DType; 2],
        columns: [i64; 2],
        attr: Option<(&'a str, i64)>,
    }

    /// The values of `keys` and the number of keys, of a table read from a file.
    fn read(case: Case<'_>, keys: Tensor, default: Tensor) -> Result<Vec<Tensor>> {
        let dir = TestDir::new("table");
        if let Some(contents) = case.contents {
            std::fs::write(dir.join("f"), contents).unwrap();
        }
        let g = crate::graph();
        let table = g.op("HashTableV2").attr("key_dtype", case.dtypes[0]).attr("value_dtype", case.dtypes[1]);
        let table = table.attr("use_node_name_sharing", true).out();
        let name = g.constant(Tensor::string(dir.text("f")));
        let mut fill = g.op("InitializeTableFromTextFileV2").input(table).input(name);
        fill = fill.attr("key_index", case.columns[0]).attr("value_index", case.columns[1]);
        if let Some((name, value)) = case.attr {
            fill = fill.attr(name, value);
        }
        let fill = fill.build();
        let find = lookup_table_find(table, g.constant(keys), g.constant(default));
        let size = lookup_table_size(table);
        g.check()?;
        let run = Evaluation::new(g.snapshot());
        run.run_targets(&[fill], &[])?;
        run.run(&[find, size], &[])
    }

    #[test]
    fn lines_become_keys_and_values() {
        let (text, int) = (DType::Str, DType::I64);
        let vocabulary =
            |attr| Case { contents: Some("emerson\nlake\npalmer\n"), dtypes: [text, int], columns: [-2, -1], attr };
        let minus = || Tensor::scalar(-1i64);
        let find = |attr, key: &'static str| read(vocabulary(attr), words([key]), minus());
        assert_eq!(find(None, "lake").unwrap(), [Tensor::from([1i64]), Tensor::scalar(3i64)]);
        assert_eq!(find(Some(("offset", 1)), "lake").unwrap()[0], Tensor::from([2i64]));
        assert_eq!(find(Some(("vocab_size", 2)), "palmer").unwrap(), [Tensor::from([-1i64]), Tensor::scalar(2i64)]);
        let error = find(Some(("vocab_size", 5)), "x").unwrap_err();
        assert!(error.message().contains("expected 5 but got 3"), "{error}");
        let back = Case { dtypes: [int, text], columns: [-1, -2], ..vocabulary(None) };
        let found = read(back, Tensor::from([0i64, 2, 5]), Tensor::string("UNK")).unwrap();
        assert_eq!(found[0], words(["emerson", "palmer", "UNK"]));
        // A line may be a number.
        let numbers = Case { contents: Some("42\n1\n-1000\n"), dtypes: [int, int], columns: [-2, -1], attr: None };
        let found = read(numbers, Tensor::from([1i64, -1000, 5]), minus()).unwrap();
        assert_eq!(found, [Tensor::from([1i64, 2, -1]), Tensor::scalar(3i64)]);
        let parts = Case { contents: Some("1\tone\n2\ttwo\n"), dtypes: [int, text], columns: [0, 1], attr: None };
        assert_eq!(read(parts, Tensor::from([2i64]), Tensor::string("")).unwrap()[0], words(["two"]));
    }

    #[test]
    fn bad_files_are_named() {
        let case = |contents, dtypes, columns| Case { contents, dtypes, columns, attr: None };
        let (text, int) = (DType::Str, DType::I64);
        let fails = |case: Case<'_>, code: Code, words: &str| {
            let keys = if case.dtypes[0] == DType::Str { Tensor::string("a") } else { Tensor::scalar(1i64) };
            let default = if case.dtypes[1] == DType::Str { Tensor::string("") } else { Tensor::scalar(1i64) };
            let error = read(case, keys, default).unwrap_err();
            assert_eq!(error.code(), code, "{error}");
            assert!(error.message().contains(words), "{error}");
        };
        fails(case(None, [text, int], [-2, -1]), Code::NotFound, "/f");
        fails(case(Some("a\n\nb\n"), [text, int], [-2, -1]), Code::InvalidArgument, "empty line found at position 1");
        fails(case(Some("a\na\n"), [text, int], [-2, -1]), Code::FailedPrecondition, "occurs twice");
        fails(case(Some("a\n"), [text, text], [0, 1]), Code::InvalidArgument, "expected at least 2 got 1");
        fails(case(Some("a\n"), [int, int], [-2, -1]), Code::InvalidArgument, "Field a in line 0 is not a valid int64");
        let whole = "the value of the table is int64, but the whole line needs string";
        fails(case(Some("1\n"), [text, int], [0, -2]), Code::InvalidArgument, whole);
        fails(
            case(Some("x\ta\n"), [int, text], [0, 1]),
            Code::InvalidArgument,
            "Field x in line 0 is not a valid int64",
        );
    }
}
