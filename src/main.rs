//! The `kolo` command. Everything it does is in `cli`; what it calls is the library.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
