//! Checkpoints of a session's variables, as TensorFlow 1.x's `Saver` writes and reads them.
//!
//! A [`Saver`] adds ops to a graph once and then only runs them by name: it works with any session that has the graph,
//! wherever the variables are. The tasks that hold the variables write the data; the saver itself writes the `checkpoint`
//! file, the `.meta` file, and removes old checkpoints.
//!
//! ```text
//!   DIR/checkpoint                        the newest checkpoint, and those that are kept
//!   DIR/model-100.index, .data-…          the variables: see kolo_ops::io::bundle
//!   DIR/model-100.meta                    the graph
//! ```

mod background;
mod build;
mod retention;
mod state;

use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use kolo_core::{Code, Error, PartialShape, Result, Tensor};
use kolo_graph::Graph;
use kolo_graph::wire::proto::SaverDef;
use kolo_ops::io::bundle::Bundle;
use kolo_ops::io::files::{remove_unfinished, write_whole};
use kolo_runtime::Session;
use parking_lot::{Condvar, Mutex};

use super::meta_graph::MetaGraph;
use build::{BackgroundOps, add_background};
use retention::Retention;
use state::{as_text, candidates, check_whole, directory_of, remove_checkpoint, write_state, written_at};

pub(crate) use state::check_writable;

pub use background::BackgroundSave;
pub use build::SaverBuilder;
pub use state::{CheckpointState, checkpoint_exists, checkpoint_state, latest_checkpoint};

/// Saves and restores the variables of a graph. Owns neither a graph nor a session; many threads may use one.
///
/// ```
/// use kolo::train::Saver;
/// use kolo::{Session, Tensor};
///
/// let dir = std::env::temp_dir().join(format!("kolo-saver-{}", std::process::id()));
/// let g = kolo::graph();
/// let w = g.variable("w", [1.0f32, 2.0]);
/// let double = w.assign(w.read() * 2.0);
/// let init = g.global_variables_initializer();
/// let saver = Saver::new(&g)?;
///
/// let session = Session::new(&g)?;
/// session.run_op(init)?;
/// let checkpoint = saver.save(&session, dir.join("model"), Some(1))?;
/// session.run_op(double)?;
/// saver.restore(&session, &checkpoint)?;
/// assert_eq!(session.fetch(w.read())?, Tensor::from([1.0f32, 2.0]));
/// # std::fs::remove_dir_all(&dir).ok();
/// # Ok::<(), kolo::Error>(())
/// ```
pub struct Saver {
    shared: Arc<Shared>,
}

/// What a save in the background needs after the call that began it has returned.
struct Shared {
    def: SaverDef,
    background: Option<BackgroundOps>,
    paths: Paths,
    meta_files: MetaFiles,
    meta: Mutex<MetaGraph>,
    retention: Mutex<Retention>,
    /// A save is under way.
    busy: Mutex<bool>,
    free: Condvar,
    /// The tensors of a checkpoint, by name; empty if that is not known.
    tensors: Vec<(String, PartialShape)>,
}

/// How the `checkpoint` file names checkpoints.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Paths {
    AsGiven,
    Relative,
}

/// Whether there is a `.meta` file with each checkpoint.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MetaFiles {
    Written,
    None,
}

/// Which part of a larger tensor a variable holds, for variables that are saved as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaveSlice {
    /// The name of the whole in the checkpoint.
    pub full_name: String,
    /// The shape of the whole.
    pub full_shape: Vec<usize>,
    /// Where the part begins, one number per dimension.
    pub offset: Vec<usize>,
}

/// What [`Saver::restore_latest`] found.
#[derive(Debug)]
pub struct Restored {
    /// The checkpoint that was restored.
    pub prefix: String,
    /// Newer ones that were damaged, newest first, and how.
    pub skipped: Vec<(String, Error)>,
}

impl Saver {
    /// A saver of all global variables of `graph`, to which it adds the ops it needs. Make it when all variables exist and
    /// before the session, or extend the session after it. Details: [`SaverBuilder`].
    #[track_caller]
    pub fn new(graph: &Graph) -> Result<Saver> {
        SaverBuilder::new(graph).build()
    }

