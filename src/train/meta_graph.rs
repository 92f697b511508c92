//! `.meta` files: a graph with its variables, its collections and its saver, as TensorFlow writes and reads them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use kolo_core::{Error, Result};
use kolo_graph::wire::graph::{ExportOptions, ImportOptions, export, import};
use kolo_graph::wire::proto::{
    BytesList, CollectionDef, CollectionKind, GraphDef, MetaGraphDef, MetaInfoDef, NodeList, SaveSliceInfoDef,
    SaverDef, VariableDef,
};
use kolo_graph::{Graph, Nodes, VariableKind, VariableRecord};
use kolo_ops::io::files::file_error;
use prost::Message as _;

use super::SaveSlice;

/// Ops that TensorFlow does not have. They, and what depends on them, stay out of the file.
const OWN_OPS: [&str; 2] = ["BackgroundSaveV2", "AwaitSaveV2"];

/// Collections whose members are variables.
const VARIABLES: &str = "variables";
const TRAINABLE: &str = "trainable_variables";
const LOCAL: &str = "local_variables";

/// What a `.meta` file is made from: a graph as it was at some time.
pub(super) struct MetaGraph {
    nodes: Nodes,
    variables: Vec<VariableRecord>,
    collections: Vec<(String, Vec<String>)>,
    saver: Option<SaverDef>,
    slices: HashMap<String, SaveSlice>,
    /// The file, once it was asked for.
    bytes: Option<Arc<Vec<u8>>>,
}

impl MetaGraph {
    /// The graph as it is now. `slices` says which variables are parts of larger tensors.
    pub fn of(graph: &Graph, saver: Option<SaverDef>, slices: Vec<(String, SaveSlice)>) -> MetaGraph {
        let mut meta = MetaGraph {
            nodes: Nodes::default(),
            variables: Vec::new(),
            collections: Vec::new(),
            saver,
            slices: slices.into_iter().collect(),
            bytes: None,
        };
        meta.update(graph);
        meta
    }

    /// Takes the graph as it is now.
    pub fn update(&mut self, graph: &Graph) {
        self.nodes = graph.snapshot();
        self.variables = graph.variables(<[VariableRecord]>::to_vec);
        let list = |name: String| {
            let members = graph.collection(&name);
            (name, members)
        };
        self.collections = graph.collections().into_iter().map(list).collect();
        self.bytes = None;
    }

    /// The file's contents.
    pub fn bytes(&mut self) -> Result<Arc<Vec<u8>>> {
        if let Some(bytes) = &self.bytes {
            return Ok(bytes.clone());
        }
        let bytes = Arc::new(self.message()?.encode_to_vec());
        self.bytes = Some(bytes.clone());
        Ok(bytes)
    }

