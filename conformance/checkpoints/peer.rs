//! Kolo's side of `conformance/run checkpoints`: saves what TensorFlow restores, and restores what TensorFlow saved. A
//! program, not a test: without TensorFlow's files beside it, it would prove nothing. `check.py` has the same table of
//! variables and calls it as `checkpoint_peer save|restore FOLDER`; what disagrees is a panic.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use half::{bf16, f16};
use kolo::train::{SaveSlice, Saver, SaverBuilder, create_global_step, latest_checkpoint};
use kolo::{DType, Graph, Initializer, Session, SessionConfig, Shape, Tensor, VariableKind};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["save", folder] => save(Path::new(folder)),
        ["restore", folder] => restore(Path::new(folder)),
        _ => {
            eprintln!("usage: checkpoint_peer save|restore FOLDER");
            std::process::exit(2);
        }
    }
}

/// All variables but the parts of `part` and the global step.
fn table() -> Vec<(&'static str, VariableKind, Tensor)> {
    use VariableKind::{Reference, Resource};
    let strings = [&b"ab"[..], b"", b"\x00\xff"].map(|text| text.to_vec().into());
    vec![
        ("f32", Resource, Tensor::from_vec([2, 3], (0..6).map(|i| i as f32 * 0.5 - 1.0).collect()).unwrap()),
        ("f64", Reference, Tensor::from([1.0f64 / 3.0, -2.0, 1e300])),
        ("half", Resource, Tensor::vector([0.5f32, -1.5].map(f16::from_f32))),
        ("bf16", Resource, Tensor::vector([1.0f32, -0.25].map(bf16::from_f32))),
        ("i8", Resource, Tensor::from([-128i8, 0, 127])),
        ("i16", Resource, Tensor::from([-300i16, 300])),
        ("i32", Resource, Tensor::scalar(7i32)),
        ("i64", Reference, Tensor::scalar(-5_000_000_000i64)),
        ("u8", Resource, Tensor::from([0u8, 255])),
        ("u16", Resource, Tensor::from([65535u16])),
        ("flag", Resource, Tensor::from([true, false, true])),
        ("text", Resource, Tensor::from_strings([3], strings.to_vec()).unwrap()),
        ("none", Resource, Tensor::zeros(DType::F32, [0, 4]).unwrap()),
        ("scope/w", Reference, Tensor::from_vec([1000, 3], (0..3000).map(|i| i as f32 * 0.25).collect()).unwrap()),
    ]
}

fn part() -> Tensor {
    Tensor::from_vec([5, 4], (0..20).map(|i| i as f32).collect()).unwrap()
}

/// The variables, each on the device that `device` names, and their saver.
fn saver(g: &Graph, initial: bool, sharded: bool) -> Saver {
    let device = |i: usize| if sharded { format!("/cpu:{}", i % 2) } else { String::new() };
    let start = |value: &Tensor| match initial {
        true => Initializer::Value(value.clone()),
        false => Initializer::Value(Tensor::zeros(value.dtype(), value.shape().clone()).unwrap()),
    };
    for (i, (name, kind, value)) in table().into_iter().enumerate() {
        g.device(&device(i), || {
            g.new_variable(name, start(&value)).shape(value.shape().clone()).dtype(value.dtype()).kind(kind).build()
        });
    }
    let step = create_global_step(g).unwrap();
    let mut builder = SaverBuilder::new(g).sharded(sharded).max_to_keep(2);
    for (i, (row, n_rows)) in [(0, 3), (3, 2)].into_iter().enumerate() {
        let value = part().rows(row, n_rows).unwrap();
        let part = g.device(&device(i), || {
            g.new_variable(&format!("part/part_{i}"), start(&value)).shape(Shape::from([n_rows, 4])).build()
        });
        let slice = SaveSlice { full_name: "part".into(), full_shape: vec![5, 4], offset: vec![row, 0] };
        builder = builder.slice(part, slice);
    }
    let plain: Vec<_> = g.global_variables().into_iter().filter(|v| !v.name().starts_with("part/")).collect();
    step.assign(g.constant(42i64));
    g.global_variables_initializer();
    builder.variables(&plain).build().unwrap()
}

fn session(g: &Graph) -> Arc<Session> {
    let config = SessionConfig { device_count: BTreeMap::from([("CPU".to_owned(), 2)]), ..SessionConfig::default() };
    Arc::new(Session::with_config(g, config).unwrap())
}

/// Every variable of the graph has the value of the table.
fn check(g: &Graph, session: &Session) {
    let value = |name: &str| session.fetch(g.find_variable(name).unwrap().read()).unwrap();
    for (name, _, expected) in table() {
        let found = value(name);
        assert_eq!((found.dtype(), found.shape()), (expected.dtype(), expected.shape()), "{name}");
        assert_eq!(found, expected, "{name}");
    }
    assert_eq!(value("global_step"), Tensor::scalar(42i64));
    assert_eq!(value("part/part_0"), part().rows(0, 3).unwrap());
    assert_eq!(value("part/part_1"), part().rows(3, 2).unwrap());
}

fn save(dir: &Path) {
    for (folder, sharded) in [("kolo", false), ("kolo_sharded", true)] {
        let g = kolo::graph();
        let saver = saver(&g, true, sharded);
        let session = session(&g);
        session.run_named(&[], &[], &["init"]).unwrap();
        session.run_named(&[], &[], &["AssignVariableOp"]).unwrap();
        for step in [40, 41, 42] {
            saver.save(&session, dir.join(folder).join("m"), Some(step)).unwrap();
        }
        let background = dir.join(format!("{folder}_background")).join("m");
        saver.save_in_background(&session, background, Some(42)).unwrap().wait().unwrap();
    }
}

fn restore(dir: &Path) {
    for folder in ["tf", "tf_sharded"] {
        let newest = latest_checkpoint(dir.join(folder)).unwrap().unwrap();
        assert_eq!(Path::new(&newest), dir.join(folder).join("m-42"));
        let g = kolo::graph();
        let saver = saver(&g, false, false);
        let first = session(&g);
        saver.restore(&first, &newest).unwrap();
        check(&g, &first);

        let g = kolo::graph();
        let saver = Saver::import_meta_graph(&g, format!("{newest}.meta")).unwrap().unwrap();
        assert_eq!(g.collection("losses"), ["loss:0"]);
        let second = session(&g);
        saver.restore(&second, &newest).unwrap();
        check(&g, &second);
        // TensorFlow's own save ops, run by Kolo, write what TensorFlow wrote.
        let again = dir.join(format!("{folder}_by_kolo")).join("m");
        saver.save(&second, &again, Some(42)).unwrap();
        saver.save_in_background(&second, &again, Some(43)).unwrap().wait().unwrap();
    }
}
