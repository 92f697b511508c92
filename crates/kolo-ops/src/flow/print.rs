//! `Print` and `PrintV2`: text to the standard streams of the process that runs them. `StringFormat`: tensors as text.
//!
//! `summarize` limits what is shown. Two layouts exist, both TensorFlow's: a flat one, in which the first elements are
//! followed by dots, for `Print` and `Assert`; and NumPy's, with the first and last elements of every dimension, for
//! `StringFormat`.

use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::atomic::{AtomicI64, Ordering};

use kolo_core::{DType, Element, ElementVisitor, Error, Result, Tensor};
use kolo_graph::{Effects, Gradient, Graph, OpDef, Operation, Output, shape_fns};

use crate::kernel::KernelInit;
use crate::op::{Gpu, Op, cpu_any, cpu_made};
use crate::{Cost, Kernel, KernelCtx, KernelMaker};

/// Passes `x` on, and prints `message` and some elements of each of `data` whenever it does.
#[track_caller]
pub fn print<'g>(x: Output<'g>, data: &[Output<'g>], message: &str) -> Output<'g> {
    x.graph().op("Print").input(x).inputs(data.iter().copied()).attr("message", message).out()
}

/// Prints `template`, in which each `{}` stands for one of `inputs`, to standard error.
#[track_caller]
pub fn print_format<'g>(graph: &'g Graph, template: &str, inputs: &[Output<'g>]) -> Operation<'g> {
    graph.op("PrintV2").input(string_format(graph, template, inputs)).build()
}

/// `template`, in which each `{}` stands for one of `inputs`.
#[track_caller]
pub fn string_format<'g>(graph: &'g Graph, template: &str, inputs: &[Output<'g>]) -> Output<'g> {
    let builder = graph.op("StringFormat").inputs(inputs.iter().copied());
    builder.attr("template", template).attr("placeholder", "{}").out()
}

pub(crate) static PRINT: Op = Op {
    def: OpDef {
        name: "Print",
        signature: "(input:T, data:list(U)) -> (output:T) ; T:type, U:list(type)>=0, message:string=\"\", first_n:int=-1, \
                    summarize:int=3",
        shape: shape_fns::same_as_input_0,
        gradient: Gradient::Same,
        stateful: true,
        effects: Effects::Outside,
        ..OpDef::BASE
    },
    kernels: &[cpu_made(KernelMaker::Object(Print::make))],
    gpu: Gpu::Never("it prints on the host"),
    cost: Cost::Inline,
};

pub(crate) static PRINT_V2: Op = Op {
    def: OpDef {
        name: "PrintV2",
        signature: "(input:string) -> () ; output_stream:string=\"stderr\", end:string=\"\\n\"",
        shape: |ctx| ctx.input_of_rank(0, 0).map(|_| Vec::new()),
        gradient: Gradient::None("nothing comes out"),
        stateful: true,
        effects: Effects::Outside,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(print_v2)],
    gpu: Gpu::Never("it prints on the host"),
    cost: Cost::Inline,
};

pub(crate) static STRING_FORMAT: Op = Op {
    def: OpDef {
        name: "StringFormat",
        signature: "(inputs:list(T)) -> (output:string) ; T:list(type)>=0, template:string=\"%s\", \
                    placeholder:string=\"%s\", summarize:int=3",
        shape: shape_fns::scalars,
        gradient: Gradient::None("text"),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| {
        let text = format_template(ctx)?;
        ctx.set_output(0, Tensor::string(text));
        Ok(())
    })],
    gpu: Gpu::STRINGS,
    cost: Cost::Inline,
};

struct Print {
    /// How often it may still print; negative for always.
    left: AtomicI64,
}

impl Print {
    fn make(init: &KernelInit<'_>) -> Result<Box<dyn Kernel>> {
        Ok(Box::new(Print { left: AtomicI64::new(init.attrs().int("first_n")?) }))
    }
}

impl Kernel for Print {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        let spend = |left: i64| if left > 0 { Some(left - 1) } else { None };
        let left = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, spend).unwrap_or_else(|left| left);
        if left != 0 {
            let mut text = ctx.attrs().str("message")?.to_owned();
            let limit = ctx.attrs().int("summarize")?;
            for i in 1..ctx.n_inputs() {
                write!(text, "[{}]", summary(ctx.input(i)?, limit)).map_err(|_| Error::internal("no text"))?;
            }
            text.push('\n');
            // Nobody is there to read it: not a reason to fail a step.
            let _ = std::io::stderr().write_all(visible(text.as_bytes()).as_bytes());
        }
        ctx.forward(0, 0)
    }
}

