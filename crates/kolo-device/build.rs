//! Tells the crate how it is optimised: nothing in the language does, and `debug_assertions` is another question.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Cargo gives the level of this package, with the overrides of the workspace or the dependent's profile.
    let level = std::env::var("OPT_LEVEL").unwrap_or_default();
    println!("cargo::rustc-env=KOLO_DEVICE_OPT_LEVEL={level}");
}
