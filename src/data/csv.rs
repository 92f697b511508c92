//! Tables as comma-separated values: named columns, each of one type.

use std::path::Path;

use csv::{ReaderBuilder, StringRecord, Trim};
use kolo_core::{DType, Error, Result, Tensor};
use prost::bytes::Bytes;

use super::file::Input;
use super::{Dataset, io_error};

/// The longest file that is read into memory.
const MAX_BYTES: u64 = 4 << 30;

/// How a table is read.
///
/// ```
/// use kolo::data::csv::{Csv, Missing};
/// use kolo::{DType, Tensor};
///
/// let table = Csv::new()
///     .column("age", DType::F32)
///     .column("city", DType::Str)
///     .missing(Missing::Fill(0.0))
///     .parse("people", "city,age\nVienna,30\nGraz,\n")?;
/// assert_eq!(table.column("age")?, &Tensor::from([30.0f32, 0.0]));
/// # Ok::<(), kolo::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Csv {
    wanted: Vec<(String, DType)>,
    has_header: bool,
    delimiter: u8,
    missing: Missing,
}

/// What becomes of a cell with nothing in it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Missing {
    /// It is an error, which names line and column.
    #[default]
    Refuse,
    /// It becomes this number; in columns of strings, the empty string.
    Fill(f64),
    /// Its whole row is left out.
    SkipRow,
}

/// Columns of equal length.
#[derive(Clone, Debug)]
pub struct Table {
    columns: Vec<(String, Tensor)>,
}

impl Default for Csv {
    fn default() -> Csv {
        Csv::new()
    }
}

impl Csv {
    /// Cells between commas, with names in the first line, none of them missing.
    pub fn new() -> Csv {
        Csv { wanted: Vec::new(), has_header: true, delimiter: b',', missing: Missing::Refuse }
    }

    /// Reads the column of this name: `float`, `double`, `int32`, `int64`, `uint8`, `bool` or `string`. If none are asked
    /// for, all are read: as `float` where every cell is a number, else as `string`.
    pub fn column(mut self, name: &str, dtype: DType) -> Csv {
        self.wanted.push((name.to_owned(), dtype));
        self
    }

    /// There are no names in the first line; columns are called `0`, `1`, and so on.
    pub fn no_header(mut self) -> Csv {
        self.has_header = false;
        self
    }

    /// Another delimiter than the comma, such as `b';'` or `b'\t'`.
    pub fn delimiter(mut self, delimiter: u8) -> Csv {
        self.delimiter = delimiter;
        self
    }

    /// What becomes of cells with nothing in them.
    pub fn missing(mut self, missing: Missing) -> Csv {
        self.missing = missing;
        self
    }

    /// Reads a file, gzipped or not.
    pub fn read(&self, path: impl AsRef<Path>) -> Result<Table> {
        let path = path.as_ref();
        let bytes = Input::open(path)?.read_rest(MAX_BYTES)?;
        self.parse_bytes(&path.display().to_string(), &bytes)
    }

    /// Reads text; `name` is for errors.
    pub fn parse(&self, name: &str, text: &str) -> Result<Table> {
        self.parse_bytes(name, text.as_bytes())
    }

    fn parse_bytes(&self, name: &str, bytes: &[u8]) -> Result<Table> {
        let mut reader = ReaderBuilder::new()
            .has_headers(self.has_header)
            .delimiter(self.delimiter)
            .trim(Trim::All)
            .from_reader(bytes);
        let names: Vec<String> = match self.has_header {
            true => reader.headers().map_err(|reason| wrong(name, &reason))?.iter().map(str::to_owned).collect(),
            false => Vec::new(),
        };
        let mut rows = Vec::new();
        for row in reader.records() {
            rows.push(row.map_err(|reason| wrong(name, &reason))?);
        }
        let n_columns = rows.first().map_or(names.len(), StringRecord::len);
        let names = if self.has_header { names } else { (0..n_columns).map(|i| i.to_string()).collect() };
        let wanted = self.wanted_columns(name, &names, &rows)?;
        if self.missing == Missing::SkipRow {
            rows.retain(|row| wanted.iter().all(|(i, ..)| !row[*i].is_empty()));
        }
        let mut columns = Vec::new();
        for (i, column, dtype) in wanted {
            let tensor = self.read_column(&rows, i, dtype);
            columns.push((
                column.clone(),
                tensor.map_err(|error| error.context(format_args!("{name}: column '{column}'")))?,
            ));
        }
        Ok(Table { columns })
    }

