//! Adds the nodes of a message to a graph.
//!
//! First everything is read and resolved without touching the graph; then the nodes are added, each after its inputs. The
//! only edges that may point backwards are those from a `NextIteration` to a `Merge`, which close loops: such a merge is
//! added as if nothing came round, and the edge is put in at the end. Its shape is then a guess, the shape of what enters
//! the loop. If what comes round does not bear it out, all nodes are taken back and added again with a weaker guess.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use kolo_core::{DeviceSpec, Error, PartialShape, Result};

use super::CONSUMER_VERSION;
use super::origins::GraphOrigins;
use crate::describe::request::{NodeRequest, expected_inputs};
use crate::op::registry::did_you_mean;
use crate::rewrite::order::topological_order;
use crate::wire::attr::attr_from_proto;
use crate::wire::functions::{Flat, Functions, LowerOptions, join, lower};
use crate::wire::proto::{GraphDebugInfo, GraphDef, NodeDef};
use crate::wire::tensor::MAX_FILLED_BYTES;
use crate::{AttrValue, Attrs, Endpoint, Flow, Graph, NodeId, Origin, Signature, UnknownOp};

/// How to add a message's nodes.
#[derive(Clone, Debug)]
pub struct ImportOptions {
    /// Put `prefix/` before all names. Without a prefix, nodes may also take inputs from nodes that the graph already has.
    pub prefix: Option<String>,
    /// Outputs of the graph to use in place of some of the message's, by their names there (`x:0`, or `x` for the same).
    pub input_map: HashMap<String, Endpoint>,
    /// How many bytes the constants of this message may take that are not in it (see [`crate::wire::tensor`]).
    pub max_filled_bytes: u64,
    /// Where the nodes stand in their file; see [`super::read_graph_file`].
    pub origins: GraphOrigins,
    /// What becomes of calls of functions.
    pub calls: Calls,
    /// How many nodes calls may be written out as: a few functions that call each other twice could ask for more than
    /// there is memory for.
    pub max_function_nodes: usize,
}

/// What becomes of calls of functions, and of branches and loops that name functions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Calls {
    /// They are written out as plain nodes, which can run anywhere.
    #[default]
    Lower,
    /// They stay as they are. Such a graph can be looked at and written again, but not run.
    Keep,
}

impl Default for ImportOptions {
    fn default() -> ImportOptions {
        ImportOptions {
            prefix: None,
            input_map: HashMap::new(),
            max_filled_bytes: MAX_FILLED_BYTES,
            origins: GraphOrigins::default(),
            calls: Calls::default(),
            max_function_nodes: 1 << 20,
        }
    }
}

/// What was added.
#[derive(Clone, Debug, PartialEq)]
pub struct Imported {
    /// The nodes, in the message's order. A call is the node that keeps its name.
    pub nodes: Vec<NodeId>,
    /// The attributes that the graph does not have now.
    pub dropped_attrs: Vec<DroppedAttr>,
    /// The version of the program that wrote the message, 0 if it does not say.
    pub producer: i32,
}

/// An attribute that was not taken over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DroppedAttr {
    /// The node's name in the message.
    pub node: String,
    /// The attribute's name.
    pub attr: String,
    /// Why.
    pub reason: String,
}

/// Adds the nodes of `def` to `graph`, all of them or, on an error, none.
///
/// Attributes that are missing take their defaults. Attributes that the op does not have are dropped, and so are
/// annotations (names that begin with `_`) that Kolo has no value for. A node whose op is not in the table is kept with all of
/// its attributes; a run that needs it is refused. Calls of functions are written out as plain nodes,
/// named after the call, unless the options say otherwise; the library is kept with the graph. A function that calls
/// itself is an `Unimplemented` error.
pub fn import(graph: &Graph, def: &GraphDef, options: ImportOptions) -> Result<Imported> {
    import_within(graph, def, options, &[])
}

