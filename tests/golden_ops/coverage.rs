//! The coverage table and the counts it shows are up to date.

use std::collections::BTreeMap;

#[test]
fn the_counts_are_those_of_the_files() {
    if std::env::var_os("KOLO_GOLDEN_ONLY").is_some() {
        return;
    }
    let mut counts: BTreeMap<String, [usize; 2]> = BTreeMap::new();
    for case in crate::cases() {
        for op in &case.ops {
            let count = counts.entry(op.clone()).or_default();
            count[0] += 1;
            count[1] += usize::from(case.grad.is_some() || case.train.is_some());
        }
    }
    let lines: Vec<String> = counts.iter().map(|(op, [n, grads])| format!("{op} {n} {grads}")).collect();
    let text = std::fs::read_to_string(crate::golden().join("counts.txt")).unwrap();
    let listed: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(listed, lines, "counts.txt is out of date; run conformance/ops/generate.py");
}

#[test]
fn the_table_of_ops_is_up_to_date() {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_kolo")).args(["ops", "--coverage"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let file = std::fs::read(crate::root().join("docs/ops.md")).unwrap_or_default();
    assert!(file == output.stdout, "docs/ops.md is out of date; run `cargo run -- ops --coverage > docs/ops.md`");
}
