//! Branches and loops over functions, written with the ops that steer a step.

use kolo_core::{DType, Error, Result, Tensor};

use super::body::Unstated;
use super::library::{count, dtype_number, function_attr, with_defaults};
use super::lower::{Call, Lowering, Site, output, text};
use crate::wire::proto::{AttrValue, NameAttrList, NodeDef, Value};
use crate::wire::tensor::to_proto;

/// Outputs, and what must run for its effects.
type Written = (Vec<String>, Vec<String>);

/// One side of a branch: what runs while it is taken.
struct Side {
    pivot: String,
    outputs: Vec<String>,
    effects: Vec<String>,
}

impl Lowering<'_> {
    /// `If`: a `Switch` for each input, both bodies, a `Merge` for each output.
    pub fn branch(&mut self, call: &Call<'_>, site: &Site) -> Result<Written> {
        let branches = [function_attr(call.node, "else_branch")?, function_attr(call.node, "then_branch")?];
        let (cond, inputs) = split_first(call)?;
        let is_bool = attr_type(call.node, "Tcond").is_none_or(|dtype| dtype == DType::Bool as i32);
        let cond = if is_bool { cond } else { self.truth(site, cond)? };
        let cond = self.gated(site, "cond", cond, &call.controls)?;
        let pivot = self.emit(site, "pivot", "Switch", vec![cond.clone(), cond.clone()], &[], [])?;
        let mut switches = Vec::with_capacity(inputs.len());
        for (i, input) in inputs.iter().enumerate() {
            let pair = vec![input.clone(), cond.clone()];
            switches.push(self.emit(site, &format!("switch_{i}"), "Switch", pair, &[], [])?);
        }
        let mut sides = Vec::new();
        for (taken, (name, function)) in ["else", "then"].into_iter().zip(branches).enumerate() {
            let inputs = switches.iter().map(|switch| output(switch, taken)).collect();
            sides.push(self.side(site, name, function, output(&pivot, taken), inputs)?);
        }
        self.merge(site, sides)
    }

    /// `Case`: as `If`, with a predicate for each branch. An index out of range takes the last one.
    pub fn case(&mut self, call: &Call<'_>, site: &Site) -> Result<Written> {
        let branches = match call.node.attr.get("branches").and_then(|value| value.value.as_ref()) {
            Some(Value::List(list)) if !list.func.is_empty() => list.func.as_slice(),
            _ => return Err(Error::invalid_argument("attribute 'branches' should be a list of functions")),
        };
        let (index, inputs) = split_first(call)?;
        let index = self.gated(site, "index", index, &call.controls)?;
        let mut sides = Vec::with_capacity(branches.len());
        for (k, function) in branches.iter().enumerate() {
            let pred = match k + 1 == branches.len() {
                false => self.compare(site, "Equal", &index, k)?,
                true => {
                    let below = self.compare(site, "Less", &index, k)?;
                    let above = self.compare(site, "GreaterEqual", &index, 0)?;
                    let earlier = self.emit(site, "is_earlier", "LogicalAnd", vec![below, above], &[], [])?;
                    self.emit(site, "is_last", "LogicalNot", vec![earlier], &[], [])?
                }
            };
            let pivot = self.emit(site, &format!("pivot_{k}"), "Switch", vec![pred.clone(), pred.clone()], &[], [])?;
            let mut taken = Vec::with_capacity(inputs.len());
            for (i, input) in inputs.iter().enumerate() {
                let pair = vec![input.clone(), pred.clone()];
                let switch = self.emit(site, &format!("switch_{k}_{i}"), "Switch", pair, &[], [])?;
                taken.push(output(&switch, 1));
            }
            sides.push(self.side(site, &format!("branch_{k}"), function, output(&pivot, 1), taken)?);
        }
        self.merge(site, sides)
    }

    /// `While`: each variable enters a frame and goes round. Those that the body returns as they are need not.
    pub fn repeat(&mut self, call: &Call<'_>, site: &Site) -> Result<Written> {
        let (cond, body) = (function_attr(call.node, "cond")?, function_attr(call.node, "body")?);
        let n = call.inputs.len();
        let mut is_invariant = self.invariants(body, n)?;
        let frame = format!("{}{}while", self.options.frame_prefix, site.scope);
        let parallel_iterations = match call.node.attr.get("parallel_iterations") {
            Some(AttrValue { value: Some(Value::I(n)) }) => *n,
            _ => 10,
        };
        let mut inputs = call.inputs.clone();
        if is_invariant.iter().all(|&is_invariant| is_invariant) {
            // Something must go round, or there would be no iterations.
            let zero = self.constant(site, "round", 0, &call.controls)?;
            inputs.push(zero);
            is_invariant.push(false);
        }
        let mut enters = Vec::with_capacity(inputs.len());
        for (i, input) in inputs.iter().enumerate() {
            let attrs = [
                ("frame_name", text(&frame)),
                ("is_constant", AttrValue { value: Some(Value::B(is_invariant[i])) }),
                ("parallel_iterations", AttrValue { value: Some(Value::I(parallel_iterations)) }),
            ];
            enters.push(self.emit(site, &format!("enter_{i}"), "Enter", vec![input.clone()], &call.controls, attrs)?);
        }
        // The merges come before what closes the loop, so its names are fixed now.
        let mut next_names = Vec::with_capacity(inputs.len());
        let mut merges = Vec::with_capacity(inputs.len());
        for (i, enter) in enters.iter().enumerate() {
            if is_invariant[i] {
                next_names.push(String::new());
                merges.push(enter.clone());
                continue;
            }
            let next = self.unique(&format!("{}next_{i}", site.scope));
            merges.push(self.emit(site, &format!("merge_{i}"), "Merge", vec![enter.clone(), next.clone()], &[], [])?);
            next_names.push(next);
        }
        let rounds: Vec<usize> = (0..inputs.len()).filter(|&i| !is_invariant[i]).collect();

        let cond_site =
            Site { scope: format!("{}cond/", site.scope), pivot: Some(merges[rounds[0]].clone()), ..site.clone() };
        let (pred, cond_effects) = self.inline(cond, merges[..n].to_vec(), &cond_site, Unstated::AsNeeded)?;
        let [pred] = <[String; 1]>::try_from(pred).map_err(|pred| {
            Error::invalid_argument(format!("the condition '{}' gives {} values, not one", cond.name, pred.len()))
        })?;
        let (signature, _) = self.options.functions.find(&cond.name)?;
        let pred_type = signature
            .output_arg
            .first()
            .and_then(|arg| dtype_number(arg, &with_defaults(&cond.attr, signature)))
            .unwrap_or(DType::Bool as i32);
        let pred = if pred_type == DType::Bool as i32 { pred } else { self.truth(&cond_site, pred)? };
        let loop_cond = self.emit(site, "loop_cond", "LoopCond", vec![pred], &cond_effects, [])?;

        let mut switches = vec![String::new(); inputs.len()];
        for &i in &rounds {
            let pair = vec![merges[i].clone(), loop_cond.clone()];
            switches[i] = self.emit(site, &format!("switch_{i}"), "Switch", pair, &[], [])?;
        }
        let pivot = self.emit(site, "body_pivot", "Identity", vec![output(&switches[rounds[0]], 1)], &[], [])?;
        let mut arguments = Vec::with_capacity(n);
        for i in 0..n {
            arguments.push(match is_invariant[i] {
                false => output(&switches[i], 1),
                // It is there in the iteration that ends the loop, too, in which the body must not run.
                true => {
                    let enter = vec![enters[i].clone()];
                    self.emit(site, &format!("invariant_{i}"), "Identity", enter, std::slice::from_ref(&pivot), [])?
                }
            });
        }
        let body_site = Site { scope: format!("{}body/", site.scope), pivot: Some(pivot), ..site.clone() };
        let (mut results, body_effects) = self.inline(body, arguments, &body_site, Unstated::AsNeeded)?;
        if results.len() != n {
            return Err(Error::invalid_argument(format!(
                "the body '{}' gives {} values for {n} loop variables",
                body.name,
                results.len()
            )));
        }
        if inputs.len() > n {
            results.push(output(&switches[n], 1));
        }
        for &i in &rounds {
            let waits = body_effects.iter().map(|name| format!("^{name}"));
            let node = NodeDef {
                name: next_names[i].clone(),
                op: "NextIteration".to_owned(),
                input: std::iter::once(results[i].clone()).chain(waits).collect(),
                device: site.device.clone(),
                ..NodeDef::default()
            };
            self.push(site, node, &[])?;
        }
        let mut outputs = call.inputs.clone();
        let mut last = String::new();
        for &i in &rounds {
            last = self.emit(site, &format!("exit_{i}"), "Exit", vec![switches[i].clone()], &[], [])?;
            if i < n {
                outputs[i].clone_from(&last);
            }
        }
        let has_effects = !(cond_effects.is_empty() && body_effects.is_empty());
        let effects = if has_effects { vec![last] } else { Vec::new() };
        for (i, name) in outputs.iter_mut().enumerate() {
            if has_effects {
                let passed = vec![std::mem::take(name)];
                *name = self.emit(site, &format!("output_{i}"), "Identity", passed, &effects, [])?;
            }
        }
        Ok((outputs, effects))
    }

    /// Which loop variables the body returns as they came.
    fn invariants(&self, body: &NameAttrList, n: usize) -> Result<Vec<bool>> {
        let (signature, function) = self.options.functions.find(&body.name)?;
        let attrs = with_defaults(&body.attr, signature);
        let (args, returned) = (&signature.input_arg, &signature.output_arg);
        let mut single = args.len() == n && returned.len() == n;
        for arg in args.iter().chain(returned) {
            single &= count(arg, &attrs)? == 1;
        }
        if !single {
            return Ok(vec![false; n]);
        }
        Ok(args.iter().zip(returned).map(|(arg, result)| function.ret.get(&result.name) == Some(&arg.name)).collect())
    }

    /// The body of one side, which runs when `taken` is alive.
    fn side(
        &mut self,
        site: &Site,
        name: &str,
        function: &NameAttrList,
        taken: String,
        inputs: Vec<String>,
    ) -> Result<Side> {
        let pivot = self.emit(site, &format!("{name}_pivot"), "Identity", vec![taken], &[], [])?;
        let inner = Site { scope: format!("{}{name}/", site.scope), pivot: Some(pivot.clone()), ..site.clone() };
        let (outputs, effects) = self.inline(function, inputs, &inner, Unstated::AsNeeded)?;
        Ok(Side { pivot, outputs, effects })
    }

    /// The outputs of whichever side was taken.
    fn merge(&mut self, site: &Site, sides: Vec<Side>) -> Result<Written> {
        let n_outputs = sides.first().map_or(0, |side| side.outputs.len());
        if let Some(other) = sides.iter().find(|side| side.outputs.len() != n_outputs) {
            return Err(Error::invalid_argument(format!(
                "the branches give {n_outputs} and {} values; they should give the same number",
                other.outputs.len()
            )));
        }
        let mut effects = Vec::new();
        if sides.iter().any(|side| !side.effects.is_empty()) {
            let mut ends = Vec::with_capacity(sides.len());
            for side in &sides {
                ends.push(self.emit(site, "side_end", "Identity", vec![side.pivot.clone()], &side.effects, [])?);
            }
            effects.push(self.emit(site, "end", "Merge", ends, &[], [])?);
        }
        let mut outputs = Vec::with_capacity(n_outputs);
        for i in 0..n_outputs {
            let both = sides.iter().map(|side| side.outputs[i].clone()).collect();
            let merge = self.emit(site, &format!("merge_{i}"), "Merge", both, &[], [])?;
            outputs.push(match effects.is_empty() {
                true => merge,
                false => self.emit(site, &format!("output_{i}"), "Identity", vec![merge], &effects, [])?,
            });
        }
        if effects.is_empty() && outputs.is_empty() {
            // Whoever waits for the branch waits at least for its condition.
            let ends = sides.into_iter().map(|side| side.pivot).collect();
            effects.push(self.emit(site, "end", "Merge", ends, &[], [])?);
        }
        Ok((outputs, effects))
    }

    /// `tensor`, once the call may begin.
    fn gated(&mut self, site: &Site, name: &str, tensor: String, controls: &[String]) -> Result<String> {
        if controls.is_empty() {
            return Ok(tensor);
        }
        self.emit(site, name, "Identity", vec![tensor], controls, [])
    }

    fn truth(&mut self, site: &Site, tensor: String) -> Result<String> {
        let to = AttrValue { value: Some(Value::Type(DType::Bool as i32)) };
        self.emit(site, "truth", "Cast", vec![tensor], &[], [("DstT", to)])
    }

    fn compare(&mut self, site: &Site, op: &str, index: &str, with: usize) -> Result<String> {
        let with = i32::try_from(with).map_err(|_| Error::invalid_argument("too many branches"))?;
        let constant = self.constant(site, "number", with, &[])?;
        self.emit(site, &format!("is_{op}_{with}"), op, vec![index.to_owned(), constant], &[], [])
    }

    fn constant(&mut self, site: &Site, name: &str, value: i32, controls: &[String]) -> Result<String> {
        let value = AttrValue { value: Some(Value::Tensor(Box::new(to_proto(&Tensor::scalar(value))?))) };
        let dtype = AttrValue { value: Some(Value::Type(DType::I32 as i32)) };
        self.emit(site, name, "Const", Vec::new(), controls, [("dtype", dtype), ("value", value)])
    }
}

/// The first input, which decides, and the others.
fn split_first<'c>(call: &'c Call<'_>) -> Result<(String, &'c [String])> {
    match call.inputs.split_first() {
        Some((first, others)) => Ok((first.clone(), others)),
        None => Err(Error::invalid_argument("the input that decides is missing")),
    }
}

fn attr_type(node: &NodeDef, name: &str) -> Option<i32> {
    match node.attr.get(name)?.value {
        Some(Value::Type(number)) => Some(number),
        _ => None,
    }
}
