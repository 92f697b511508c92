//! `kolo agent`: runs on a host what a launcher elsewhere says, for as long as that launcher is there.

use std::io::{BufRead as _, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use super::crew::{JOIN_TOKEN, Local, event_to_json, free_ports};
use super::group::{Event, Key, MOST_EVENTS};
use super::watch::StopSignals;
use crate::agents::{Heard, JoinToken, Line, join};
use crate::{Error, Result};

/// How long processes have to end when the launcher has gone.
const GRACE: Duration = Duration::from_secs(10);

/// The most ports that are looked for at once.
const MOST_PORTS: u64 = 16_384;

/// Flags of `kolo agent`.
#[derive(clap::Args)]
#[command(
    after_help = "It connects to the launcher, which proves by its certificate that it is the one that the token is for; nothing
listens here. It runs what that launcher says, as the user who started it, and ends with it."
)]
pub struct Args {
    /// Join the launcher at this address, which `kolo launch --hosts` prints
    #[arg(long, value_name = "HOST:PORT")]
    join: String,
    /// Join as this one of --hosts [default: this host's name]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Read the join token from this file [default: $KOLO_JOIN_TOKEN]
    #[arg(long, value_name = "FILE", conflicts_with = "token_stdin")]
    token_file: Option<PathBuf>,
    /// Read the join token from standard input, and end when that closes
    #[arg(long)]
    token_stdin: bool,
    /// Wait this many seconds for the launcher to be there
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0)]
    join_deadline: f64,
}

pub fn run(args: &Args) -> Result<()> {
    let stop = StopSignals::install();
    let token = token(args)?;
    let host_name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = args.name.clone().unwrap_or_else(|| host_name.trim().to_owned());
    let joined = join(&args.join, &token, super::seconds("--join-deadline", args.join_deadline)?)?;
    if args.token_stdin {
        end_with_input(&stop)?;
    }
    joined.line.say(&json!({ "hello": name }));
    let (sender, events) = mpsc::sync_channel(MOST_EVENTS);
    let n_running = Arc::new(AtomicUsize::new(0));
    let mut local = Local::new(sender)?;
    tell(events, joined.line.clone(), n_running.clone())?;
    let why = serve(&mut local, &joined.line, &joined.heard, &n_running, &stop);
    if let Some(text) = stop_reason(&why) {
        joined.line.say(&event_to_json(&Event::Lost { host: 0, why: text.to_owned() }));
    }
    local.signal_all(Signal::TERM);
    let asked = Instant::now();
    while n_running.load(Ordering::Acquire) > 0 && asked.elapsed() < GRACE && stop.count() < 2 {
        std::thread::sleep(Duration::from_millis(20));
    }
    local.signal_all(Signal::KILL);
    match why {
        Over::Bye | Over::Stopped => Ok(()),
        Over::Refused(why) => {
            Err(Error::failed_precondition(format!("the launcher at {} sent this agent away: {why}", args.join)))
        }
        Over::Gone(why) => Err(Error::unavailable(format!(
            "the launcher at {} is lost, and its processes here were ended: {why}",
            args.join
        ))),
    }
}

/// Why an agent ends.
enum Over {
    /// The launcher is done.
    Bye,
    Refused(String),
    Gone(String),
    /// A signal, or the end of its input.
    Stopped,
}

fn stop_reason(why: &Over) -> Option<&'static str> {
    matches!(why, Over::Stopped).then_some("it was asked to end")
}