/// [`import`] on behalf of another import, which is writing the bodies of these functions.
pub(crate) fn import_within(
    graph: &Graph,
    def: &GraphDef,
    options: ImportOptions,
    within: &[String],
) -> Result<Imported> {
    let producer = check_versions(def)?;
    let library = join(graph.nodes().library(), def.library.as_ref())?;
    let functions = Functions::new(&library);
    let prefix = options.prefix.as_deref().map_or("", |prefix| prefix.trim_end_matches('/'));
    let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
    let flat = match options.calls {
        Calls::Lower => {
            let options = LowerOptions {
                registry: graph.registry(),
                functions: &functions,
                library: &library,
                within,
                is_taken: &|name| graph.nodes().find(&format!("{prefix}{name}")).is_some(),
                is_mapped: &|node, output| {
                    let map = &options.input_map;
                    map.contains_key(&format!("{node}:{output}")) || output == 0 && map.contains_key(node)
                },
                max_nodes: options.max_function_nodes,
                frame_prefix: &prefix,
            };
            lower(&def.node, options)?
        }
        Calls::Keep => None,
    };
    let flat = flat.as_ref();
    let message = Message {
        nodes: flat.map_or(&def.node, |flat| &flat.nodes),
        flat,
        debug_info: def.debug_info.as_ref(),
        prefix,
    };
    let plan = Plan::new(graph, &message, &options)?;
    let mut nodes = plan.add(graph)?;
    nodes.truncate(def.node.len());
    graph.set_library(library.clone());
    Ok(Imported { nodes, dropped_attrs: plan.dropped_attrs, producer })
}

/// The producer's version, if we may read what it wrote.
fn check_versions(def: &GraphDef) -> Result<i32> {
    let Some(versions) = &def.versions else { return Ok(def.version) };
    if versions.min_consumer > CONSUMER_VERSION {
        return Err(Error::invalid_argument(format!(
            "GraphDef min consumer version {} above current version {CONSUMER_VERSION}",
            versions.min_consumer
        )));
    }
    if versions.bad_consumers.contains(&CONSUMER_VERSION) {
        return Err(Error::invalid_argument(format!("GraphDef disallows consumer version {CONSUMER_VERSION}")));
    }
    Ok(versions.producer)
}

/// A message without calls, or with calls that are kept.
struct Message<'a> {
    nodes: &'a [NodeDef],
    /// Set if calls were written out.
    flat: Option<&'a Flat>,
    debug_info: Option<&'a GraphDebugInfo>,
    /// Empty, or with a slash at its end.
    prefix: String,
}

/// Everything the message says, read and resolved.
struct Plan<'a> {
    nodes: Vec<PlannedNode<'a>>,
    /// The nodes' numbers, each after those that it needs.
    order: Vec<usize>,
    dropped_attrs: Vec<DroppedAttr>,
}

struct PlannedNode<'a> {
    def: &'a NodeDef,
    name: String,
    flow: Flow,
    inputs: Vec<Source>,
    control_inputs: Vec<Source>,
    attrs: Attrs,
    device: DeviceSpec,
    source: Option<Origin>,
    device_source: Option<Origin>,
    /// Set if the op is not in the table.
    unknown: Option<Arc<UnknownOp>>,
}

/// Where an input comes from.
#[derive(Clone, Copy, PartialEq)]
enum Source {
    /// Output `index` of a node of the message.
    Message { node: usize, index: u32 },
    /// An output that the graph already has.
    Graph(Endpoint),
}

/// Input `input` of the merge `merge` comes from output `index` of `source`, a `NextIteration`.
struct BackEdge {
    merge: usize,
    input: usize,
    source: usize,
    index: u32,
}

impl<'a> Plan<'a> {
    fn new(graph: &Graph, message: &Message<'a>, options: &ImportOptions) -> Result<Plan<'a>> {
        let mut names = HashMap::with_capacity(message.nodes.len());
        for (i, node) in message.nodes.iter().enumerate() {
            if names.insert(node.name.as_str(), i).is_some() {
                return Err(Error::invalid_argument(format!("Duplicate node name in graph: '{}'", node.name)));
            }
        }
        let prefix = message.prefix.clone();
        let mut reader =
            Reader { graph, names, prefix, options, budget: options.max_filled_bytes, dropped: Vec::new() };
        let read = |(i, node): (usize, &'a NodeDef)| {
            let at = message.flat.map_or(i, |flat| flat.from[i]);
            let (source, device_source) = options.origins.of(at, node, message.debug_info);
            let read = reader.node(node).map_err(|error| match &source {
                Some(line) => in_node(error, node).and(format_args!(" (at {line})")),
                None => in_node(error, node),
            })?;
            Ok(PlannedNode { source, device_source, ..read })
        };
        let nodes = message.nodes.iter().enumerate().map(read).collect::<Result<Vec<_>>>()?;
        let mut plan = Plan { nodes, order: Vec::new(), dropped_attrs: reader.dropped };
        plan.order = topological_order(&plan.needs()).map_err(|cycle| plan.describe_cycle(&cycle))?;
        Ok(plan)
    }

    /// For each node, those that must be added before it.
    fn needs(&self) -> Vec<Vec<usize>> {
        let of = |node: &PlannedNode<'_>| {
            let data = node.inputs.iter().filter(|source| self.back_source(node, source).is_none());
            let all = data.chain(&node.control_inputs).filter_map(|source| match source {
                Source::Message { node, .. } => Some(*node),
                Source::Graph(_) => None,
            });
            all.collect()
        };
        self.nodes.iter().map(of).collect()
    }

