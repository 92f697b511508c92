//! Commands and flags. Each command is a file; flags and environment variables are read here and nowhere else.

mod bench;
mod cert;
mod checkpoint;
mod completions;
mod config;
mod devices;
mod doctor;
mod doctor_gpu;
mod doctor_ranks;
mod explain;
mod explain_collectives;
mod graph_file;
mod launch;
mod machine;
mod ops;
mod place;
mod refusal;
mod run;
mod security;
mod serve;
mod signals;
mod stop;
mod sweep;
mod task;
mod trace;
mod train;

use std::ffi::OsStr;
use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use tracing_subscriber::EnvFilter;

use self::refusal::Given;

/// Kolo: dataflow graphs over many devices.
#[derive(Parser)]
#[command(name = "kolo", version, about, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
#[allow(clippy::large_enum_variant)] // There is one, for as long as the program runs.
enum Command {
    /// Train a model: digits, images, text
    Train(train::Args),
    /// Train a recipe many times, with other flags each, and name the best
    Sweep(sweep::Args),
    /// Run a model from TensorFlow or Kolo: a GraphDef or a SavedModel
    Run(run::Args),
    /// Serve one task of a cluster: a parameter server or a worker
    Serve(serve::Args),
    /// Start any program several times, on this machine or on several, and look after the processes
    Launch(launch::Args),
    /// Run on this host what `kolo launch` elsewhere says
    Agent(launch::agent::Args),
    /// End the process groups that are named on standard input when it closes
    #[command(hide = true, name = launch::guard::COMMAND)]
    Guard,
    /// End a training, a launch or a server of this machine in order, and wait until it has ended
    Stop(stop::Args),
    /// Find what a training waits for: ranks of this machine, or all tasks of a cluster; also: doctor gpu
    Doctor(doctor::Args),
    /// Make certificates for a cluster
    Cert(cert::Args),
    /// Explain TF_CONFIG and other cluster descriptions
    Config(config::Args),
    /// Show where every node of a graph would run, and why, without running it; also: explain collectives
    Explain(explain::Args),
    /// Run a graph once and write a trace for Chrome or Perfetto
    Trace(trace::Args),
    /// List this machine's devices, without allocating memory on them
    Devices(devices::Args),
    /// List the ops with their signatures, kernels and gradients
    Ops(ops::Args),
    /// Show, verify and convert checkpoints, also to and from safetensors
    Checkpoint(checkpoint::Args),
    /// Measure Kolo's side of a benchmark; bench/run compares it with others
    Bench(bench::Args),
    /// Print a completion script for your shell
    Completions(completions::Args),
}

/// Runs the command line; the exit code is 1 for an error, 2 for wrong usage.
pub fn main() -> ExitCode {
    signals::install();
    let command = Cli::command();
    let matches = command.clone().get_matches();
    let cli = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli,
        Err(error) => error.exit(),
    };
    match log().and_then(|()| Given::new(&command, &matches).check()).and_then(|()| run(cli.command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kolo: {:?}: {error}", error.code());
            ExitCode::FAILURE
        }
    }
}

/// Begins to log, as `KOLO_LOG` says.
fn log() -> crate::Result<()> {
    let filter = log_filter(std::env::var_os("KOLO_LOG").as_deref())?;
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).without_time().init();
    Ok(())
}

/// The filter that a text describes.
fn log_filter(text: Option<&OsStr>) -> crate::Result<EnvFilter> {
    let wrong = |text: &str, why: String| {
        crate::Error::invalid_argument(format!(
            "KOLO_LOG='{text}' cannot be parsed: {why}; write a level, such as info, or levels by target, such as \
             warn,kolo::placement=info"
        ))
    };
    match text.map(|text| text.to_str().ok_or(text)) {
        None | Some(Ok("")) => Ok(EnvFilter::new("warn,kolo::placement=info")),
        Some(Ok(text)) => EnvFilter::builder().parse(text).map_err(|error| wrong(text, error.to_string())),
        Some(Err(text)) => Err(wrong(&text.to_string_lossy(), "it is not UTF-8".to_owned())),
    }
}

fn run(command: Command) -> crate::Result<()> {
    let ends_by_itself = matches!(
        command,
        Command::Train(_) | Command::Sweep(_) | Command::Serve(_) | Command::Launch(_) | Command::Agent(_)
    );
    if !ends_by_itself {
        signals::end_at_once();
    }
    match command {
        Command::Train(args) => train::run(&args),
        Command::Sweep(args) => sweep::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Launch(args) => launch::run(&args),
        Command::Agent(args) => launch::agent::run(&args),
        Command::Guard => launch::guard::run(),
        Command::Stop(args) => stop::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Cert(args) => cert::run(&args),
        Command::Config(args) => config::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Trace(args) => trace::run(&args),
        Command::Devices(args) => devices::run(&args),
        Command::Ops(args) => ops::run(&args),
        Command::Checkpoint(args) => checkpoint::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Completions(args) => completions::run(&args),
    }
}

/// Prints a line; exits quietly if the reader has closed the pipe (`kolo ops | head`).
fn print(text: impl std::fmt::Display) -> crate::Result<()> {
    use std::io::Write;
    match writeln!(std::io::stdout(), "{text}") {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        Err(error) => Err(crate::Error::unavailable(format!("cannot write to standard output: {error}"))),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_log_filter_that_cannot_be_parsed_is_an_error() {
        let filter = |text: &str| log_filter(Some(OsStr::new(text)));
        for text in ["kolo=loud", "=", "info=what=ever"] {
            let error = filter(text).unwrap_err().to_string();
            assert!(error.contains("KOLO_LOG=") && error.contains(text) && error.contains("such as info"), "{error}");
        }
        for text in ["", "info", "warn,kolo::placement=debug"] {
            filter(text).unwrap();
        }
        log_filter(None).unwrap();
    }
}
