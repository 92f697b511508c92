//! Training curves: Kolo's own gradients and updates, from TensorFlow's initial values, must lose as TensorFlow does.

use kolo::{DType, Error, Graph, Operation, Output, PartialShape, Result, Tensor, gradients};
use serde_json::Value as Json;

use crate::case::{Case, Tolerance, indices, strings};
use crate::compare::difference;
use crate::run::{import, patient, session};

/// What differs.
pub fn check(case: &Case) -> Vec<String> {
    let plan = case.train.as_ref().expect("asked only where there is training");
    match losses(case, plan) {
        Ok(losses) => {
            let tolerance = Tolerance { rtol: plan["rtol"].as_f64(), ..Tolerance::default() };
            let expected = &case.expected[plan["expect"].as_u64().unwrap_or_default() as usize];
            difference(expected, &losses, tolerance).into_iter().collect()
        }
        Err(error) => vec![format!("{:?}: {error}", error.code())],
    }
}

/// The losses before the steps that the case wants to see.
fn losses(case: &Case, plan: &Json) -> Result<Tensor> {
    let text = |key: &str| plan[key].as_str().unwrap_or_default();
    let graph = import(&case.def)?;
    let loss = graph.output(text("loss"))?;
    let variables: Vec<Output<'_>> =
        strings(&plan["variables"]).iter().map(|name| graph.output(name)).collect::<Result<_>>()?;
    let mut trainer = Trainer::new(&graph, text("optimizer"), plan["lr"].as_f64().unwrap_or_default() as f32);
    for (variable, grad) in variables.iter().zip(gradients(&[loss], &variables)?) {
        let grad = grad.ok_or_else(|| Error::internal(format!("no gradient of {variable:?}")))?;
        trainer.add(*variable, grad.dense()?)?;
    }
    let session = session(&graph)?;
    session.run_op(graph.operation(text("start"))?)?;
    let run = |fetches: &[Output<'_>], feeds: &[(Output<'_>, Tensor)], targets: &[Operation<'_>]| {
        session.run_with(&patient(), fetches, feeds, targets).map(|(values, _)| values)
    };
    run(&[], &[], &trainer.starts)?;
    let seen: Vec<usize> = indices(&plan["seen"]).into_iter().flatten().collect();
    let (mut losses, mut powers) = (Vec::new(), [BETA_1, BETA_2]);
    for step in 0..plan["steps"].as_u64().unwrap_or_default() as usize {
        if seen.contains(&step) {
            losses.push(run(&[loss], &[], &[])?[0].scalar_value::<f32>()?);
        }
        let feeds = [0, 1].map(|i| (trainer.powers[i], Tensor::scalar(powers[i])));
        run(&[], &feeds[..if trainer.is_adam { 2 } else { 0 }], &trainer.updates)?;
        powers = [powers[0] * BETA_1, powers[1] * BETA_2];
    }
    Ok(Tensor::vector(losses))
}

const BETA_1: f32 = 0.9;
const BETA_2: f32 = 0.999;

/// Updates of variables, made of the ops themselves.
struct Trainer<'g> {
    graph: &'g Graph,
    is_adam: bool,
    lr: Output<'g>,
    /// The powers of the two betas, to feed.
    powers: [Output<'g>; 2],
    starts: Vec<Operation<'g>>,
    updates: Vec<Operation<'g>>,
}

impl<'g> Trainer<'g> {
    fn new(graph: &'g Graph, optimizer: &str, lr: f32) -> Trainer<'g> {
        let scalar = || graph.op("Placeholder").attr("dtype", DType::F32).attr("shape", PartialShape::scalar()).out();
        let start = graph.op("NoOp").build();
        Trainer {
            graph,
            is_adam: optimizer == "adam",
            lr: graph.constant(lr),
            powers: [scalar(), scalar()],
            starts: vec![start],
            updates: Vec::new(),
        }
    }

    fn add(&mut self, variable: Output<'g>, grad: Output<'g>) -> Result<()> {
        let graph = self.graph;
        let update = match self.is_adam {
            false => graph.op("ResourceApplyGradientDescent").inputs([variable, self.lr, grad]).build(),
            true => {
                let (m, v) = (self.slot(variable, "m")?, self.slot(variable, "v")?);
                let [beta1, beta2, epsilon] = [BETA_1, BETA_2, 1e-8].map(|value| graph.constant(value));
                let powers = self.powers;
                let inputs = [variable, m, v, powers[0], powers[1], self.lr, beta1, beta2, epsilon, grad];
                graph.op("ResourceApplyAdam").inputs(inputs).build()
            }
        };
        self.updates.push(update);
        Ok(())
    }

    /// A variable of zeros, like `variable`.
    fn slot(&mut self, variable: Output<'g>, name: &str) -> Result<Output<'g>> {
        let (dtype, shape) = variable.handle().ok_or_else(|| Error::internal("not a variable"))?;
        let zeros = Tensor::zeros(dtype, shape.known().ok_or_else(|| Error::internal("of unknown shape"))?)?;
        let name = format!("{}/{name}", variable.operation().name());
        let slot =
            self.graph.op("VarHandleOp").attr("dtype", dtype).attr("shape", shape).attr("shared_name", name).out();
        self.starts.push(self.graph.op("AssignVariableOp").input(slot).input(self.graph.constant(zeros)).build());
        Ok(slot)
    }
}
