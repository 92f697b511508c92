//! `DecodeCSV`: lines of values between commas, a tensor for each column.

use bytes::Bytes;
use kolo_core::{DType, Error, Result, Tensor};
use kolo_graph::{Gradient, OpDef, Output};

use crate::op::{Gpu, KernelMaker, Op, cpu_made};
use crate::string::to_number::FromText;
use crate::{Cost, Kernel, KernelCtx, KernelInit};

/// The columns of CSV records. A default gives a column's dtype, and its value where a field is empty; one without elements
/// means that the field must not be.
///
/// # Panics
/// If there are no columns.
#[track_caller]
pub fn decode_csv<'g>(records: Output<'g>, defaults: &[Output<'g>]) -> Vec<Output<'g>> {
    assert!(!defaults.is_empty(), "decode_csv needs at least one column");
    records.graph().op("DecodeCSV").input(records).inputs(defaults.iter().copied()).build().outputs()
}

pub(crate) static DECODE_CSV: Op = Op {
    def: OpDef {
        name: "DecodeCSV",
        signature: "(records:string, record_defaults:list(OUT_TYPE)) -> (output:list(OUT_TYPE)) ; \
                    OUT_TYPE:list(type){float,double,int32,int64,string}>=1, field_delim:string=\",\", \
                    use_quote_delim:bool=true, na_value:string=\"\", select_cols:list(int)=[]",
        shape: |ctx| {
            for i in 1..ctx.n_inputs() {
                if ctx.input(i).rank().is_some_and(|rank| rank > 1) || ctx.input(i).dim(0).is_some_and(|n| n > 1) {
                    return Err(Error::invalid_argument("Shape of a default must be a length-0 or length-1 vector"));
                }
            }
            Ok(vec![ctx.input(0).clone(); ctx.n_outputs()])
        },
        gradient: Gradient::None("text is not numbers"),
        ..OpDef::BASE
    },
    kernels: &[cpu_made(KernelMaker::Object(|init| Ok(Box::new(DecodeCsv::new(init)?))))],
    gpu: Gpu::FILES,
    cost: Cost::Elements,
};

struct DecodeCsv {
    delimiter: u8,
    quotes: bool,
    missing: Vec<u8>,
    /// Which columns; all of them if empty.
    columns: Vec<usize>,
}

impl DecodeCsv {
    fn new(init: &KernelInit<'_>) -> Result<DecodeCsv> {
        let attrs = init.attrs();
        let &[delimiter] = attrs.str("field_delim")?.as_bytes() else {
            return Err(Error::invalid_argument("field_delim should be only 1 char"));
        };
        let mut columns = Vec::new();
        for column in attrs.ints("select_cols")? {
            let column = usize::try_from(column)
                .map_err(|_| Error::invalid_argument("select_cols should be non-negative indices"))?;
            if columns.last().is_some_and(|&last| last >= column) {
                return Err(Error::invalid_argument("select_cols should be strictly increasing indices"));
            }
            columns.push(column);
        }
        let n_columns = attrs.dtypes("OUT_TYPE")?.len();
        if !columns.is_empty() && columns.len() != n_columns {
            return Err(Error::invalid_argument(format!(
                "{} select_cols for {n_columns} outputs: there must be as many",
                columns.len()
            )));
        }
        let missing = attrs.str("na_value")?.as_bytes().to_vec();
        Ok(DecodeCsv { delimiter, quotes: attrs.bool("use_quote_delim")?, missing, columns })
    }

    /// The fields of a record.
    fn fields(&self, record: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut fields = Vec::new();
        if record.is_empty() {
            return Ok(fields);
        }
        let mut at = 0;
        while at < record.len() {
            if matches!(record[at], b'\n' | b'\r') {
                at += 1;
                continue;
            }
            let mut field = Vec::new();
            if self.quotes && record[at] == b'"' {
                at = self.quoted(record, at + 1, &mut field)?;
            } else {
                while at < record.len() && record[at] != self.delimiter {
                    if matches!(record[at], b'\n' | b'\r') || (self.quotes && record[at] == b'"') {
                        return Err(Error::invalid_argument("Unquoted fields cannot have quotes/CRLFs inside"));
                    }
                    field.push(record[at]);
                    at += 1;
                }
            }
            fields.push(field);
            at += 1;
        }
        if record.last() == Some(&self.delimiter) {
            fields.push(Vec::new());
        }
        Ok(fields)
    }

    /// Reads a field whose first quote was read; returns where it ends.
    fn quoted(&self, record: &[u8], mut at: usize, field: &mut Vec<u8>) -> Result<usize> {
        while let Some(&byte) = record.get(at) {
            if byte != b'"' {
                field.push(byte);
                at += 1;
                continue;
            }
            match record.get(at + 1) {
                None => return Ok(at + 1),
                Some(&next) if next == self.delimiter => return Ok(at + 1),
                Some(b'"') => {
                    field.push(b'"');
                    at += 2;
                }
                Some(_) => {
                    return Err(Error::invalid_argument("Quote inside a string has to be escaped by another quote"));
                }
            }
        }
        Err(Error::invalid_argument("Quoted field has to end with quote followed by delim or end"))
    }

    /// The chosen fields of each record.
    fn records(&self, records: &[Bytes], n: usize) -> Result<Vec<Vec<Vec<u8>>>> {
        let mut all = Vec::with_capacity(records.len());
        for (i, record) in records.iter().enumerate() {
            let mut fields = self.fields(record)?;
            if !self.columns.is_empty() {
                fields = self.columns.iter().filter_map(|&column| fields.get(column).cloned()).collect();
            }
            if fields.len() != n {
                return Err(Error::invalid_argument(format!(
                    "Expect {n} fields but have {} in record {i}",
                    fields.len()
                )));
            }
            all.push(fields);
        }
        Ok(all)
    }
}

/// The values of one column.
fn column<T>(
    default: &[T],
    fields: &[Option<&[u8]>],
    at: usize,
    dtype: DType,
    read: impl Fn(&[u8]) -> Option<T>,
) -> Result<Vec<T>>
where
    T: Clone,
{
    let value = |(record, field): (usize, &Option<&[u8]>)| match (field, default) {
        (Some(field), _) => read(field).ok_or_else(|| {
            let field = String::from_utf8_lossy(field);
            Error::invalid_argument(format!("Field {at} in record {record} is not a valid {dtype}: {field}"))
        }),
        (None, [default]) => Ok(default.clone()),
        (None, _) => Err(Error::invalid_argument(format!("Field {at} is required but missing in record {record}!"))),
    };
    fields.iter().enumerate().map(value).collect()
}

impl Kernel for DecodeCsv {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        let n = ctx.n_inputs() - 1;
        let shape = ctx.input(0)?.shape().clone();
        let records = self.records(ctx.input(0)?.strings()?, n)?;
        for at in 0..n {
            let is_missing = |field: &[u8]| field.is_empty() || (!self.missing.is_empty() && field == self.missing);
            let fields: Vec<Option<&[u8]>> =
                records.iter().map(|fields| Some(fields[at].as_slice()).filter(|field| !is_missing(field))).collect();
            let default = ctx.input(at + 1)?;
            let dtype = default.dtype();
            fn numbers<T: FromText>(
                shape: &kolo_core::Shape,
                default: &Tensor,
                fields: &[Option<&[u8]>],
                at: usize,
            ) -> Result<Tensor> {
                let values = column(default.data::<T>()?, fields, at, T::DTYPE, T::from_text)?;
                Tensor::from_vec(shape.clone(), values)
            }
            let out = match dtype {
                DType::F32 => numbers::<f32>(&shape, default, &fields, at)?,
                DType::F64 => numbers::<f64>(&shape, default, &fields, at)?,
                DType::I32 => numbers::<i32>(&shape, default, &fields, at)?,
                DType::I64 => numbers::<i64>(&shape, default, &fields, at)?,
                DType::Str => {
                    let read = |field: &[u8]| Some(Bytes::copy_from_slice(field));
                    let values = column(default.strings()?, &fields, at, dtype, read)?;
                    Tensor::from_strings(shape.clone(), values)?
                }
                other => {
                    return Err(Error::invalid_argument(format!("csv: data type {other} not supported in field {at}")));
                }
            };
            ctx.set_output(at, out);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::string::words;
    use crate::testing::{OpTest, check_op, tensor};

    fn csv<const N: usize>(records: [&'static str; N]) -> OpTest {
        let test = check_op("DecodeCSV").input(words(records));
        test.input(tensor::<f32, 1>([0], [])).input([7i32]).input(words(["d"]))
    }

    #[test]
    fn columns_are_read() {
        csv(["1.5,2,abc", "2,,", "  3 , 4 ,\"a,b\"", "1e2,-5,\"x\"\"y\"", "1,2,\"a\nb\""]).gives_all([
            Tensor::from([1.5f32, 2.0, 3.0, 100.0, 1.0]),
            Tensor::from([2i32, 7, 4, -5, 2]),
            words(["abc", "d", "a,b", "x\"y", "a\nb"]),
        ]);
        let texts = || check_op("DecodeCSV");
        texts()
            .attr("select_cols", vec![0i64, 2])
            .input(words(["a,b,c"]))
            .input(words([""]))
            .input(words([""]))
            .gives_all([words(["a"]), words(["c"])]);
        texts().attr("na_value", "NA").input(words(["NA,1"])).input([5.0f32]).input([1.0f32]).gives([5.0f32]);
        texts()
            .attr("use_quote_delim", false)
            .input(words(["\"a\",b"]))
            .input(words([""]))
            .input(words([""]))
            .gives(words(["\"a\""]));
        texts()
            .attr("field_delim", "\t")
            .input("1\t2")
            .input([1i64])
            .input(1.0f64)
            .gives_all([Tensor::scalar(1i64), Tensor::scalar(2.0f64)]);
    }

    #[test]
    fn bad_records_are_named() {
        csv(["1,2"]).fails("Expect 3 fields but have 2 in record 0");
        csv(["1,2,a", "1,2,3,4"]).fails("Expect 3 fields but have 4 in record 1");
        csv([""]).fails("Expect 3 fields but have 0 in record 0");
        csv(["x,2,3"]).fails("Field 0 in record 0 is not a valid float: x");
        csv(["1,2.5,a"]).fails("Field 1 in record 0 is not a valid int32: 2.5");
        csv(["1,99999999999,a"]).fails("not a valid int32");
        csv([",2,a"]).fails("Field 0 is required but missing in record 0!");
        csv(["1,2,a\"b"]).fails("Unquoted fields cannot have quotes/CRLFs inside");
        csv(["1,2,a\n"]).fails("Unquoted fields cannot have quotes/CRLFs inside");
        csv(["1,2,\"a"]).fails("Quoted field has to end with quote");
        csv(["1,2,\"a\"b"]).fails("escaped by another quote");
        csv(["1,2,a"]).attr("select_cols", vec![0i64, 2, 1]).fails("strictly increasing");
    }
}
