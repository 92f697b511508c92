//! The crates depend downwards only, as `ARCHITECTURE.md` draws them.

use std::path::Path;

/// From the bottom up: a crate may use those before it.
const ORDER: [&str; 7] = ["kolo-core", "kolo-graph", "kolo-device", "kolo-ops", "kolo-runtime", "kolo-net", "kolo"];

/// Neighbours in the list that must not know each other: a device cannot name a graph.
const APART: [(&str, &str); 1] = [("kolo-device", "kolo-graph")];

/// The crates of ours that a manifest names as dependencies, for building or for tests.
fn ours(manifest: &str) -> Vec<String> {
    let mut is_dependencies = false;
    let mut found = Vec::new();
    for line in manifest.lines().map(str::trim) {
        if line.starts_with('[') {
            is_dependencies = line.trim_matches(['[', ']']).ends_with("dependencies") && !line.contains("workspace");
        } else if is_dependencies {
            let name = line.split(['=', '.', ' ']).next().unwrap_or_default();
            found.extend(name.starts_with("kolo").then(|| name.to_owned()));
        }
    }
    found
}

#[test]
fn crates_depend_downwards_only() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let place = |name: &str| ORDER.iter().position(|other| *other == name).unwrap_or_else(|| panic!("{name} is new"));
    let mut n_edges = 0;
    for name in ORDER {
        let folder = if name == "kolo" { root.to_owned() } else { root.join("crates").join(name) };
        let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).unwrap();
        for used in ours(&manifest) {
            n_edges += 1;
            assert!(place(&used) < place(name), "{name} depends on {used}, which is above it");
            assert!(!APART.contains(&(name, used.as_str())), "{name} must not know {used}");
        }
    }
    // The reading of manifests works at all.
    assert!(n_edges > 12, "{n_edges} edges were found");
    let folders = std::fs::read_dir(root.join("crates")).unwrap().count();
    assert_eq!(folders + 1, ORDER.len(), "a crate is missing from the list");
}