    /// The place, name and dtype of every column to read.
    fn wanted_columns(
        &self,
        name: &str,
        names: &[String],
        rows: &[StringRecord],
    ) -> Result<Vec<(usize, String, DType)>> {
        if self.wanted.is_empty() {
            let is_number = |i: usize| rows.iter().all(|row| row[i].is_empty() || row[i].parse::<f32>().is_ok());
            let dtype = |i: usize| if is_number(i) { DType::F32 } else { DType::Str };
            return Ok(names.iter().enumerate().map(|(i, column)| (i, column.clone(), dtype(i))).collect());
        }
        let find = |(column, dtype): &(String, DType)| match names.iter().position(|name| name == column) {
            Some(i) => Ok((i, column.clone(), *dtype)),
            None => {
                Err(Error::not_found(format!("{name}: there is no column '{column}'; there are: {}", names.join(", "))))
            }
        };
        self.wanted.iter().map(find).collect()
    }

    fn read_column(&self, rows: &[StringRecord], i: usize, dtype: DType) -> Result<Tensor> {
        let fill = match self.missing {
            Missing::Fill(fill) => Some(fill),
            Missing::Refuse | Missing::SkipRow => None,
        };
        let bools = |cell: &str| match cell.to_ascii_lowercase().as_str() {
            "1" | "true" | "yes" => Some(true),
            "0" | "false" | "no" => Some(false),
            _ => None,
        };
        match dtype {
            DType::F32 => cells(rows, i, dtype, fill.map(|x| x as f32), |cell| cell.parse().ok()).map(Tensor::from),
            DType::F64 => cells(rows, i, dtype, fill, |cell| cell.parse().ok()).map(Tensor::from),
            DType::I32 => cells(rows, i, dtype, fill.map(|x| x as i32), |cell| cell.parse().ok()).map(Tensor::from),
            DType::I64 => cells(rows, i, dtype, fill.map(|x| x as i64), |cell| cell.parse().ok()).map(Tensor::from),
            DType::U8 => cells(rows, i, dtype, fill.map(|x| x as u8), |cell| cell.parse().ok()).map(Tensor::from),
            DType::Bool => cells(rows, i, dtype, fill.map(|x| x != 0.0), bools).map(Tensor::from),
            DType::Str => {
                let text = |cell: &str| Some(Bytes::copy_from_slice(cell.as_bytes()));
                let strings = cells(rows, i, dtype, fill.map(|_| Bytes::new()), text)?;
                Tensor::from_strings([strings.len()], strings)
            }
            other => Err(Error::unimplemented(format!(
                "cells are read as float, double, int32, int64, uint8, bool or string, not as {other}"
            ))),
        }
    }
}

/// One column's values.
fn cells<T: Clone>(
    rows: &[StringRecord],
    i: usize,
    dtype: DType,
    fill: Option<T>,
    read: impl Fn(&str) -> Option<T>,
) -> Result<Vec<T>> {
    let line = |row: &StringRecord| row.position().map_or(0, |position| position.line());
    let cell = |row: &StringRecord| match (&row[i], &fill) {
        ("", Some(fill)) => Ok(fill.clone()),
        ("", None) => Err(Error::invalid_argument(format!(
            "line {}: a value is missing; fill missing values or skip their rows",
            line(row)
        ))),
        (text, _) => read(text).ok_or_else(|| {
            let at = row.position().map_or(0, |position| position.byte());
            Error::invalid_argument(format!("line {}: expected {dtype}, found '{text}' (row at byte {at})", line(row)))
        }),
    };
    rows.iter().map(cell).collect()
}

fn wrong(name: &str, reason: &csv::Error) -> Error {
    match reason.kind() {
        csv::ErrorKind::Io(reason) => io_error(name, reason),
        csv::ErrorKind::UnequalLengths { pos, expected_len, len } => {
            let (line, at) = pos.as_ref().map_or((0, 0), |pos| (pos.line(), pos.byte()));
            Error::data_loss(format!(
                "{name}: line {line}: expected {expected_len} cells, found {len} (row at byte {at})"
            ))
        }
        _ => Error::data_loss(format!("{name}: {reason}")),
    }
}

impl Table {
    /// How many rows there are.
    pub fn len(&self) -> usize {
        self.columns.first().map_or(0, |(_, column)| column.n_elements())
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The names of the columns.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.columns.iter().map(|(name, _)| name.as_str())
    }

    /// The column of this name, a list.
    pub fn column(&self, name: &str) -> Result<&Tensor> {
        let found = self.columns.iter().find(|(column, _)| column == name);
        found.map(|(_, tensor)| tensor).ok_or_else(|| {
            let names: Vec<&str> = self.names().collect();
            Error::not_found(format!("there is no column '{name}'; there are: {}", names.join(", ")))
        })
    }

