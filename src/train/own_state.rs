//! What each rank has of its own, such as what it has not sent of its gradients: saved beside a checkpoint, with a row for each rank.
//!
//! ```text
//!   DIR/model.ckpt-100.index, …       what all ranks have alike
//!   DIR/model.ckpt-100.ranks          a safetensors file: for each variable the values of all ranks, one below the other
//! ```
//!
//! As many ranks as have saved get their own values back, and go on as if nothing had happened, to the bit. Another number of ranks
//! get the mean each: what all of them together have not sent, as a mean over the ranks, is what it was.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kolo_core::{DType, Error, Result, Shape, Tensor};
use kolo_graph::{Graph, Variable};
use kolo_runtime::Session;

use super::safetensors::{read_safetensors, write_safetensors};
use super::saver::checkpoint_exists;
use crate::parallel::{OF_ONE_RANK, World};

/// The variables of which each rank has its own values.
pub(super) struct OwnState<'g> {
    variables: Vec<Variable<'g>>,
}

/// The values of all ranks, by the names of the variables, one row for each rank. Rank 0 has them.
pub(super) type OfAllRanks = BTreeMap<String, Tensor>;

const EXTENSION: &str = "ranks";

impl<'g> OwnState<'g> {
    /// Those that [`DataParallel::steps`](crate::parallel::DataParallel::steps) has added to the graph.
    pub fn of(graph: &'g Graph) -> Result<OwnState<'g>> {
        let variables =
            graph.collection(OF_ONE_RANK).iter().map(|name| graph.find_variable(name)).collect::<Result<_>>()?;
        Ok(OwnState { variables })
    }

    /// Whether there is nothing of the kind.
    pub fn is_empty(&self) -> bool {
        self.variables.is_empty()
    }

    /// The values of all ranks, for rank 0. All ranks call it.
    pub fn gather(&self, world: &World, session: &Session) -> Result<OfAllRanks> {
        let reads: Vec<_> = self.variables.iter().map(|variable| variable.read()).collect();
        let mut all = OfAllRanks::new();
        for (variable, value) in self.variables.iter().zip(session.run(&reads, &[], &[])?) {
            let n = value.n_elements();
            all.insert(variable.name(), world.gather(value.reshaped(Shape::new(&[1, n])?)?, 0)?);
        }
        Ok(all)
    }

    /// Gives each rank its values beside the checkpoint that rank 0 has restored; nothing if there are none. All ranks call it.
    pub fn restore(&self, world: &World, session: &Session, prefix: Option<&str>) -> Result<()> {
        let saved = self.read(prefix);
        // An error of rank 0 is one of all ranks, and no wait of the others for it.
        let n_saved = match &saved {
            Ok(saved) => saved.values().next().map_or(0, |first| first.shape()[0] as i64),
            Err(_) => -1,
        };
        let n_saved = world.broadcast(vec![Tensor::scalar(n_saved)], 0)?[0].scalar_value::<i64>()?;
        let mut saved = saved?;
        if n_saved < 0 {
            return Err(Error::data_loss("rank 0 cannot read what ranks had of their own"));
        }
        if n_saved == 0 {
            return Ok(());
        }
        let mut feeds = Vec::with_capacity(self.variables.len());
        for variable in &self.variables {
            let shape =
                variable.shape().known().ok_or_else(|| Error::internal("a variable of a rank without a shape"))?;
            let (n, dtype) = (shape.n_elements(), variable.dtype());
            let of_all = saved.remove(&variable.name());
            let own = match n_saved as usize == world.size() {
                true => {
                    let rows = Shape::new(&[world.size(), n])?;
                    world.scatter(of_all.map_or_else(|| Tensor::zeros(dtype, rows), Ok)?, 0)?
                }
                false => {
                    let mean = match of_all {
                        Some(of_all) => mean_row(&of_all)?,
                        None => Tensor::zeros(dtype, Shape::new(&[n])?)?,
                    };
                    world.broadcast(vec![mean], 0)?.remove(0)
                }
            };
            feeds.push((*variable, own.reshaped(shape)?));
        }
        let inputs: Vec<String> = feeds.iter().map(|(variable, _)| variable.initializer().input(1).name()).collect();
        let initializers: Vec<String> = feeds.iter().map(|(variable, _)| variable.initializer().name()).collect();
        let named: Vec<(&str, Tensor)> =
            inputs.iter().zip(feeds).map(|(name, (_, value))| (name.as_str(), value)).collect();
        let targets: Vec<&str> = initializers.iter().map(String::as_str).collect();
        session.run_named(&[], &named, &targets).map(drop)
    }

    /// What is beside a checkpoint, if it is about these variables.
    fn read(&self, prefix: Option<&str>) -> Result<OfAllRanks> {
        let Some(path) = prefix.map(beside).filter(|path| path.exists()) else {
            if prefix.is_some() {
                tracing::info!(
                    target: "kolo::train",
                    "the checkpoint was saved by ranks that had sent their gradients whole: nothing is left to send"
                );
            }
            return Ok(OfAllRanks::new());
        };
        let saved = read_safetensors(&path)?;
        let n_ranks = saved.values().next().map_or(0, |first| first.shape().dims().first().copied().unwrap_or(0));
        for variable in &self.variables {
            let name = variable.name();
            let wanted = [n_ranks, variable.shape().n_elements().unwrap_or(0)];
            let fits = |value: &&Tensor| value.shape().dims() == wanted && value.dtype() == variable.dtype();
            if n_ranks == 0 || saved.get(&name).filter(fits).is_none() {
                return Err(Error::failed_precondition(format!(
                    "{} is of another model, or of ranks that exchanged gradients in another way: it has no '{name}' of {} elements for \
                     each rank; go on with the --exchange that it was saved with, or remove the file to begin with nothing left to send",
                    path.display(),
                    wanted[1]
                )));
            }
        }
        Ok(saved)
    }
}

/// The file beside a checkpoint.
fn beside(prefix: &str) -> PathBuf {
    PathBuf::from(format!("{prefix}.{EXTENSION}"))
}

/// Writes what ranks have beside a checkpoint that is about to be written.
pub(super) fn write_beside(of_all: &OfAllRanks, dir: &Path, step: i64) -> Result<()> {
    let path = beside(&dir.join(format!("model.ckpt-{step}")).to_string_lossy());
    std::fs::create_dir_all(dir)
        .map_err(|error| Error::unavailable(format!("cannot make {}: {error}", dir.display())))?;
    write_safetensors(of_all, &path)
}

/// Removes what is beside checkpoints that are gone. Call it when none is being written.
pub(super) fn remove_orphans(dir: &Path) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        let is_beside = path.extension().is_some_and(|extension| extension == EXTENSION);
        if is_beside && !checkpoint_exists(path.with_extension("")) {
            // It stays, and is found the next time.
            let _ = std::fs::remove_file(&path);
        }
    }
}

/// The mean over rows.
fn mean_row(of_all: &Tensor) -> Result<Tensor> {
    let (n_rows, n) = (of_all.shape()[0].max(1), of_all.shape()[1]);
    match of_all.dtype() {
        DType::F64 => {
            let rows = of_all.data::<f64>()?;
            let mean = (0..n).map(|i| rows.iter().skip(i).step_by(n).sum::<f64>() / n_rows as f64);
            Ok(Tensor::vector(mean.collect::<Vec<f64>>()))
        }
        _ => {
            let rows = of_all.data::<f32>()?;
            let mean = (0..n).map(|i| rows.iter().skip(i).step_by(n).sum::<f32>() / n_rows as f32);
            Ok(Tensor::vector(mean.collect::<Vec<f32>>()))
        }
    }
}
