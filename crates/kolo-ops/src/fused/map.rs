//! Trees of elementwise ops as one generated kernel each: every input is read once, nothing between is stored.
//!
//! Inputs that are as large as the output, of one element, a row or a column of it take the flat loop, with loads of 16 bytes
//! where addresses and sizes allow. Others take the strided loop of `map.rs`.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::OnceLock;

use kolo_core::{DType, Error, Result, Shape, Tensor};
use kolo_device::cuda::{Args, CudaDevice, Grid, ProgramKey};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::fused;
use crate::Cost;
use crate::array::cast::gpu_text;
use crate::cuda::columns::{Mapped, reduce_columns};
use crate::cuda::map::{RANK, is_aligned, strides};
use crate::cuda::reduce::SUM;
use crate::cuda::{c_type, gpu};
use crate::fused::program::{Arg, Program};
use crate::kernel::KernelInit;
use crate::op::{KernelMaker, Op, gpu_made};
use crate::{Kernel, KernelCtx};

/// A tree of elementwise ops; see [`Program`].
pub static MAP: Op = fused(
    "_KoloFusedMap",
    "(inputs:list(Tin)) -> (output:T) ; Tin:list(type)>=1, T:type, program:string",
    Cost::Elements,
)
.gpu(&[gpu_made("", &[], KernelMaker::Object(FusedMap::make))]);

/// A tree of elementwise ops, and the sums of its value over all dimensions but the last.
pub static MAP_AND_SUM: Op = fused(
    "_KoloFusedMapAndSum",
    "(inputs:list(Tin)) -> (output:T, sums:T) ; Tin:list(type)>=1, T:type, program:string",
    Cost::Elements,
)
.gpu(&[gpu_made("", &[], KernelMaker::Object(FusedMapAndSum::make))]);

/// A program, as CUDA C++.
struct Element {
    program: Program,
    /// Names it, among all of this process.
    name: &'static str,
    /// Defines the function `element`.
    code: String,
    types: Vec<DType>,
    out: DType,
}

impl Element {
    fn make(init: &KernelInit<'_>) -> Result<Element> {
        let types = init.attrs().dtypes("Tin")?;
        Element::new(init.attrs().str("program")?, types, init.attrs().dtype("T")?)
    }

    fn new(text: &str, types: Vec<DType>, out: DType) -> Result<Element> {
        let program = Program::parse(text, types.len())?;
        let code = code(&program, &types)?;
        let last = program.steps.last().map(|step| step.out);
        if last != Some(out) || types.iter().chain([&out]).any(|dtype| c_type(*dtype) == "void") {
            return Err(Error::invalid_argument(format!("'{text}' does not give {out}, or not on a GPU")));
        }
        Ok(Element { name: intern(&code), program, code, types, out })
    }

    /// Enqueues the flat or the strided loop. An input of `None` is the output itself, before it is written.
    fn launch(&self, device: &CudaDevice, inputs: &[Option<&Tensor>], output: &mut Tensor) -> Result<()> {
        let n = output.n_elements();
        if n == 0 {
            return Ok(());
        }
        let shape = output.shape().clone();
        let walk = strides(&shape, inputs)?;
        let mut list = Args::new();
        for tensor in inputs {
            list = match tensor {
                Some(tensor) => list.input(tensor),
                // The kernel reads its output's old value instead.
                None => list.i64(0),
            };
        }
        let Some((kinds, columns)) = kinds(&walk.sizes, &walk.steps) else {
            let rank = walk.sizes.len();
            let key = ProgramKey { family: "walk", op: self.name, dtypes: [None; 3], variant: rank as u32 };
            let kernel = device.function(&key, || self.strided(rank))?;
            let mut list = list.output(output).size(n).sizes(&walk.sizes, RANK);
            for steps in &walk.steps {
                list = list.sizes(steps, RANK);
            }
            return device.launch(kernel, Grid::over(n), &list);
        };
        let widest = self.types.iter().chain([&self.out]).filter_map(|dtype| dtype.size()).max().unwrap_or(1);
        let mut width = (16 / widest).max(1);
        let has_rows = kinds.iter().any(|kind| matches!(kind, Kind::Row | Kind::Column));
        let may = |width: usize| {
            let wide = |kind: &Kind| matches!(kind, Kind::Whole | Kind::Row);
            let loads = inputs.iter().zip(&kinds).filter(|(_, kind)| wide(kind)).filter_map(|(tensor, _)| *tensor);
            (!has_rows || columns % width == 0)
                && n >= width
                && is_aligned(output, width)
                && loads.into_iter().all(|tensor| is_aligned(tensor, width))
        };
        while width > 1 && !may(width) {
            width /= 2;
        }
        let is_long = n > i32::MAX as usize;
        let variant = kinds.iter().enumerate().map(|(i, &kind)| (kind as u32) << (2 * i)).sum::<u32>()
            | width.trailing_zeros() << 24
            | u32::from(is_long) << 31;
        let key = ProgramKey { family: "fused", op: self.name, dtypes: [None; 3], variant };
        let kernel = device.function(&key, || self.flat(&kinds, width, is_long))?;
        let list = list.output(output).size(n).size(columns);
        device.launch(kernel, Grid::over(n.div_ceil(width)), &list)
    }