    /// The node and output that `source` is, if it comes round a loop into `node`.
    fn back_source(&self, node: &PlannedNode<'_>, source: &Source) -> Option<(usize, u32)> {
        match *source {
            Source::Message { node: from, index }
                if node.flow == Flow::Merge && self.nodes[from].flow == Flow::NextIteration =>
            {
                Some((from, index))
            }
            Source::Message { .. } | Source::Graph(_) => None,
        }
    }

    fn back_edges(&self) -> Vec<BackEdge> {
        let of = |(merge, node): (usize, &PlannedNode<'_>)| {
            let edges = node.inputs.iter().enumerate().filter_map(move |(input, from)| {
                let (source, index) = self.back_source(&self.nodes[merge], from)?;
                Some(BackEdge { merge, input, source, index })
            });
            edges.collect::<Vec<_>>()
        };
        self.nodes.iter().enumerate().flat_map(of).collect()
    }

    fn describe_cycle(&self, cycle: &[usize]) -> Error {
        const SHOWN: usize = 8;
        let mut names: Vec<String> = cycle.iter().take(SHOWN).map(|&i| format!("'{}'", self.nodes[i].name)).collect();
        match cycle.len() > SHOWN {
            true => names.push(format!("{} more nodes", cycle.len() - SHOWN)),
            false => names.extend(names.first().cloned()),
        }
        Error::invalid_argument(format!(
            "the graph has a cycle: {}; only a NextIteration may lead back, to a Merge",
            names.join(" needs ")
        ))
    }

    /// Adds the nodes, with the strongest shapes for loops that are found within a few attempts.
    fn add(&self, graph: &Graph) -> Result<Vec<NodeId>> {
        /// Each attempt infers all shapes again, so a hostile graph must not get to choose their number.
        const MAX_GUESSES: usize = 4;
        let back_edges = self.back_edges();
        let n_before = graph.nodes().len();
        let mut shapes: HashMap<usize, PartialShape> = HashMap::new();
        for attempt in 0.. {
            let unsure = back_edges.iter().any(|edge| !known_unknown(shapes.get(&edge.merge)));
            let added = self.add_once(graph, &shapes).and_then(|ids| {
                let weaker = close_loops(graph, &self.nodes, &ids, &back_edges)?;
                Ok((ids, weaker))
            });
            let weaker = match added {
                Ok((ids, weaker)) if weaker.is_empty() => return Ok(ids),
                Ok((_, weaker)) if attempt < MAX_GUESSES => Some(weaker),
                // An error may be due to a wrong guess, unless nothing was guessed.
                Ok(_) => None,
                Err(_) if unsure => None,
                Err(error) => {
                    graph.truncate(n_before);
                    return Err(error);
                }
            };
            graph.truncate(n_before);
            match weaker {
                Some(weaker) => shapes.extend(weaker),
                None => shapes.extend(back_edges.iter().map(|edge| (edge.merge, PartialShape::unknown()))),
            }
        }
        Err(Error::internal("shapes of loops do not settle"))
    }

    /// Adds the nodes in order; what comes round loops is left out. The merges in `shapes` get these shapes.
    fn add_once(&self, graph: &Graph, shapes: &HashMap<usize, PartialShape>) -> Result<Vec<NodeId>> {
        let mut ids = vec![NodeId::INVALID; self.nodes.len()];
        for &i in &self.order {
            let node = &self.nodes[i];
            let id = self.add_node(graph, node, &ids).map_err(|error| in_node(error, node.def))?;
            if let Some(shape) = shapes.get(&i) {
                // What enters this loop may itself have become weaker with the guess for a loop around it.
                let at = Endpoint { node: id, index: 0 };
                let inferred = graph.nodes().output(at).shape.clone();
                graph.replace_output_shape(at, inferred.relax(shape));
            }
            ids[i] = id;
        }
        Ok(ids)
    }

