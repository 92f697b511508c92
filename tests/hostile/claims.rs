//! Clients of a cluster, who have its token, and want what belongs to its tasks or to other clients.

use kolo::tls::Credentials;
use kolo::{Code, Connect as _, DType, PartialShape, Session, Shape, Tensor};
use kolo_net::grpc::{GrpcMaster, GrpcPeer, LinkOptions};
use kolo_net::proto::{KoloClaimRequest, KoloReplicateRequest, ResetRequest};
use kolo_net::services::{MasterService as _, WorkerService as _};
use tokio::runtime::{Builder, Runtime};

use crate::support::{PATIENCE, Spec, one_at_a_time};

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

/// A client of the user who has started the servers.
fn client() -> LinkOptions {
    LinkOptions { deadline: Some(PATIENCE), credentials: Credentials::User, ..LinkOptions::default() }
}

#[test]
fn only_the_task_itself_may_claim_its_variables() {
    let _turn = one_at_a_time();
    let spec = Spec::new(&[("ps", 2)]);
    let replica = spec.start("ps", 1, &[]);
    let _owner = spec.serve("ps", 0, &["--durability", "replicated", "--replica", "ps:1"]);
    replica.wait_for("serving grpc://");
    let g = kolo::graph();
    let (init, read, add) = g.device("/job:ps/task:0", || {
        let variable = g.variable("v", 1.0f32);
        (variable.initializer(), variable.read(), variable.assign_add(g.constant(1.0f32)))
    });
    let session = Session::connect(&spec.target("ps", 0), &g).unwrap();
    session.run_op(init).unwrap();

    let runtime = runtime();
    let thief = GrpcPeer::new("the replica", spec.address("ps", 1), client(), runtime.handle().clone());
    let task = "/job:ps/replica:0/task:0".to_owned();
    for nonce in [Vec::new(), b"a guess".to_vec()] {
        let claimed = runtime.block_on(thief.claim(KoloClaimRequest { task: task.clone(), nonce: nonce.clone() }));
        let error = claimed.map(|claimed| claimed.entry.len()).expect_err("variables were handed out");
        assert_eq!(error.code(), Code::Aborted, "{error}");
        assert!(error.message().contains("only /job:ps/replica:0/task:0 may"), "{error}");
        let record =
            KoloReplicateRequest { task: task.clone(), epoch: u64::MAX, is_whole: true, nonce, ..Default::default() };
        let error = runtime.block_on(thief.replicate(record)).expect_err("a stranger's values were stored");
        assert_eq!(error.code(), Code::Aborted, "{error}");
    }
    // The owner is not fenced off.
    session.run_op(add).unwrap();
    assert_eq!(session.fetch(read).unwrap().scalar_value::<f32>().unwrap(), 2.0);
}

/// A session with one variable in a container, and how to read it.
fn with_variable<'g>(g: &'g kolo::Graph, target: &str, container: &str) -> (Session, kolo::Output<'g>) {
    let handle = g
        .op("VarHandleOp")
        .attr("container", container)
        .attr("shared_name", "v")
        .attr("dtype", DType::F32)
        .attr("shape", PartialShape::from(Shape::from([0usize; 0])))
        .build()
        .output(0);
    let write = g.op("AssignVariableOp").input(handle).input(g.constant(7.0f32)).build();
    let read = g.op("ReadVariableOp").input(handle).attr("dtype", DType::F32).build().output(0);
    let session = Session::connect(target, g).unwrap();
    session.run_op(write).unwrap();
    (session, read)
}

#[test]
fn reset_ends_no_session_in_other_containers() {
    let _turn = one_at_a_time();
    let spec = Spec::new(&[("worker", 1)]);
    let _server = spec.serve("worker", 0, &[]);
    let (own, others) = (kolo::graph(), kolo::graph());
    let (mine, my_value) = with_variable(&own, &spec.target("worker", 0), "mine");
    let (theirs, their_value) = with_variable(&others, &spec.target("worker", 0), "theirs");
    let runtime = runtime();
    let master = GrpcMaster::new("server", spec.address("worker", 0), client(), runtime.handle().clone());
    let reset = |container: &[&str]| {
        let container = container.iter().map(|&name| name.to_owned()).collect();
        runtime.block_on(master.reset(ResetRequest { container, ..ResetRequest::default() })).unwrap();
    };
    // Without names it is the default container's, which neither uses.
    reset(&[]);
    for (session, value) in [(&mine, my_value), (&theirs, their_value)] {
        assert_eq!(session.fetch(value).unwrap(), Tensor::scalar(7.0f32));
    }
    reset(&["mine"]);
    assert_eq!(theirs.fetch(their_value).unwrap(), Tensor::scalar(7.0f32));
    assert_eq!(mine.fetch(my_value).unwrap_err().code(), Code::Aborted);
}
