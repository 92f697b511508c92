//! `SymbolicGradient` of a function that names no gradient: the function is written into a graph of its own, gradients are taken
//! there as of any other graph, and what comes out is written in place of the call.

use std::collections::HashMap;

use kolo_core::{Error, Result};

use super::library::{count, with_defaults};
use super::lower::{Call, Lowering, Site, dedup, merged_device, node_of, output, text};
use crate::describe::Output;
use crate::grad::{GradientOptions, gradients_with};
use crate::wire::graph::{ExportOptions, ImportOptions, export, import_within};
use crate::wire::proto::{AttrValue, GraphDef, NameAttrList, NodeDef, Value};
use crate::{Flow, Graph};

/// Names in the graph of the gradient alone.
const CALL: &str = "call";

fn argument(i: usize) -> String {
    format!("argument_{i}")
}

impl Lowering<'_> {
    /// The gradients of the inputs of `function`, given those inputs and then the gradients of its outputs.
    pub fn derived_gradient(
        &mut self,
        function: &NameAttrList,
        call: &Call<'_>,
        site: &Site,
    ) -> Result<(Vec<String>, Vec<String>)> {
        let (signature, _) = self.options.functions.find(&function.name)?;
        let attrs = with_defaults(&function.attr, signature);
        let n_of = |args: &[_]| args.iter().try_fold(0usize, |n, arg| Ok::<_, Error>(n + count(arg, &attrs)?));
        let (n_inputs, n_outputs) = (n_of(&signature.input_arg)?, n_of(&signature.output_arg)?);
        let dtypes = match call.node.attr.get("Tin").and_then(|value| value.value.as_ref()) {
            Some(Value::List(list)) => list.r#type.clone(),
            _ => Vec::new(),
        };
        if call.inputs.len() != n_inputs + n_outputs || dtypes.len() != call.inputs.len() {
            return Err(Error::invalid_argument(format!(
                "the gradient of function '{}' takes its {n_inputs} inputs and the gradients of its {n_outputs} outputs, \
                 found {} inputs of {} types",
                function.name,
                call.inputs.len(),
                dtypes.len()
            )));
        }
        let (graph, gradients) = self.gradient_graph(function, &dtypes, n_inputs, n_outputs)?;
        self.write_graph(graph, gradients, call, site)
    }

    /// A graph of the function's gradients: its nodes, and the names of the tensors that are the gradients.
    fn gradient_graph(
        &mut self,
        function: &NameAttrList,
        dtypes: &[i32],
        n_inputs: usize,
        n_outputs: usize,
    ) -> Result<(GraphDef, Vec<String>)> {
        let placeholder = |(i, dtype): (usize, &i32)| NodeDef {
            name: argument(i),
            op: "Placeholder".to_owned(),
            attr: [("dtype".to_owned(), AttrValue { value: Some(Value::Type(*dtype)) })].into(),
            ..NodeDef::default()
        };
        let mut node: Vec<NodeDef> = dtypes.iter().enumerate().map(placeholder).collect();
        node.push(NodeDef {
            name: CALL.to_owned(),
            op: function.name.clone(),
            input: (0..n_inputs).map(argument).collect(),
            attr: function.attr.clone(),
            ..NodeDef::default()
        });
        let def = GraphDef { node, library: Some(self.options.library.clone()), ..GraphDef::default() };
        let graph = Graph::new(self.options.registry);
        let options = ImportOptions { max_function_nodes: self.nodes_left(), ..ImportOptions::default() };
        import_within(&graph, &def, options, &self.stack)?;
        let tensors = |names: Vec<String>| names.iter().map(|name| graph.output(name)).collect::<Result<Vec<_>>>();
        let xs = tensors((0..n_inputs).map(argument).collect())?;
        let ys = tensors((0..n_outputs).map(|k| format!("{CALL}:{k}")).collect())?;
        let given = tensors((n_inputs..n_inputs + n_outputs).map(argument).collect())?;
        let floats: Vec<(Output<'_>, Output<'_>)> =
            ys.into_iter().zip(given).filter(|(y, _)| y.dtype().is_float()).collect();
        let (ys, given): (Vec<_>, Vec<_>) = floats.into_iter().unzip();
        let options = GradientOptions { grad_ys: given.into_iter().map(Some).collect(), ..GradientOptions::default() };
        let found = gradients_with(&ys, &xs, &options)?;
        let mut names = Vec::with_capacity(n_inputs);
        for (x, found) in xs.iter().zip(found) {
            let gradient = match found {
                Some(gradient) => gradient.dense()?,
                None => graph.op("ZerosLike").input(*x).out(),
            };
            names.push(gradient.name());
        }
        graph.check()?;
        let written = export(&graph.nodes(), ExportOptions::default())?;
        Ok((written, names))
    }

    /// Writes a graph's nodes at `site`, with the call's inputs in place of its arguments. Returns these tensors of it.
    fn write_graph(
        &mut self,
        graph: GraphDef,
        wanted: Vec<String>,
        call: &Call<'_>,
        site: &Site,
    ) -> Result<(Vec<String>, Vec<String>)> {
        let arguments: HashMap<String, &String> =
            call.inputs.iter().enumerate().map(|(i, input)| (argument(i), input)).collect();
        let kept = graph.node.into_iter().filter(|node| !arguments.contains_key(&node.name));
        let kept: Vec<NodeDef> = kept.collect();
        let names: HashMap<String, String> =
            kept.iter().map(|node| (node.name.clone(), self.unique(&format!("{}{}", site.scope, node.name)))).collect();
        let tensor = |input: &str| -> String {
            let (name, k) = match input.rsplit_once(':') {
                Some((name, k)) => (name, k.parse().unwrap_or(0)),
                None => (input, 0),
            };
            match (arguments.get(name), names.get(name)) {
                (Some(argument), _) => (*argument).clone(),
                (None, Some(name)) => output(name, k),
                (None, None) => input.to_owned(),
            }
        };
        for node in kept {
            let mut controls: Vec<String> = call.controls.clone();
            let mut inputs = Vec::with_capacity(node.input.len());
            for input in &node.input {
                match input.strip_prefix('^') {
                    Some(name) => controls.push(node_of(&tensor(name)).to_owned()),
                    None => inputs.push(tensor(input)),
                }
            }
            dedup(&mut controls);
            let mut attr = node.attr.clone();
            // What the nodes are with is written by this graph's names, and all of them go where the call does.
            attr.remove("_class");
            if self.flow_of(&node) == Flow::Enter
                && let Some(AttrValue { value: Some(Value::S(frame)) }) = attr.get("frame_name")
            {
                let frame = format!("{}{}{}", self.options.frame_prefix, site.scope, String::from_utf8_lossy(frame));
                attr.insert("frame_name".to_owned(), text(&frame));
            }
            let device = merged_device(&site.device, &node.device)?;
            let written = NodeDef { name: names[&node.name].clone(), input: inputs, device, attr, ..node };
            self.push(site, written, &controls)?;
        }
        Ok((wanted.iter().map(|name| tensor(name)).collect(), Vec::new()))
    }
}
