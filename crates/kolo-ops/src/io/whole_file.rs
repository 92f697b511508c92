//! `ReadFile`, `WriteFile`: the contents of a file as a string. `MatchingFiles`: the files whose names match patterns.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use kolo_core::{Error, PartialShape, Result, Tensor};
use kolo_graph::{Effects, Gradient, OpDef, Operation, Output, shape_fns};

use super::FileAccess;
use super::files::{file_error, write_whole_within};
use super::on_thread::{Request, make, path_of};
use crate::Cost;
use crate::op::{Gpu, KernelMaker, Op, cpu_made};

/// The contents of a file.
#[track_caller]
pub fn read_file(filename: Output<'_>) -> Output<'_> {
    filename.graph().op("ReadFile").input(filename).out()
}

/// Writes a file, and the directories above it.
#[track_caller]
pub fn write_file<'g>(filename: Output<'g>, contents: Output<'g>) -> Operation<'g> {
    filename.graph().op("WriteFile").inputs([filename, contents]).build()
}

/// The names of the files that match patterns with `*`, `?` and `[…]`, sorted.
#[track_caller]
pub fn matching_files(pattern: Output<'_>) -> Output<'_> {
    pattern.graph().op("MatchingFiles").input(pattern).out()
}

pub(crate) static READ_FILE: Op = Op {
    def: OpDef {
        name: "ReadFile",
        signature: "(filename:string) -> (contents:string)",
        shape: |ctx| {
            ctx.input_of_rank(0, 0)?;
            shape_fns::scalars(ctx)
        },
        gradient: Gradient::None("a file does not depend on a graph"),
        effects: Effects::Outside,
        ..OpDef::BASE
    },
    kernels: &[cpu_made(KernelMaker::Async(|init| make(init, read)))],
    gpu: Gpu::FILES,
    cost: Cost::Inline,
};

pub(crate) static WRITE_FILE: Op = Op {
    def: OpDef {
        name: "WriteFile",
        signature: "(filename:string, contents:string) -> ()",
        shape: |ctx| {
            ctx.input_of_rank(0, 0)?;
            ctx.input_of_rank(1, 0)?;
            Ok(Vec::new())
        },
        gradient: Gradient::None("nothing comes out"),
        stateful: true,
        effects: Effects::Outside,
        ..OpDef::BASE
    },
    kernels: &[cpu_made(KernelMaker::Async(|init| make(init, write)))],
    gpu: Gpu::FILES,
    cost: Cost::Inline,
};

pub(crate) static MATCHING_FILES: Op = Op {
    def: OpDef {
        name: "MatchingFiles",
        signature: "(pattern:string) -> (filenames:string)",
        shape: |ctx| match ctx.input(0).rank() {
            Some(rank) if rank > 1 => Err(not_a_list(ctx.input(0))),
            _ => Ok(vec![PartialShape::of_rank(1)]),
        },
        gradient: Gradient::None("names are not numbers"),
        effects: Effects::Outside,
        ..OpDef::BASE
    },
    kernels: &[cpu_made(KernelMaker::Async(|init| make(init, matching)))],
    gpu: Gpu::FILES,
    cost: Cost::Inline,
};

/// All of a file; an error if it is none. A device or a pipe might never end.
pub(crate) fn contents(path: &Path, access: &FileAccess) -> Result<Vec<u8>> {
    let fails = |error: std::io::Error| file_error("cannot read", path, &error);
    // A pipe would be waited for until somebody writes.
    if !fs::metadata(path).map_err(fails)?.is_file() {
        return Err(Error::failed_precondition(format!("cannot read {}: it is not a file", path.display())));
    }
    let mut file = access.open(path).map_err(fails)?;
    // Of what was opened: the name may be another's by now.
    let about = file.metadata().map_err(fails)?;
    if !about.is_file() {
        return Err(Error::failed_precondition(format!("cannot read {}: it is not a file", path.display())));
    }
    let mut contents = Vec::new();
    let n = usize::try_from(about.len()).unwrap_or(usize::MAX);
    contents
        .try_reserve_exact(n)
        .map_err(|_| Error::resource_exhausted(format!("OOM when reading the {n} bytes of {}", path.display())))?;
    file.read_to_end(&mut contents).map_err(fails)?;
    Ok(contents)
}

fn read(request: &Request) -> Result<Vec<Tensor>> {
    let path = request.path(request.text(0, "Input filename")?)?;
    Ok(vec![Tensor::string(contents(&path, request.access())?)])
}

fn write(request: &Request) -> Result<Vec<Tensor>> {
    let path = request.path(request.text(0, "Input filename")?)?;
    write_whole_within(request.access(), &path, request.text(1, "Contents")?, 0o666)?;
    Ok(Vec::new())
}

fn not_a_list(shape: &dyn std::fmt::Display) -> Error {
    Error::invalid_argument(format!("Input patterns tensor must be scalar or vector, but had shape: {shape}"))
}

fn matching(request: &Request) -> Result<Vec<Tensor>> {
    if request.inputs[0].shape().rank() > 1 {
        return Err(not_a_list(request.inputs[0].shape()));
    }
    let mut names: Vec<String> = Vec::new();
    for pattern in request.inputs[0].strings()? {
        path_of(pattern)?;
        let pattern = String::from_utf8_lossy(pattern);
        let found = expand(&pattern, request)?;
        names.extend(found.into_iter().filter_map(|path| path.to_str().map(str::to_owned)));
    }
    names.sort();
    let n = names.len();
    Ok(vec![Tensor::from_strings([n], names.into_iter().map(Bytes::from).collect())?])
}

/// The paths that match a pattern, part by part.
fn expand(pattern: &str, request: &Request) -> Result<Vec<PathBuf>> {
    let root = if pattern.starts_with('/') { PathBuf::from("/") } else { PathBuf::new() };
    let mut paths = vec![root];
    for part in pattern.split('/').filter(|part| !part.is_empty()) {
        if !part.contains(['*', '?', '[', '\\']) {
            paths = paths.into_iter().map(|path| path.join(part)).collect();
            continue;
        }
        let mut next = Vec::new();
        for path in paths {
            let directory = if path.as_os_str().is_empty() { Path::new(".") } else { path.as_path() };
            if !request.may_touch(&directory.join("x")) {
                // The directory itself says why, once for all that it holds.
                request.path(directory.to_string_lossy().as_bytes())?;
                continue;
            }
            // What is not a directory, or cannot be read, holds nothing that matches.
            let Ok(names) = request.access().list(directory) else { continue };
            for name in names {
                if name.to_str().is_some_and(|name| matches(part.as_bytes(), name.as_bytes())) {
                    next.push(path.join(name));
                }
            }
        }
        paths = next;
    }
    paths.retain(|path| !path.as_os_str().is_empty() && path.exists());
    paths.iter().try_for_each(|path| request.path(path.to_string_lossy().as_bytes()).map(drop))?;
    Ok(paths)
}

/// Whether a name matches a pattern of one part. Goes back to the last `*` only, so that it takes no more than the product
/// of both lengths.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        if pattern.get(p) == Some(&b'*') {
            star = Some((p, n));
            p += 1;
        } else if let Some(length) = matches_one(&pattern[p.min(pattern.len())..], name[n]) {
            p += length;
            n += 1;
        } else if let Some((at, from)) = star {
            p = at + 1;
            n = from + 1;
            star = Some((at, from + 1));
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|&byte| byte == b'*')
}

