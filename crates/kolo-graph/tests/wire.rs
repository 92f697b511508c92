//! The wire messages against what TensorFlow itself wrote (see `data/make_fixtures.py`), and against noise.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use kolo_graph::wire::describe::{Described, Enum, Field, Kind, Label, Message};
use kolo_graph::wire::proto::GraphDef;
use kolo_graph::wire::text;
use proptest::prelude::*;
use prost::Message as _;

const FIXTURES: &[&str] = &[
    "consts",
    "floats",
    "functions",
    "lists",
    "placeholders",
    "ref_variables",
    "resource_variables",
    "strings",
    "strings_by_hand",
    "variants",
    "while_v1",
];

fn read(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn read_bytes(fixture: &str) -> Vec<u8> {
    read(&format!("{fixture}.pb"))
}

fn read_text(fixture: &str) -> String {
    String::from_utf8(read(&format!("{fixture}.pbtxt"))).expect("fixtures are UTF-8")
}

/// NaN differs from itself, so messages are compared by their bytes.
#[track_caller]
fn assert_same(left: &GraphDef, right: &GraphDef, what: &str) {
    assert!(left.encode_to_vec() == right.encode_to_vec(), "{what}: {left:?}\nis not\n{right:?}");
}

/// Shows the first line that differs, rather than two long texts.
#[track_caller]
fn assert_same_lines(found: &str, expected: &str) {
    for (n, (found, expected)) in found.lines().zip(expected.lines()).enumerate() {
        assert_eq!(found, expected, "line {}", n + 1);
    }
    assert_eq!(found.len(), expected.len());
}

#[test]
fn text_of_decoded_bytes_is_that_of_python() {
    for fixture in FIXTURES {
        let graph = GraphDef::decode(read_bytes(fixture).as_slice()).unwrap();
        assert_same_lines(&text::print(&graph), &read_text(fixture));
    }
}

#[test]
fn parsed_text_is_the_message_of_the_bytes() {
    for fixture in FIXTURES {
        let graph: GraphDef = text::parse(&read_text(fixture)).unwrap();
        let decoded = GraphDef::decode(read_bytes(fixture).as_slice()).unwrap();
        assert_same(&graph, &decoded, fixture);
    }
    let graph: GraphDef = text::parse(&read_text("strings_by_hand_utf8")).unwrap();
    let decoded = GraphDef::decode(read_bytes("strings_by_hand").as_slice()).unwrap();
    assert_same(&graph, &decoded, "strings_by_hand_utf8");
}

#[test]
fn tables_are_tensorflow_s_descriptors() {
    let mut lines = BTreeSet::new();
    list_message(GraphDef::DESCRIPTION, &mut lines);
    let expected: BTreeSet<String> =
        String::from_utf8(read("descriptors.txt")).unwrap().lines().map(str::to_owned).collect();
    let missing: Vec<_> = expected.difference(&lines).collect();
    let invented: Vec<_> = lines.difference(&expected).collect();
    assert!(missing.is_empty() && invented.is_empty(), "{missing:#?}\n{invented:#?}");
}

/// Adds a line for every field of `message`, and of the messages in it.
fn list_message(message: &Message, lines: &mut BTreeSet<String>) {
    for Field { name, number, kind, label } in message.fields {
        let of = message.name;
        let label = match label {
            Label::Single => "single".to_owned(),
            Label::Optional => "optional".to_owned(),
            Label::Oneof(oneof) => format!("oneof {oneof}"),
            Label::Repeated => "repeated".to_owned(),
            Label::Map => "map".to_owned(),
        };
        if !lines.insert(format!("{of} {number} {name} {label} {kind}")) {
            return;
        }
        match kind {
            Kind::Message(entry) if label == "map" => {
                assert!(matches!(entry.fields[0], Field { name: "key", number: 1, .. }));
                assert!(matches!(entry.fields[1], Field { name: "value", number: 2, .. }));
                let (key, value) = (entry.fields[0].kind, entry.fields[1].kind);
                assert_eq!(entry.name, format!("map<{key}, {value}>"));
                match value {
                    Kind::Message(inner) => list_message(inner, lines),
                    _ => continue,
                }
            }
            Kind::Message(inner) => list_message(inner, lines),
            Kind::Enum(Enum { name: of, values }) => {
                lines.extend(values.iter().map(|(name, number)| format!("{of} {number} {name}")));
            }
            _ => {}
        }
    }
}

#[test]
fn structs_keep_every_field_of_their_tables() {
    // Each pass takes another member of every oneof.
    for pass in 0..10 {
        let mut expected = String::new();
        full_text(GraphDef::DESCRIPTION, pass, &mut Vec::new(), &mut expected);
        let graph: GraphDef = text::parse(&expected).unwrap();
        assert_same_lines(&text::print(&graph), &expected);
        let again = GraphDef::decode(graph.encode_to_vec().as_slice()).unwrap();
        assert_eq!(again, graph);
    }
}

/// Writes `message` with every field set, each to something that is not its default, and no message in itself.
fn full_text(message: &'static Message, pass: usize, outer: &mut Vec<&'static str>, out: &mut String) {
    outer.push(message.name);
    let n_members = message.fields.iter().filter(|field| matches!(field.label, Label::Oneof(_))).count();
    let mut member = 0;
    for field in message.fields {
        if matches!(field.label, Label::Oneof(_)) {
            member += 1;
            if member - 1 != pass % n_members {
                continue;
            }
        }
        for _ in 0..if field.label == Label::Repeated { 2 } else { 1 } {
            let indent = "  ".repeat(outer.len() - 1);
            *out += &format!("{indent}{}", field.name);
            let rest = match field.kind {
                Kind::Bool => ": true\n",
                Kind::Int32 => ": -2147483648\n",
                Kind::Int64 => ": -9223372036854775808\n",
                Kind::Uint32 => ": 4294967295\n",
                Kind::Uint64 | Kind::Fixed64 => ": 18446744073709551615\n",
                Kind::Float => ": 0.1\n",
                Kind::Double => ": 1e-300\n",
                Kind::String => ": \"\\342\\230\\203\"\n",
                Kind::Bytes => ": \"\\377\"\n",
                Kind::Enum(_) => ": -5\n",
                Kind::Message(inner) => {
                    *out += " {\n";
                    if field.label == Label::Map || !outer.contains(&inner.name) {
                        full_text(inner, pass, outer, out);
                    }
                    *out += &indent;
                    "}\n"
                }
            };
            *out += rest;
        }
    }
    outer.pop();
}

/// A random message, as wire bytes: every byte of `entropy` is a choice, and when they run out it ends.
fn random_bytes(message: &'static Message, entropy: &mut dyn Iterator<Item = u8>, depth: usize) -> Vec<u8> {
    use prost::encoding::{bytes, double, fixed64, float, string, uint64};
    let mut out = Vec::new();
    while let Some(choice) = entropy.next().filter(|&choice| choice > 20) {
        let Field { number, kind, .. } = message.fields[usize::from(choice) % message.fields.len()];
        let mut word = || u64::from_le_bytes(std::array::from_fn(|_| entropy.next().unwrap_or(0)));
        match kind {
            Kind::Int32 | Kind::Int64 | Kind::Uint32 | Kind::Uint64 => {
                uint64::encode(number, &(word() >> (choice % 60)), &mut out);
            }
            Kind::Bool => uint64::encode(number, &u64::from(choice % 2), &mut out),
            Kind::Enum(_) => uint64::encode(number, &u64::from(choice), &mut out),
            Kind::Fixed64 => fixed64::encode(number, &word(), &mut out),
            Kind::Double => double::encode(number, &f64::from_bits(word()), &mut out),
            Kind::Float => float::encode(number, &f32::from_bits(word() as u32), &mut out),
            Kind::String => {
                let value: String = word().to_le_bytes().map(char::from).into_iter().collect();
                string::encode(number, &value, &mut out);
            }
            Kind::Bytes => bytes::encode(number, &word().to_le_bytes().to_vec(), &mut out),
            Kind::Message(_) if depth == 0 => {}
            Kind::Message(inner) => {
                bytes::encode(number, &random_bytes(inner, entropy, depth - 1), &mut out);
            }
        }
    }
    out
}

/// What must hold of every message there is: its text is read back as itself.
fn check_text(graph: &GraphDef) -> Result<(), TestCaseError> {
    let printed = text::print(graph);
    let parsed: GraphDef = text::parse(&printed).map_err(|error| TestCaseError::fail(format!("{error}\n{printed}")))?;
    prop_assert_eq!(&text::print(&parsed), &printed);
    // All NaNs have one text, so bits of theirs may be lost.
    if !printed.contains("nan") {
        prop_assert_eq!(parsed.encode_to_vec(), graph.encode_to_vec());
    }
    Ok(())
}

/// One change to a text or to bytes: at a place, take some away and put something in.
fn mutations<T: Clone + std::fmt::Debug>(
    inserted: impl Strategy<Value = T>,
) -> impl Strategy<Value = Vec<(prop::sample::Index, usize, T)>> {
    prop::collection::vec((any::<prop::sample::Index>(), 0..4_usize, inserted), 1..6)
}

const SNIPPETS: &[&str] = &[
    "", " ", "\n", "{", "}", "<", ">", "[", "]", "[]", ":", ";", ",", "-", "\"", "'", "\\", "#", "0", "9", ".", "0x",
    "e", "f", "inf", "nan", "true", "DT_FLOAT", "node", "attr", "é", "\0", "\\u12", "\\xff", "'' \"\"",
];

proptest! {
    #[test]
    fn random_messages_survive_text(entropy in prop::collection::vec(any::<u8>(), 0..600)) {
        let bytes = random_bytes(GraphDef::DESCRIPTION, &mut entropy.into_iter(), 8);
        let graph = GraphDef::decode(bytes.as_slice()).expect("the table fits the structs");
        check_text(&graph)?;
    }

    #[test]
    fn random_bytes_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        if let Ok(graph) = GraphDef::decode(bytes.as_slice()) {
            check_text(&graph)?;
        }
    }

    #[test]
    fn changed_bytes_do_no_harm(
        fixture in prop::sample::select(FIXTURES),
        changes in mutations(prop::collection::vec(any::<u8>(), 0..3)),
    ) {
        let mut bytes = read_bytes(fixture);
        for (at, n_taken, put) in changes {
            let at = at.index(bytes.len() + 1);
            let end = bytes.len().min(at + n_taken);
            bytes.splice(at..end, put);
        }
        if let Ok(graph) = GraphDef::decode(bytes.as_slice()) {
            check_text(&graph)?;
        }
    }

    #[test]
    fn changed_text_does_no_harm(
        fixture in prop::sample::select(FIXTURES),
        changes in mutations(prop::sample::select(SNIPPETS)),
    ) {
        let mut chars: Vec<char> = read_text(fixture).chars().collect();
        for (at, n_taken, put) in changes {
            let at = at.index(chars.len() + 1);
            let end = chars.len().min(at + n_taken);
            chars.splice(at..end, put.chars());
        }
        let changed: String = chars.into_iter().collect();
        match text::parse::<GraphDef>(&changed) {
            Ok(graph) => check_text(&graph)?,
            Err(error) => prop_assert!(error.line <= changed.lines().count() + 1),
        }
    }

    #[test]
    fn random_text_does_no_harm(text in any::<String>(), soup in prop::collection::vec(prop::sample::select(SNIPPETS), 0..40)) {
        let _ = text::parse::<GraphDef>(&text);
        if let Ok(graph) = text::parse::<GraphDef>(&soup.concat()) {
            check_text(&graph)?;
        }
    }
}