    fn head(&self) -> (String, String) {
        let pointers: String =
            self.types.iter().enumerate().map(|(i, dtype)| format!("const {}* in{i}, ", c_type(*dtype))).collect();
        // An input that is the output comes as a null pointer.
        let open: String = (0..self.types.len())
            .filter(|&i| self.types[i] == self.out)
            .map(|i| format!("    if (in{i} == nullptr) in{i} = (const U*)out;\n"))
            .collect();
        (pointers, open)
    }

    fn flat(&self, kinds: &[Kind], width: usize, is_long: bool) -> String {
        let (pointers, open) = self.head();
        let index = if is_long { "i64" } else { "u32" };
        let (mut once, mut loads) = (String::new(), String::new());
        let (mut packed, mut plain) = (Vec::new(), Vec::new());
        for (i, (kind, dtype)) in kinds.iter().zip(&self.types).enumerate() {
            let pack = format!("Pack<{}, {width}>", c_type(*dtype));
            match kind {
                Kind::Single => once += &format!("    const auto c{i} = widen(in{i}[0]);\n"),
                Kind::Whole => loads += &format!("        const {pack} a{i} = ((const {pack}*)in{i})[i];\n"),
                Kind::Row => loads += &format!("        const {pack} a{i} = *(const {pack}*)(in{i} + column);\n"),
                Kind::Column => loads += &format!("        const auto c{i} = widen(in{i}[row]);\n"),
            }
            let is_one = matches!(kind, Kind::Single | Kind::Column);
            packed.push(if is_one { format!("c{i}") } else { format!("widen(a{i}.at[j])") });
            plain.push(if is_one { format!("c{i}") } else { format!("widen(in{i}[i])") });
        }
        let has_rows = kinds.iter().any(|kind| matches!(kind, Kind::Row | Kind::Column));
        let place = format!(
            "        const {index} row = (({index})i * {width}) / ({index})columns, \
             column = (({index})i * {width}) - row * ({index})columns;\n"
        );
        let place = if has_rows { place } else { String::new() };
        // A row is a multiple of the width, so only what has no rows can have a rest.
        let rest = match has_rows {
            true => String::new(),
            false => format!(
                "    for (i64 i = packs * {width} + thread_number(); i < n; i += n_threads())\n\
                 \x20       out[i] = Narrow<U>::from(element({}));\n",
                plain.join(", ")
            ),
        };
        format!(
            "typedef {} U;\n{}extern \"C\" __global__ void KOLO_ENTRY({pointers}U* out, i64 n, i64 columns) {{\n{open}{once}\
             \x20   const i64 packs = n / {width};\n\
             \x20   for (i64 i = thread_number(); i < packs; i += n_threads()) {{\n{place}{loads}\
             \x20       Pack<U, {width}> b;\n        #pragma unroll\n\
             \x20       for (int j = 0; j < {width}; j++) b.at[j] = Narrow<U>::from(element({}));\n\
             \x20       ((Pack<U, {width}>*)out)[i] = b;\n    }}\n{rest}}}\n",
            c_type(self.out),
            self.code,
            packed.join(", ")
        )
    }

