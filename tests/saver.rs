//! Savers through sessions: what comes back, what is kept, what happens to damaged files.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kolo::train::{
    SaveSlice, Saver, SaverBuilder, checkpoint_exists, checkpoint_state, create_global_step, latest_checkpoint,
};
use kolo::{Code, DType, Graph, Initializer, Session, SessionConfig, Tensor, VariableKind};
use kolo_ops::io::bundle::Bundle;

/// A new directory, removed when dropped.
struct Dir(PathBuf);

impl Dir {
    fn new() -> Dir {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("saver-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::create_dir_all(&path).unwrap();
        Dir(path)
    }

    fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn text(&self, name: &str) -> String {
        self.join(name).to_str().unwrap().to_owned()
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Two variables of either kind, a step, and an operation that adds one to the floats.
fn model(g: &Graph) -> Vec<String> {
    let w = g.variable("w", [[1.0f32, 2.0], [3.0, 4.0]]);
    let b = g.new_variable("b", [5.0f64, 6.0]).kind(VariableKind::Reference).build();
    create_global_step(g).unwrap();
    let add = [w.assign_add(g.constant([[1.0f32, 1.0], [1.0, 1.0]])), b.assign_add(g.constant([1.0f64, 1.0]))];
    g.group("add", &add);
    g.global_variables_initializer();
    vec![w.read().name(), b.read().name(), "global_step/Read/ReadVariableOp:0".into()]
}

fn values(session: &Session, names: &[String]) -> Vec<Tensor> {
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    session.run_named(&names, &[], &[]).unwrap()
}

fn started(g: &Graph) -> Arc<Session> {
    let session = Arc::new(Session::new(g).unwrap());
    session.run_named(&[], &[], &["init"]).unwrap();
    session
}

#[test]
fn what_was_saved_comes_back_in_another_session() {
    let dir = Dir::new();
    let g = kolo::graph();
    let names = model(&g);
    let saver = Saver::new(&g).unwrap();
    assert_eq!(saver.def().filename_tensor_name, "save/Const:0");
    assert_eq!(saver.def().save_tensor_name, "save/control_dependency:0");
    assert_eq!(saver.def().restore_op_name, "save/restore_all");
    let session = started(&g);
    let before = values(&session, &names);
    let prefix = saver.save(&session, dir.join("sub/m"), Some(7)).unwrap();
    assert_eq!(prefix, dir.text("sub/m-7"));
    session.run_named(&[], &[], &["add"]).unwrap();
    assert_ne!(values(&session, &names), before);

    let other = Session::new(&g).unwrap();
    saver.restore(&other, &prefix).unwrap();
    assert_eq!(values(&other, &names), before);
    assert_eq!(latest_checkpoint(dir.join("sub")).unwrap(), Some(prefix.clone()));
    assert!(checkpoint_exists(&prefix) && !checkpoint_exists(dir.join("sub/m")));
    assert_eq!(latest_checkpoint(dir.join("nowhere")).unwrap(), None);
}

/// Weights may be secrets, or made of them.
#[test]
#[cfg(unix)]
fn every_file_of_a_checkpoint_is_for_its_owner_alone() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = Dir::new();
    let g = kolo::graph();
    model(&g);
    let one = Saver::new(&g).unwrap();
    let shards = SaverBuilder::new(&g).sharded(true).build().unwrap();
    let session = started(&g);
    one.save(&session, dir.join("one"), Some(1)).unwrap();
    shards.save(&session, dir.join("shards"), Some(1)).unwrap();
    let names = dir.names();
    for kind in ["checkpoint", "one-1.index", "one-1.meta", "one-1.data", "shards-1.data"] {
        assert!(names.iter().any(|name| name.starts_with(kind)), "no {kind}: {names:?}");
    }
    for name in names {
        let mode = fs::metadata(dir.join(&name)).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{name}: {mode:o}");
    }
}

#[test]
fn old_checkpoints_go_and_the_list_says_which_are_left() {
    let dir = Dir::new();
    let g = kolo::graph();
    model(&g);
    let saver = SaverBuilder::new(&g).max_to_keep(2).build().unwrap();
    let session = started(&g);
    for step in 1..=4 {
        saver.save(&session, dir.join("m"), Some(step)).unwrap();
    }
    let kept = [dir.text("m-3"), dir.text("m-4")];
    assert_eq!(saver.last_checkpoints(), kept);
    let text = fs::read_to_string(dir.join("checkpoint")).unwrap();
    let path = |at: usize| format!("{:?}", kept[at]);
    // Byte for byte what TensorFlow writes.
    let expected = format!(
        "model_checkpoint_path: {1}\nall_model_checkpoint_paths: {0}\nall_model_checkpoint_paths: {1}\n",
        path(0),
        path(1)
    );
    assert_eq!(text, expected);
    let files = |step: i32| ["data-00000-of-00001", "index", "meta"].map(|end| format!("m-{step}.{end}"));
    assert_eq!(dir.names(), [vec!["checkpoint".to_owned()], files(3).to_vec(), files(4).to_vec()].concat());

    // A saver of a later process takes the list over.
    let again = SaverBuilder::new(&g).name("again").max_to_keep(2).build().unwrap();
    session.extend(&g).unwrap();
    again.recover_last_checkpoints(&dir.0).unwrap();
    again.save(&session, dir.join("m"), Some(5)).unwrap();
    assert_eq!(again.last_checkpoints(), [dir.text("m-4"), dir.text("m-5")]);
    assert!(!checkpoint_exists(dir.join("m-3")));
}

#[test]
fn relative_paths_survive_a_move() {
    let dir = Dir::new();
    let g = kolo::graph();
    let names = model(&g);
    let saver = SaverBuilder::new(&g).relative_paths(true).build().unwrap();
    let session = started(&g);
    saver.save(&session, dir.join("a/m"), Some(1)).unwrap();
    let text = fs::read_to_string(dir.join("a/checkpoint")).unwrap();
    assert_eq!(text, "model_checkpoint_path: \"m-1\"\nall_model_checkpoint_paths: \"m-1\"\n");
    fs::rename(dir.join("a"), dir.join("b")).unwrap();
    let other = Session::new(&g).unwrap();
    let restored = saver.restore_latest(&other, dir.join("b")).unwrap().unwrap();
    assert_eq!(restored.prefix, dir.text("b/m-1"));
    assert_eq!(values(&other, &names), values(&session, &names));
}

#[test]
fn a_background_save_is_a_snapshot() {
    let dir = Dir::new();
    let g = kolo::graph();
    let w = g.new_variable("w", Initializer::Ones).shape([1 << 20]).build();
    let add = w.assign_add(kolo::ops::ones_like(w.read()));
    g.global_variables_initializer();
    let saver = SaverBuilder::new(&g).max_to_keep(0).build().unwrap();
    let session = started(&g);
    for step in 0..6 {
        let save = saver.save_in_background(&session, dir.join("m"), Some(step)).unwrap();
        // Updates race with the write; what is written must be from before all of them.
        for _ in 0..3 {
            session.run_op(add).unwrap();
        }
        let prefix = save.wait().unwrap();
        let saved = Bundle::open(&prefix).unwrap().read("w").unwrap();
        let expected = (step * 3 + 1) as f32;
        assert!(saved.data::<f32>().unwrap().iter().all(|x| *x == expected), "step {step}");
    }
    assert_eq!(checkpoint_state(&dir.0).unwrap().unwrap().all_model_checkpoint_paths.len(), 6);
}

#[test]
fn a_failed_save_leaves_what_was_there() {
    let dir = Dir::new();
    let g = kolo::graph();
    model(&g);
    let saver = Saver::new(&g).unwrap();
    let session = started(&g);
    saver.save(&session, dir.join("m"), Some(1)).unwrap();
    let before = dir.names();
    // A file where the next checkpoint's directory should be.
    let blocked = dir.join("checkpoint/m");
    let error = saver.save(&session, &blocked, Some(2)).unwrap_err();
    assert!(error.message().contains("saving") && error.message().contains(&dir.text("checkpoint")), "{error}");
    let save = saver.save_in_background(&session, &blocked, Some(2)).unwrap();
    assert!(save.wait().unwrap_err().message().contains(&dir.text("checkpoint")));
    assert_eq!(dir.names(), before);
    assert_eq!(latest_checkpoint(&dir.0).unwrap(), Some(dir.text("m-1")));
    // And the saver goes on.
    saver.save_in_background(&session, dir.join("m"), Some(3)).unwrap().wait().unwrap();
    assert_eq!(latest_checkpoint(&dir.0).unwrap(), Some(dir.text("m-3")));
    for bad in ["", "/", "checkpoint"] {
        assert_eq!(saver.save(&session, bad, None).unwrap_err().code(), Code::InvalidArgument, "{bad}");
    }
}

#[test]
fn damaged_checkpoints_are_skipped_and_named() {
    let dir = Dir::new();
    let g = kolo::graph();
    let names = model(&g);
    let saver = Saver::new(&g).unwrap();
    let session = started(&g);
    assert!(saver.restore_latest(&session, &dir.0).unwrap().is_none());
    let mut at = Vec::new();
    for step in 1..=5 {
        saver.save(&session, dir.join("m"), Some(step)).unwrap();
        at.push(values(&session, &names));
        session.run_named(&[], &[], &["add"]).unwrap();
    }
    // 5: a flipped bit in b, the first tensor; 4: cut short; 3: an index without data.
    let data = |step: i32| dir.join(&format!("m-{step}.data-00000-of-00001"));
    let mut bytes = fs::read(data(5)).unwrap();
    bytes[3] ^= 1;
    fs::write(data(5), bytes).unwrap();
    let bytes = fs::read(data(4)).unwrap();
    fs::write(data(4), &bytes[..bytes.len() - 1]).unwrap();
    fs::remove_file(data(3)).unwrap();
    let other = Session::new(&g).unwrap();
    let restored = saver.restore_latest(&other, &dir.0).unwrap().unwrap();
    assert_eq!(restored.prefix, dir.text("m-2"));
    assert_eq!(values(&other, &names), at[1]);
    let skipped: Vec<&str> = restored.skipped.iter().map(|(prefix, _)| prefix.as_str()).collect();
    assert_eq!(skipped, [dir.text("m-5"), dir.text("m-4"), dir.text("m-3")]);
    let message = restored.skipped[0].1.message();
    assert!(message.contains("m-5.data-00000-of-00001") && message.contains("tensor 'b'"), "{message}");
    assert_eq!(saver.last_checkpoints(), [dir.text("m-1"), dir.text("m-2")]);

    // All damaged: an error. Another graph: an error at once, for the checkpoint is whole.
    for step in 1..=2 {
        fs::write(dir.join(&format!("m-{step}.index")), b"nonsense").unwrap();
    }
    let error = saver.restore_latest(&other, &dir.0).unwrap_err();
    assert_eq!(error.code(), Code::DataLoss);
    assert!(error.message().contains("none of the 5 checkpoints"), "{error}");
    saver.save(&other, dir.join("m"), Some(6)).unwrap();
    let g = kolo::graph();
    g.variable("v", 1.0f32);
    let saver = Saver::new(&g).unwrap();
    let error = saver.restore_latest(&Session::new(&g).unwrap(), &dir.0).unwrap_err();
    assert!(error.message().contains("Key v not found in checkpoint"), "{error}");
    fs::write(dir.join("checkpoint"), "model_checkpoint_path: 3").unwrap();
    assert_eq!(checkpoint_state(&dir.0).unwrap_err().code(), Code::DataLoss);
}

#[test]
fn without_a_usable_list_the_newest_whole_checkpoint_is_taken() {
    let dir = Dir::new();
    let g = kolo::graph();
    let names = model(&g);
    let saver = Saver::new(&g).unwrap();
    let session = started(&g);
    let mut at = Vec::new();
    for step in 8..=10 {
        saver.save(&session, dir.join("m"), Some(step)).unwrap();
        at.push(values(&session, &names));
        session.run_named(&[], &[], &["add"]).unwrap();
    }
    let restored = || {
        let saver = Saver::new(&g).unwrap();
        let other = Session::new(&g).unwrap();
        let restored = saver.restore_latest(&other, &dir.0).unwrap().map(|restored| restored.prefix);
        (restored, values(&other, &names))
    };
    let list = dir.join("checkpoint");
    fs::remove_file(&list).unwrap();
    assert_eq!(restored(), (Some(dir.text("m-10")), at[2].clone()));
    for damaged in [&b"model_checkpoint_path: 3"[..], &[0xff, 0xfe], b""] {
        fs::write(&list, damaged).unwrap();
        assert_eq!(restored(), (Some(dir.text("m-10")), at[2].clone()), "{damaged:?}");
    }
    // The newest one is verified.
    let data = dir.join("m-10.data-00000-of-00001");
    let mut bytes = fs::read(&data).unwrap();
    bytes[3] ^= 1;
    fs::write(&data, bytes).unwrap();
    assert_eq!(restored(), (Some(dir.text("m-9")), at[1].clone()));
    // A list of which nothing is left, beside one that is whole.
    fs::write(&list, "model_checkpoint_path: \"m-10\"").unwrap();
    assert_eq!(restored(), (Some(dir.text("m-9")), at[1].clone()));
    // Retention goes on with what was found.
    let again = Saver::new(&g).unwrap();
    let session = Session::new(&g).unwrap();
    again.restore_latest(&session, &dir.0).unwrap().unwrap();
    assert_eq!(again.last_checkpoints(), [dir.text("m-8"), dir.text("m-9")]);
    // If nothing is whole, nothing begins anew.
    fs::remove_file(&list).unwrap();
    for step in 8..=10 {
        fs::write(dir.join(&format!("m-{step}.index")), b"nonsense").unwrap();
    }
    let error = again.restore_latest(&session, &dir.0).unwrap_err();
    assert_eq!(error.code(), Code::DataLoss, "{error}");
}

#[test]
fn a_checkpoint_of_another_model_is_named_with_what_differs() {
    let dir = Dir::new();
    let g = kolo::graph();
    g.variable("same", [1.0f32, 2.0]);
    g.variable("kernel", [1.0f32, 2.0, 3.0]);
    g.variable("old/bias", 1.0f32);
    g.global_variables_initializer();
    Saver::new(&g).unwrap().save(&started(&g), dir.join("m"), Some(7)).unwrap();

    let g = kolo::graph();
    g.variable("same", [1.0f32, 2.0]);
    g.variable("kernel", [1.0f32, 2.0]);
    g.variable("new/bias", 1.0f32);
    g.global_variables_initializer();
    let saver = Saver::new(&g).unwrap();
    let session = started(&g);
    for error in [
        saver.restore_latest(&session, &dir.0).unwrap_err(),
        saver.restore(&session, dir.join("m-7")).unwrap_err(),
        saver.check_fits(&dir.0).unwrap_err(),
    ] {
        assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
        let wanted = [
            dir.text("m-7"),
            "another model".into(),
            "'new/bias' is not in it".into(),
            "'kernel' is [3], not [2]".into(),
        ];
        for part in wanted {
            assert!(error.message().contains(&part), "{part} is missing in {error}");
        }
        assert!(!error.message().contains("'same'"), "{error}");
    }
    // A model that grew by a variable is another one, and one that saves fewer is not: it restores what it has.
    let g = kolo::graph();
    g.variable("same", [1.0f32, 2.0]);
    g.global_variables_initializer();
    let saver = Saver::new(&g).unwrap();
    saver.check_fits(&dir.0).unwrap();
    saver.restore_latest(&started(&g), &dir.0).unwrap().unwrap();
    // Nothing there is nobody's.
    saver.check_fits(dir.join("nowhere")).unwrap();
}

#[test]
fn a_variable_of_another_shape_is_not_restored() {
    let dir = Dir::new();
    for (kind, text) in
        [(VariableKind::Resource, "Expected [2] got [3] (variable 'v')"), (VariableKind::Reference, "[2]")]
    {
        let g = kolo::graph();
        g.new_variable("v", [1.0f32, 2.0, 3.0]).kind(kind).build();
        g.global_variables_initializer();
        let prefix = Saver::new(&g).unwrap().save(&started(&g), dir.join("m"), None).unwrap();
        let g = kolo::graph();
        g.new_variable("v", [1.0f32, 2.0]).kind(kind).build();
        let saver = Saver::new(&g).unwrap();
        let error = saver.restore(&Session::new(&g).unwrap(), &prefix).unwrap_err();
        assert!(error.message().contains(text), "{error}");
    }
}

#[test]
fn names_and_slices() {
    let dir = Dir::new();
    let g = kolo::graph();
    let top = g.variable("p/part_0", [[1i32, 2]]);
    let bottom = g.variable("p/part_1", [[3i32, 4], [5, 6]]);
    let other = g.variable("other", 9i32);
    g.global_variables_initializer();
    let part = |row: usize| SaveSlice { full_name: "p".into(), full_shape: vec![3, 2], offset: vec![row, 0] };
    let saver =
        SaverBuilder::new(&g).slice(bottom, part(1)).slice(top, part(0)).named("renamed", other).build().unwrap();
    let session = started(&g);
    let prefix = saver.save(&session, dir.join("m"), None).unwrap();
    let mut bundle = Bundle::open(&prefix).unwrap();
    assert_eq!(bundle.names().collect::<Vec<_>>(), ["p", "renamed"]);
    assert_eq!(bundle.read("p").unwrap(), Tensor::from([[1i32, 2], [3, 4], [5, 6]]));

    // The same tensor in other parts, and whole.
    let g = kolo::graph();
    let whole = g.new_variable("p", Initializer::Zeros).shape([3, 2]).dtype(DType::I32).build();
    let right = g.new_variable("right", Initializer::Zeros).shape([3, 1]).dtype(DType::I32).build();
    let column = SaveSlice { full_name: "p".into(), full_shape: vec![3, 2], offset: vec![0, 1] };
    let savers = [
        SaverBuilder::new(&g).variables(&[whole]).build().unwrap(),
        SaverBuilder::new(&g).slice(right, column).build().unwrap(),
    ];
    let session = Session::new(&g).unwrap();
    savers.iter().for_each(|saver| saver.restore(&session, &prefix).unwrap());
    assert_eq!(session.fetch(whole.read()).unwrap(), Tensor::from([[1i32, 2], [3, 4], [5, 6]]));
    assert_eq!(session.fetch(right.read()).unwrap(), Tensor::from([[2i32], [4], [6]]));

    // What cannot be.
    let refused = |builder: SaverBuilder<'_>, text: &str| {
        let error = builder.build().err().unwrap();
        assert!(error.message().contains(text), "{error}");
    };
    refused(SaverBuilder::new(&g).named("x", whole).named("x", right), "same name: x");
    refused(SaverBuilder::new(&g).slice(right, part(1)), "is not a part of 'p'");
    refused(SaverBuilder::new(&kolo::graph()), "no variables to save");
}

#[test]
fn a_sharded_checkpoint_has_a_file_for_each_device() {
    let dir = Dir::new();
    let g = kolo::graph();
    let a = g.device("/cpu:0", || g.variable("a", [1.0f32, 2.0]));
    let b = g.device("/cpu:1", || g.variable("b", [3.0f32, 4.0]));
    let c = g.device("/cpu:1", || g.new_variable("c", 5i64).kind(VariableKind::Reference).build());
    g.global_variables_initializer();
    let saver = SaverBuilder::new(&g).sharded(true).build().unwrap();
    let config = || SessionConfig { device_count: [("CPU".to_owned(), 2)].into(), ..SessionConfig::default() };
    let session = Arc::new(Session::with_config(&g, config()).unwrap());
    session.run_named(&[], &[], &["init"]).unwrap();
    let saved = saver.save(&session, dir.join("m"), Some(1)).unwrap();
    let in_background = saver.save_in_background(&session, dir.join("m"), Some(2)).unwrap().wait().unwrap();
    for prefix in [saved, in_background] {
        assert_eq!(Bundle::open(&prefix).unwrap().n_shards(), 2);
        let other = Session::with_config(&g, config()).unwrap();
        saver.restore(&other, &prefix).unwrap();
        let found = other.run(&[a.read(), b.read(), c.read()], &[], &[]).unwrap();
        assert_eq!(found, [Tensor::from([1.0f32, 2.0]), Tensor::from([3.0f32, 4.0]), Tensor::scalar(5i64)]);
    }
    assert!(!dir.join("m-1_temp").exists());
}

#[test]
fn a_meta_file_brings_back_graph_variables_and_saver() {
    let dir = Dir::new();
    let g = kolo::graph();
    let names = model(&g);
    g.add_to_collection("updates", "add");
    let saver = SaverBuilder::new(&g).max_to_keep(3).build().unwrap();
    let session = started(&g);
    session.run_named(&[], &[], &["add"]).unwrap();
    let prefix = saver.save(&session, dir.join("m"), None).unwrap();

    let g2 = kolo::graph();
    let saver2 = Saver::import_meta_graph(&g2, format!("{prefix}.meta")).unwrap().unwrap();
    assert_eq!(saver2.def(), saver.def());
    let variables = |g: &Graph| g.global_variables().iter().map(|v| (v.name(), v.kind())).collect::<Vec<_>>();
    assert_eq!(variables(&g2), variables(&g));
    assert_eq!(g2.trainable_variables().len(), 2);
    assert_eq!(g2.collection("updates"), ["add"]);
    assert_eq!(kolo::train::global_step(&g2).unwrap().name(), "global_step");
    let other = Arc::new(Session::new(&g2).unwrap());
    saver2.restore(&other, &prefix).unwrap();
    assert_eq!(values(&other, &names), values(&session, &names));
    saver2.save_in_background(&other, dir.join("n"), Some(1)).unwrap().wait().unwrap();
    assert_eq!(fs::read(dir.join("n-1.index")).unwrap(), fs::read(dir.join("m.index")).unwrap());
    // The file does not grow by being read and written.
    assert_eq!(fs::read(dir.join("n-1.meta")).unwrap(), fs::read(dir.join("m.meta")).unwrap());
    fs::write(dir.join("bad.meta"), b"nonsense").unwrap();
    assert_eq!(Saver::import_meta_graph(&kolo::graph(), dir.join("bad.meta")).err().unwrap().code(), Code::DataLoss);
}

#[test]
fn without_its_ops_a_background_save_is_done_when_it_returns() {
    let dir = Dir::new();
    let g = kolo::graph();
    model(&g);
    let saver = SaverBuilder::new(&g).background_ops(false).build().unwrap();
    assert!(g.nodes().iter().all(|(_, node)| !node.op().starts_with("Background")));
    let save = saver.save_in_background(&started(&g), dir.join("m"), None).unwrap();
    assert!(save.is_done() && checkpoint_exists(dir.join("m")));
    assert_eq!(save.wait().unwrap(), dir.text("m"));
}

fn kolo_command(arguments: &[&str]) -> (bool, String) {
    let done = std::process::Command::new(env!("CARGO_BIN_EXE_kolo")).args(arguments).output().unwrap();
    let text = [done.stdout, done.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
    (done.status.success(), text)
}

#[test]
fn the_command_shows_verifies_and_converts() {
    let dir = Dir::new();
    let g = kolo::graph();
    model(&g);
    let prefix = Saver::new(&g).unwrap().save(&started(&g), dir.join("m"), Some(1)).unwrap();
    let (ok, text) = kolo_command(&["checkpoint", "show", &dir.text("")]);
    assert!(ok && text.contains("w            float[2,2]") && text.ends_with("3 tensors, 40 bytes\n"), "{text}");
    let (ok, text) = kolo_command(&["checkpoint", "show", &prefix, "--tensor", "b", "--json"]);
    assert!(ok, "{text}");
    assert_eq!(text, "{\"b\":{\"dtype\":\"double\",\"shape\":[2],\"values\":[5.0,6.0]}}\n");
    let (there, back) = (dir.text("x.safetensors"), dir.text("again"));
    for (from, to) in [(&prefix, &there), (&there, &back)] {
        let (ok, text) = kolo_command(&["checkpoint", "convert", from, to]);
        assert!(ok, "{text}");
    }
    assert_eq!(fs::read(dir.join("again.index")).unwrap(), fs::read(dir.join("m-1.index")).unwrap());
    let (ok, text) = kolo_command(&["checkpoint", "verify", &format!("{prefix}.index")]);
    assert!(ok && text.contains("3 tensors, all checksums match"), "{text}");
    fs::write(dir.join("m-1.data-00000-of-00001"), [0; 40]).unwrap();
    let (ok, text) = kolo_command(&["checkpoint", "verify", &prefix]);
    assert!(!ok && text.contains("DataLoss") && text.contains("tensor 'w'"), "{text}");
    let (ok, text) = kolo_command(&["checkpoint", "show", &dir.text("nothing")]);
    assert!(!ok && text.contains("NotFound") && text.contains("nothing.index"), "{text}");
}

/// A file that may not grow any more, as on a full disk: the error comes from the system in the middle of a write.
#[cfg(unix)]
#[test]
fn a_write_that_the_system_refuses_leaves_the_old_checkpoint() {
    let dir = Dir::new();
    let tensors = |n: usize| std::collections::BTreeMap::from([("big".to_owned(), Tensor::from(vec![1.0f32; n]))]);
    kolo::train::write_safetensors(&tensors(10), dir.join("small.safetensors")).unwrap();
    kolo::train::write_safetensors(&tensors(4_000_000), dir.join("large.safetensors")).unwrap();
    let (ok, text) = kolo_command(&["checkpoint", "convert", &dir.text("small.safetensors"), &dir.text("m")]);
    assert!(ok, "{text}");
    let before = dir.names();
    let script = "trap '' XFSZ; ulimit -f 8000; exec \"$0\" checkpoint convert \"$1\" \"$2\"";
    let done = std::process::Command::new("sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_kolo"), &dir.text("large.safetensors"), &dir.text("m")])
        .output()
        .unwrap();
    let text = String::from_utf8(done.stderr).unwrap();
    assert!(!done.status.success(), "{text}");
    assert!(text.contains("m.data-00000-of-00001") && text.contains("of 16000000 bytes are missing"), "{text}");
    assert_eq!(dir.names(), before);
    assert_eq!(Bundle::open(&dir.text("m")).unwrap().read("big").unwrap(), Tensor::from(vec![1.0f32; 10]));
}
