//! What is wrong is refused with a clear error, and the session (or the graph) is usable afterwards.

use kolo::{Code, DType, Error, Graph, PartialShape, Session, Shape, Tensor, wire};

#[track_caller]
fn refused(error: Error, code: Code, parts: &[&str]) {
    assert_eq!(error.code(), code, "{error}");
    for part in parts {
        assert!(error.to_string().contains(part), "'{part}' is missing in: {error}");
    }
}

fn import(text: &str) -> Result<Graph, Error> {
    let graph = kolo::graph();
    let def = wire::graph::read_graph(text.as_bytes())?;
    wire::graph::import(&graph, &def, wire::graph::ImportOptions::default())?;
    Ok(graph)
}

/// Describing something wrong fails, and the graph without it still runs.
#[track_caller]
fn describing(wrong: impl Fn(&Graph), code: Code, parts: &[&str]) {
    let g = kolo::graph();
    let fine = g.constant(1.0f32) + 1.0;
    wrong(&g);
    refused(g.take_error().expect("it is wrong"), code, parts);
    assert_eq!(Session::new(&g).and_then(|session| session.fetch(fine)), Ok(Tensor::scalar(2.0f32)));
}

#[test]
fn wrong_descriptions() {
    let x = |g: &Graph| g.placeholder::<f32>("x", [Some(2), Some(3)]).endpoint();
    describing(
        |g| {
            g.op("MatMull").build();
        },
        Code::NotFound,
        &["MatMull", "did you mean 'MatMul'?", "bad_input.rs"],
    );
    describing(
        |g| {
            g.op("NoOp").attr("shape", 1i64).build();
        },
        Code::InvalidArgument,
        &["no attribute 'shape'"],
    );
    describing(
        |g| {
            let x = kolo::Output::new(g, x(g));
            let _ = g.op("MatMul").input(x).input(x).attr("transpose_a", 3i64).build();
        },
        Code::InvalidArgument,
        &["transpose_a", "found int 3"],
    );
    describing(
        |g| {
            let x = kolo::Output::new(g, x(g));
            let _ = x + g.constant(1i32);
        },
        Code::InvalidArgument,
        &["should be float, found int32", "x:0 float[2,3]"],
    );
    describing(
        |g| {
            let x = kolo::Output::new(g, x(g));
            let _ = x + g.constant([1.0f32, 2.0]);
        },
        Code::InvalidArgument,
        &["[2,3]", "[2]", "broadcast"],
    );
    describing(|g| g.device("/gpu:zero", || ()), Code::InvalidArgument, &["/gpu:zero", "bad_input.rs"]);
    describing(
        |g| {
            g.op("NoOp").name("a b").build();
        },
        Code::InvalidArgument,
        &["'a b' is not a valid node name"],
    );
    describing(
        |g| {
            g.op("NoOp").name("a\\b").build();
        },
        Code::InvalidArgument,
        &["is not a valid node name"],
    );
}

#[test]
fn gigantic_shapes() {
    assert_eq!(Shape::new(&[1 << 40, 1 << 40]).unwrap_err().code(), Code::InvalidArgument);
    let g = kolo::graph();
    let dims = g.placeholder::<i64>("dims", [Some(2)]);
    let filled = g.op("Fill").input(dims).input(g.constant(0.0f32)).out();
    let session = Session::new(&g).expect("the graph is fine");
    let run = |dims: [i64; 2]| {
        session.run(&[filled], &[(g.operation("dims").expect("made above").output(0), Tensor::from(dims))], &[])
    };
    for dims in [[1 << 40, 1 << 40], [1 << 31, 1 << 31], [-1, 2]] {
        assert!(matches!(run(dims).unwrap_err().code(), Code::InvalidArgument | Code::ResourceExhausted));
    }
    assert_eq!(run([1, 2]), Ok(vec![Tensor::zeros(DType::F32, [1, 2]).expect("small")]));
}

#[test]
fn wrong_graph_files() {
    let node = |name: &str, input: &str| {
        format!(
            "node {{ name: \"{name}\" op: \"Neg\" input: \"{input}\" attr {{ key: \"T\" value {{ type: DT_FLOAT }} }} }}\n"
        )
    };
    let refuse = |text: &str, parts: &[&str]| match import(text) {
        Ok(_) => panic!("it should be refused: {text}"),
        Err(error) => {
            for part in parts {
                assert!(error.to_string().contains(part), "'{part}' is missing in: {error}");
            }
        }
    };
    refuse(&(node("a", "b") + &node("b", "a")), &["cycle", "a", "b"]);
    refuse(&node("a", "missing"), &["missing"]);
    refuse("node { name: \"a\" op: \"NoOp\" } node { name: \"a\" op: \"NoOp\" }", &["'a'"]);
    refuse("node { name: \"a\" op: ", &["1:"]);
    refuse("node { name: \"a\" op: \"NoOp\" device: \"/nonsense:1\" }", &["/nonsense:1"]);
    assert!(import("node { name: \"a\" op: \"NoOp\" }").is_ok());
    // What nobody knows is only refused where it is to run.
    let odd = import("node { name: \"a\" op: \"Frobnicate\" }").expect("it is kept");
    let session = Session::new(&odd).expect("nothing runs yet");
    refused(session.run_named(&[], &[], &["a"]).unwrap_err(), Code::NotFound, &["Frobnicate", "'a'"]);
}

#[test]
fn a_device_that_does_not_exist() {
    let g = kolo::graph();
    let fine = g.constant(1.0f32);
    let lost = g.device("/job:ps/task:3", || g.constant(2.0f32));
    let session = Session::new(&g).expect("placement happens when it is run");
    refused(
        session.fetch(lost).unwrap_err(),
        Code::InvalidArgument,
        &["/job:ps/task:3", "device:CPU:0", "bad_input.rs"],
    );
    assert_eq!(session.fetch(fine), Ok(Tensor::scalar(1.0f32)));
    assert!(g.placeholder::<f32>("p", PartialShape::unknown()).is_valid());
}
