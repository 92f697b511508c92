//! A valid cluster is the same in every form; invalid ones are refused with the reason.

use proptest::prelude::*;

use super::*;

fn small() -> ClusterSpec {
    ClusterSpec::from_lists([("ps", vec!["ps0:2222"]), ("worker", vec!["w0:2222", "w1:2222"])]).unwrap()
}

#[track_caller]
fn refused<T: fmt::Debug>(result: Result<T>, why: &str) {
    let error = result.unwrap_err();
    assert!(error.message().contains(why), "{error}");
}

#[test]
fn every_form_gives_the_same_cluster() {
    assert_eq!(ClusterSpec::parse("ps=ps0:2222; worker = w0:2222, w1:2222;").unwrap(), small());
    let json = r#"{"ps": ["ps0:2222"], "worker": {"1": "w1:2222", "0": "w0:2222"}}"#;
    assert_eq!(ClusterSpec::parse(json).unwrap(), small());
    assert_eq!(ClusterSpec::parse(&format!("{{\"cluster\": {json}, \"task\": 1}}")).unwrap(), small());
    assert_eq!(ClusterSpec::from_def(&small().to_def()).unwrap(), small());
    let folder = std::env::temp_dir().join(format!("kolo-cluster-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("cluster");
    for text in [json, "ps=ps0:2222\nworker=w0:2222,w1:2222\n"] {
        std::fs::write(&path, text).unwrap();
        assert_eq!(ClusterSpec::read(&path).unwrap(), small());
    }
    std::fs::remove_dir_all(&folder).unwrap();
    refused(ClusterSpec::read(&path), "cannot be read");
}

#[test]
fn tasks_are_found_and_others_are_not() {
    let cluster = small();
    assert_eq!(cluster.address("worker", 1), Ok("w1:2222"));
    assert_eq!(cluster.task_index("worker", "1"), Ok(1));
    refused(cluster.address("worker", 2), "job 'worker' has no task 2; it has tasks 0 to 1");
    refused(cluster.address("boss", 0), "no job 'boss'; it has ps, worker");
    refused(cluster.task_index("worker", "one"), "'one' is not a task of job 'worker', which has tasks 0 to 1");
    refused(cluster.task_index("ps", "-1"), "which has task 0");
    refused(cluster.task_index("ps", "4294967296"), "which has task 0");
    let sparse = ClusterSpec::parse(r#"{"w": {"7": "a:1", "2": "b:1"}}"#).unwrap();
    refused(sparse.task_index("w", "3"), "it has tasks 2, 7");
    assert_eq!(sparse.all_tasks().collect::<Vec<_>>(), [("w", 2, "b:1"), ("w", 7, "a:1")]);
}

#[test]
fn wrong_addresses_are_refused_with_the_reason() {
    let one = |address: &str| ClusterSpec::from_lists([("worker", vec![address])]);
    for good in ["a:1", "10.0.0.1:65535", "[::1]:2222", "a-b.c_d.example:80", "localhost:0", "w0:02222"] {
        assert!(one(good).is_ok(), "{good}");
    }
    refused(one("a:2222b:2222"), "'a:2222' and 'b:2222'; a comma is missing");
    refused(one("10.0.0.1:222210.0.0.2:2222"), "a comma is likely to be missing");
    refused(one("[::1]:2222[::2]:2222"), "is a comma missing");
    refused(one("a:2222 b:2222"), "is a comma missing");
    refused(one("::1:2222"), "needs brackets: [::1]:2222");
    refused(one("fe80::1"), "needs brackets");
    refused(one("grpc://a:1"), "leave out 'grpc://' and write a:1");
    refused(one("a"), "the port is missing");
    refused(one("a:"), "'' is not a port number");
    refused(one("a:+1"), "'+1' is not a port number");
    refused(one("a:65536"), "larger than 65535");
    refused(one(":1"), "the host is missing");
    refused(one("256.1.1.1:1"), "not an IPv4 address");
    refused(one("-a:1"), "not a host name");
    refused(one("[::1]"), "a port must follow");
    refused(one("[x]:1"), "not an IPv6 address");
    refused(one(""), "it is empty");
    refused(one("a:1é"), "not a port number");
    refused(one("é:1:2"), "comma");
}

#[test]
fn wrong_clusters_are_refused_with_the_reason() {
    refused(ClusterSpec::parse("ps=a:1;worker=b:1,A:1"), "ps:0 and worker:1 have the same address, A:1");
    refused(ClusterSpec::parse("ps=[::1]:1,[0:0:0:0:0:0:0:1]:1"), "have the same address");
    refused(ClusterSpec::parse("ps=a:1;ps=b:1"), "job 'ps' is given twice");
    refused(ClusterSpec::parse("1ps=a:1"), "'1ps' is not a job's name");
    refused(ClusterSpec::parse("p s=a:1"), "not a job's name");
    refused(ClusterSpec::parse(""), "needs a job");
    refused(ClusterSpec::parse("ps"), "is not job=host:port");
    refused(ClusterSpec::parse("ps=a:1,,b:1"), "ps:1: an address is missing");
    refused(ClusterSpec::parse(r#"{"ps": []}"#), "job 'ps' has no tasks");
    refused(ClusterSpec::parse(r#"{"ps": [1]}"#), "ps:0 should be an address in quotes, found 1");
    refused(ClusterSpec::parse(r#"{"ps": "a:1"}"#), "should be a list of addresses");
    refused(ClusterSpec::parse(r#"{"ps": {"x": "a:1"}}"#), "'x' is not a task index");
    refused(ClusterSpec::parse(r#"{"ps": {"3000000000": "a:1"}}"#), "the largest is 2147483647");
    refused(ClusterSpec::parse("{"), "not JSON");
    let mut def = small().to_def();
    def.job[0].tasks.insert(-1, "x:1".into());
    refused(ClusterSpec::from_def(&def), "job 'ps' has a task -1");
    assert!(ClusterSpec::parse("a=localhost:0,localhost:0").is_ok());
}

/// A program may run without parameter servers, and still have the job in its list.
#[test]
fn a_job_without_tasks_is_no_part_of_the_cluster() {
    let cluster = ClusterSpec::parse(r#"{"ps": [], "worker": ["a:1"], "evaluator": {}}"#).unwrap();
    assert_eq!(cluster, ClusterSpec::parse("worker=a:1").unwrap());
    assert_eq!(cluster.jobs().collect::<Vec<_>>(), ["worker"]);
    let mut def = small().to_def();
    def.job.push(crate::wire::proto::JobDef { name: "none".into(), ..Default::default() });
    assert_eq!(ClusterSpec::from_def(&def).unwrap(), small());
    // In a flag, it is a slip.
    refused(ClusterSpec::parse("ps=;worker=a:1"), "ps:0: an address is missing");
}

#[test]
fn the_first_difference_is_named() {
    let cluster = small();
    assert_eq!(cluster.first_difference(&small()), None);
    let moved = ClusterSpec::parse("ps=ps0:2222;worker=w0:2222,w1:3333").unwrap();
    let difference = cluster.first_difference(&moved).unwrap();
    assert_eq!(difference, "worker:1 is w1:2222 here, worker:1 is w1:3333 there");
    assert_ne!(cluster.fingerprint(), moved.fingerprint());
    let shorter = ClusterSpec::parse("ps=ps0:2222;worker=w0:2222").unwrap();
    assert_eq!(shorter.first_difference(&cluster).unwrap(), "no more tasks here, worker:1 is w1:2222 there");
    // Equal clusters have equal fingerprints.
    assert_eq!(cluster.fingerprint(), small().fingerprint());
    assert_eq!(cluster.to_string(), "ps:0 ps0:2222\nworker:0 w0:2222\nworker:1 w1:2222\n");
}

const CLUSTER: &str = r#""cluster": {"chief": ["c:1"], "ps": ["p:1"], "worker": ["a:1", "b:1"]}"#;

fn config(rest: &str) -> Result<TfConfig> {
    TfConfig::parse(&format!("{{{CLUSTER}{rest}}}"))
}

#[test]
fn tf_config_says_who_we_are() {
    let task = |job: &str, index: u32| Some(Task { job: job.into(), index });
    let worker = config(r#", "task": {"type": "worker", "index": 1}, "environment": "cloud""#).unwrap();
    assert_eq!((worker.task.clone(), worker.is_chief()), (task("worker", 1), false));
    assert_eq!(worker.environment.as_deref(), Some("cloud"));
    assert_eq!(config(r#", "task": {"type": "worker", "index": "1"}"#).unwrap().task, task("worker", 1));
    let chief = config(r#", "task": {"type": "chief"}"#).unwrap();
    assert_eq!((chief.task.clone(), chief.is_chief()), (task("chief", 0), true));
    // An evaluator may be outside or inside the cluster.
    assert_eq!(config(r#", "task": {"type": "evaluator", "index": 0}"#).unwrap().task, task("evaluator", 0));
    let inside = r#"{"cluster": {"worker": ["a:1"], "evaluator": ["e:1"]}, "task": {"type": "evaluator", "index": 0}}"#;
    assert!(!TfConfig::parse(inside).unwrap().is_chief());
    let first = r#"{"cluster": {"worker": ["a:1"], "ps": ["p:1"]}, "task": {"type": "worker", "index": 0}}"#;
    assert!(TfConfig::parse(first).unwrap().is_chief());
    let alone = TfConfig::parse("{}").unwrap();
    assert!(alone.cluster.is_none() && alone.task.is_none() && alone.is_chief());
    assert!(TfConfig::parse(r#"{"cluster": {}, "task": {"type": "worker", "index": 0}}"#).unwrap().cluster.is_none());
}

#[test]
fn a_wrong_tf_config_is_refused_with_the_reason() {
    refused(TfConfig::parse("worker"), "TF_CONFIG is not JSON");
    refused(TfConfig::parse("[]"), "TF_CONFIG should be a JSON object, found a list");
    refused(TfConfig::parse(r#"{"cluster": 3}"#), "TF_CONFIG: 'cluster' should be an object of jobs, found 3");
    refused(TfConfig::parse(r#"{"cluster": {"ps": ["a:2222b:2222"]}}"#), "TF_CONFIG: cluster: ps:0: ");
    refused(config(""), "no 'task'");
    refused(config(r#", "task": {"type": "worker", "index": 2}"#), "job 'worker' has no task 2; it has tasks 0 to 1");
    refused(config(r#", "task": {"type": "worker", "index": "x"}"#), "'x' is not a task of job 'worker'");
    refused(config(r#", "task": {"type": "worker", "index": 0.5}"#), "'0.5' is not a task");
    refused(config(r#", "task": {"type": "worker", "index": []}"#), "found a list");
    refused(config(r#", "task": {"type": "wroker", "index": 0}"#), "no job 'wroker'; it has chief, ps, worker");
    refused(config(r#", "task": {"index": 0}"#), "'type' is missing");
    refused(config(r#", "task": 7"#), "'task' should be an object");
    refused(config(r#", "environment": 7"#).map(|_| ()), "task");
    let two = r#"{"cluster": {"chief": ["a:1"], "master": ["b:1"]}, "task": {"type": "chief", "index": 0}}"#;
    refused(TfConfig::parse(two), "chief:0 and master:0 cannot both lead");
}

fn any_cluster() -> impl Strategy<Value = ClusterSpec> {
    let tasks = proptest::collection::btree_set(0u32..50, 1..5);
    proptest::collection::btree_map("[a-z][a-z0-9_]{0,5}", tasks, 1..4).prop_map(|jobs| {
        let jobs = jobs.into_iter().map(|(job, tasks)| {
            let tasks = tasks.into_iter().map(|task| (task, format!("{}-x:{}", job.replace('_', "-"), task + 1)));
            (job.clone(), tasks.collect())
        });
        // Two jobs whose names differ in an underscore would have the same addresses.
        ClusterSpec::new(jobs.collect()).unwrap_or_else(|_| small())
    })
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in ".{0,60}") {
        let _ = ClusterSpec::parse(&text);
        let _ = TfConfig::parse(&text);
        let _ = address::parse(&text);
    }

    #[test]
    fn texts_near_the_right_form_are_read_or_refused(text in "[a-c0-9:.,;=\\[\\]-]{0,24}") {
        if let Ok(cluster) = ClusterSpec::parse(&text) {
            prop_assert_eq!(ClusterSpec::from_def(&cluster.to_def()).unwrap(), cluster);
        }
    }

    #[test]
    fn any_json_is_read_or_refused(text in r#"\{"(cluster|task|ps)": (\{|\[|"|[0-9]).{0,40}"#) {
        let _ = TfConfig::parse(&text);
        let _ = ClusterSpec::parse(&text);
    }

    #[test]
    fn equal_clusters_have_equal_fingerprints_and_others_a_difference(a in any_cluster(), b in any_cluster()) {
        let again = ClusterSpec::from_def(&a.to_def()).unwrap();
        prop_assert_eq!(a.fingerprint(), again.fingerprint());
        prop_assert_eq!(a.first_difference(&again), None);
        prop_assert_eq!(a == b, a.first_difference(&b).is_none());
        prop_assert_eq!(a == b, a.fingerprint() == b.fingerprint());
    }
}
