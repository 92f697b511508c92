//! The `kolo` command.

fn main() {}
