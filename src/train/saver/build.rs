//! The ops of a saver, laid out as TensorFlow's `Saver` does, so that either can use the other's graph.
//!
//! ```text
//!   save/Const ──> SaveV2 ──^──> save/control_dependency          one file
//!            └───> RestoreV2 ──> Assign… ──^──> save/restore_all
//!
//!   save/Const ──> _temp/part ──> ShardedFilename ──> SaveV2      one of these for each device
//!                                            └──────> MergeV2Checkpoints ──^──> save/Identity
//! ```
//!
//! Saving in the background has ops of its own beside those, which no `.meta` file mentions: see [`add_background`].

use std::collections::{BTreeMap, HashSet};

use kolo_core::{DeviceSpec, Error, PartialShape, Result, Tensor};
use kolo_graph::wire::proto::SaverDef;
use kolo_graph::{Graph, NodeId, Operation, Output, Variable, VariableKind};
use kolo_ops::array::placeholder::placeholder_with_default;

use super::{MetaFiles, Paths, SaveSlice, Saver};

/// A saver that is about to be made.
#[must_use = "a saver is made by build()"]
pub struct SaverBuilder<'g> {
    graph: &'g Graph,
    variables: Option<Vec<Saved<'g>>>,
    sharded: bool,
    max_to_keep: usize,
    hours: f64,
    relative_paths: bool,
    write_meta_graph: bool,
    background_ops: bool,
    name: String,
}

/// A variable, and what it is called in checkpoints.
struct Saved<'g> {
    name: String,
    variable: Variable<'g>,
    slice: Option<SaveSlice>,
}

