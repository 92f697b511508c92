//! SavedModels: what TensorFlow's `tf.saved_model.save` and its builders of version 1 write, loaded and run.
//!
//! ```no_run
//! use kolo::Tensor;
//! use kolo::saved_model::SavedModel;
//!
//! let model = SavedModel::load("exported/1")?;
//! let outputs = model.run("serving_default", &[("x", Tensor::from([[1.0f32, 2.0, 3.0]]))])?;
//! println!("{:?}", outputs["y"]);
//! # Ok::<(), kolo::Error>(())
//! ```
//!
//! Loading follows TensorFlow's loader: the graph with the wanted tags is chosen, its variables are restored by the
//! operation that it names for this, and its initializer runs. Only the parts that its signatures need are imported.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kolo_core::{DType, Error, PartialShape, Result, Tensor};
use kolo_graph::Graph;
use kolo_graph::wire::graph::{ImportOptions, import, subgraph};
use kolo_graph::wire::proto::{
    CollectionKind, MetaGraphDef, SavedModelDef, SignatureDef, TensorInfo as TensorInfoProto,
};
use kolo_graph::wire::tensor::{dtype_from_number, shape_from_proto};
use kolo_runtime::{Session, SessionConfig};
use prost::Message as _;

/// The signature under which TensorFlow 2 names its initializer.
const INIT_SIGNATURE: &str = "__saved_model_init_op";

/// How to load a SavedModel.
#[derive(Clone, Default)]
pub struct LoadOptions {
    /// The tags of the wanted graph, all of them; empty means `serve`, or the only graph there is.
    pub tags: Vec<String>,
    /// Nodes and tensors that are wanted although no signature needs them.
    pub also: Vec<String>,
    /// The devices and settings of the session.
    pub config: SessionConfig,
}

/// A model that is ready to run.
pub struct SavedModel {
    graph: Graph,
    session: Session,
    signatures: BTreeMap<String, Signature>,
    path: PathBuf,
}

/// What a model can be asked for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Signature {
    /// What to feed, by the signature's own names.
    pub inputs: BTreeMap<String, TensorInfo>,
    /// What comes back.
    pub outputs: BTreeMap<String, TensorInfo>,
}

/// A tensor of a signature.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// Its name in the graph, such as `x:0`.
    pub name: String,
    /// Its element type.
    pub dtype: DType,
    /// Its shape, as far as it is known.
    pub shape: PartialShape,
}

impl SavedModel {
    /// Loads the model in this folder, which has a file `saved_model.pb`.
    pub fn load(path: impl AsRef<Path>) -> Result<SavedModel> {
        SavedModel::load_with(path, LoadOptions::default())
    }

    /// [`SavedModel::load`] with other tags, more nodes, or other devices.
    pub fn load_with(path: impl AsRef<Path>, options: LoadOptions) -> Result<SavedModel> {
        let path = path.as_ref();
        let name = path.display();
        load(path, options).map_err(|error| error.context(&name))
    }

    /// Whether this folder looks like a SavedModel.
    pub fn is_at(path: impl AsRef<Path>) -> bool {
        path.as_ref().join("saved_model.pb").is_file() || path.as_ref().join("saved_model.pbtxt").is_file()
    }

    /// What the model can be asked for, by name.
    pub fn signatures(&self) -> &BTreeMap<String, Signature> {
        &self.signatures
    }

    /// The signature of this name; an error that lists them otherwise.
    pub fn signature(&self, name: &str) -> Result<&Signature> {
        self.signatures.get(name).ok_or_else(|| {
            let path = self.path.display();
            Error::not_found(format!("{path} has no signature '{name}'; it has {}", list(self.signatures.keys())))
        })
    }