    fn message(&self) -> Result<MetaGraphDef> {
        let mut graph_def = export(&self.nodes, ExportOptions::default())?;
        drop_own_ops(&mut graph_def);
        let kept: HashSet<&str> = graph_def.node.iter().map(|node| node.name.as_str()).collect();
        let bytes = |of: &dyn Fn(&VariableRecord) -> bool| {
            let value = self.variables.iter().filter(|variable| of(variable));
            BytesList { value: value.map(|variable| self.variable_def(variable).encode_to_vec()).collect() }
        };
        let mut collection_def = BTreeMap::new();
        let mut add = |name: &str, kind: CollectionKind| {
            collection_def.insert(name.to_owned(), CollectionDef { kind: Some(kind) });
        };
        for (name, members) in [
            (VARIABLES, bytes(&|variable| !variable.local)),
            (TRAINABLE, bytes(&|variable| variable.trainable)),
            (LOCAL, bytes(&|variable| variable.local)),
        ] {
            if !members.value.is_empty() {
                add(name, CollectionKind::BytesList(members));
            }
        }
        for (name, members) in &self.collections {
            let records: Vec<&VariableRecord> =
                members.iter().filter_map(|member| self.variables.iter().find(|v| v.name == *member)).collect();
            if !members.is_empty() && records.len() == members.len() {
                let value = records.into_iter().map(|variable| self.variable_def(variable).encode_to_vec()).collect();
                add(name, CollectionKind::BytesList(BytesList { value }));
                continue;
            }
            // A member that is not in the file's graph would keep TensorFlow from reading the file at all.
            let node_of = |member: &String| member.split(':').next().unwrap_or_default().to_owned();
            let value: Vec<String> =
                members.iter().filter(|member| kept.contains(node_of(member).as_str())).cloned().collect();
            if !value.is_empty() {
                add(name, CollectionKind::NodeList(NodeList { value }));
            }
        }
        let meta_info_def = MetaInfoDef {
            // The version whose graphs and checkpoints these are. Loaders look at it.
            tensorflow_version: "1.15.0".to_owned(),
            tensorflow_git_version: format!("kolo-{}", env!("CARGO_PKG_VERSION")),
            ..MetaInfoDef::default()
        };
        Ok(MetaGraphDef {
            meta_info_def: Some(meta_info_def),
            graph_def: Some(graph_def),
            saver_def: self.saver.clone(),
            collection_def,
            ..MetaGraphDef::default()
        })
    }

    fn variable_def(&self, variable: &VariableRecord) -> VariableDef {
        let initializer = self.nodes.node(variable.initializer);
        let initial = initializer.inputs.get(1).map(|at| self.nodes.endpoint_name(*at)).unwrap_or_default();
        let sizes = |sizes: &[usize]| sizes.iter().map(|size| *size as i64).collect::<Vec<i64>>();
        let slice = self.slices.get(&variable.name).map(|slice| SaveSliceInfoDef {
            full_name: slice.full_name.clone(),
            full_shape: sizes(&slice.full_shape),
            var_offset: sizes(&slice.offset),
            var_shape: variable.shape.dims().unwrap_or_default().iter().map(|d| d.map_or(-1, |d| d as i64)).collect(),
        });
        VariableDef {
            variable_name: self.nodes.endpoint_name(variable.handle),
            initializer_name: initializer.name.to_string(),
            snapshot_name: self.nodes.endpoint_name(variable.read),
            save_slice_info_def: slice,
            is_resource: variable.kind == VariableKind::Resource,
            initial_value_name: initial,
            trainable: variable.trainable,
            synchronization: 0,
            aggregation: 0,
        }
    }
}

fn drop_own_ops(def: &mut GraphDef) {
    let mut dropped: HashSet<String> = HashSet::new();
    // Nodes come after their inputs, except around loops, which ours are not part of.
    for node in &def.node {
        let source = |input: &String| input.trim_start_matches('^').split(':').next().unwrap_or_default().to_owned();
        if OWN_OPS.contains(&node.op.as_str()) || node.input.iter().any(|input| dropped.contains(&source(input))) {
            dropped.insert(node.name.clone());
        }
    }
    def.node.retain(|node| !dropped.contains(&node.name));
}

/// What [`import_meta_graph`] tells besides what it adds.
pub(super) struct ImportedMeta {
    /// The saver that the file names.
    pub saver: Option<SaverDef>,
    /// Which variables are parts of larger tensors.
    pub slices: Vec<(String, SaveSlice)>,
}

