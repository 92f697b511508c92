//! Records and keys are TensorFlow's for the same files.

use std::io::Write;

use kolo_core::{Code, DType, Result, Tensor};
use kolo_graph::{Graph, Output};

use crate::io::bundle::checksum::Checksum;
use crate::io::files::TestDir;
use crate::string::words;
use crate::testing::Evaluation;

fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let sum = |of: &[u8]| Checksum::of(of).masked().to_le_bytes();
    [&length[..], &sum(&length), data, &sum(data)].concat()
}

/// A queue with the names of these files, closed after them.
fn names<'g>(g: &'g Graph, dir: &TestDir, files: &[&str]) -> (Output<'g>, Vec<kolo_graph::Operation<'g>>) {
    let queue = g.op("FIFOQueueV2").attr("component_types", vec![DType::Str]).attr("shared_name", "names").out();
    let list: Vec<bytes::Bytes> = files.iter().map(|file| dir.text(file).into()).collect();
    let list = g.constant(Tensor::from_strings([list.len()], list).unwrap());
    let fill = g.op("QueueEnqueueManyV2").input(queue).input(list).build();
    let close = g.op("QueueCloseV2").input(queue).control_input(fill).build();
    (queue, vec![close])
}

/// Keys (without the directory) and values of `n` reads, and what the last one more gives.
fn read(
    reader: &str,
    attrs: &[(&str, kolo_graph::AttrValue)],
    dir: &TestDir,
    files: &[&str],
    n: usize,
) -> (Vec<[String; 2]>, Code) {
    let g = crate::graph();
    let (queue, fill) = names(&g, dir, files);
    let builder = g.op(reader).attr("shared_name", "reader");
    let reader = attrs.iter().fold(builder, |builder, (name, value)| builder.attr(name, value.clone())).out();
    let outputs = g.op("ReaderReadV2").inputs([reader, queue]).build().outputs();
    let produced = g.op("ReaderNumRecordsProducedV2").input(reader).out();
    g.check().unwrap();
    let run = Evaluation::new(g.snapshot());
    run.run_targets(&fill, &[]).unwrap();
    let start = dir.text("").len();
    let text = |tensor: &Tensor| String::from_utf8(tensor.strings().unwrap()[0].to_vec()).unwrap();
    let one = || -> Result<[String; 2]> {
        let found = run.run(&outputs, &[])?;
        Ok([text(&found[0])[start..].to_owned(), text(&found[1])])
    };
    let found = (0..n).map(|i| one().unwrap_or_else(|error| panic!("record {i}: {error}"))).collect();
    let code = one().unwrap_err().code();
    assert_eq!(run.run(&[produced], &[]).unwrap(), [Tensor::scalar(n as i64)]);
    (found, code)
}

fn pairs<const N: usize>(list: [[&str; 2]; N]) -> (Vec<[String; 2]>, Code) {
    (list.iter().map(|pair| pair.map(str::to_owned)).collect(), Code::OutOfRange)
}

#[test]
fn records() {
    let dir = TestDir::new("records");
    let all: Vec<u8> = [b"rec0", b"rec1", b"rec2"].iter().flat_map(|data| record(*data)).collect();
    std::fs::write(dir.join("r"), &all).unwrap();
    let once = [["r:0", "rec0"], ["r:20", "rec1"], ["r:40", "rec2"]];
    let twice = pairs([once[0], once[1], once[2], once[0], once[1], once[2]]);
    assert_eq!(read("TFRecordReaderV2", &[], &dir, &["r", "r"], 6), twice);
    let mut packed = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::default());
    packed.write_all(&record(b"zz")).unwrap();
    std::fs::write(dir.join("z"), packed.finish().unwrap()).unwrap();
    let found = read("TFRecordReaderV2", &[("compression_type", "ZLIB".into())], &dir, &["z"], 1);
    assert_eq!(found, pairs([["z:0", "zz"]]));
    // Cut off in the second record, a broken checksum, a length that nobody could mean.
    std::fs::write(dir.join("cut"), &all[..30]).unwrap();
    assert_eq!(read("TFRecordReaderV2", &[], &dir, &["cut"], 1).1, Code::DataLoss);
    let mut wrong = all.clone();
    wrong[13] ^= 1;
    std::fs::write(dir.join("wrong"), &wrong).unwrap();
    assert_eq!(read("TFRecordReaderV2", &[], &dir, &["wrong"], 0).1, Code::DataLoss);
    let length = u64::MAX.to_le_bytes();
    std::fs::write(dir.join("long"), [&length[..], &Checksum::of(&length).masked().to_le_bytes()].concat()).unwrap();
    assert_eq!(read("TFRecordReaderV2", &[], &dir, &["long"], 0).1, Code::DataLoss);
}