    fn strided(&self, rank: usize) -> String {
        let (pointers, open) = self.head();
        let n = self.types.len();
        let list = |f: &dyn Fn(usize) -> String, between: &str| (0..n).map(f).collect::<Vec<_>>().join(between);
        format!(
            "typedef {} U;\n{}struct Sizes {{ i64 at[{RANK}]; }};\n\
             extern \"C\" __global__ void KOLO_ENTRY({pointers}U* out, i64 n, Sizes sizes, {}) {{\n{open}\
             \x20   for (i64 i = thread_number(); i < n; i += n_threads()) {{\n\
             \x20       i64 rest = i; {}\n        #pragma unroll\n\
             \x20       for (int d = {rank} - 1; d >= 0; d--) {{\n\
             \x20           i64 c;\n\
             \x20           if (n < 0x7fffffff) {{ u32 s = (u32)sizes.at[d], r = (u32)rest; c = r % s; rest = r / s; }}\n\
             \x20           else {{ c = rest % sizes.at[d]; rest /= sizes.at[d]; }}\n\
             \x20           {}\n        }}\n\
             \x20       out[i] = Narrow<U>::from(element({}));\n    }}\n}}\n",
            c_type(self.out),
            self.code,
            list(&|i| format!("Sizes s{i}"), ", "),
            list(&|i| format!("i64 o{i} = 0;"), " "),
            list(&|i| format!("o{i} += c * s{i}.at[d];"), " "),
            list(&|i| format!("widen(in{i}[o{i}])"), ", "),
        )
    }
}

/// How an input lies in the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Element by element.
    Whole = 0,
    /// One element for all.
    Single = 1,
    /// One element for each column.
    Row = 2,
    /// One element for each row.
    Column = 3,
}

/// The kind of each input, and the number of columns, if the walk is over one or two dimensions that all inputs fit.
fn kinds(sizes: &[i64], steps: &[SmallVec<[i64; RANK]>]) -> Option<(SmallVec<[Kind; 8]>, usize)> {
    let columns = *sizes.last().unwrap_or(&1);
    let kind = |steps: &SmallVec<[i64; RANK]>| match (sizes.len(), steps.as_slice()) {
        (0, _) => Some(Kind::Whole),
        (1, [1]) => Some(Kind::Whole),
        (1, [0]) => Some(Kind::Single),
        (2, [row, 1]) if *row == columns => Some(Kind::Whole),
        (2, [0, 0]) => Some(Kind::Single),
        (2, [0, 1]) => Some(Kind::Row),
        (2, [1, 0]) => Some(Kind::Column),
        _ => None,
    };
    Some((steps.iter().map(kind).collect::<Option<_>>()?, columns as usize))
}

/// The function `element` and those it calls, one for each step.
fn code(program: &Program, types: &[DType]) -> Result<String> {
    let wide = |dtype: DType| format!("Wide<{}>::type", c_type(dtype));
    let dtype = |arg: &Arg| match *arg {
        Arg::Input(i) => types[i],
        Arg::Value(i) => program.steps[i].out,
    };
    let mut text = String::new();
    let mut body = String::new();
    for (i, step) in program.steps.iter().enumerate() {
        let expression = match (program.text(i)?, step.out) {
            // A conversion.
            ("x0", to) => gpu_text(dtype(step.args.first().unwrap_or(&Arg::Input(0))), to).text,
            (text, _) => text,
        };
        let expression = match step.parameter {
            Some(p) => expression.replace("p0", &format!("__int_as_float(0x{:x})", p.to_bits())),
            None => expression.to_owned(),
        };
        let arguments: Vec<String> =
            step.args.iter().enumerate().map(|(k, arg)| format!("{} x{k}", wide(dtype(arg)))).collect();
        // The condition of a choice is no number; what is chosen is.
        let of = dtype(step.args.last().unwrap_or(&Arg::Input(0)));
        text += &format!(
            "static __device__ __forceinline__ {} f{i}({}) {{ typedef {} W; return widen(Narrow<{}>::from({expression})); }}\n",
            wide(step.out),
            arguments.join(", "),
            wide(of),
            c_type(step.out)
        );
        let values: Vec<String> = step
            .args
            .iter()
            .map(|arg| match *arg {
                Arg::Input(i) => format!("x{i}"),
                Arg::Value(i) => format!("v{i}"),
            })
            .collect();
        body += &format!("    const {} v{i} = f{i}({});\n", wide(step.out), values.join(", "));
    }
    let inputs: Vec<String> = types.iter().enumerate().map(|(i, dtype)| format!("{} x{i}", wide(*dtype))).collect();
    let last = program.steps.len() - 1;
    let out = wide(program.steps[last].out);
    Ok(format!(
        "{text}static __device__ __forceinline__ {out} element({}) {{\n{body}    return v{last};\n}}\n",
        inputs.join(", ")
    ))
}