    fn from_def(
        graph: &Graph,
        def: SaverDef,
        background: Option<BackgroundOps>,
        slices: Vec<(String, SaveSlice)>,
        tensors: Vec<(String, PartialShape)>,
        paths: Paths,
        meta_files: MetaFiles,
    ) -> Saver {
        let max_to_keep = usize::try_from(def.max_to_keep).unwrap_or(0);
        let retention = Retention::new(max_to_keep, f64::from(def.keep_checkpoint_every_n_hours), now());
        let shared = Shared {
            meta: Mutex::new(MetaGraph::of(graph, Some(def.clone()), slices)),
            def,
            background,
            paths,
            meta_files,
            retention: Mutex::new(retention),
            busy: Mutex::new(false),
            free: Condvar::new(),
            tensors,
        };
        Saver { shared: Arc::new(shared) }
    }

    /// Adds the graph in a `.meta` file to `graph`, with its variables and collections; the saver it was saved with, if the
    /// file names one.
    pub fn import_meta_graph(graph: &Graph, meta: impl AsRef<Path>) -> Result<Option<Saver>> {
        let imported = super::meta_graph::import_meta_graph(graph, meta.as_ref())?;
        let Some(def) = imported.saver else { return Ok(None) };
        let background = match add_background(graph, &def) {
            Ok(ops) => Some(ops),
            // A saver of another kind, such as one of the first format, still restores.
            Err(error) if error.code() == Code::Unimplemented => None,
            Err(error) => return Err(error.context(meta.as_ref().display())),
        };
        Ok(Some(Saver::from_def(
            graph,
            def,
            background,
            imported.slices,
            Vec::new(),
            Paths::AsGiven,
            MetaFiles::Written,
        )))
    }

    /// The names of its ops and its limits.
    pub fn def(&self) -> &SaverDef {
        &self.shared.def
    }

    /// Writes a checkpoint and returns its prefix: `prefix`, or `prefix-STEP` if there is a step. The directory is made if
    /// it is missing. If it fails, checkpoints that were there before are as they were.
    pub fn save(&self, session: &Session, prefix: impl AsRef<Path>, global_step: Option<i64>) -> Result<String> {
        let prefix = numbered(prefix.as_ref(), global_step)?;
        let _turn = self.shared.turn();
        self.shared.save(session, &prefix)?;
        Ok(prefix)
    }

    /// Takes the variables as they are now and writes them while the caller goes on. Training that updates a variable
    /// meanwhile pays for one copy of it. One save runs at a time: a second one first waits for the first.
    pub fn save_in_background(
        &self,
        session: &Arc<Session>,
        prefix: impl AsRef<Path>,
        global_step: Option<i64>,
    ) -> Result<BackgroundSave> {
        let prefix = numbered(prefix.as_ref(), global_step)?;
        BackgroundSave::begin(&self.shared, session, prefix)
    }

    /// Gives the variables the values in the checkpoint at `prefix`.
    pub fn restore(&self, session: &Session, prefix: impl AsRef<Path>) -> Result<()> {
        let def = &self.shared.def;
        let prefix = as_text(prefix.as_ref())?;
        let feed = [(def.filename_tensor_name.as_str(), Tensor::string(prefix.to_owned()))];
        session.run_named(&[], &feed, &[&def.restore_op_name]).map(drop).map_err(|error| {
            // What the graph says of it first is one op of many. Tasks elsewhere may have files that are not here.
            let of_another_model = match Bundle::open(prefix) {
                Ok(bundle) if error.code() != Code::DataLoss => self.shared.fit(&bundle).err(),
                _ => None,
            };
            match of_another_model {
                Some(other) => other.and(format_args!("; {}", error.message())),
                None => error.context(format_args!("restoring {prefix}")),
            }
        })
    }

    /// An error that lists what differs if the newest checkpoint of a directory is of another model: if variables of this
    /// saver are missing in it or have another shape. Call it before a training saves into a directory that it did not
    /// restore from.
    pub fn check_fits(&self, dir: impl AsRef<Path>) -> Result<()> {
        let dir = dir.as_ref();
        // A damaged one says nothing of its model.
        let newest = candidates(dir)?.into_iter().flatten().find_map(|prefix| Bundle::open(&prefix).ok());
        match newest.map(|bundle| self.shared.fit(&bundle)) {
            Some(Err(error)) => Err(error.and(format_args!("; choose another directory than {}", dir.display()))),
            _ => Ok(()),
        }
    }