    fn add_node(&self, graph: &Graph, node: &PlannedNode<'_>, ids: &[NodeId]) -> Result<NodeId> {
        let endpoint = |source: &Source| match *source {
            Source::Message { node, index } => Endpoint { node: ids[node], index },
            Source::Graph(at) => at,
        };
        let expected = match graph.registry().find(&node.def.op) {
            Ok((_, signature)) => expected_inputs(signature, &node.attrs),
            Err(_) => Vec::new(),
        };
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for source in &node.inputs {
            let source = match self.back_source(node, source) {
                // Stands in until the loop is closed.
                Some(_) => {
                    node.inputs.iter().find(|source| self.back_source(node, source).is_none()).ok_or_else(|| {
                        Error::invalid_argument("all inputs come from a NextIteration, none from outside of the loop")
                    })?
                }
                None => source,
            };
            let at = endpoint(source);
            graph.learn_output(at, expected.get(inputs.len()).copied().flatten());
            check_output(graph, at)?;
            inputs.push(at);
        }
        let request = NodeRequest {
            op: node.def.op.clone(),
            name: Some(node.name.clone()),
            inputs,
            control_inputs: node.control_inputs.iter().map(|source| endpoint(source).node).collect(),
            attrs: node.attrs.clone(),
            device: node.device.clone(),
            source: node.source.clone(),
            device_source: node.device_source.clone(),
        };
        graph.import(request, node.unknown.clone())
    }
}

fn known_unknown(shape: Option<&PartialShape>) -> bool {
    shape.is_some_and(|shape| *shape == PartialShape::unknown())
}

/// Puts in the edges that come round. Returns shapes for the merges whose shape does not hold for what comes round.
fn close_loops(
    graph: &Graph,
    nodes: &[PlannedNode<'_>],
    ids: &[NodeId],
    back_edges: &[BackEdge],
) -> Result<HashMap<usize, PartialShape>> {
    let mut weaker: HashMap<usize, PartialShape> = HashMap::new();
    for edge in back_edges {
        let source = Endpoint { node: ids[edge.source], index: edge.index };
        let place = |error| in_node(error, nodes[edge.merge].def);
        check_output(graph, source).map_err(place)?;
        let (assumed, found) = {
            let nodes = graph.nodes();
            let found = nodes.output(source).clone();
            (nodes.output(Endpoint { node: ids[edge.merge], index: 0 }).clone(), found)
        };
        if found.dtype != assumed.dtype || (assumed.is_ref && !found.is_ref) {
            let of = |is_ref: bool| if is_ref { "a reference to " } else { "" };
            return Err(place(Error::invalid_argument(format!(
                "input {} should be {}{}, found {}{} from '{}'",
                edge.input,
                of(assumed.is_ref),
                assumed.dtype,
                of(found.is_ref),
                found.dtype,
                nodes[edge.source].name
            ))));
        }
        graph.close_loop(ids[edge.merge], edge.input, source).map_err(place)?;
        let relaxed = assumed.shape.relax(&found.shape);
        if relaxed != assumed.shape {
            let entry = weaker.entry(edge.merge).or_insert_with(|| relaxed.clone());
            *entry = entry.relax(&relaxed);
        }
    }
    Ok(weaker)
}

fn check_output(graph: &Graph, at: Endpoint) -> Result<()> {
    let nodes = graph.nodes();
    let source = nodes.node(at.node);
    if (at.index as usize) < source.outputs.len() {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "Connecting to invalid output {} of source node {} which has {} outputs",
        at.index,
        source.name,
        source.outputs.len()
    )))
}

fn in_node(error: Error, node: &NodeDef) -> Error {
    error.with_node(&node.name, &node.op, &node.device)
}

/// Reads nodes, given what their inputs can be.
struct Reader<'a, 'o> {
    graph: &'o Graph,
    names: HashMap<&'a str, usize>,
    /// Empty, or with a slash at its end.
    prefix: String,
    options: &'o ImportOptions,
    budget: u64,
    dropped: Vec<DroppedAttr>,
}

