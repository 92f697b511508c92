//! `checkpoint`: a gigabyte of variables, saved in the foreground and while training goes on.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use crate::train::SaverBuilder;
use crate::{Error, Initializer, Result, Session, Tensor};

use super::measure::{Better, Report, median};

const N_VARIABLES: usize = 16;
/// 64 MB of floats each.
const N_ELEMENTS: usize = 16_000_000;
const N_BYTES: f64 = (N_VARIABLES * N_ELEMENTS * 4) as f64;
const N_SAMPLES: usize = 6;

pub fn run(report: &Report) -> Result<()> {
    let folder = Folder::new()?;
    let g = crate::graph();
    let small = Initializer::Uniform { low: -0.05, high: 0.05 };
    let variables: Vec<_> =
        (0..N_VARIABLES).map(|i| g.new_variable(&format!("w{i}"), small.clone()).shape([N_ELEMENTS]).build()).collect();
    let updates: Vec<_> = variables.iter().map(|w| w.assign_sub(w.read() * 1e-4)).collect();
    let train = g.group("train", &updates);
    let init = g.global_variables_initializer();
    let saver = SaverBuilder::new(&g).max_to_keep(1).build()?;
    let session = Arc::new(Session::new(&g)?);
    session.run_op(init)?;
    let step = session.make_callable(&[], &[], &[train])?;
    let timed = |body: &mut dyn FnMut() -> Result<()>| -> Result<f64> {
        let start = Instant::now();
        body()?;
        Ok(start.elapsed().as_secs_f64())
    };

    // Plain writes and saves in turn, each to new files and either first, so that the disk and the system's cache are
    // in the same mood for both. The first two warm up.
    let reads: Vec<_> = variables.iter().map(|w| w.read()).collect();
    let (mut writes, mut of_plain) = (Vec::new(), Vec::new());
    for i in 0..N_SAMPLES + 2 {
        let values = session.run(&reads, &[], &[])?;
        let save = || timed(&mut || saver.save(&session, folder.0.join("m"), None).map(drop));
        let plain = || timed(&mut || write_plainly(&folder.0.join("plain"), &values));
        let (save, plain) = match i % 2 {
            0 => {
                let plain = plain()?;
                (save()?, plain)
            }
            _ => (save()?, plain()?),
        };
        folder.clear();
        if i > 1 {
            writes.push(N_BYTES / save / 1e6);
            of_plain.push(plain / save);
        }
    }
    report.print("checkpoint", "write", "MB/s", Better::Higher, &writes)?;
    report.print("checkpoint", "write-of-plain", "x", Better::Higher, &of_plain)?;

    let alone = (0..2 + N_SAMPLES).map(|_| timed(&mut || step.call(&[]).map(drop))).collect::<Result<Vec<f64>>>()?;
    let alone = median(&alone[2..]);
    let (mut pauses, mut costs) = (Vec::new(), Vec::new());
    for i in 0..=N_SAMPLES {
        let start = Instant::now();
        let save = saver.save_in_background(&session, folder.0.join("m"), None)?;
        let pause = start.elapsed().as_secs_f64();
        // What training loses until the save has ended: the pause, and what the steps meanwhile take longer.
        let (mut n_steps, begun) = (0, Instant::now());
        while !save.is_done() {
            step.call(&[])?;
            n_steps += 1;
        }
        let cost = pause + begun.elapsed().as_secs_f64() - f64::from(n_steps) * alone;
        save.wait()?;
        folder.clear();
        if i > 0 {
            pauses.push(pause * 1e3);
            costs.push(cost * 1e3);
        }
    }
    report.print("checkpoint", "pause", "ms", Better::Lower, &pauses)?;
    report.print("checkpoint", "cost", "ms", Better::Lower, &costs)
}

/// What any program would do: write the bytes, and wait until they are on the disk, as a save does.
fn write_plainly(path: &Path, values: &[Tensor]) -> Result<()> {
    let failed =
        |error: std::io::Error| Error::failed_precondition(format!("cannot write {}: {error}", path.display()));
    let mut file = File::create(path).map_err(failed)?;
    for value in values {
        file.write_all(value.host_bytes()?).map_err(failed)?;
    }
    file.sync_all().map_err(failed)
}

/// A folder for the files, in `KOLO_BENCH_DIR` or the system's temporary folder; removed in the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Folder> {
        let parent = std::env::var_os("KOLO_BENCH_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
        let path = parent.join(format!("kolo-bench-checkpoint-{}", std::process::id()));
        fs::create_dir_all(&path)
            .map_err(|error| Error::failed_precondition(format!("cannot make {}: {error}", path.display())))?;
        Ok(Folder(path))
    }
}

impl Folder {
    /// Removes the files.
    fn clear(&self) {
        for entry in fs::read_dir(&self.0).into_iter().flatten().flatten() {
            let _ = fs::remove_file(entry.path());
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