    /// All numeric columns but `without`, side by side as `float[n, columns]`: the features of a model.
    pub fn matrix(&self, without: &[&str]) -> Result<Tensor> {
        let is_kept =
            |(name, tensor): &&(String, Tensor)| !without.contains(&name.as_str()) && tensor.dtype() != DType::Str;
        let columns: Vec<Vec<f32>> =
            self.columns.iter().filter(is_kept).map(|(_, tensor)| super::column::to_f32s(tensor)).collect();
        let n = self.len();
        let values = (0..n).flat_map(|row| columns.iter().map(move |column| column[row])).collect();
        Tensor::from_vec([n, columns.len()], values)
    }

    /// A data set of the rows, with the columns in their order.
    pub fn dataset(&self) -> Dataset {
        Dataset::new(self.columns.iter().map(|(_, tensor)| tensor.clone()))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const TEXT: &str = "name, height,is_tall,n\nAda,1.65,no,3\n\"Bo, Jr\",1.9,yes,-4\n";

    #[test]
    fn columns_have_names_and_types() {
        let csv = Csv::new().column("height", DType::F32).column("n", DType::I64).column("name", DType::Str);
        let table = csv.column("is_tall", DType::Bool).parse("t", TEXT).unwrap();
        assert_eq!(table.column("height").unwrap(), &Tensor::from([1.65f32, 1.9]));
        assert_eq!(table.column("n").unwrap(), &Tensor::from([3i64, -4]));
        assert_eq!(table.column("is_tall").unwrap(), &Tensor::from([false, true]));
        assert_eq!(table.column("name").unwrap().strings().unwrap()[1], "Bo, Jr");
        assert_eq!(table.matrix(&["is_tall"]).unwrap(), Tensor::from([[1.65f32, 3.0], [1.9, -4.0]]));
        assert_eq!(table.dataset().len(), Some(2));
        assert!(table.column("x").unwrap_err().message().contains("there are: height, n, name, is_tall"));
    }

    #[test]
    fn types_are_found_where_none_are_stated() {
        let table = Csv::new().parse("t", TEXT).unwrap();
        let dtypes: Vec<_> = table.names().map(|name| table.column(name).unwrap().dtype()).collect();
        assert_eq!(dtypes, [DType::Str, DType::F32, DType::Str, DType::F32]);
        let table = Csv::new().no_header().delimiter(b';').parse("t", "1;2\n3;4\n").unwrap();
        assert_eq!(table.matrix(&[]).unwrap(), Tensor::from([[1.0f32, 2.0], [3.0, 4.0]]));
        assert!(Csv::new().parse("t", "").unwrap().is_empty());
        assert_eq!(Csv::new().parse("t", "a,b\n").unwrap().names().count(), 2);
    }

    #[test]
    fn a_missing_value_is_what_the_reader_says() {
        let text = "a,b\n1,x\n,y\n3,\n";
        let csv = Csv::new().column("a", DType::I32).column("b", DType::Str);
        let error = csv.parse("t.csv", text).unwrap_err();
        assert!(error.message().contains("t.csv: column 'a': line 3: a value is missing"), "{error}");
        let filled = csv.clone().missing(Missing::Fill(-1.0)).parse("t", text).unwrap();
        assert_eq!(filled.column("a").unwrap(), &Tensor::from([1, -1, 3]));
        assert_eq!(filled.column("b").unwrap().strings().unwrap()[2], "");
        let skipped = csv.missing(Missing::SkipRow).parse("t", text).unwrap();
        assert_eq!((skipped.len(), skipped.column("a").unwrap()), (1, &Tensor::from([1])));
    }

    #[test]
    fn errors_say_line_column_and_byte() {
        let says = |csv: Csv, text: &str, expected: &str| {
            let error = csv.parse("t", text).unwrap_err();
            assert!(error.message().contains(expected), "{error}");
        };
        let typed = |dtype| Csv::new().column("a", dtype);
        says(typed(DType::I32), "a\n1\nx\n", "t: column 'a': line 3: expected int32, found 'x' (row at byte 4)");
        says(typed(DType::U8), "a\n300\n", "expected uint8, found '300'");
        says(typed(DType::Bool), "a\nmaybe\n", "expected bool, found 'maybe'");
        says(typed(DType::F16), "a\n1\n", "not as half");
        says(typed(DType::F32), "b\n1\n", "t: there is no column 'a'; there are: b");
        says(Csv::new(), "a,b\n1,2\n3\n", "t: line 3: expected 2 cells, found 1 (row at byte 8)");
    }

    #[test]
    fn bytes_that_are_not_text_are_an_error() {
        assert!(Csv::new().parse_bytes("t", b"a\n\xff\n").unwrap_err().message().starts_with("t: "));
    }
}