/// A short name for a piece of code, the same for the same code.
fn intern(code: &str) -> &'static str {
    static NAMES: OnceLock<Mutex<HashMap<String, &'static str>>> = OnceLock::new();
    let mut names = NAMES.get_or_init(Default::default).lock();
    if let Some(name) = names.get(code) {
        return name;
    }
    // The same in every process, so that kernels are found in the cache; no two pieces of code have one name.
    let mut hasher = DefaultHasher::new();
    code.hash(&mut hasher);
    let mut name = format!("{:016x}", hasher.finish());
    while names.values().any(|taken| *taken == name) {
        name.push('x');
    }
    // One for each program that this process ever ran, kept for good.
    let name: &'static str = Box::leak(name.into_boxed_str());
    names.insert(code.to_owned(), name);
    name
}

/// Output 0 in the memory of an input that dies here if possible, and which one that is.
fn output_of(ctx: &mut KernelCtx<'_>, dtype: DType, shape: &Shape) -> Result<(Tensor, Option<usize>)> {
    let mut output = None;
    for i in 0..ctx.n_inputs() {
        if ctx.input(i)?.dtype() == dtype && ctx.input(i)?.shape() == shape {
            let (tensor, reused) = ctx.reuse_or_allocate(i, dtype, shape.clone())?;
            output = Some((tensor, reused.then_some(i)));
            if reused {
                break;
            }
        }
    }
    match output {
        Some(found) => Ok(found),
        None => Ok((ctx.allocate(dtype, shape.clone())?, None)),
    }
}

fn shape_of(ctx: &KernelCtx<'_>, program: &Program) -> Result<Shape> {
    let shapes: Vec<&Shape> = (0..ctx.n_inputs()).map(|i| ctx.input(i).map(Tensor::shape)).collect::<Result<_>>()?;
    if shapes.len() != program.n_inputs {
        return Err(Error::internal(format!("{} inputs for {}", shapes.len(), program.n_inputs)));
    }
    program.shape(&shapes)
}

/// `_KoloFusedMap`.
pub(crate) struct FusedMap(Element);

impl FusedMap {
    pub(crate) fn make(init: &KernelInit<'_>) -> Result<Box<dyn Kernel>> {
        Ok(Box::new(FusedMap(Element::make(init)?)))
    }
}

impl Kernel for FusedMap {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        let shape = shape_of(ctx, &self.0.program)?;
        let (mut output, reused) = output_of(ctx, self.0.out, &shape)?;
        let inputs: SmallVec<[Option<&Tensor>; 8]> = (0..ctx.n_inputs())
            .map(|i| if reused == Some(i) { Ok(None) } else { ctx.input(i).map(Some) })
            .collect::<Result<_>>()?;
        self.0.launch(gpu(ctx)?, &inputs, &mut output)?;
        drop(inputs);
        ctx.set_output(0, output);
        Ok(())
    }
}

/// The sums of an elementwise op's values down their columns; the inputs have one shape.
pub(crate) fn mapped_sums(
    ctx: &KernelCtx<'_>,
    op: &'static str,
    inputs: &[&Tensor],
    columns: usize,
    sums: &mut Tensor,
) -> Result<()> {
    let dtype = sums.dtype();
    let args: Vec<String> = (0..inputs.len()).map(|i| format!("i{i}")).collect();
    let element =
        Element::new(&format!("{op},{},-,{}", dtype.name(), args.join(" ")), vec![dtype; inputs.len()], dtype)?;
    let n = inputs[0].n_elements();
    let mut values = ctx.allocate(dtype, inputs[0].shape().clone())?;
    let mapped = Mapped { name: element.name, code: &element.code, out: &mut values };
    reduce_columns(ctx, &SUM, inputs, Some(mapped), (n / columns, columns), sums)
}

/// `_KoloFusedMapAndSum`.
pub(crate) struct FusedMapAndSum(Element);