/// How much of the pattern stands for one character, if this one fits.
fn matches_one(pattern: &[u8], byte: u8) -> Option<usize> {
    match pattern {
        [b'?', ..] => Some(1),
        [b'\\', escaped, ..] => (*escaped == byte).then_some(2),
        [b'[', class @ ..] => {
            let (negated, class) = match class {
                [b'!' | b'^', rest @ ..] => (true, rest),
                _ => (false, class),
            };
            // A closing bracket that comes first is an ordinary character.
            let end = class.iter().skip(1).position(|&byte| byte == b']')? + 1;
            let (mut found, mut i) = (false, 0);
            while i < end {
                if i + 2 < end && class[i + 1] == b'-' {
                    found |= (class[i]..=class[i + 2]).contains(&byte);
                    i += 3;
                } else {
                    found |= class[i] == byte;
                    i += 1;
                }
            }
            (found != negated).then_some(1 + usize::from(negated) + end + 1)
        }
        [first, ..] => (*first == byte).then_some(1),
        [] => None,
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::Code;

    use super::*;
    use crate::io::files::{TestDir, write_whole};
    use crate::testing::{Evaluation, check_op};

    #[test]
    fn what_is_written_is_read() {
        let dir = TestDir::new("whole");
        let g = crate::graph();
        let name = g.constant(Tensor::string(dir.text("sub/y")));
        let write = write_file(name, g.constant("hi"));
        let read = read_file(name);
        g.check().unwrap();
        let run = Evaluation::new(g.snapshot());
        assert_eq!(run.run(&[read], &[]).unwrap_err().code(), Code::NotFound);
        run.run_targets(&[write], &[]).unwrap();
        assert_eq!(run.run(&[read], &[]).unwrap(), [Tensor::string("hi")]);
        let directory = check_op("ReadFile").input(Tensor::string(dir.text("sub")));
        assert_eq!(directory.run(true).unwrap_err().code(), Code::FailedPrecondition);
    }

    #[test]
    fn names_are_matched() {
        let dir = TestDir::new("matching");
        for name in ["b1", "a1", "a2", "sub/a9"] {
            write_whole(&dir.join(name), b"").unwrap();
        }
        let found = |patterns: &[&str]| -> Vec<String> {
            let list: Vec<Bytes> = patterns.iter().map(|pattern| Bytes::from(dir.text(pattern))).collect();
            let input = Tensor::from_strings([list.len()], list).unwrap();
            let out = check_op("MatchingFiles").input(input).run(false).unwrap().remove(0);
            let start = dir.text("").len();
            out.strings().unwrap().iter().map(|name| String::from_utf8_lossy(name)[start..].to_owned()).collect()
        };
        // As TensorFlow finds them.
        assert_eq!(found(&["a*"]), ["a1", "a2"]);
        assert_eq!(found(&["*"]), ["a1", "a2", "b1", "sub"]);
        assert_eq!(found(&["[ab]1"]), ["a1", "b1"]);
        assert_eq!(found(&["?1"]), ["a1", "b1"]);
        assert_eq!(found(&["*/a*"]), ["sub/a9"]);
        assert_eq!(found(&["nope*"]), [""; 0]);
        assert_eq!(found(&["a1"]), ["a1"]);
        assert_eq!(found(&["b*", "a*"]), ["a1", "a2", "b1"]);
    }

    #[test]
    fn patterns() {
        let all = |pattern: &str, name: &str| matches(pattern.as_bytes(), name.as_bytes());
        assert!(all("a*b*c", "axxbyyc") && !all("a*b*c", "axxbyy"));
        assert!(all("[!a-c]x", "dx") && !all("[!a-c]x", "bx"));
        assert!(all("[]a]", "]") && all(r"\*", "*") && !all(r"\*", "x"));
        assert!(all("*", "") && all("**", "x") && !all("[", "["));
        assert!(!all(&"*a".repeat(50), &"a".repeat(49)), "and without taking for ever");
    }
}