fn print_v2(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let [text] = ctx.input(0)?.strings()? else {
        return Err(Error::invalid_argument(format!(
            "PrintV2 prints a scalar string, found shape {}",
            ctx.input(0)?.shape()
        )));
    };
    let text = visible(&[text, ctx.attrs().str("end")?.as_bytes()].concat()).into_bytes();
    // As for `Print`, a stream that is closed is no reason to fail.
    let _ = match ctx.attrs().str("output_stream")? {
        "stdout" => std::io::stdout().write_all(&text),
        "stderr" | "log(info)" | "log(warning)" | "log(error)" => std::io::stderr().write_all(&text),
        other => {
            return Err(Error::invalid_argument(format!(
                "Unknown output stream: {other}, use stdout, stderr, log(info), log(warning) or log(error)"
            )));
        }
    };
    Ok(())
}

/// Text for a terminal. Control characters, which could move its cursor, change its title or type for its user, and bytes
/// that are no text are shown as escapes; line ends and tabs stay.
fn visible(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            match character {
                '\n' | '\t' => text.push(character),
                control if control.is_control() => text.extend(control.escape_default()),
                other => text.push(other),
            }
        }
        text.extend(chunk.invalid().iter().map(|byte| format!("\\x{byte:02x}")));
    }
    text
}

fn format_template(ctx: &KernelCtx<'_>) -> Result<String> {
    let attrs = ctx.attrs();
    let (template, placeholder) = (attrs.str("template")?, attrs.str("placeholder")?);
    let parts: Vec<&str> = if placeholder.is_empty() { vec![template] } else { template.split(placeholder).collect() };
    if parts.len() - 1 != ctx.n_inputs() {
        return Err(Error::invalid_argument(format!(
            "num placeholders in template and num inputs must match: {} vs. {}",
            parts.len() - 1,
            ctx.n_inputs()
        )));
    }
    let n_at_ends = attrs.int("summarize")?;
    let mut text = parts[0].to_owned();
    for (i, part) in parts[1..].iter().enumerate() {
        let input = ctx.input(i)?;
        let elements = texts(input, Quotes::Double)?;
        // A negative number shows everything.
        let n_at_ends = usize::try_from(n_at_ends).unwrap_or(usize::MAX / 2);
        nested(&elements, input.shape(), 0, n_at_ends, &mut text);
        text.push_str(part);
    }
    Ok(text)
}

/// The first `limit` elements in order, with brackets around the rows of all but the last dimension; a negative limit
/// shows all. What cannot be shown is named.
pub(super) fn summary(tensor: &Tensor, limit: i64) -> String {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let elements = match texts(tensor, Quotes::None) {
        Ok(elements) => elements,
        Err(_) => return format!("{}{}", tensor.dtype(), tensor.shape()),
    };
    let mut text = String::new();
    let mut at = 0;
    match tensor.shape().rank() {
        0 => text.extend(elements.into_iter().take(limit)),
        _ => flat(&elements, tensor.shape(), 0, limit, &mut at, &mut text),
    }
    if tensor.n_elements() > limit {
        text.push_str("...");
    }
    text
}

fn flat(elements: &[String], shape: &[usize], dim: usize, limit: usize, at: &mut usize, text: &mut String) {
    if *at >= limit {
        return;
    }
    if dim + 1 == shape.len() {
        for i in 0..shape[dim] {
            if *at >= limit {
                if dim != 0 {
                    text.push_str("...");
                }
                return;
            }
            if i > 0 {
                text.push(' ');
            }
            text.push_str(&elements[*at]);
            *at += 1;
        }
        return;
    }
    for _ in 0..shape[dim] {
        if *at >= limit {
            return;
        }
        text.push('[');
        flat(elements, shape, dim + 1, limit, at, text);
        text.push(']');
    }
}