/// Adds what a `.meta` file holds to `graph`: nodes, variables, collections.
pub(super) fn import_meta_graph(graph: &Graph, path: &Path) -> Result<ImportedMeta> {
    let bytes = std::fs::read(path).map_err(|error| file_error("cannot read", path, &error))?;
    let name = path.display();
    let meta = MetaGraphDef::decode(&bytes[..])
        .map_err(|error| Error::data_loss(format!("{name} is not a .meta file, or damaged: {error}")))?;
    let def = meta.graph_def.ok_or_else(|| Error::data_loss(format!("{name} holds no graph")))?;
    import(graph, &def, ImportOptions::default()).map_err(|error| error.context(&name))?;
    let mut slices = Vec::new();
    let lists: Vec<(&str, Vec<VariableDef>)> = meta
        .collection_def
        .iter()
        .filter_map(|(name, collection)| Some((name.as_str(), variable_defs(collection)?)))
        .collect();
    let members = |wanted: &'static str| {
        let list = lists.iter().find(|(name, _)| *name == wanted);
        list.map(|(_, defs)| defs.as_slice()).unwrap_or_default()
    };
    let trainable: HashSet<&str> = members(TRAINABLE).iter().map(|def| def.variable_name.as_str()).collect();
    for (list, local) in [(VARIABLES, false), (LOCAL, true)] {
        for def in members(list) {
            let is_trainable = trainable.contains(def.variable_name.as_str());
            let variable = adopt(graph, def, is_trainable, local).map_err(|error| error.context(&name))?;
            if let Some(slice) = def.save_slice_info_def.as_ref().and_then(slice_of) {
                slices.push((variable, slice));
            }
        }
    }
    for (name, collection) in &meta.collection_def {
        if [VARIABLES, TRAINABLE, LOCAL].contains(&name.as_str()) {
            continue;
        }
        let names = match &collection.kind {
            Some(CollectionKind::NodeList(list)) => list.value.clone(),
            Some(CollectionKind::BytesList(_)) => {
                let defs = lists.iter().find(|(list, _)| list == name).map(|(_, defs)| defs.as_slice());
                defs.unwrap_or_default().iter().map(|def| node_of(&def.variable_name).to_owned()).collect()
            }
            _ => Vec::new(),
        };
        names.iter().filter(|name| graph.output(name).is_ok() || graph.operation(name).is_ok()).for_each(|member| {
            graph.add_to_collection(name, member);
        });
    }
    let saver = meta.saver_def.filter(|def| !def.save_tensor_name.is_empty());
    Ok(ImportedMeta { saver, slices })
}

/// The variables of a collection; `None` if its members are something else.
fn variable_defs(collection: &CollectionDef) -> Option<Vec<VariableDef>> {
    let Some(CollectionKind::BytesList(list)) = &collection.kind else { return None };
    let defs: Option<Vec<VariableDef>> = list.value.iter().map(|bytes| VariableDef::decode(&bytes[..]).ok()).collect();
    defs.filter(|defs| defs.iter().all(|def| !def.variable_name.is_empty() && !def.initializer_name.is_empty()))
}

/// Makes imported nodes known as a variable; its name.
fn adopt(graph: &Graph, def: &VariableDef, trainable: bool, local: bool) -> Result<String> {
    let handle = graph.output(&def.variable_name)?;
    let name = node_of(&def.variable_name).to_owned();
    let read = match graph.output(&def.snapshot_name) {
        Ok(read) => read,
        Err(_) if !def.is_resource => handle,
        Err(error) => return Err(error),
    };
    let record = VariableRecord {
        name: name.clone(),
        kind: if def.is_resource { VariableKind::Resource } else { VariableKind::Reference },
        dtype: read.dtype(),
        shape: read.shape(),
        handle: handle.endpoint(),
        read: read.endpoint(),
        initializer: graph.operation(&def.initializer_name)?.id(),
        trainable,
        local,
    };
    graph.adopt_variable(record)?;
    Ok(name)
}

fn node_of(tensor: &str) -> &str {
    tensor.split(':').next().unwrap_or(tensor)
}

fn slice_of(def: &SaveSliceInfoDef) -> Option<SaveSlice> {
    let sizes = |sizes: &[i64]| sizes.iter().map(|size| usize::try_from(*size).ok()).collect::<Option<Vec<usize>>>();
    Some(SaveSlice {
        full_name: def.full_name.clone(),
        full_shape: sizes(&def.full_shape)?,
        offset: sizes(&def.var_offset)?,
    })
}