    /// Restores the newest whole checkpoint that the directory's `checkpoint` file lists, or, if the file is missing or
    /// damaged or lists none that is whole, the newest whole one in the directory. Takes the list over, so that retention
    /// goes on where it was. Damaged ones are skipped, and told of in the log and in the result. `None` if the directory has
    /// none; an error if all are damaged, or if a whole one is of another model.
    pub fn restore_latest(&self, session: &Session, dir: impl AsRef<Path>) -> Result<Option<Restored>> {
        let dir = dir.as_ref();
        let Some(candidates) = candidates(dir)? else { return Ok(None) };
        let mut skipped = Vec::new();
        for (i, prefix) in candidates.iter().enumerate() {
            let error = match self.restore(session, prefix) {
                Ok(()) => {
                    let whole = candidates[i..].iter().rev().filter(|prefix| checkpoint_exists(prefix));
                    self.take_over(dir, whole.cloned().collect());
                    return Ok(Some(Restored { prefix: prefix.clone(), skipped }));
                }
                Err(error) => error,
            };
            if error.code() != Code::DataLoss && check_whole(prefix).is_ok() {
                return Err(error);
            }
            tracing::warn!(target: "kolo::checkpoint", "{prefix} is damaged and skipped: {error}");
            skipped.push((prefix.clone(), error));
        }
        match skipped.into_iter().next() {
            Some((_, error)) => Err(error.and(format_args!(
                "; none of the {} checkpoints of {} is whole",
                candidates.len(),
                dir.display()
            ))),
            None => Ok(None),
        }
    }

    /// The checkpoints it knows of, oldest first.
    pub fn last_checkpoints(&self) -> Vec<String> {
        self.shared.retention.lock().prefixes().cloned().collect()
    }

    /// Takes over the list in the directory's `checkpoint` file, so that retention goes on where it was. Files that an
    /// earlier process left unfinished are removed.
    pub fn recover_last_checkpoints(&self, dir: impl AsRef<Path>) -> Result<()> {
        if let Some(state) = checkpoint_state(&dir)? {
            let existing = state.all_model_checkpoint_paths.into_iter().filter(|prefix| checkpoint_exists(prefix));
            self.take_over(dir.as_ref(), existing.collect());
        }
        Ok(())
    }

    fn take_over(&self, dir: &Path, prefixes: Vec<String>) {
        let with_times = prefixes.into_iter().map(|prefix| {
            let written = written_at(&prefix);
            (prefix, written)
        });
        self.shared.retention.lock().recover(with_times.collect());
        remove_unfinished(dir);
    }

    /// Writes this graph, as it is now, to later checkpoints' `.meta` files. Without it they hold the graph as it was when
    /// the saver was made.
    pub fn set_meta_graph(&self, graph: &Graph) -> Result<()> {
        graph.check()?;
        self.shared.meta.lock().update(graph);
        Ok(())
    }
}

impl Shared {
    /// An error that lists the tensors that a checkpoint does not have, or has in another shape.
    fn fit(&self, bundle: &Bundle) -> Result<()> {
        const SHOWN: usize = 5;
        let difference = |(name, shape): &(String, PartialShape)| match bundle.find(name) {
            Ok(stored) if shape.admits(&stored.shape) => None,
            Ok(stored) => Some(format!("'{name}' is {}, not {shape}", stored.shape)),
            Err(_) => Some(format!("'{name}' is not in it")),
        };
        let different: Vec<String> = self.tensors.iter().filter_map(difference).collect();
        if different.is_empty() {
            return Ok(());
        }
        let more = match different.len() {
            n if n > SHOWN => format!(", and {} more", n - SHOWN),
            _ => String::new(),
        };
        Err(Error::failed_precondition(format!(
            "the checkpoint {} is of another model: {}{more}",
            bundle.prefix(),
            different[..different.len().min(SHOWN)].join(", ")
        )))
    }

