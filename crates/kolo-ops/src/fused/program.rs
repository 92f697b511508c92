//! What a fused elementwise node computes: steps that name ops of the table, so that a graph from elsewhere can ask for nothing
//! but those.
//!
//! As text: `op,output dtype,parameter,arguments` with `;` between steps; arguments are inputs (`i0`) and earlier steps' values
//! (`v0`), the parameter is a float's bits in hexadecimal or `-`. `Mul,float,-,i0 i1;Relu,float,-,v0` is `relu(a · b)`.

use std::fmt;

use kolo_core::{DType, Error, Result, Shape};
use kolo_graph::{Elementwise, Node, ShapesFit};

use crate::math::elementwise::{broadcast_shape, parameter};

/// Most steps of a program.
pub const MOST_STEPS: usize = 32;
/// Most inputs of a program.
pub const MOST_INPUTS: usize = 12;

/// The steps, the last of which gives the output.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// In order: arguments come first.
    pub steps: Vec<Step>,
    /// How many inputs there are.
    pub n_inputs: usize,
}

/// One op.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// What it does.
    pub op: &'static str,
    /// What it gives.
    pub out: DType,
    /// An attribute that the op computes with.
    pub parameter: Option<f32>,
    /// What it takes.
    pub args: Vec<Arg>,
}

/// What a step takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arg {
    /// An input of the program.
    Input(usize),
    /// The value of an earlier step.
    Value(usize),
}

/// The op as a step of a program, if it is one: `(name, parameter)`. Whether there is a kernel for its dtypes is another matter.
pub fn step_of(node: &Node) -> Option<(&'static str, Option<f32>)> {
    let elementwise = node.def.elementwise.filter(|elementwise| elementwise.holds_for(&node.attrs))?;
    expression(node.op(), node.inputs.len())?;
    let parameter = match elementwise.parameter {
        Some(attr) => Some(parameter(&node.attrs, attr).ok()?),
        None => None,
    };
    Some((node.def.name, parameter))
}

/// The expression of an op over so many arguments, for [`crate::cuda`], and how their shapes must fit.
fn expression(op: &str, n_args: usize) -> Option<(&'static str, Elementwise)> {
    let elementwise = crate::find_op(op).ok()?.def.elementwise?;
    let text = elementwise.text(n_args).filter(|_| elementwise.shapes != ShapesFit::Own)?;
    Some((text, elementwise))
}

impl Program {
    /// Reads a program's text.
    pub fn parse(text: &str, n_inputs: usize) -> Result<Program> {
        let bad = |step: &str| Error::invalid_argument(format!("'{step}' is not a step of a fused elementwise op"));
        let mut steps: Vec<Step> = Vec::new();
        for step in text.split(';') {
            let parts: Vec<&str> = step.split(',').collect();
            let &[op, out, parameter, args] = parts.as_slice() else { return Err(bad(step)) };
            let op = crate::find_op(op)?.def.name;
            let parameter = match parameter {
                "-" => None,
                bits => Some(f32::from_bits(u32::from_str_radix(bits, 16).map_err(|_| bad(step))?)),
            };
            let arg = |text: &str| {
                let (kind, number) = text.split_at_checked(1)?;
                let number: usize = number.parse().ok()?;
                match kind {
                    "i" if number < n_inputs => Some(Arg::Input(number)),
                    "v" if number < steps.len() => Some(Arg::Value(number)),
                    _ => None,
                }
            };
            let args: Option<Vec<Arg>> = args.split(' ').map(arg).collect();
            let args = args.ok_or_else(|| bad(step))?;
            let (_, elementwise) = expression(op, args.len()).ok_or_else(|| bad(step))?;
            if elementwise.parameter.is_some() != parameter.is_some() || steps.len() >= MOST_STEPS {
                return Err(bad(step));
            }
            steps.push(Step { op, out: DType::from_name(out)?, parameter, args });
        }
        if steps.is_empty() || n_inputs > MOST_INPUTS {
            return Err(Error::invalid_argument(format!("a fused elementwise op of {n_inputs} inputs and no steps")));
        }
        Ok(Program { steps, n_inputs })
    }

