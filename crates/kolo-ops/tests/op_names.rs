//! What an op is, is stated in its own file (`kolo_graph::OpDef` and its facts). Code elsewhere that asks for an op's name knows
//! something about that op which its author cannot see, and which the next op of the kind will lack. This test reads the
//! sources and refuses such questions, but for a few that are about a name as such.

#![allow(clippy::unwrap_used)] // Helpers of tests may fail as tests do.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use regex::Regex;

/// Where names are compared, how often, and why that is no fact about an op.
const ALLOWED: &[(&str, usize, &str)] = &[
    ("crates/kolo-graph/src/grad/mod.rs", 2, "finds the stacks that the gradient rewrite itself made for a loop"),
    ("crates/kolo-graph/src/grad/backward.rs", 1, "looks at a request for a node, to put another in its place"),
    ("crates/kolo-graph/src/op/infer.rs", 1, "evaluates the few ops that shapes are computed with"),
    ("crates/kolo-graph/src/wire/functions/mod.rs", 1, "writes out the calls that the wire format knows"),
    ("crates/kolo-net/src/doctor.rs", 1, "guesses from a message of another process what it waits for"),
    ("crates/kolo-ops/src/math/batch_matmul.rs", 1, "tells the two ops of its own file apart"),
    ("crates/kolo-ops/src/math/segment/sorted.rs", 2, "tells the ops of its own file apart"),
    ("crates/kolo-ops/src/math/segment/sparse_grad.rs", 1, "tells the ops of its own file apart"),
    ("crates/kolo-ops/src/nn/fused.rs", 1, "reads its own attribute, which lists ops by name"),
    ("crates/kolo-ops/src/queue/access.rs", 1, "tells the makers of its own folder apart"),
];

/// A fusion is a pattern of certain ops.
const PATTERNS: &str = "crates/kolo-runtime/src/fusion/";

/// How a name is asked for. Sources are read with white space put together.
const QUESTIONS: &[&str] = &[
    r#"\bop\(\) (==|!=) ""#,
    r#"\bop (==|!=) ""#,
    r#"\bname (==|!=) "[A-Z]"#,
    r"\bop\(\)\.(starts_with|ends_with|strip_prefix|strip_suffix|contains)\(",
    r#"\bop\.(starts_with|ends_with|strip_prefix|strip_suffix|contains)\(""#,
    r"contains\(&\w+(\.\w+)*\.op\(\)\)",
    r"match [\w.&*]*\bop\(\) \{",
    r#"match op \{ ""#,
    r"matches!\( ?[\w.&*]*\bop\(\),",
    r#"matches!\( ?op, ""#,
    r#"let \("[A-Z]\w*""#,
];

#[test]
fn nobody_asks_for_an_ops_name_to_learn_what_it_is() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let questions = questions();
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    visit(&root.join("src"), &mut |path, text| read(&root, path, text, &questions, &mut found));
    for entry in fs::read_dir(root.join("crates")).unwrap() {
        let sources = entry.unwrap().path().join("src");
        visit(&sources, &mut |path, text| read(&root, path, text, &questions, &mut found));
    }
    let mut wrong = Vec::new();
    for (path, n, why) in ALLOWED {
        let n_found = found.remove(*path).map_or(0, |found| found.len());
        if n_found != *n {
            wrong.push(format!("{path}: {n_found} comparisons of names where {n} are expected ({why})"));
        }
    }
    for (path, places) in found.into_iter().filter(|(path, _)| !path.starts_with(PATTERNS)) {
        wrong.extend(places.iter().map(|place| format!("{path}: …{place}…")));
    }
    assert!(wrong.is_empty(), "state it in the op's file instead, and ask for that:\n{}", wrong.join("\n"));
}

#[test]
fn questions_are_recognised() {
    for text in [
        r#"if node.op() == "Const" {"#,
        r#"matches!( node.op(), "Shape" | "Size")"#,
        r#"match node.op() { "Identity" => 1"#,
        r#"op.ends_with("Grad")"#,
        r#"READERS.contains(&node.op())"#,
        r#"if let ("Identity", [at]) = "#,
    ] {
        assert!(questions().iter().any(|question| question.is_match(text)), "{text}");
    }
}

fn questions() -> Vec<Regex> {
    QUESTIONS.iter().map(|question| Regex::new(&format!("(?-u){question}")).unwrap()).collect()
}

/// Shows `f` all sources under a folder, those of tests left out.
fn visit(folder: &Path, f: &mut dyn FnMut(&Path, &str)) {
    for entry in fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_test = name == "tests" || name.ends_with("tests.rs") || name == "testing.rs";
        if path.is_dir() && !is_test {
            visit(&path, f);
        } else if name.ends_with(".rs") && !is_test {
            f(&path, &fs::read_to_string(&path).unwrap());
        }
    }
}

/// Adds the places of one file.
fn read(root: &Path, path: &Path, text: &str, questions: &[Regex], found: &mut BTreeMap<String, Vec<String>>) {
    // Tests come last in a file.
    let code = text.find("#[cfg(test)]\n").map_or(text, |at| match text[at..].contains("mod tests {") {
        true => &text[..at],
        false => text,
    });
    let lines = code.lines().map(str::trim).filter(|line| !line.starts_with("//"));
    let code = lines.collect::<Vec<_>>().join(" ");
    let name = path.strip_prefix(root).unwrap_or(path).to_string_lossy().replace('\\', "/");
    for place in questions.iter().flat_map(|question| question.find_iter(&code)) {
        let around = code[place.start()..].chars().take(70).collect();
        found.entry(name.clone()).or_default().push(around);
    }
}
