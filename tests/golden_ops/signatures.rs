//! Every op's signature against TensorFlow's registry, as `op_defs.txt.gz` lists it.

use std::collections::{BTreeMap, BTreeSet};

use kolo_graph::{AttrDef, Signature};
use kolo_ops::TABLE;

/// Ops that TensorFlow does not have, and whose names do not say so.
const OURS: [&str; 2] = ["AwaitSaveV2", "BackgroundSaveV2"];

/// Attributes that TensorFlow 1.15, which must be able to read what we write, does not have. The first four only tell
/// TensorFlow's compiler what a product is for; import reports all that it drops.
const NEWER: [&str; 5] = ["grad_a", "grad_b", "grad_x", "grad_y", "bad_indices_policy"];

#[test]
fn every_signature_is_tensorflows() {
    let text = String::from_utf8(crate::unzip(&crate::golden().join("op_defs.txt.gz"))).unwrap();
    let mut theirs = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (name, rest) = line.split_once(' ').unwrap();
        theirs.insert(name, rest.split_once(' ').unwrap());
    }
    let mut complaints = Vec::new();
    for op in TABLE.iter().copied().flatten() {
        let name = op.def.name;
        if OURS.contains(&name) || name.contains("Kolo") {
            continue;
        }
        let Some((flags, signature)) = theirs.get(name) else {
            complaints.push(format!("{name}: TensorFlow has no such op"));
            continue;
        };
        let (theirs, ours) = match (Signature::parse(signature), Signature::parse(op.def.signature)) {
            (Ok(theirs), Ok(ours)) => (theirs, ours),
            (theirs, ours) => {
                complaints.push(format!("{name}: {:?} {:?}", theirs.err(), ours.err()));
                continue;
            }
        };
        let mut note = |what: &str, theirs: String, ours: String| {
            if theirs != ours {
                complaints.push(format!("{name}: {what}: TensorFlow has {theirs}, Kolo {ours}"));
            }
        };
        note("inputs", format!("{:?}", theirs.inputs), format!("{:?}", ours.inputs));
        note("outputs", format!("{:?}", theirs.outputs), format!("{:?}", ours.outputs));
        note("stateful", flags.contains('s').to_string(), op.def.stateful.to_string());
        note("allows uninitialised", flags.contains('u').to_string(), op.def.allows_uninitialized_input.to_string());
        let names: BTreeSet<&str> = theirs.attrs.iter().chain(&ours.attrs).map(|attr| attr.name.as_str()).collect();
        for attr in names.into_iter().filter(|name| !NEWER.contains(name)) {
            let (theirs, ours) = (theirs.attr(attr), ours.attr(attr));
            note(&format!("attr {attr}"), describe(theirs), describe(ours));
            let (theirs, ours) = (types(theirs), types(ours));
            let only = |a: &BTreeSet<&str>, b: &BTreeSet<&str>| a.difference(b).copied().collect::<Vec<_>>().join(",");
            note(&format!("attr {attr}: types that the other lacks"), only(&theirs, &ours), only(&ours, &theirs));
        }
    }
    assert!(complaints.is_empty(), "{} differences:\n{}", complaints.len(), complaints.join("\n"));
}

/// An attribute's definition as text, but for its types; the order of allowed values means nothing.
fn describe(attr: Option<&AttrDef>) -> String {
    let Some(attr) = attr else { return "none".to_owned() };
    let strings: BTreeSet<&str> = attr.strings.iter().map(String::as_str).collect();
    let list = if attr.is_list { " list" } else { "" };
    format!("{:?}{list} {strings:?} >= {:?} = {:?}", attr.kind, attr.minimum, attr.default)
}

/// The types an attribute allows, by name; `any` if all.
fn types(attr: Option<&AttrDef>) -> BTreeSet<&'static str> {
    let names: BTreeSet<_> = attr.into_iter().flat_map(|attr| &attr.types).map(|dtype| dtype.name()).collect();
    if names.is_empty() { BTreeSet::from(["any"]) } else { names }
}
