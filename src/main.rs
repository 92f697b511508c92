//! The `kolo` command. All of it is in the library, which is compiled while the ops still are; this only calls it.

fn main() -> std::process::ExitCode {
    kolo::command_line()
}
