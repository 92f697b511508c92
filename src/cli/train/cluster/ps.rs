//! A parameter server that `TF_CONFIG` describes: it serves until the workers have ended, so that a job of Kubernetes is over when
//! its training is.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::ended::Ended;
use super::worker::server_config;
use crate::cli::print;
use crate::cli::signals;
use crate::cli::train::options::Common;
use crate::place::TaskSeat;
use crate::{Connect as _, Error, Result, Server, Session, SessionConfig};

/// How often it looks who has ended.
const LOOK: Duration = Duration::from_millis(250);

/// When the chief has ended, or this process was asked to, the workers that are left have so long.
const GRACE: Duration = Duration::from_secs(20);

/// So long it still answers those who close their sessions.
const LINGER: Duration = Duration::from_millis(500);

/// Serves the task of this seat until all workers have ended, or some time after the chief has.
pub fn keep_variables(common: &Common, seat: &TaskSeat) -> Result<()> {
    let security = common.cluster.security.read()?;
    let mut session = common.session_config()?;
    // It keeps variables in host memory, as `kolo train --ps` does.
    session.device_count.insert("GPU".to_owned(), 0);
    let server = Arc::new(Server::new(&seat.cluster, "ps", seat.index, server_config(common, &security, session)?)?);
    let is_asked = Arc::new(AtomicBool::new(false));
    let (asked, stopped) = (is_asked.clone(), Arc::downgrade(&server));
    signals::on_stop(move || {
        // The chief saves what is here, so it comes first; who insists is obeyed.
        if asked.swap(true, Ordering::Relaxed)
            && let Some(server) = stopped.upgrade()
        {
            server.stop();
        }
    });
    print(format_args!("serving {} as /job:ps/task:{} until the training ends", server.target(), seat.index))?;
    let watched = server.clone();
    let (index, n_workers) = (seat.index, seat.n_replicas());
    let watch = move || {
        let ended = wait_for_end(&watched, index, n_workers, &security, &is_asked);
        watched.stop();
        ended
    };
    let watch = std::thread::Builder::new().name("kolo-ended".to_owned()).spawn(watch);
    let watch = watch.map_err(|error| Error::resource_exhausted(format!("no thread: {error}")))?;
    server.join()?;
    watch.join().map_err(|_| Error::internal("the thread that waits for the end of the training has panicked"))?
}

fn wait_for_end(
    server: &Server,
    index: u32,
    n_workers: usize,
    security: &crate::tls::Security,
    is_asked: &AtomicBool,
) -> Result<()> {
    let g = crate::graph();
    let mut ended = Ended::new(&g, index)?;
    let config = SessionConfig { device_filters: vec![format!("/job:ps/task:{index}")], ..SessionConfig::default() };
    let session = Session::connect_secured(&server.target(), &g, config, security)?;
    let mut gives_up = None;
    loop {
        let known = match ended.look(&session) {
            Ok(known) => known,
            // Somebody has insisted on the end, and the server is not there any more.
            Err(_) if is_asked.load(Ordering::Relaxed) => return Ok(()),
            Err(error) => return Err(error.context("waiting for the end of the training")),
        };
        if known.len() >= n_workers {
            std::thread::sleep(LINGER);
            return Ok(());
        }
        if gives_up.is_none() && (known.contains(&0) || is_asked.load(Ordering::Relaxed)) {
            gives_up = Some(Instant::now() + GRACE);
        }
        if gives_up.is_some_and(|at| at <= Instant::now()) {
            tracing::warn!(target: "kolo::train", "{} of {n_workers} workers have said that they have ended; not waiting for the others", known.len());
            return Ok(());
        }
        std::thread::sleep(LOOK);
    }
}