/// Does what the launcher says.
fn serve(local: &mut Local, line: &Line, heard: &Receiver<Heard>, n_running: &AtomicUsize, stop: &StopSignals) -> Over {
    loop {
        if stop.count() > 0 {
            return Over::Stopped;
        }
        let message = match heard.recv_timeout(Duration::from_millis(50)) {
            Ok(Heard::Message(message)) => message,
            Ok(Heard::Gone(why)) => return Over::Gone(why),
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => return Over::Gone("the connection is closed".to_owned()),
        };
        if message["bye"] == true {
            return Over::Bye;
        }
        if let Some(why) = message["refused"].as_str() {
            return Over::Refused(why.to_owned());
        }
        if let Some(n) = message["ports"].as_u64() {
            let ports = free_ports(n.min(MOST_PORTS) as usize).unwrap_or_default();
            line.say(&event_to_json(&Event::Ports { host: 0, ports }));
        } else if start(local, line, &message["start"], n_running).is_none()
            && signal(local, &message["signal"]).is_none()
        {
            return Over::Gone("it said something that no launcher says".to_owned());
        }
    }
}

fn start(local: &mut Local, line: &Line, message: &Value, n_running: &AtomicUsize) -> Option<()> {
    let number = |name: &str| message.get(name)?.as_u64();
    let key = Key { rank: usize::try_from(number("rank")?).ok()?, attempt: u32::try_from(number("attempt")?).ok()? };
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let program: Option<Vec<String>> = message.get("program")?.as_array()?.iter().map(text).collect();
    let variables =
        message.get("variables")?.as_object()?.iter().map(|(name, value)| Some((name.clone(), text(value)?)));
    let variables: Option<Vec<(String, String)>> = variables.collect();
    let folder = message.get("folder").and_then(Value::as_str).map(Path::new);
    let (program, variables) = (program?, variables?);
    n_running.fetch_add(1, Ordering::AcqRel);
    if let Some(ending) = local.start(key, &program, variables, folder) {
        n_running.fetch_sub(1, Ordering::AcqRel);
        line.say(&event_to_json(&Event::Ended { key, ending }));
    }
    Some(())
}

fn signal(local: &Local, message: &Value) -> Option<()> {
    let signal = Signal::from_named_raw(i32::try_from(message.get("number")?.as_i64()?).ok()?)?;
    local.signal(usize::try_from(message.get("rank")?.as_u64()?).ok()?, signal);
    Some(())
}

/// Tells the launcher what happens here.
fn tell(events: Receiver<Event>, line: Line, n_running: Arc<AtomicUsize>) -> Result<()> {
    let tell = move || {
        while let Ok(event) = events.recv() {
            // A launcher that has gone is noticed by whoever listens to it; the processes are still waited for.
            line.say(&event_to_json(&event));
            if matches!(event, Event::Ended { .. }) {
                n_running.fetch_sub(1, Ordering::AcqRel);
            }
        }
    };
    let started = std::thread::Builder::new().name("kolo-tell".to_owned()).spawn(tell);
    started.map(drop).map_err(|error| Error::resource_exhausted(format!("no thread: {error}")))
}

fn token(args: &Args) -> Result<JoinToken> {
    if args.token_stdin {
        let mut line = String::new();
        let read = std::io::stdin().lock().take(1 << 10).read_line(&mut line);
        return match read {
            Ok(1..) => JoinToken::parse(&line),
            _ => Err(Error::invalid_argument("--token-stdin: standard input has no line with the join token")),
        };
    }
    if let Some(path) = &args.token_file {
        return JoinToken::read(path).map_err(|error| error.context("--token-file"));
    }
    match std::env::var(JOIN_TOKEN) {
        Ok(text) => JoinToken::parse(&text).map_err(|error| error.context(JOIN_TOKEN)),
        Err(_) => Err(Error::invalid_argument(format!(
            "no join token: set {JOIN_TOKEN} to the one that `kolo launch --hosts` prints, or give --token-file"
        ))),
    }
}

/// Ends this agent when its standard input does: whoever started it by ssh has gone.
fn end_with_input(stop: &StopSignals) -> Result<()> {
    let stop = stop.clone();
    let watch = move || {
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        stop.add();
    };
    let started = std::thread::Builder::new().name("kolo-parent".to_owned()).spawn(watch);
    started.map(drop).map_err(|error| Error::resource_exhausted(format!("no thread: {error}")))
}