impl<'a> Reader<'a, '_> {
    fn node(&mut self, node: &'a NodeDef) -> Result<PlannedNode<'a>> {
        let known = self.graph.registry().find(&node.op).ok();
        let mut inputs = Vec::new();
        let mut control_inputs = Vec::new();
        for input in &node.input {
            match input.strip_prefix('^') {
                Some(name) => {
                    let source = self.source(name, 0)?;
                    if !control_inputs.contains(&source) {
                        control_inputs.push(source);
                    }
                }
                None if control_inputs.is_empty() => inputs.push(self.data_source(input)?),
                None => {
                    return Err(Error::invalid_argument(format!(
                        "Control dependencies must come after regular dependencies: '{input}' follows one"
                    )));
                }
            }
        }
        Ok(PlannedNode {
            def: node,
            name: format!("{}{}", self.prefix, node.name),
            flow: known.map_or(Flow::Plain, |(op, _)| op.flow),
            inputs,
            control_inputs,
            attrs: self.attrs(node, known.map(|(_, signature)| signature))?,
            device: DeviceSpec::parse(&node.device)?,
            source: None,
            device_source: None,
            unknown: known.is_none().then(|| Arc::new(UnknownOp { op: node.op.clone(), attrs: node.attr.clone() })),
        })
    }

    /// Reads `name` or `name:index`.
    fn data_source(&self, input: &str) -> Result<Source> {
        let (name, index) = match input.rsplit_once(':') {
            Some((name, digits)) if !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()) => {
                let index = digits.parse();
                (name, index.map_err(|_| Error::invalid_argument(format!("'{input}' is not the name of an output")))?)
            }
            _ => (input, 0),
        };
        let map = &self.options.input_map;
        let mapped = map.get(&format!("{name}:{index}")).or_else(|| map.get(name).filter(|_| index == 0));
        match mapped {
            Some(at) if at.node.index() < self.graph.nodes().len() => Ok(Source::Graph(*at)),
            Some(at) => Err(Error::invalid_argument(format!("'{input}' is mapped to {at:?}, which does not exist"))),
            None => self.source(name, index),
        }
    }

    fn source(&self, name: &str, index: u32) -> Result<Source> {
        if let Some(&node) = self.names.get(name) {
            return Ok(Source::Message { node, index });
        }
        let nodes = self.graph.nodes();
        match nodes.find(name) {
            Some(node) if self.prefix.is_empty() => Ok(Source::Graph(Endpoint { node, index })),
            _ => {
                let hint = did_you_mean(name, self.names.keys().copied());
                Err(Error::invalid_argument(format!("Unknown input node '{name}'{hint}")))
            }
        }
    }

    /// Of an unknown op (one without a signature) the annotations; the rest stays as it came.
    fn attrs(&mut self, node: &NodeDef, signature: Option<&Signature>) -> Result<Attrs> {
        let mut attrs = Attrs::default();
        for (name, value) in &node.attr {
            let def = signature.and_then(|signature| signature.attr(name));
            let is_annotation = name.starts_with('_');
            if signature.is_none() && !is_annotation {
                continue;
            }
            let value = match (def, is_annotation) {
                (None, false) => Err(format!("{} has no such attribute", node.op)),
                _ => match attr_from_proto(value, def, &mut self.budget) {
                    Ok(value) => Ok(value),
                    Err(error) if def.is_some() => return Err(error.context(format_args!("attribute '{name}'"))),
                    Err(error) => Err(error.message().to_owned()),
                },
            };
            match value {
                Ok(value) if name == "_class" => attrs.set(name.as_str(), self.classes(value)),
                Ok(value) => attrs.set(name.as_str(), value),
                // What is not understood of an unknown op is kept all the same.
                Err(_) if signature.is_none() => {}
                Err(reason) => {
                    self.dropped.push(DroppedAttr { node: node.name.clone(), attr: name.clone(), reason });
                }
            }
        }
        Ok(attrs)
    }

    /// Colocation groups are names of nodes, which the prefix changes.
    fn classes(&self, value: AttrValue) -> AttrValue {
        let renamed = |value| match value {
            AttrValue::Str(text) => AttrValue::Str(self.renamed_class(&text).unwrap_or(text)),
            other => other,
        };
        match value {
            AttrValue::List(classes) if !self.prefix.is_empty() => {
                AttrValue::List(classes.into_iter().map(renamed).collect())
            }
            other => other,
        }
    }

    fn renamed_class(&self, class: &[u8]) -> Option<Bytes> {
        let name = std::str::from_utf8(class).ok()?.strip_prefix("loc:@")?;
        self.names.contains_key(name).then(|| format!("loc:@{}{name}", self.prefix).into())
    }
}
