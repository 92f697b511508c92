//! Kernels that do their work on a file thread: a function from inputs to outputs.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use kolo_core::{Error, Result, Tensor};

use super::FileAccess;
use super::threads::IoThreads;
use crate::kernel::KernelInit;
use crate::{AsyncKernel, Done, KernelCtx};

/// What such a function may use.
pub(super) struct Request {
    /// The inputs.
    pub inputs: Vec<Tensor>,
    access: FileAccess,
}

impl Request {
    /// The one string of input `i`.
    pub fn text(&self, i: usize, what: &str) -> Result<&Bytes> {
        match self.inputs[i].strings()? {
            [text] if self.inputs[i].shape().rank() == 0 => Ok(text),
            _ => Err(Error::invalid_argument(format!(
                "{what} tensor must be scalar, but had shape: {}",
                self.inputs[i].shape()
            ))),
        }
    }

    /// A path that may be touched.
    pub fn path(&self, name: &[u8]) -> Result<PathBuf> {
        let path = path_of(name)?;
        self.access.check(&path)?;
        Ok(path)
    }

    /// Which files may be touched.
    pub fn access(&self) -> &FileAccess {
        &self.access
    }

    /// True if a path may be touched.
    pub fn may_touch(&self, path: &Path) -> bool {
        self.access.check(path).is_ok()
    }
}

/// A file's name as a path.
pub(super) fn path_of(name: &[u8]) -> Result<PathBuf> {
    match std::str::from_utf8(name) {
        Ok(name) => Ok(PathBuf::from(name)),
        Err(_) => Err(Error::invalid_argument(format!(
            "the file name {:?} is not valid UTF-8",
            String::from_utf8_lossy(name)
        ))),
    }
}

/// A kernel that runs `work`.
pub(super) fn make(init: &KernelInit<'_>, work: fn(&Request) -> Result<Vec<Tensor>>) -> Result<Box<dyn AsyncKernel>> {
    Ok(Box::new(OnThread { threads: IoThreads::of(init.resources)?, work }))
}

struct OnThread {
    threads: Arc<IoThreads>,
    work: fn(&Request) -> Result<Vec<Tensor>>,
}

impl AsyncKernel for OnThread {
    fn start(&self, ctx: &mut KernelCtx<'_>, done: Done) {
        let inputs = match (0..ctx.n_inputs()).map(|i| ctx.take_input(i)).collect::<Result<Vec<Tensor>>>() {
            Ok(inputs) => inputs,
            Err(error) => return done.finish(Err(error)),
        };
        let request = Request { inputs, access: ctx.step.resources().file_access() };
        let work = self.work;
        // If there is no thread, the dropped `Done` ends the work with an error.
        let _ = self.threads.run(move || done.finish(work(&request).map(Into::into)));
    }
}
