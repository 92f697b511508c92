//! One case, read from its GraphDef.

use std::collections::BTreeMap;

use kolo::wire::proto::{AttrValue, GraphDef, NodeDef, TensorShapeProto, Value};
use kolo::{Error, Result, Tensor, wire};
use serde_json::Value as Json;

/// A graph, what to run in it, and what TensorFlow got.
pub struct Case {
    pub name: String,
    pub ops: Vec<String>,
    pub def: GraphDef,
    pub runs: Vec<Run>,
    /// Whether it may also run with its inputs fed.
    pub may_feed: bool,
    /// Whether `{dir}` in its strings stands for an empty folder.
    pub has_folder: bool,
    pub tolerance: Tolerance,
    pub grad: Option<GradCase>,
    pub train: Option<Json>,
    pub expected: Vec<Tensor>,
}

/// One call of `Session::run`.
pub struct Run {
    pub fetches: Vec<String>,
    pub targets: Vec<String>,
    pub feeds: Vec<(String, Tensor)>,
    /// What is fed from an earlier run: the run and which of its fetches. Of a handle, its name.
    pub feed_results: Vec<(String, usize, usize)>,
    pub expect: Vec<usize>,
    pub error: Option<String>,
    /// The error when the inputs are fed, if it differs; `OK` if there is none then.
    pub error_fed: Option<String>,
    pub compare: String,
    pub timeout_ms: u64,
    /// How many times it runs; the values are those of the last.
    pub repeat: u64,
}

/// Gradients to take and compare; `expect` has `None` where TensorFlow gives none.
pub struct GradCase {
    pub ys: Vec<String>,
    pub dys: Vec<String>,
    pub xs: Vec<String>,
    pub expect: Vec<Option<usize>>,
}

/// How far floats may differ; by default as far as their dtype suggests.
#[derive(Clone, Copy, Default)]
pub struct Tolerance {
    pub rtol: Option<f64>,
    pub atol: Option<f64>,
    /// `atol` of half and bfloat16 alone.
    pub half_atol: Option<f64>,
    pub exact: bool,
}

impl Case {
    pub fn read(bytes: &[u8]) -> Result<Case> {
        let mut def = wire::graph::read_graph(bytes)?;
        let (mut json, mut expected, mut feeds) = (None, BTreeMap::new(), BTreeMap::new());
        let mut take = |node: &NodeDef| -> Result<bool> {
            let number = |prefix| node.name.strip_prefix(prefix).and_then(|n: &str| n.parse::<usize>().ok());
            if node.name == "case" {
                if let Some(Value::S(text)) = node.attr.get("_case").and_then(|attr| attr.value.as_ref()) {
                    json = serde_json::from_slice::<Json>(text).ok();
                }
            } else if let Some(i) = number("expected/") {
                expected.insert(i, value_of(node)?);
            } else if let Some(i) = number("feed/") {
                feeds.insert(i, value_of(node)?);
            } else {
                return Ok(false);
            }
            Ok(true)
        };
        let mut kept = Vec::new();
        for node in std::mem::take(&mut def.node) {
            if !take(&node)? {
                kept.push(node);
            }
        }
        def.node = kept;
        let json = json.ok_or_else(|| Error::data_loss("a case without its node 'case'"))?;
        let runs = json["runs"].as_array().into_iter().flatten().map(|run| Run {
            fetches: strings(&run["fetch"]),
            targets: strings(&run["target"]),
            feeds: run["feed"]
                .as_object()
                .into_iter()
                .flatten()
                .map(|(name, i)| (name.clone(), feeds[&(i.as_u64().unwrap() as usize)].clone()))
                .collect(),
            feed_results: run["feed_result"]
                .as_object()
                .into_iter()
                .flatten()
                .filter_map(|(name, at)| match indices(at)[..] {
                    [Some(run), Some(fetch)] => Some((name.clone(), run, fetch)),
                    _ => None,
                })
                .collect(),
            expect: indices(&run["expect"]).into_iter().flatten().collect(),
            error: run["error"].as_str().map(str::to_owned),
            error_fed: run["error_fed"].as_str().map(str::to_owned),
            compare: run["compare"].as_str().unwrap_or("equal").to_owned(),
            timeout_ms: run["timeout_ms"].as_u64().unwrap_or(30_000),
            repeat: run["repeat"].as_u64().unwrap_or(1),
        });
        Ok(Case {
            name: json["name"].as_str().unwrap_or_default().to_owned(),
            ops: strings(&json["ops"]),
            runs: runs.collect(),
            may_feed: json["fed"].as_bool().unwrap_or(true) && def.node.iter().any(is_input),
            has_folder: json["dir"].as_bool().unwrap_or(false),
            tolerance: Tolerance {
                rtol: json["rtol"].as_f64(),
                atol: json["atol"].as_f64(),
                half_atol: json["half_atol"].as_f64(),
                exact: json["exact"].as_bool().unwrap_or(false),
            },
            grad: json.get("grad").map(|grad| GradCase {
                ys: strings(&grad["ys"]),
                dys: strings(&grad["dys"]),
                xs: strings(&grad["xs"]),
                expect: indices(&grad["expect"]),
            }),
            train: json.get("train").cloned(),
            def,
            expected: expected.into_values().collect(),
        })
    }

    /// The same graph with its inputs as placeholders of unknown shape, and what to feed.
    pub fn fed(&self) -> Result<(GraphDef, Vec<(String, Tensor)>)> {
        let (mut def, mut feeds) = (self.def.clone(), Vec::new());
        for node in def.node.iter_mut().filter(|node| is_input(node)) {
            feeds.push((format!("{}:0", node.name), value_of(node)?));
            node.op = "Placeholder".to_owned();
            node.attr.remove("value");
            let unknown = TensorShapeProto { unknown_rank: true, ..TensorShapeProto::default() };
            node.attr.insert("shape".to_owned(), AttrValue { value: Some(Value::Shape(unknown)) });
        }
        Ok((def, feeds))
    }
}

fn is_input(node: &NodeDef) -> bool {
    node.op == "Const" && node.name.starts_with("in/")
}

fn value_of(node: &NodeDef) -> Result<Tensor> {
    match node.attr.get("value").and_then(|attr| attr.value.as_ref()) {
        Some(Value::Tensor(tensor)) => wire::tensor::from_proto(tensor),
        _ => Err(Error::data_loss(format!("constant '{}' has no value", node.name))),
    }
}

pub fn strings(json: &Json) -> Vec<String> {
    json.as_array().into_iter().flatten().filter_map(Json::as_str).map(str::to_owned).collect()
}

pub fn indices(json: &Json) -> Vec<Option<usize>> {
    json.as_array().into_iter().flatten().map(|i| i.as_u64().map(|i| i as usize)).collect()
}
