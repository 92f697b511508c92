//! `kolo completions`: what a shell needs to complete commands and flags.

use crate::Result;
use clap::CommandFactory;
use clap_complete::Shell;

/// Flags of `kolo completions`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kolo completions bash > ~/.local/share/bash-completion/completions/kolo
  kolo completions zsh > \"${fpath[1]}/_kolo\"
  kolo completions fish > ~/.config/fish/completions/kolo.fish")]
pub struct Args {
    /// Print the script for this shell
    #[arg(value_enum)]
    shell: Shell,
}

pub fn run(args: &Args) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut super::Cli::command(), "kolo", &mut script);
    super::print(String::from_utf8_lossy(&script).trim_end())
}