#[test]
fn lines_files_and_fixed_lengths() {
    let dir = TestDir::new("lines");
    std::fs::write(dir.join("t"), "h\nl1\nl2\r\n\nl4").unwrap();
    std::fs::write(dir.join("e"), "").unwrap();
    std::fs::write(dir.join("f"), "HHabcdefghF").unwrap();
    let lines = read("TextLineReaderV2", &[("skip_header_lines", 1i64.into())], &dir, &["t"], 4);
    assert_eq!(lines, pairs([["t:2", "l1"], ["t:3", "l2"], ["t:4", ""], ["t:5", "l4"]]));
    let whole = read("WholeFileReaderV2", &[], &dir, &["t", "e"], 2);
    assert_eq!(whole, pairs([["t", "h\nl1\nl2\r\n\nl4"], ["e", ""]]));
    let fixed = |hop: i64, n: usize| {
        let sizes = [("header_bytes", 2i64), ("record_bytes", 3), ("footer_bytes", 1), ("hop_bytes", hop)];
        let attrs = sizes.map(|(name, value)| (name, value.into()));
        read("FixedLengthRecordReaderV2", &attrs, &dir, &["f"], n)
    };
    assert_eq!(fixed(0, 2), pairs([["f:0", "abc"], ["f:1", "def"]]));
    assert_eq!(fixed(2, 3), pairs([["f:0", "abc"], ["f:1", "cde"], ["f:2", "efg"]]));
    let path = dir.text("t");
    assert_eq!(read("IdentityReaderV2", &[], &dir, &["t"], 1), pairs([["t", path.as_str()]]));
    assert_eq!(read("TextLineReaderV2", &[], &dir, &["missing"], 0).1, Code::NotFound);
}

#[test]
fn several_at_a_time_and_a_reset() {
    let dir = TestDir::new("upto");
    let all: Vec<u8> = [b"rec0", b"rec1", b"rec2"].iter().flat_map(|data| record(*data)).collect();
    std::fs::write(dir.join("r"), all).unwrap();
    let g = crate::graph();
    let (queue, fill) = names(&g, &dir, &["r", "r"]);
    let reader = g.op("TFRecordReaderV2").attr("shared_name", "reader").out();
    let up_to = |n: i64| g.op("ReaderReadUpToV2").inputs([reader, queue, g.constant(n)]).build().output(1);
    let (two, none) = (up_to(2), up_to(0));
    let produced = g.op("ReaderNumRecordsProducedV2").input(reader).out();
    let reset = g.op("ReaderResetV2").input(reader).build();
    g.check().unwrap();
    let run = Evaluation::new(g.snapshot());
    run.run_targets(&fill, &[]).unwrap();
    // A call ends with a file, as in TensorFlow.
    assert_eq!(run.run(&[two], &[]).unwrap(), [words(["rec0", "rec1"])]);
    assert_eq!(run.run(&[two], &[]).unwrap(), [words(["rec2"])]);
    assert_eq!(run.run(&[two], &[]).unwrap(), [words(["rec0", "rec1"])]);
    assert_eq!(run.run(&[produced], &[]).unwrap(), [Tensor::scalar(5i64)]);
    run.run_targets(&[reset], &[]).unwrap();
    assert_eq!(run.run(&[produced], &[]).unwrap(), [Tensor::scalar(0i64)]);
    assert_eq!(run.run(&[two], &[]).unwrap_err().code(), Code::OutOfRange, "the file that was begun is forgotten");
    assert_eq!(run.run(&[none], &[]).unwrap_err().code(), Code::InvalidArgument);
}