    /// Runs a signature: feeds its inputs, returns its outputs, both by the signature's names.
    pub fn run(&self, signature: &str, inputs: &[(&str, Tensor)]) -> Result<BTreeMap<String, Tensor>> {
        let about = self.signature(signature)?;
        let mut feeds = Vec::with_capacity(inputs.len());
        for (name, value) in inputs {
            let input = about.inputs.get(*name).ok_or_else(|| {
                let has = list(about.inputs.keys());
                Error::not_found(format!("signature '{signature}' has no input '{name}'; it has {has}"))
            })?;
            input.check(name, value)?;
            feeds.push((input.name.as_str(), value.clone()));
        }
        if let Some(missing) = about.inputs.keys().find(|name| !inputs.iter().any(|(given, _)| given == name)) {
            return Err(Error::invalid_argument(format!("signature '{signature}' needs input '{missing}' too")));
        }
        let fetches: Vec<&str> = about.outputs.values().map(|output| output.name.as_str()).collect();
        let values = self.session.run_named(&fetches, &feeds, &[])?;
        Ok(about.outputs.keys().cloned().zip(values).collect())
    }

    /// The graph, as far as it was imported.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Gives up all but the session.
    pub fn into_session(self) -> Session {
        self.session
    }

    /// The session that holds the variables.
    pub fn session(&self) -> &Session {
        &self.session
    }
}

impl TensorInfo {
    /// An error that names the input if `value` does not fit.
    pub fn check(&self, name: &str, value: &Tensor) -> Result<()> {
        if value.dtype() == self.dtype && self.shape.admits(value.shape()) {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "input '{name}' should be {}{}, found {}{}",
            self.dtype,
            self.shape,
            value.dtype(),
            value.shape()
        )))
    }

    fn read(info: &TensorInfoProto) -> Result<TensorInfo> {
        let shape = info.tensor_shape.as_ref().map_or(Ok(PartialShape::unknown()), shape_from_proto)?;
        Ok(TensorInfo { name: info.name.clone(), dtype: dtype_from_number(info.dtype)?, shape })
    }
}

fn load(path: &Path, options: LoadOptions) -> Result<SavedModel> {
    let meta = choose(read(path)?, &options.tags)?;
    let def = meta.graph_def.as_ref().ok_or_else(|| Error::data_loss("the SavedModel has no graph"))?;
    let signatures = signatures(&meta.signature_def)?;
    let init = init_op(&meta);
    let index = path.join("variables").join("variables.index");
    let saver = meta.saver_def.as_ref().filter(|saver| !saver.restore_op_name.is_empty() && index.is_file());
    if saver.is_none() && index.is_file() {
        return Err(Error::unimplemented(
            "the SavedModel has variables but does not name the operation that restores them; save it again without \
             experimental_skip_saver",
        ));
    }

    let mut wanted: Vec<&str> = options.also.iter().map(String::as_str).collect();
    for signature in signatures.values() {
        wanted.extend(signature.inputs.values().chain(signature.outputs.values()).map(|tensor| tensor.name.as_str()));
    }
    wanted.extend(saver.iter().flat_map(|saver| [saver.restore_op_name.as_str(), saver.filename_tensor_name.as_str()]));
    wanted.extend(init);
    let graph = kolo_ops::graph();
    import(&graph, &subgraph(def, &wanted)?, ImportOptions::default())?;
    let session = Session::with_config(&graph, options.config)?;

    let mut feeds = Vec::new();
    for asset in &meta.asset_file_def {
        let tensor = asset.tensor_info.as_ref().map_or("", |info| info.name.as_str());
        // A path that no needed node asks for is not fed.
        if graph.output(tensor).is_ok() {
            let file = path.join("assets").join(&asset.filename);
            feeds.push((tensor, Tensor::string(file.to_string_lossy().into_owned())));
        }
    }
    if let Some(saver) = saver {
        let prefix = path.join("variables").join("variables");
        let prefix = Tensor::string(prefix.to_string_lossy().into_owned());
        let mut feeds = feeds.clone();
        feeds.push((&saver.filename_tensor_name, prefix));
        session
            .run_named(&[], &feeds, &[&saver.restore_op_name])
            .map_err(|error| error.context("cannot restore the variables"))?;
    }
    if let Some(init) = init {
        session.run_named(&[], &feeds, &[init]).map_err(|error| error.context("cannot run the initializer"))?;
    }
    Ok(SavedModel { graph, session, signatures, path: path.to_owned() })
}