impl FusedMapAndSum {
    pub(crate) fn make(init: &KernelInit<'_>) -> Result<Box<dyn Kernel>> {
        Ok(Box::new(FusedMapAndSum(Element::make(init)?)))
    }
}

impl Kernel for FusedMapAndSum {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        let element = &self.0;
        let shape = shape_of(ctx, &element.program)?;
        let (Some(&columns), true) = (shape.last(), shape.rank() >= 2) else {
            return Err(Error::invalid_argument(format!("Input tensor must be at least 2D: {shape}")));
        };
        let n = shape.n_elements();
        let mut sums = ctx.allocate(element.out, Shape::new(&[columns])?)?;
        let mut output = ctx.allocate(element.out, shape.clone())?;
        let inputs: SmallVec<[&Tensor; 8]> = (0..ctx.n_inputs()).map(|i| ctx.input(i)).collect::<Result<_>>()?;
        let is_plain = inputs.iter().all(|tensor| *tensor.shape() == shape || tensor.n_elements() == 1);
        if n == 0 {
            ctx.device.fill(&mut sums, 0)?;
        } else if is_plain {
            let mapped = Mapped { name: element.name, code: &element.code, out: &mut output };
            reduce_columns(ctx, &SUM, &inputs, Some(mapped), (n / columns, columns), &mut sums)?;
        } else {
            let some: SmallVec<[Option<&Tensor>; 8]> = inputs.iter().map(|tensor| Some(*tensor)).collect();
            element.launch(gpu(ctx)?, &some, &mut output)?;
            reduce_columns(ctx, &SUM, &[&output], None, (n / columns, columns), &mut sums)?;
        }
        drop(inputs);
        ctx.set_output(0, output);
        ctx.set_output(1, sums);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_are_known_by_their_steps() {
        let step = |steps: &[i64]| SmallVec::<[i64; RANK]>::from_slice(steps);
        let found = kinds(&[5, 3], &[step(&[3, 1]), step(&[0, 0]), step(&[0, 1]), step(&[1, 0])]);
        let (found, columns) = found.unwrap();
        assert_eq!((found.as_slice(), columns), (&[Kind::Whole, Kind::Single, Kind::Row, Kind::Column][..], 3));
        assert!(kinds(&[5, 3], &[step(&[1, 5])]).is_none());
        assert!(kinds(&[2, 5, 3], &[step(&[15, 3, 1])]).is_none());
    }

    #[test]
    fn sources_compile() {
        let key = |op, variant| ProgramKey { family: "fused", op, dtypes: [None; 3], variant };
        let mut all = Vec::new();
        let f = DType::F32;
        for (text, types, out) in [
            ("Mul,float,-,i0 i1;LeakyRelu,float,3e4ccccd,v0;Cast,half,-,v1", vec![f, f], DType::F16),
            ("Less,bool,-,i0 i1;SelectV2,float,-,v0 i0 i1;AddN,float,-,v1 i0 i1", vec![f, f], f),
            ("Cast,float,-,i0;BiasAdd,float,-,v0 i1;Relu,float,-,v1", vec![DType::BF16, f], f),
            ("Cast,bool,-,i0;LogicalNot,bool,-,v0;Cast,double,-,v1", vec![DType::I64], DType::F64),
            (
                "Tanh,bfloat16,-,i0;Maximum,bfloat16,-,v0 i1;KoloGeluGrad,bfloat16,-,v1 i0",
                vec![DType::BF16; 2],
                DType::BF16,
            ),
            ("Sigmoid,float,-,i0;SigmoidGrad,float,-,v0 i1;Floor,float,-,v1;Pow,float,-,v2 v0", vec![f, f], f),
        ] {
            let element = Element::new(text, types.clone(), out).unwrap();
            let whole = vec![Kind::Whole; types.len()];
            let mut mixed = whole.clone();
            mixed[types.len() - 1] = Kind::Row;
            mixed[0] = if types.len() > 1 { Kind::Column } else { Kind::Single };
            all.push((key(element.name, 0), element.flat(&whole, 2, false)));
            all.push((key(element.name, 1), element.flat(&mixed, 1, true)));
            all.push((key(element.name, 2), element.strided(3)));
        }
        crate::cuda::tests::compiles(all);
    }
}
