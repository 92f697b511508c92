//! SIGINT, SIGTERM and SIGHUP, from the first moment of the process on.
//!
//! The handler is installed before anything else is done. What it does is for each command to say, and a signal that came
//! before that is not lost: it takes effect when the command is ready for it. A second one ends the process at once.

use std::sync::Mutex;

/// The exit code of a process that a signal ended at once.
const INTERRUPTED: u8 = 130;

static SIGNALS: Mutex<Signals> = Mutex::new(Signals { n_pending: 0, on_stop: None });

struct Signals {
    /// Signals that came before there was anything to call.
    n_pending: usize,
    on_stop: Option<Box<dyn FnMut() + Send>>,
}

impl Signals {
    /// Takes note of a signal; false if the process is to end now.
    fn receive(&mut self) -> bool {
        match &mut self.on_stop {
            Some(on_stop) => on_stop(),
            None => self.n_pending += 1,
        }
        self.n_pending < 2
    }

    fn set(&mut self, mut on_stop: Box<dyn FnMut() + Send>) {
        (0..std::mem::take(&mut self.n_pending)).for_each(|_| on_stop());
        self.on_stop = Some(on_stop);
    }
}

/// Installs the handler. The first thing that a process does.
pub fn install() {
    let receive = || {
        let goes_on = SIGNALS.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).receive();
        if !goes_on {
            std::process::exit(INTERRUPTED.into());
        }
    };
    if let Err(error) = ctrlc::set_handler(receive) {
        // There is no log yet.
        eprintln!("kolo: signals end this process at once: {error}");
    }
}

/// Calls `on_stop` for every signal, those that have come already included.
pub fn on_stop(on_stop: impl FnMut() + Send + 'static) {
    SIGNALS.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).set(Box::new(on_stop));
}

/// Lets a signal end the process, as it does without a handler.
pub fn end_at_once() {
    on_stop(|| std::process::exit(INTERRUPTED.into()));
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn a_signal_that_comes_before_its_handler_is_handed_over() {
        let mut signals = Signals { n_pending: 0, on_stop: None };
        assert!(signals.receive());
        let n_heard = Arc::new(AtomicUsize::new(0));
        let heard = n_heard.clone();
        signals.set(Box::new(move || {
            heard.fetch_add(1, Ordering::Relaxed);
        }));
        assert_eq!(n_heard.load(Ordering::Relaxed), 1);
        assert!(signals.receive() && signals.receive());
        assert_eq!(n_heard.load(Ordering::Relaxed), 3);
        // Somebody who insists need not wait for a start that hangs.
        let mut signals = Signals { n_pending: 0, on_stop: None };
        assert!(signals.receive() && !signals.receive());
    }
}
