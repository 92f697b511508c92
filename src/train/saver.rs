//! Checkpoints of a session's variables, as TensorFlow 1.x's `Saver` writes and reads them.

use std::path::Path;
use std::sync::Arc;

use kolo_core::{Error, Result};
use kolo_graph::{Graph, Variable};
use kolo_runtime::Session;

/// Saves and restores the variables of a graph. Owns no graph and no session; many threads may use one.
pub struct Saver {}

/// A saver that is about to be made.
#[must_use = "a saver is made by build()"]
pub struct SaverBuilder<'g> {
    _graph: &'g Graph,
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

/// A save that goes on while training does. Dropping it waits for the save to end.
pub struct BackgroundSave {}

/// What [`Saver::restore_latest`] found.
#[derive(Debug)]
pub struct Restored {
    /// The checkpoint that was restored.
    pub prefix: String,
    /// Newer ones that were damaged, and how.
    pub skipped: Vec<(String, Error)>,
}

/// What a directory's `checkpoint` file says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CheckpointState {
    /// The newest checkpoint.
    pub model_checkpoint_path: String,
    /// All that are kept, oldest first, the newest included.
    pub all_model_checkpoint_paths: Vec<String>,
}

impl Saver {
    /// A saver of all global variables of `graph`, to which it adds the ops it needs. Call it when all variables exist and
    /// before the session is made, or extend the session after it.
    pub fn new(graph: &Graph) -> Result<Saver> {
        SaverBuilder::new(graph).build()
    }

    /// Writes a checkpoint and returns its prefix: `prefix`, or `prefix-STEP` if there is a step.
    pub fn save(&self, _session: &Session, _prefix: impl AsRef<Path>, _global_step: Option<i64>) -> Result<String> {
        Err(Error::unimplemented("soon"))
    }

    /// Takes the variables as they are now and writes them while the caller goes on. At most one runs at a time: a second
    /// one waits for the first.
    pub fn save_in_background(
        &self,
        _session: &Arc<Session>,
        _prefix: impl AsRef<Path>,
        _global_step: Option<i64>,
    ) -> Result<BackgroundSave> {
        Err(Error::unimplemented("soon"))
    }

    /// Gives the variables the values in the checkpoint at `prefix`.
    pub fn restore(&self, _session: &Session, _prefix: impl AsRef<Path>) -> Result<()> {
        Err(Error::unimplemented("soon"))
    }

    /// Restores the newest whole checkpoint that the directory's `checkpoint` file lists, and takes the list over, so that
    /// retention goes on where it was. `None` if the directory has none; an error if all are damaged.
    pub fn restore_latest(&self, _session: &Session, _dir: impl AsRef<Path>) -> Result<Option<Restored>> {
        Err(Error::unimplemented("soon"))
    }

    /// The checkpoints it knows of, oldest first.
    pub fn last_checkpoints(&self) -> Vec<String> {
        Vec::new()
    }

    /// Takes over the list in the directory's `checkpoint` file, so that retention goes on where it was.
    pub fn recover_last_checkpoints(&self, _dir: impl AsRef<Path>) -> Result<()> {
        Err(Error::unimplemented("soon"))
    }

    /// Writes this graph, as it is now, to later checkpoints' `.meta` files.
    pub fn set_meta_graph(&self, _graph: &Graph) -> Result<()> {
        Err(Error::unimplemented("soon"))
    }

    /// Adds the graph in a `.meta` file to `graph`, with its variables and collections; the saver it was saved with, if the
    /// file names one.
    pub fn import_meta_graph(_graph: &Graph, _meta: impl AsRef<Path>) -> Result<Option<Saver>> {
        Err(Error::unimplemented("soon"))
    }
}

impl BackgroundSave {
    /// True once it ended, well or badly.
    pub fn is_done(&self) -> bool {
        true
    }

    /// Waits until it ended; the prefix of the checkpoint.
    pub fn wait(self) -> Result<String> {
        Err(Error::unimplemented("soon"))
    }
}

impl<'g> SaverBuilder<'g> {
    /// A saver of all global variables of `graph`, unless told otherwise.
    pub fn new(graph: &'g Graph) -> SaverBuilder<'g> {
        SaverBuilder { _graph: graph }
    }

    /// These variables and no others, under their own names.
    pub fn variables(self, _variables: &[Variable<'g>]) -> Self {
        self
    }

    /// This variable, under this name in the checkpoint; besides others that are named.
    pub fn named(self, _name: &str, _variable: Variable<'g>) -> Self {
        self
    }

    /// This variable is a part of a larger tensor.
    pub fn slice(self, _variable: Variable<'g>, _slice: SaveSlice) -> Self {
        self
    }

    /// One file per device, written where the variables are.
    pub fn sharded(self, _sharded: bool) -> Self {
        self
    }

    /// How many checkpoints to keep; 0 keeps all. 5 unless said.
    pub fn max_to_keep(self, _max_to_keep: usize) -> Self {
        self
    }

    /// Keeps one checkpoint for every so many hours for ever.
    pub fn keep_checkpoint_every_n_hours(self, _hours: f64) -> Self {
        self
    }

    /// Writes paths in the `checkpoint` file relative to it, so that the directory can be moved.
    pub fn relative_paths(self, _relative: bool) -> Self {
        self
    }

    /// Whether to write `.meta` files. It does unless told otherwise.
    pub fn write_meta_graph(self, _write: bool) -> Self {
        self
    }

    /// The scope of its ops; `save` unless said.
    pub fn name(self, _name: &str) -> Self {
        self
    }

    /// Adds the ops.
    pub fn build(self) -> Result<Saver> {
        Err(Error::unimplemented("soon"))
    }
}

/// The newest checkpoint of a directory, by its `checkpoint` file; `None` if it has none or the files are gone.
pub fn latest_checkpoint(_dir: impl AsRef<Path>) -> Result<Option<String>> {
    Err(Error::unimplemented("soon"))
}

/// Whether there are files of a checkpoint with this prefix.
pub fn checkpoint_exists(_prefix: impl AsRef<Path>) -> bool {
    false
}

/// What the directory's `checkpoint` file says, paths made absolute or relative to the working directory; `None` if there
/// is no such file.
pub fn checkpoint_state(_dir: impl AsRef<Path>) -> Result<Option<CheckpointState>> {
    Err(Error::unimplemented("soon"))
}