    /// Waits until no other save of this saver is under way.
    fn turn(self: &Arc<Self>) -> Turn {
        let mut busy = self.busy.lock();
        while *busy {
            self.free.wait(&mut busy);
        }
        *busy = true;
        Turn(self.clone())
    }

    /// Saves and waits for it. The caller holds the turn.
    fn save(&self, session: &Session, prefix: &str) -> Result<()> {
        let feed = [(self.def.filename_tensor_name.as_str(), Tensor::string(prefix.to_owned()))];
        session
            .run_named(&[&self.def.save_tensor_name], &feed, &[])
            .map_err(|error| error.context(format_args!("saving {prefix}")))?;
        self.finish(prefix)
    }

    /// What comes after the data: the graph, the list, and the end of old checkpoints.
    fn finish(&self, prefix: &str) -> Result<()> {
        let written = |error: Error| error.context(format_args!("the variables are in {prefix}, but not all is done"));
        if self.meta_files == MetaFiles::Written {
            let bytes = self.meta.lock().bytes().map_err(written)?;
            write_whole(format!("{prefix}.meta").as_ref(), &bytes).map_err(written)?;
        }
        let mut retention = self.retention.lock();
        let now = now();
        let mut gone = retention.add(prefix, now);
        // If the new one is not whole, as far as can be seen from here, the old ones may be all there is.
        if !gone.is_empty()
            && let Err(error) = check_whole(prefix)
        {
            tracing::warn!(target: "kolo::checkpoint", "old checkpoints are kept, since the new one is not whole: {error}");
            for old in gone.drain(..).rev() {
                let written = written_at(&old);
                retention.put_back(old, written);
            }
        }
        let all: Vec<String> = retention.prefixes().cloned().collect();
        write_state(prefix, &all, self.paths == Paths::Relative).map_err(written)?;
        for old in gone {
            // The checkpoint is safe; space that is not freed is a matter for the log.
            if let Err(error) = remove_checkpoint(&old) {
                tracing::warn!(target: "kolo::checkpoint", "the old checkpoint {old} stays: {error}");
            }
        }
        Ok(())
    }
}

/// The right to save; given back when dropped.
struct Turn(Arc<Shared>);

impl Drop for Turn {
    fn drop(&mut self) {
        *self.0.busy.lock() = false;
        self.0.free.notify_one();
    }
}

/// `prefix`, or `prefix-STEP`.
fn numbered(prefix: &Path, global_step: Option<i64>) -> Result<String> {
    let text = as_text(prefix)?;
    if prefix.file_name().is_none() || text.ends_with('/') {
        return Err(Error::invalid_argument(format!(
            "'{text}' is a directory; a prefix is a path such as {text}/model"
        )));
    }
    let numbered = match global_step {
        Some(step) => format!("{text}-{step}"),
        None => text.to_owned(),
    };
    if directory_of(&numbered).join(state::STATE_FILE) == Path::new(&numbered) {
        return Err(Error::invalid_argument(format!(
            "'{numbered}' is the name of the list of checkpoints; choose another"
        )));
    }
    Ok(numbered)
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn old_checkpoints_stay_while_the_new_one_is_not_whole() {
        let dir = std::env::temp_dir().join(format!("kolo-saver-whole-{}", std::process::id()));
        let g = kolo_ops::graph();
        g.variable("v", [1.0f32, 2.0]);
        let init = g.global_variables_initializer();
        let saver = SaverBuilder::new(&g).max_to_keep(1).build().unwrap();
        let session = Session::new(&g).unwrap();
        session.run_op(init).unwrap();
        let first = saver.save(&session, dir.join("m"), Some(1)).unwrap();
        // As if a task had written the second where it cannot be seen from here.
        let second = dir.join("m-2").to_str().unwrap().to_owned();
        saver.shared.finish(&second).unwrap();
        assert!(checkpoint_exists(&first));
        assert_eq!(saver.last_checkpoints(), [first.clone(), second]);
        let third = saver.save(&session, dir.join("m"), Some(3)).unwrap();
        assert!(!checkpoint_exists(&first));
        assert_eq!(saver.last_checkpoints(), [third]);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
