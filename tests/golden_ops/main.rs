//! Every op against TensorFlow, without TensorFlow: `tests/golden` holds graphs that it made and what it computed from
//! them (`conformance/ops` makes them; its README says how). Each case runs twice, once as it is and once with its
//! inputs fed as tensors of unknown shape, so that neither shape inference nor kernels can lean on the other.
//!
//! `KOLO_GOLDEN` names another folder to check, `KOLO_GOLDEN_ONLY` keeps the cases whose name contains it, and
//! `KOLO_GOLDEN_DEVICE=gpu` runs on a GPU what has a kernel there.

#![allow(clippy::unwrap_used)]

mod case;
mod compare;
mod coverage;
mod folder;
mod known;
mod run;
mod signatures;
mod train;

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use case::Case;
use known::Known;

/// A case that takes longer is named, since each should take milliseconds.
const SLOW: Duration = Duration::from_secs(10);

/// The folder of this package's own files.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn golden() -> PathBuf {
    std::env::var_os("KOLO_GOLDEN").map_or_else(|| root().join("tests/golden"), PathBuf::from)
}

fn unzip(path: &Path) -> Vec<u8> {
    let file = std::fs::File::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).unwrap();
    bytes
}

/// All cases of all areas. A file is a row of GraphDefs, each behind its length in four bytes.
fn cases() -> Vec<Case> {
    let only = std::env::var("KOLO_GOLDEN_ONLY").unwrap_or_default();
    let mut paths: Vec<PathBuf> = std::fs::read_dir(golden()).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.to_string_lossy().ends_with(".pb.gz"));
    paths.sort();
    let mut cases = Vec::new();
    for path in paths {
        let bytes = unzip(&path);
        let mut rest = &bytes[..];
        while let Some((length, tail)) = rest.split_first_chunk::<4>() {
            let (def, tail) = tail.split_at(u32::from_le_bytes(*length) as usize);
            cases.push(Case::read(def).unwrap_or_else(|error| panic!("{}: {error}", path.display())));
            rest = tail;
        }
    }
    cases.retain(|case| case.name.contains(&only));
    cases
}

/// The ops of `cases` that Kolo does not have; such cases wait for them.
fn absent_ops(cases: &[Case]) -> BTreeSet<String> {
    let ops = cases.iter().flat_map(|case| &case.ops);
    ops.filter(|op| kolo_ops::find_op(op).is_err()).cloned().collect()
}

#[test]
fn every_case_agrees_with_tensorflow() {
    let mut cases = cases();
    assert!(!cases.is_empty(), "no cases in {}", golden().display());
    let absent = absent_ops(&cases);
    let n_all = cases.len();
    cases.retain(|case| !case.ops.iter().any(|op| absent.contains(op)));
    let (next, complaints) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..n_threads {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let begin = Instant::now();
                    let found = run::check(case);
                    if begin.elapsed() > SLOW {
                        println!("slow: {} took {:.1} s", case.name, begin.elapsed().as_secs_f64());
                    }
                    complaints
                        .lock()
                        .unwrap()
                        .extend(found.into_iter().map(|(mode, why)| (case.name.clone(), mode, why)));
                }
            });
        }
    });
    let mut complaints = complaints.into_inner().unwrap();
    complaints.sort();
    let mut known = Known::read(&root().join("conformance/ops/known.txt"));
    if run::on_gpu() {
        known.add(Known::read(&root().join("conformance/ops/known_gpu.txt")));
    }
    let (expected, unexpected): (Vec<_>, Vec<_>) =
        complaints.into_iter().partition(|(name, mode, _)| known.covers(name, mode));
    for (name, mode, why) in &unexpected {
        println!("FAILED {name} ({mode}): {why}");
    }
    let names = |list: &[(String, &str, String)]| list.iter().map(|(name, ..)| name.clone()).collect::<BTreeSet<_>>();
    let (failed, listed) = (names(&unexpected), names(&expected));
    let n_known = listed.difference(&failed).count();
    println!("{} passed, {} failed, {n_known} known to differ", cases.len() - failed.len() - n_known, failed.len());
    if n_all > cases.len() {
        println!("not run: {} cases of ops that are not there yet: {absent:?}", n_all - cases.len());
    }
    for line in known.used(&expected) {
        println!("known: {line}");
    }
    assert!(failed.is_empty(), "{} cases disagree with TensorFlow; see above", failed.len());
    if std::env::var_os("KOLO_GOLDEN_ONLY").is_none() {
        assert_eq!(known.unused(&expected), Vec::<String>::new(), "these lines of known.txt are no longer true");
    }
}