/// NumPy's layout: `n_at_ends` elements at each end of every dimension.
fn nested(elements: &[String], shape: &[usize], dim: usize, n_at_ends: usize, text: &mut String) {
    let Some(&n) = shape.get(dim) else {
        text.push_str(elements.first().map_or("", String::as_str));
        return;
    };
    let step: usize = shape[dim + 1..].iter().product();
    let space = |text: &mut String| {
        let is_last = dim + 1 == shape.len();
        text.push_str(&if is_last {
            " ".to_owned()
        } else {
            "\n".repeat(shape.len() - dim - 1) + &" ".repeat(dim + 1)
        });
    };
    text.push('[');
    for i in 0..n.min(n_at_ends) {
        if i > 0 {
            space(text);
        }
        nested(&elements[i * step..(i + 1) * step], shape, dim + 1, n_at_ends, text);
    }
    if n > 2 * n_at_ends {
        space(text);
        text.push_str("...");
    }
    for i in n_at_ends.max(n.saturating_sub(n_at_ends))..n {
        space(text);
        nested(&elements[i * step..(i + 1) * step], shape, dim + 1, n_at_ends, text);
    }
    text.push(']');
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Quotes {
    None,
    Double,
}

/// Every element as text.
fn texts(tensor: &Tensor, quotes: Quotes) -> Result<Vec<String>> {
    if tensor.dtype() == DType::Str {
        let quote = |text: &bytes::Bytes| match quotes {
            Quotes::None => escape(text),
            Quotes::Double => format!("\"{}\"", escape(text)),
        };
        return Ok(tensor.strings()?.iter().map(quote).collect());
    }
    struct Texts<'a>(&'a Tensor);
    impl ElementVisitor for Texts<'_> {
        type Out = Vec<String>;
        fn visit<T: Element>(self) -> Result<Vec<String>> {
            self.0.data::<T>()?.iter().map(|element| Ok(element.to_string())).collect()
        }
    }
    match tensor.dtype() {
        DType::F32 => Ok(tensor.data::<f32>()?.iter().map(|&x| float(x)).collect()),
        DType::F16 => Ok(tensor.data::<half::f16>()?.iter().map(|x| float(x.to_f32())).collect()),
        DType::BF16 => Ok(tensor.data::<half::bf16>()?.iter().map(|x| float(x.to_f32())).collect()),
        DType::F64 => Ok(tensor.data::<f64>()?.iter().map(|&x| double(x)).collect()),
        DType::Bool => Ok(tensor.data::<bool>()?.iter().map(|&x| u8::from(x).to_string()).collect()),
        other => other.visit("printing", Texts(tensor)),
    }
}

/// As `%.6g`, or with as many digits as it takes to read the same number back.
fn float(x: f32) -> String {
    let short = general(f64::from(x), 6);
    if short.parse() == Ok(x) || x.is_nan() { short } else { general(f64::from(x), 9) }
}

/// As `%.15g`, or with as many digits as it takes to read the same number back.
fn double(x: f64) -> String {
    let short = general(x, 15);
    if short.parse() == Ok(x) || x.is_nan() { short } else { general(x, 17) }
}

/// C's `%.{digits}g`.
fn general(x: f64, digits: usize) -> String {
    if x.is_nan() {
        return "nan".to_owned();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf".to_owned() } else { "-inf".to_owned() };
    }
    let scientific = format!("{x:.*e}", digits - 1);
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let trim = |text: &str| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text.to_owned(),
    };
    if exponent < -4 || exponent >= digits as i32 {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{}e{sign}{:02}", trim(mantissa), exponent.abs());
    }
    trim(&format!("{x:.*}", (digits as i32 - 1 - exponent).max(0) as usize))
}