    /// The text of step `i`, over its arguments.
    pub(crate) fn text(&self, i: usize) -> Result<&'static str> {
        let step = &self.steps[i];
        let found = expression(step.op, step.args.len()).map(|(text, _)| text);
        found.ok_or_else(|| Error::internal(format!("{} of {} arguments is not elementwise", step.op, step.args.len())))
    }

    /// The shape of the output, for inputs of these shapes; an error if they do not fit.
    pub fn shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        let mut shapes: Vec<Shape> = Vec::with_capacity(self.steps.len());
        for step in &self.steps {
            let of = |arg: &Arg| match *arg {
                Arg::Input(i) => inputs[i],
                Arg::Value(i) => &shapes[i],
            };
            let fit =
                expression(step.op, step.args.len()).map_or(ShapesFit::Own, |(_, elementwise)| elementwise.shapes);
            let mut shape = of(&step.args[0]).clone();
            for other in step.args[1..].iter().map(of) {
                let fits = match fit {
                    ShapesFit::Broadcast => {
                        if *other != shape {
                            shape = broadcast_shape(&shape, other)?;
                        }
                        true
                    }
                    ShapesFit::Same => *other == shape,
                    ShapesFit::Bias => shape.rank() >= 2 && other.rank() == 1 && shape.last() == other.last(),
                    // No step of a program is such an op.
                    ShapesFit::Own => false,
                };
                if !fits {
                    return Err(Error::invalid_argument(match fit {
                        ShapesFit::Bias => format!(
                            "Must provide as many biases as the last dimension of the input tensor: {other} vs. {shape}"
                        ),
                        _ => format!("the inputs of {} must have the same shape, found {shape} and {other}", step.op),
                    }));
                }
            }
            shapes.push(shape);
        }
        shapes.pop().ok_or_else(|| Error::internal("a program without steps"))
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, step) in self.steps.iter().enumerate() {
            let parameter = step.parameter.map_or_else(|| "-".to_owned(), |p| format!("{:x}", p.to_bits()));
            let args: Vec<String> = step
                .args
                .iter()
                .map(|arg| match arg {
                    Arg::Input(i) => format!("i{i}"),
                    Arg::Value(i) => format!("v{i}"),
                })
                .collect();
            let between = if i == 0 { "" } else { ";" };
            write!(f, "{between}{},{},{parameter},{}", step.op, step.out.name(), args.join(" "))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_read_what_they_write() {
        let text = "Mul,float,-,i0 i1;LeakyRelu,float,3e4ccccd,v0;Cast,half,-,v1;BiasAdd,half,-,v2 i2";
        let program = Program::parse(text, 3).unwrap();
        assert_eq!(program.to_string(), text);
        assert_eq!(program.steps[1].parameter, Some(0.2));
        let shape = |dims: &[usize]| Shape::new(dims).unwrap();
        let (a, b, bias) = (shape(&[5, 1]), shape(&[3]), shape(&[3]));
        assert_eq!(program.shape(&[&a, &b, &bias]).unwrap(), shape(&[5, 3]));
        assert!(program.shape(&[&a, &b, &shape(&[2])]).is_err());
    }

    #[test]
    fn anything_else_is_refused() {
        for bad in [
            "",
            "Mul,float,-,i0",
            "Mul,float,-,i0 i9",
            "Mul,float,-,i0 v0",
            "MatMul,float,-,i0 i1",
            "Mul,nothing,-,i0 i1",
            "Mul,float,3f800000,i0 i1",
            "LeakyRelu,float,-,i0",
            "LeakyRelu,float,xyz,i0",
            "Mul,float,-,i0 i1;",
            "exit(1),float,-,i0",
        ] {
            assert!(Program::parse(bad, 2).is_err(), "{bad}");
        }
        let long = vec!["Neg,float,-,i0"; MOST_STEPS + 1].join(";");
        assert!(Program::parse(&long, 1).is_err());
    }
}