fn read(path: &Path) -> Result<SavedModelDef> {
    let file = path.join("saved_model.pb");
    if !file.is_file() && path.join("saved_model.pbtxt").is_file() {
        return Err(Error::unimplemented("the SavedModel is text (saved_model.pbtxt); only saved_model.pb is read"));
    }
    let bytes =
        std::fs::read(&file).map_err(|error| Error::not_found(format!("cannot read saved_model.pb: {error}")))?;
    let model = SavedModelDef::decode(prost::bytes::Bytes::from(bytes))
        .map_err(|error| Error::data_loss(format!("saved_model.pb is not a SavedModel: {error}")))?;
    match model.saved_model_schema_version {
        1 => Ok(model),
        other => Err(Error::unimplemented(format!("the SavedModel is of schema {other}; only 1 is known"))),
    }
}

/// The graph with these tags.
fn choose(model: SavedModelDef, tags: &[String]) -> Result<MetaGraphDef> {
    let tags_of = |meta: &MetaGraphDef| {
        let mut tags = meta.meta_info_def.as_ref().map_or(Vec::new(), |info| info.tags.clone());
        tags.sort();
        tags
    };
    let mut wanted = if tags.is_empty() { vec!["serve".to_owned()] } else { tags.to_vec() };
    wanted.sort();
    wanted.dedup();
    let all: Vec<Vec<String>> = model.meta_graphs.iter().map(tags_of).collect();
    let found = all.iter().position(|tags| *tags == wanted).or((tags.is_empty() && all.len() == 1).then_some(0));
    let missing = || {
        let have: Vec<String> = all.iter().map(|tags| format!("[{}]", tags.join(", "))).collect();
        Error::not_found(format!("no graph has the tags [{}]; there are {}", wanted.join(", "), have.join(", ")))
    };
    let found = found.ok_or_else(missing)?;
    model.meta_graphs.into_iter().nth(found).ok_or_else(|| Error::internal("a graph that was just there is gone"))
}

/// The signatures whose tensors all have names; others (sparse and composite tensors) cannot be fed.
fn signatures(defs: &BTreeMap<String, SignatureDef>) -> Result<BTreeMap<String, Signature>> {
    let tensors = |map: &BTreeMap<String, TensorInfoProto>| -> Result<BTreeMap<String, TensorInfo>> {
        map.iter().map(|(name, info)| Ok((name.clone(), TensorInfo::read(info)?))).collect()
    };
    let mut signatures = BTreeMap::new();
    for (name, def) in defs {
        let is_plain = def.inputs.values().chain(def.outputs.values()).all(|info| !info.name.is_empty());
        if name == INIT_SIGNATURE || !is_plain {
            continue;
        }
        let read = || Ok(Signature { inputs: tensors(&def.inputs)?, outputs: tensors(&def.outputs)? });
        let signature = read().map_err(|error: Error| error.context(format_args!("signature '{name}'")))?;
        signatures.insert(name.clone(), signature);
    }
    Ok(signatures)
}

/// The operation to run once the variables have their values.
fn init_op(meta: &MetaGraphDef) -> Option<&str> {
    if let Some(signature) = meta.signature_def.get(INIT_SIGNATURE) {
        return signature.outputs.get(INIT_SIGNATURE).map(|info| info.name.as_str());
    }
    ["saved_model_main_op", "legacy_init_op"].into_iter().find_map(|name| {
        match meta.collection_def.get(name)?.kind.as_ref()? {
            CollectionKind::NodeList(list) => list.value.first().map(String::as_str),
            _ => None,
        }
    })
}

fn list<'a>(names: impl Iterator<Item = &'a String>) -> String {
    let names: Vec<String> = names.map(|name| format!("'{name}'")).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}