/// Bytes as C source would write them.
fn escape(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for &byte in bytes {
        match byte {
            b'\n' => text.push_str("\\n"),
            b'\r' => text.push_str("\\r"),
            b'\t' => text.push_str("\\t"),
            b'"' | b'\'' | b'\\' => text.extend(['\\', byte as char]),
            0x20..=0x7e => text.push(byte as char),
            _ => text.push_str(&format!("\\{byte:03o}")),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check_op, tensor, wavy};

    // The expected texts were compared with TensorFlow 2.21.

    #[test]
    fn escape_sequences_are_shown_and_not_sent() {
        assert_eq!(visible("héllo\tworld\n".as_bytes()), "héllo\tworld\n");
        assert_eq!(visible(b"\x1b]0;title\x07\r\x7f"), "\\u{1b}]0;title\\u{7}\\r\\u{7f}");
        assert_eq!(visible("\u{9b}31m".as_bytes()), "\\u{9b}31m");
        assert_eq!(visible(b"ok\xff\xfe"), "ok\\xff\\xfe");
    }

    #[test]
    fn a_summary_is_flat() {
        let show = |tensor: Tensor, limit: i64, text: &str| assert_eq!(summary(&tensor, limit), text);
        show(Tensor::from([1i32, 2, 3, 4]), 3, "1 2 3...");
        show(Tensor::from([1i32, 2, 3]), 3, "1 2 3");
        show(tensor([2, 2], [1i32, 2, 3, 4]), 3, "[1 2][3...]...");
        show(tensor([2, 2], [1i32, 2, 3, 4]), -1, "[1 2][3 4]");
        show(Tensor::scalar(1.5f32), 3, "1.5");
        show(Tensor::from("a\"b"), 3, "a\\\"b");
        show(Tensor::from([true, false]), 3, "1 0");
        show(tensor::<f32, 1>([0], []), 3, "");
        show(Tensor::zeros(DType::Complex64, [2]).unwrap(), 3, "complex64[2]");
    }

    #[test]
    fn numbers_are_as_short_as_they_can_be() {
        let check = |x: f32, text: &str| assert_eq!(float(x), text);
        check(0.1, "0.1");
        check(1.0 / 3.0, "0.333333343");
        check(1e10, "1e+10");
        check(-1.5e-7, "-1.5e-07");
        check(123456.0, "123456");
        check(f32::NAN, "nan");
        check(f32::NEG_INFINITY, "-inf");
        check(0.0, "0");
        assert_eq!(double(0.1), "0.1");
        assert_eq!(double(1.0 / 3.0), "0.33333333333333331");
    }

    #[test]
    fn text_from_tensors() {
        check_op("StringFormat")
            .attr("template", "a {} b {} c")
            .attr("placeholder", "{}")
            .input([1i32, 2, 3, 4, 5, 6, 7])
            .input("x")
            .gives("a [1 2 3 ... 5 6 7] b \"x\" c");
        check_op("StringFormat")
            .attr("template", "{}")
            .attr("placeholder", "{}")
            .attr("summarize", 1i64)
            .input(tensor([3, 2], [1i32, 2, 3, 4, 5, 6]))
            .gives("[[1 2]\n ...\n [5 6]]");
        check_op("StringFormat").attr("template", "%s").fails("must match: 1 vs. 0");
    }

    #[test]
    fn printing_passes_the_value_on() {
        check_op("Print").attr("message", "m").input(wavy([2], 0)).input([1i32, 2]).gives(wavy([2], 0));
        let g = crate::graph();
        let x = g.constant([1.0f32, 2.0]);
        let printed = print(x, &[x], "x is ");
        let (kernel, odd) = (
            print_format(&g, "x is {}", &[x]),
            g.op("PrintV2").input(g.constant("text")).attr("output_stream", "file:///x").build(),
        );
        g.check().unwrap();
        let run = crate::testing::Evaluation::new(g.snapshot());
        assert_eq!(run.run(&[printed], &[]).unwrap(), [Tensor::from([1.0f32, 2.0])]);
        run.run_targets(&[kernel], &[]).unwrap();
        assert!(run.run_targets(&[odd], &[]).unwrap_err().message().contains("Unknown output stream: file:///x"));
    }
}
