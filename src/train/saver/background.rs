//! Saves that go on while training does.

use std::sync::Arc;
use std::thread::JoinHandle;

use kolo_core::{Error, Result, Tensor};
use kolo_runtime::Session;

use super::Shared;

/// A save that goes on while training does. It ends by itself, and then updates the `checkpoint` file; dropping the handle
/// waits for that.
#[must_use = "dropping it at once waits for the save"]
pub struct BackgroundSave {
    prefix: String,
    thread: Option<JoinHandle<Result<()>>>,
}

impl BackgroundSave {
    pub(super) fn begin(shared: &Arc<Shared>, session: &Arc<Session>, prefix: String) -> Result<BackgroundSave> {
        let turn = shared.turn();
        let Some(ops) = shared.background.clone() else {
            shared.save(session, &prefix)?;
            return Ok(BackgroundSave { prefix, thread: None });
        };
        let saving = |error: Error| error.context(format_args!("saving {prefix}"));
        let filename = &shared.def.filename_tensor_name;
        let feed = [(filename.as_str(), Tensor::string(prefix.clone()))];
        session.run_named(&[], &feed, &[&ops.begin]).map_err(saving)?;
        // From here on the data is being written, whatever happens to this handle.
        let (session, shared, path) = (session.clone(), shared.clone(), prefix.clone());
        let work = move || {
            let feed = [(shared.def.filename_tensor_name.as_str(), Tensor::string(path.clone()))];
            let result = session
                .run_named(&[&ops.end], &feed, &[])
                .map_err(|error| error.context(format_args!("saving {path}")))
                .and_then(|_| shared.finish(&path));
            if let Err(error) = &result {
                tracing::warn!(target: "kolo::checkpoint", "a save in the background failed: {error}");
            }
            drop(turn);
            result
        };
        let thread = std::thread::Builder::new().name("kolo-saver".into()).spawn(work);
        let thread =
            thread.map_err(|error| Error::resource_exhausted(format!("cannot start a thread to save: {error}")))?;
        Ok(BackgroundSave { prefix, thread: Some(thread) })
    }

    /// The prefix that the checkpoint has, or will have.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// True once it ended, well or badly.
    pub fn is_done(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until it ended; the prefix of the checkpoint.
    pub fn wait(mut self) -> Result<String> {
        let ended = self.thread.take().map_or(Ok(Ok(())), JoinHandle::join);
        ended.map_err(|_| Error::internal(format!("the thread that saved {} panicked", self.prefix)))??;
        Ok(std::mem::take(&mut self.prefix))
    }
}

impl Drop for BackgroundSave {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            // An error is in the log by now.
            let _ = thread.join();
        }
    }
}