impl<'g> SaverBuilder<'g> {
    /// A saver of all global variables of `graph`, unless told otherwise.
    pub fn new(graph: &'g Graph) -> SaverBuilder<'g> {
        SaverBuilder {
            graph,
            variables: None,
            sharded: false,
            max_to_keep: 5,
            hours: 10_000.0,
            relative_paths: false,
            write_meta_graph: true,
            background_ops: true,
            name: "save".to_owned(),
        }
    }

    /// These variables under their own names, and no others but those that are named besides.
    pub fn variables(self, variables: &[Variable<'g>]) -> Self {
        variables.iter().fold(self, |builder, &variable| builder.named(&variable.name(), variable))
    }

    /// This variable, under this name in the checkpoint, and no others but those that are named besides.
    pub fn named(mut self, name: &str, variable: Variable<'g>) -> Self {
        let saved = Saved { name: name.to_owned(), variable, slice: None };
        self.variables.get_or_insert_default().push(saved);
        self
    }

    /// This variable, as a part of a larger tensor, and no others but those that are named besides.
    pub fn slice(mut self, variable: Variable<'g>, slice: SaveSlice) -> Self {
        let saved = Saved { name: slice.full_name.clone(), variable, slice: Some(slice) };
        self.variables.get_or_insert_default().push(saved);
        self
    }

    /// One file per device, written where the variables are.
    pub fn sharded(mut self, sharded: bool) -> Self {
        self.sharded = sharded;
        self
    }

    /// How many checkpoints to keep; 0 keeps all. 5 unless said.
    pub fn max_to_keep(mut self, max_to_keep: usize) -> Self {
        self.max_to_keep = max_to_keep;
        self
    }

    /// Keeps one checkpoint per this number of hours forever. 10,000 by default, which is more than a year.
    pub fn keep_checkpoint_every_n_hours(mut self, hours: f64) -> Self {
        self.hours = hours;
        self
    }

    /// Writes paths in the `checkpoint` file relative to it, so that the directory can be moved.
    pub fn relative_paths(mut self, relative: bool) -> Self {
        self.relative_paths = relative;
        self
    }

    /// Whether to write `.meta` files. It does unless told otherwise.
    pub fn write_meta_graph(mut self, write: bool) -> Self {
        self.write_meta_graph = write;
        self
    }

    /// Whether to add the ops with which Kolo saves in the background. Without them, for sessions of TensorFlow's servers,
    /// [`Saver::save_in_background`] saves before it returns. It adds them unless told otherwise.
    pub fn background_ops(mut self, add: bool) -> Self {
        self.background_ops = add;
        self
    }

    /// The scope of its ops; `save` unless said.
    pub fn name(mut self, name: &str) -> Self {
        self.name = name.to_owned();
        self
    }

    /// Adds the ops.
    #[track_caller]
    pub fn build(mut self) -> Result<Saver> {
        let graph = self.graph;
        graph.check()?;
        let own = |variable: Variable<'g>| {
            let (name, slice) = crate::cluster::saved_as(graph, variable);
            Saved { name, variable, slice }
        };
        let variables = self.variables.take();
        let mut saved = variables.unwrap_or_else(|| graph.global_variables().into_iter().map(own).collect());
        check(&saved)?;
        saved.sort_by(|a, b| {
            (&a.name, a.slice.as_ref().map(|s| &s.offset)).cmp(&(&b.name, b.slice.as_ref().map(|s| &s.offset)))
        });
        let def =
            graph.no_device(|| graph.no_control_dependencies(|| graph.name_scope(&self.name, || self.add_ops(&saved))));
        graph.check()?;
        let tensors = saved.iter().map(|saved| {
            let shape = match &saved.slice {
                Some(slice) => PartialShape::new(&slice.full_shape.iter().copied().map(Some).collect::<Vec<_>>()),
                None => saved.variable.shape(),
            };
            (saved.name.clone(), shape)
        });
        let mut tensors: Vec<(String, PartialShape)> = tensors.collect();
        // The parts of one tensor are neighbours.
        tensors.dedup_by(|a, b| a.0 == b.0);
        let slices = saved.into_iter().filter_map(|saved| Some((saved.variable.name(), saved.slice?))).collect();
        let background = self.background_ops.then(|| add_background(graph, &def)).transpose()?;
        let paths = if self.relative_paths { Paths::Relative } else { Paths::AsGiven };
        let meta = if self.write_meta_graph { MetaFiles::Written } else { MetaFiles::None };
        Ok(Saver::from_def(graph, def, background, slices, tensors, paths, meta))
    }

    fn add_ops(&self, saved: &[Saved<'g>]) -> SaverDef {
        let graph = self.graph;
        let default = graph.named_constant("filename/input", "model");
        let filename = placeholder_with_default(placeholder_with_default(default, "filename"), "Const");
        let (saved_tensor, restore) = match self.sharded {
            false => {
                let all: Vec<&Saved<'g>> = saved.iter().collect();
                (save_ops(filename, &all, "", None), restore_ops(filename, &all, "", "restore_all"))
            }
            true => sharded_ops(filename, saved),
        };
        SaverDef {
            filename_tensor_name: filename.name(),
            save_tensor_name: saved_tensor.name(),
            restore_op_name: restore.name(),
            max_to_keep: i32::try_from(self.max_to_keep).unwrap_or(i32::MAX),
            sharded: self.sharded,
            keep_checkpoint_every_n_hours: self.hours as f32,
            version: 2,
        }
    }
}

fn check(saved: &[Saved<'_>]) -> Result<()> {
    if saved.is_empty() {
        return Err(Error::invalid_argument("there are no variables to save; make the saver after them"));
    }
    let mut names: BTreeMap<&str, bool> = BTreeMap::new();
    for Saved { name, variable, slice } in saved {
        let is_slice = slice.is_some();
        if names.insert(name, is_slice).is_some_and(|earlier| !(earlier && is_slice)) {
            return Err(Error::invalid_argument(format!("At least two variables have the same name: {name}")));
        }
        let Some(slice) = slice else { continue };
        let sizes: Option<Vec<usize>> = variable.shape().dims().and_then(|dims| dims.iter().copied().collect());
        let fits = sizes.is_some_and(|sizes| {
            sizes.len() == slice.full_shape.len()
                && sizes.len() == slice.offset.len()
                && sizes
                    .iter()
                    .zip(&slice.offset)
                    .zip(&slice.full_shape)
                    .all(|((n, at), full)| at.checked_add(*n).is_some_and(|end| end <= *full))
        });
        if !fits {
            return Err(Error::invalid_argument(format!(
                "variable '{}' of shape {} at {:?} is not a part of '{name}' of shape {:?}",
                variable.name(),
                variable.shape(),
                slice.offset,
                slice.full_shape
            )));
        }
    }
    Ok(())
}

/// `5 4 0,3:0,4`; empty for a whole variable.
fn specification(saved: &Saved<'_>) -> String {
    let Some(slice) = &saved.slice else { return String::new() };
    let full: Vec<String> = slice.full_shape.iter().map(usize::to_string).collect();
    let dims = saved.variable.shape();
    let sizes = dims.dims().unwrap_or_default().iter().map(|size| size.unwrap_or_default());
    let parts: Vec<String> = slice.offset.iter().zip(sizes).map(|(at, n)| format!("{at},{n}")).collect();
    format!("{} {}", full.join(" "), parts.join(":"))
}

/// Names and specifications, as constants beside the op that takes them.
fn name_constants<'g>(graph: &'g Graph, saved: &[&Saved<'g>], op: &str) -> (Output<'g>, Output<'g>) {
    let strings = |texts: Vec<String>| {
        let n = texts.len();
        // As many strings as the shape says.
        Tensor::from_strings([n], texts.into_iter().map(Into::into).collect())
    };
    let constant = |name: &str, texts: Vec<String>| match strings(texts) {
        Ok(tensor) => graph.named_constant(&format!("{op}/{name}"), tensor),
        Err(error) => {
            graph.record_error(error);
            graph.named_constant(&format!("{op}/{name}"), "")
        }
    };
    let names = constant("tensor_names", saved.iter().map(|saved| saved.name.clone()).collect());
    (names, constant("shape_and_slices", saved.iter().map(|saved| specification(saved)).collect()))
}

/// Saves to `prefix`; the output is the prefix, when that is done.
#[track_caller]
fn save_ops<'g>(prefix: Output<'g>, saved: &[&Saved<'g>], suffix: &str, device: Option<&DeviceSpec>) -> Output<'g> {
    let graph = prefix.graph();
    let add = || {
        let op = format!("SaveV2{suffix}");
        let (names, specs) = name_constants(graph, saved, &op);
        let value = |saved: &&Saved<'g>| match saved.variable.kind() {
            VariableKind::Resource => saved.variable.read(),
            VariableKind::Reference => saved.variable.handle(),
        };
        let tensors = saved.iter().map(value);
        let save = graph.op("SaveV2").name(&op).inputs([prefix, names, specs]).inputs(tensors).build();
        graph.op("Identity").name(&format!("control_dependency{suffix}")).input(prefix).control_input(save).out()
    };
    match device {
        Some(device) => graph.device(&device.to_string(), add),
        None => add(),
    }
}

/// Restores from `prefix`; the operation is done when all variables have their values.
#[track_caller]
fn restore_ops<'g>(prefix: Output<'g>, saved: &[&Saved<'g>], suffix: &str, name: &str) -> Operation<'g> {
    let graph = prefix.graph();
    let op = format!("RestoreV2{suffix}");
    let device = saved.first().map(|saved| host_of(&device_of(graph, saved.variable))).unwrap_or_default();
    let restored = graph.device(&device.to_string(), || {
        let (names, specs) = name_constants(graph, saved, &op);
        let dtypes: Vec<_> = saved.iter().map(|saved| saved.variable.dtype()).collect();
        graph.op("RestoreV2").name(&op).inputs([prefix, names, specs]).attr("dtypes", dtypes).build().outputs()
    });
    let assign = |(saved, value): (&&Saved<'g>, Output<'g>)| {
        let handle = saved.variable.handle();
        graph.colocate_with(handle.operation(), || match saved.variable.kind() {
            VariableKind::Reference => graph.op("Assign").inputs([handle, value]).build(),
            VariableKind::Resource => {
                let value = graph.op("Identity").input(value).out();
                // TensorFlow lets a variable take any shape here; a checkpoint of another model should not pass.
                graph.op("AssignVariableOp").inputs([handle, value]).attr("validate_shape", true).build()
            }
        })
    };
    let assigned: Vec<Operation<'g>> = saved.iter().zip(restored).map(assign).collect();
    graph.group(name, &assigned)
}

#[track_caller]
fn sharded_ops<'g>(filename: Output<'g>, saved: &[Saved<'g>]) -> (Output<'g>, Operation<'g>) {
    let graph = filename.graph();
    let mut by_device: BTreeMap<String, Vec<&Saved<'g>>> = BTreeMap::new();
    for saved in saved {
        by_device.entry(device_of(graph, saved.variable).to_string()).or_default().push(saved);
    }
    let host = DeviceSpec { kind: Some("CPU".into()), ..DeviceSpec::default() };
    let directory = graph.device(&host.to_string(), || {
        kolo_ops::string::join::string_join(&[filename, graph.constant("_temp/part")], "")
    });
    let n_shards = graph.named_constant("num_shards", i32::try_from(by_device.len()).unwrap_or(i32::MAX));
    let (mut prefixes, mut written, mut restored) = (Vec::new(), Vec::new(), Vec::new());
    for (shard, group) in by_device.values().enumerate() {
        let suffix = if shard == 0 { String::new() } else { format!("_{shard}") };
        let device = group.first().map(|saved| host_of(&device_of(graph, saved.variable))).unwrap_or_default();
        let prefix = graph.device(&device.to_string(), || {
            let shard = i32::try_from(shard).unwrap_or(i32::MAX);
            let number = graph.named_constant(&format!("ShardedFilename{suffix}/shard"), shard);
            let builder = graph.op("ShardedFilename").name(&format!("ShardedFilename{suffix}"));
            builder.inputs([directory, number, n_shards]).out()
        });
        prefixes.push(prefix);
        written.push(save_ops(prefix, group, &suffix, Some(&device)).operation());
        restored.push(restore_ops(filename, group, &suffix, &format!("restore_shard{suffix}")));
    }
    let device = host_of(&DeviceSpec::default());
    let merged = graph.device(&device.to_string(), || merge_ops(filename, &prefixes, &written, "Identity"));
    (merged, graph.group("restore_all", &restored))
}

/// Merges the checkpoints `prefixes`, once they are written, into `filename`, which is also the output.
#[track_caller]
fn merge_ops<'g>(filename: Output<'g>, prefixes: &[Output<'g>], written: &[Operation<'g>], name: &str) -> Output<'g> {
    let graph = filename.graph();
    let pack = graph.op("Pack").name("MergeV2Checkpoints/checkpoint_prefixes").inputs(prefixes.iter().copied());
    let pack = written.iter().fold(pack, |pack, &written| pack.control_input(written)).out();
    let merge = graph.op("MergeV2Checkpoints").inputs([pack, filename]).build();
    graph.op("Identity").name(name).input(filename).control_input(merge).out()
}

/// The device a variable asks for, itself or through what it is colocated with.
fn device_of(graph: &Graph, variable: Variable<'_>) -> DeviceSpec {
    let Some(node) = variable.handle().operation().node() else { return DeviceSpec::default() };
    if !node.device.is_empty() {
        return node.device.clone();
    }
    let nodes = graph.nodes();
    let leader = node.colocation_groups().filter_map(|name| nodes.find(name)).next();
    leader.map(|id| nodes.node(id).device.clone()).unwrap_or_default()
}

/// The first CPU of the same task: what reads and writes files for a device.
fn host_of(device: &DeviceSpec) -> DeviceSpec {
    DeviceSpec { kind: Some("CPU".into()), id: Some(0), ..device.clone() }
}

/// What to run in order to save in the background.
#[derive(Clone, Debug)]
pub(super) struct BackgroundOps {
    /// The operation that takes the values and begins to write them.
    pub begin: String,
    /// The tensor to fetch, fed with the same prefix, in order to wait for the end.
    pub end: String,
}

/// Adds, beside the ops of any saver, those that save in the background: for each `SaveV2` a `BackgroundSaveV2` with the
/// same inputs and an `AwaitSaveV2`.
pub(super) fn add_background(graph: &Graph, def: &SaverDef) -> Result<BackgroundOps> {
    let filename = graph.output(&def.filename_tensor_name)?;
    let saves = upstream(graph, graph.output(&def.save_tensor_name)?.operation(), "SaveV2");
    let merges = upstream(graph, graph.output(&def.save_tensor_name)?.operation(), "MergeV2Checkpoints");
    if saves.is_empty() || (merges.is_empty() && saves.len() > 1) {
        return Err(Error::unimplemented(format!(
            "'{}' does not save in a way that can be done in the background",
            def.save_tensor_name
        )));
    }
    let (begin, end) = graph.no_device(|| {
        graph.no_control_dependencies(|| {
            graph.absolute_scope("", || {
                graph.name_scope("background_save", || {
                    let (mut begun, mut awaited, mut prefixes) = (Vec::new(), Vec::new(), Vec::new());
                    for save in &saves {
                        let prefix = save.input(0);
                        graph.colocate_with(*save, || {
                            let inputs = (0..save.n_inputs()).map(|i| save.input(i));
                            begun.push(graph.op("BackgroundSaveV2").inputs(inputs).build());
                            awaited.push(graph.op("AwaitSaveV2").input(prefix).build());
                        });
                        prefixes.push(prefix);
                    }
                    let end = match merges.first() {
                        Some(merge) => graph.colocate_with(*merge, || merge_ops(filename, &prefixes, &awaited, "end")),
                        None => {
                            let builder = graph.op("Identity").name("end").input(filename);
                            awaited.iter().fold(builder, |builder, &awaited| builder.control_input(awaited)).out()
                        }
                    };
                    (graph.group("begin", &begun), end)
                })
            })
        })
    });
    graph.check()?;
    Ok(BackgroundOps { begin: begin.name(), end: end.name() })
}

/// The operations of this kind that `from` depends on, in the order of their making.
fn upstream<'g>(graph: &'g Graph, from: Operation<'g>, op: &str) -> Vec<Operation<'g>> {
    let nodes = graph.nodes();
    let mut seen: HashSet<NodeId> = HashSet::new();
    let mut stack = vec![from.id()];
    while let Some(id) = stack.pop() {
        if seen.insert(id) {
            let node = nodes.node(id);
            stack.extend(node.inputs.iter().map(|at| at.node).chain(node.control_inputs.iter().copied()));
        }
    }
    let mut found: Vec<NodeId> = seen.into_iter().filter(|id| nodes.node(*id).op() == op).collect();
    found.sort();
    found.into_iter().map(|id| Operation::new(graph, id)).collect()
}
