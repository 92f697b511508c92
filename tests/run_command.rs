//! `kolo run`, as a person meets it.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::process::{Command, Output};

use kolo::Tensor;
use kolo::data::npy;

fn data(name: &str) -> String {
    format!("{}/tests/data/functions/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn kolo(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kolo")).arg("run").args(args).output().expect("the binary was built for this test")
}

#[track_caller]
fn succeeds(args: &[&str]) -> String {
    let output = kolo(args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[track_caller]
fn fails(args: &[&str], parts: &[&str]) {
    let output = kolo(args);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    for part in parts {
        assert!(text.contains(part), "'{part}' is missing in:\n{text}");
    }
}

fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).expect("it is ours");
    folder
}

fn array(file: &str, name: &str) -> Tensor {
    let arrays = npy::read_npz(data(file)).expect("the fixture is there");
    arrays.into_iter().find(|(found, _)| found == name).unwrap_or_else(|| panic!("no {name}")).1
}

#[track_caller]
fn assert_close(found: &Tensor, expected: &Tensor) {
    assert_eq!(found.shape(), expected.shape());
    for (a, b) in found.data::<f32>().expect("it is float").iter().zip(expected.data::<f32>().expect("it is float")) {
        assert!((a - b).abs() < 1e-5, "{found:?} should be {expected:?}");
    }
}

#[test]
fn a_frozen_graph_runs_from_file_to_file() {
    let folder = folder("run-frozen");
    let path = |name: &str| folder.join(name).to_str().expect("a temporary path is text").to_owned();
    let (x, y) = (path("x.npy"), path("y.npy"));
    npy::write(&x, &array("frozen.npz", "feed/x")).unwrap();
    let text = succeeds(&[&data("frozen.pb"), "--feed", &format!("x=@{x}"), "--fetch", "Identity:0", "--out", &y]);
    assert!(text.contains("Identity:0 float[4,2] written to"), "{text}");
    assert_close(&npy::read(&y).unwrap(), &array("frozen.npz", "fetch/Identity:0"));
    std::fs::remove_dir_all(&folder).expect("it is ours");
}

#[test]
fn values_come_from_the_command_line_and_results_are_printed() {
    let case = data("case.pb");
    assert_eq!(succeeds(&[&case, "--feed", "i=1", "--feed", "x=[3,-2]", "--fetch", "y"]), "y float[2]\n[9.0,4.0]\n");
    let text = succeeds(&[&case, "--feed", "i=2", "--feed", "x=[3,-2]", "--fetch", "y", "--json"]);
    assert_eq!(text.trim(), r#"{"y":{"dtype":"float","shape":[2],"values":[5.0,6.0]}}"#);
    let stateful = data("stateful.pb");
    let feeds = ["--feed", "x=[1,1]", "--feed", "p=false", "--fetch", "n"];
    assert_eq!(succeeds(&[&[stateful.as_str(), "--first", "init"][..], &feeds].concat()), "n int64[]\n301\n");
    fails(&[&[stateful.as_str()][..], &feeds].concat(), &["FailedPrecondition", "ninitialized"]);
}

#[test]
fn a_saved_model_runs_by_the_names_of_its_signature() {
    let model = data("saved_v2");
    let folder = folder("run-saved");
    let path = |name: &str| folder.join(name).to_str().expect("a temporary path is text").to_owned();
    let (x, y, total) = (path("x.npy"), path("y.npy"), path("total.npy"));
    npy::write(&x, &array("saved_v2.npz", "serving_default/feed/x")).unwrap();
    let feed = format!("x=@{x}");
    succeeds(&[&model, "--feed", &feed, "--fetch", "y", "--out", &y, "--fetch", "total", "--out", &total]);
    assert_close(&npy::read(&y).unwrap(), &array("saved_v2.npz", "serving_default/fetch/y"));
    assert_close(&npy::read(&total).unwrap(), &array("saved_v2.npz", "serving_default/fetch/total"));
    let text = succeeds(&[&model, "--signature", "scale", "--feed", "by=1"]);
    assert!(text.starts_with("w float[3,2]\n[["), "{text}");
    std::fs::remove_dir_all(&folder).expect("it is ours");
}

#[test]
fn mistakes_are_named() {
    let (case, model) = (data("case.pb"), data("saved_v2"));
    let feeds = ["--feed", "i=1", "--feed", "x=[3,-2]", "--fetch"];
    fails(&[&[case.as_str()][..], &feeds, &["yy"]].concat(), &["NotFound", "'yy'", "did you mean 'y'?"]);
    fails(&[&case, "--feed", "i=1", "--feed", "x=[3]", "--fetch", "y"], &["'x' is float[2]", "float[1]"]);
    fails(&[&case, "--feed", "i=1.5", "--fetch", "y"], &["--feed i", "1.5 is not a int32"]);
    fails(&[&case, "--feed", "x", "--fetch", "y"], &["should look like x=@in.npy"]);
    fails(&[&case, "--feed", "x=@nothing.npy", "--fetch", "y"], &["nothing.npy"]);
    fails(&[&case], &["--fetch"]);
    fails(&[&model, "--signature", "serve"], &["no signature 'serve'", "'scale', 'serving_default'"]);
    fails(&[&model, "--tag", "gpu"], &["no graph has the tags [gpu]", "[serve]"]);
    fails(&[&model, "--feed", "z=1"], &["no input 'z'", "'x'"]);
    fails(&[&model, "--feed", "x=[[1,2,3]]", "--fetch", "z"], &["no output 'z'", "'total', 'y'"]);
    fails(&[&model, "--feed", "x=[[1,2]]"], &["'x' is float[?,3]", "float[1,2]"]);
    fails(&[&model], &["needs input 'x'"]);
    fails(&[&data("")], &["without a saved_model.pb"]);
}
