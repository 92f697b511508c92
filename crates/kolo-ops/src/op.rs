//! The op table.

use std::collections::HashMap;
use std::sync::OnceLock;

use kolo_core::{DType, DeviceName, Element, Error, Result};
use kolo_graph::{Attrs, Effects, Elementwise, Graph, HalfSafety, HostRule, Node, OpDef, OpRegistry, SplitRule};

use crate::host::host_kernel;
use crate::kernel::{AsyncKernel, Kernel, KernelCtx, KernelInit};

/// An op: what it is, and how it is computed on each kind of device.
pub struct Op {
    /// Signature, shapes, gradient.
    pub def: OpDef,
    /// Kernels for CPUs, one entry per group of dtypes.
    pub kernels: &'static [KernelDef],
    /// What it does on a GPU.
    pub gpu: Gpu,
    /// What a call costs, roughly.
    pub cost: Cost,
}

impl Op {
    /// The same with these effects, for families that share a constructor.
    pub(crate) const fn effects(self, effects: Effects) -> Op {
        Op { def: OpDef { effects, ..self.def }, ..self }
    }

    /// The same, an elementwise op with this expression, which is its GPU kernel too unless the op has stated others.
    pub(crate) const fn elementwise(self, elementwise: Elementwise) -> Op {
        let gpu = match self.gpu {
            Gpu::Unstated => Gpu::Kernels(crate::cuda::elementwise::kernels(elementwise.elements)),
            stated => stated,
        };
        Op { def: OpDef { elementwise: Some(elementwise), ..self.def }, gpu, ..self }
    }

    /// The same with these GPU kernels.
    pub(crate) const fn gpu(self, kernels: &'static [KernelDef]) -> Op {
        Op { gpu: Gpu::Kernels(kernels), ..self }
    }

    /// The same, that fares so in halves.
    pub(crate) const fn half(self, half: HalfSafety) -> Op {
        Op { def: OpDef { half, ..self.def }, ..self }
    }

    /// The same, whose output is split so.
    pub(crate) const fn split(self, split: SplitRule) -> Op {
        Op { def: OpDef { split, ..self.def }, ..self }
    }

    /// The same, with these arguments in host memory.
    pub(crate) const fn host_args(self, host_args: &'static [&'static str]) -> Op {
        Op { def: OpDef { host_args, ..self.def }, ..self }
    }

    /// The same, to be run where `host` says.
    pub(crate) const fn host(self, host: HostRule) -> Op {
        let gpu = if matches!(host, HostRule::Always) { Gpu::Host } else { self.gpu };
        Op { def: OpDef { host, ..self.def }, gpu, ..self }
    }
}

/// What an op does on a GPU. Every op states it, so that an op without a kernel there is a decision that somebody made, and that
/// `docs/ops.md` lists, rather than a copy to the host that nobody notices.
#[derive(Clone, Copy)]
pub enum Gpu {
    /// It has these kernels. Of some ops, forms with other dtypes run on the host; see [`HostRule`].
    Kernels(&'static [KernelDef]),
    /// It runs on the host, with host memory, wherever it is placed: [`HostRule::Always`].
    Host,
    /// It has no kernel and needs none, because of this.
    Never(&'static str),
    /// It could have a kernel but nobody has written one: it is placed on a CPU, and its inputs and outputs are copied.
    Missing,
    /// Nothing is stated. Constructors of families begin so; the table's own test refuses an op that ends so.
    Unstated,
}

impl Gpu {
    /// For ops over strings.
    pub(crate) const STRINGS: Gpu = Gpu::Never("strings are in host memory");
    /// For ops that read or write files and their records.
    pub(crate) const FILES: Gpu = Gpu::Never("files are read and written through host memory");
    /// For ops on queues, tables, barriers and the like.
    pub(crate) const OBJECTS: Gpu = Gpu::Never("the object it works on is in host memory");
    /// For ops that are in graphs but have no kernel anywhere.
    pub(crate) const NOT_RUN: Gpu = Gpu::Never("no device runs it");

    /// The kernels.
    pub const fn kernels(&self) -> &'static [KernelDef] {
        match self {
            Gpu::Kernels(kernels) => kernels,
            Gpu::Host | Gpu::Never(_) | Gpu::Missing | Gpu::Unstated => &[],
        }
    }
}

/// What a call costs, so that the executor can decide whether handing it to another thread pays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cost {
    /// Always less than a hand-off: bookkeeping, shapes, handles.
    Inline,
    /// Grows with the bytes of its inputs.
    Elements,
    /// Worth a thread of its own unless the inputs are tiny: matrix products, convolutions.
    Heavy,
}

/// A kernel: for which devices and dtypes, and how to make it.
pub struct KernelDef {
    /// The device type, such as `CPU`.
    pub device: &'static str,
    /// The type attribute that decides, such as `T`; empty if none does.
    pub attr: &'static str,
    /// The dtypes of that attribute it is for.
    pub dtypes: DTypeSet,
    /// For which nodes it is not, whatever their dtype.
    pub except: Option<Except>,
    /// How to get one.
    pub make: KernelMaker,
}

/// Nodes that a kernel refuses by their attributes, so that they are placed on a device that has another kernel.
#[derive(Clone, Copy)]
pub struct Except {
    /// For messages: what such a node does, such as `pools across channels`.
    pub what: &'static str,
    /// Whether a node with these attributes is one.
    pub is_for: fn(&Attrs) -> bool,
}

/// How to get a kernel for a node.
#[derive(Clone, Copy)]
pub enum KernelMaker {
    /// A plain function; nothing is kept between calls.
    Function(fn(&mut KernelCtx<'_>) -> Result<()>),
    /// Made once per node of a session, with attributes read and state to keep.
    Object(fn(&KernelInit<'_>) -> Result<Box<dyn Kernel>>),
    /// As `Object`, for kernels that may wait for something: they give up the thread meanwhile.
    Async(fn(&KernelInit<'_>) -> Result<Box<dyn AsyncKernel>>),
    /// The executor does it itself: control flow.
    Executor,
}

impl KernelDef {
    /// True if it fits a node with these attributes on a device of this kind.
    pub fn fits(&self, kind: &str, attrs: &Attrs) -> bool {
        self.device == kind
            && (self.attr.is_empty()
                || match attrs.find(self.attr) {
                    Some(kolo_graph::AttrValue::Type(dtype)) => self.dtypes.contains(*dtype),
                    _ => false,
                })
            && self.except.is_none_or(|except| !(except.is_for)(attrs))
    }

    /// The same for nodes other than these.
    pub(crate) const fn except(self, what: &'static str, is_for: fn(&Attrs) -> bool) -> KernelDef {
        KernelDef { except: Some(Except { what, is_for }), ..self }
    }

    /// The dtypes of the attribute that decides, for which it is chosen: tables are shared by many ops, and not every op's
    /// signature allows all of them.
    pub fn dtypes(&self, op: &Op) -> Vec<DType> {
        let signature = registry().find(op.def.name).ok().map(|(_, signature)| signature);
        let attr = signature.and_then(|signature| signature.attr(self.attr));
        let allows = |dtype: DType| attr.is_none_or(|attr| attr.types.is_empty() || attr.types.contains(&dtype));
        DType::ALL.iter().copied().filter(|dtype| self.dtypes.contains(*dtype) && allows(*dtype)).collect()
    }

    /// For messages about a kernel of `op`: `CPU`, or `CPU with T in {float, double}`.
    pub fn describe(&self, op: &Op) -> String {
        let mut text = self.device.to_owned();
        if !self.attr.is_empty() {
            let dtypes: Vec<&str> = self.dtypes(op).iter().map(|dtype| dtype.name()).collect();
            text += &format!(" with {} in {{{}}}", self.attr, dtypes.join(", "));
        }
        if let Some(except) = &self.except {
            text += &format!(", unless it {}", except.what);
        }
        text
    }
}

/// A CPU kernel for one dtype of attribute `T`.
pub const fn cpu(dtype: DType, compute: fn(&mut KernelCtx<'_>) -> Result<()>) -> KernelDef {
    cpu_on("T", &[dtype], KernelMaker::Function(compute))
}

/// A CPU kernel for every dtype.
pub const fn cpu_any(compute: fn(&mut KernelCtx<'_>) -> Result<()>) -> KernelDef {
    KernelDef { device: "CPU", attr: "", dtypes: DTypeSet::ALL, except: None, make: KernelMaker::Function(compute) }
}

/// A CPU kernel for these dtypes of the type attribute `attr`.
pub const fn cpu_on(attr: &'static str, dtypes: &[DType], make: KernelMaker) -> KernelDef {
    KernelDef { device: "CPU", attr, dtypes: DTypeSet::of(dtypes), except: None, make }
}

/// A CPU kernel for every dtype, made as `make` says.
pub const fn cpu_made(make: KernelMaker) -> KernelDef {
    KernelDef { device: "CPU", attr: "", dtypes: DTypeSet::ALL, except: None, make }
}

/// A GPU kernel for these dtypes of the type attribute `attr`, or for every dtype if `attr` is empty.
pub const fn gpu_kernel(
    attr: &'static str,
    dtypes: &[DType],
    compute: fn(&mut KernelCtx<'_>) -> Result<()>,
) -> KernelDef {
    gpu_made(attr, dtypes, KernelMaker::Function(compute))
}

/// As [`gpu_kernel`], made as `make` says.
pub const fn gpu_made(attr: &'static str, dtypes: &[DType], make: KernelMaker) -> KernelDef {
    let dtypes = if attr.is_empty() { DTypeSet::ALL } else { DTypeSet::of(dtypes) };
    KernelDef { device: "GPU", attr, dtypes, except: None, make }
}

/// A table of CPU kernels, by the dtypes of attribute `T`, or of another: `cpu_kernels!("dtype", forward: f32, f64)`. It is a list
/// of groups, separated by `|`:
///
/// - `forward: f32, f64; f16, bf16`: a generic function, for the types before the semicolon. Those after it are computed with
///   the kernel of a wider type, tensor by tensor (see [`crate::widened`]): `Narrow::Wide`, or the one in `i8 as i64`.
/// - `elementwise add: f32, f64; f16, bf16`: the same for an elementwise function, which widens narrow types by itself, block by
///   block.
/// - `forward; f16, bf16`: a function of `float` that is not generic, and the types that are computed with it.
/// - `own cpu(DType::Bool, forward_bool)`: kernels as they are. This group is the last.
macro_rules! cpu_kernels {
    // What is in brackets is done already.
    (@ $attr:literal [$($done:expr,)*]) => { &[$($done),*] };
    (@ $attr:literal [$($done:expr,)*] own $($own:expr),+) => { &[$($done,)* $($own),+] };
    (
        @ $attr:literal [$($done:expr,)*]
        elementwise $function:ident: $($ty:ty),* $(; $($narrow:ty),*)? $(| $($groups:tt)+)?
    ) => {
        $crate::op::cpu_kernels!(
            @ $attr
            [
                $($done,)*
                $($crate::op::cpu_for::<$ty>($attr, $function::<$ty>),)*
                $($($crate::op::cpu_for::<$narrow>(
                    $attr,
                    $function::<<$narrow as $crate::widened::Narrow>::Wide>,
                ),)*)?
            ]
            $($($groups)+)?
        )
    };
    (
        @ $attr:literal [$($done:expr,)*]
        $function:ident: $($ty:ty),* $(; $($narrow:ty $(as $wide:ty)?),*)? $(| $($groups:tt)+)?
    ) => {
        $crate::op::cpu_kernels!(
            @ $attr
            [
                $($done,)*
                $($crate::op::cpu_for::<$ty>($attr, $function::<$ty>),)*
                $($($crate::op::cpu_for::<$narrow>(
                    $attr,
                    $crate::widened::widened!($narrow $(as $wide)?, $function),
                ),)*)?
            ]
            $($($groups)+)?
        )
    };
    (@ $attr:literal [$($done:expr,)*] $function:ident; $($narrow:ty),* $(| $($groups:tt)+)?) => {
        $crate::op::cpu_kernels!(
            @ $attr
            [
                $($done,)*
                $crate::op::cpu_for::<f32>($attr, $function),
                $($crate::op::cpu_for::<$narrow>($attr, |ctx| {
                    $crate::widened::compute_in::<$narrow, f32>(ctx, $function)
                }),)*
            ]
            $($($groups)+)?
        )
    };
    ($attr:literal, $($groups:tt)+) => { $crate::op::cpu_kernels!(@ $attr [] $($groups)+) };
    ($first:ident $($groups:tt)*) => { $crate::op::cpu_kernels!(@ "T" [] $first $($groups)*) };
}
pub(crate) use cpu_kernels;

/// A CPU kernel for elements of one type of the type attribute `attr`.
pub(crate) const fn cpu_for<T: Element>(
    attr: &'static str,
    compute: fn(&mut KernelCtx<'_>) -> Result<()>,
) -> KernelDef {
    cpu_on(attr, &[T::DTYPE], KernelMaker::Function(compute))
}

/// A set of dtypes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DTypeSet(u64);

impl DTypeSet {
    /// All of them.
    pub const ALL: DTypeSet = DTypeSet(u64::MAX);

    /// These.
    pub const fn of(dtypes: &[DType]) -> DTypeSet {
        let (mut bits, mut i) = (0u64, 0);
        while i < dtypes.len() {
            bits |= 1 << (dtypes[i] as i32);
            i += 1;
        }
        DTypeSet(bits)
    }

    /// Whether it contains `dtype`.
    pub const fn contains(self, dtype: DType) -> bool {
        self.0 & (1 << (dtype as i32)) != 0
    }
}

/// All ops, by area. A list that one can read and search; each area's is in its `mod.rs`.
pub static TABLE: &[&[&Op]] = &[
    crate::array::OPS,
    crate::comm::OPS,
    crate::flow::OPS,
    crate::fused::OPS,
    crate::io::OPS,
    crate::math::OPS,
    crate::nn::OPS,
    crate::optim::OPS,
    crate::queue::OPS,
    crate::random::OPS,
    crate::sparse::OPS,
    crate::state::OPS,
    crate::string::OPS,
    crate::summary::OPS,
    crate::table::OPS,
    crate::undone::OPS,
];

/// The ops as a graph knows them.
pub fn registry() -> &'static OpRegistry {
    static REGISTRY: OnceLock<OpRegistry> = OnceLock::new();
    REGISTRY.get_or_init(|| {
        OpRegistry::new(TABLE.iter().copied().flatten().map(|op| op.def))
            .expect("the table's own test reads every signature")
    })
}

/// An empty graph over all ops.
pub fn graph() -> Graph {
    Graph::new(registry())
}

/// The op of this name.
pub fn find_op(name: &str) -> Result<&'static Op> {
    static BY_NAME: OnceLock<HashMap<&'static str, &'static Op>> = OnceLock::new();
    BY_NAME
        .get_or_init(|| TABLE.iter().copied().flatten().map(|&op| (op.def.name, op)).collect())
        .get(name)
        .copied()
        .ok_or_else(|| Error::not_found(format!("Op type not registered '{name}'")))
}

/// All kernels of an op, those for GPUs last.
pub fn kernels_of(op: &'static Op) -> impl Iterator<Item = &'static KernelDef> {
    op.kernels.iter().chain(op.gpu.kernels())
}

/// The kernel for `node` on `device`. On a GPU it may be a CPU kernel: the node then runs on the host, with host memory. The
/// error lists the devices and dtypes that do have a kernel.
pub fn find_kernel(node: &Node, device: &DeviceName) -> Result<&'static KernelDef> {
    let op = find_op(node.op())?;
    let host_kernel = if &*device.kind == "GPU" { host_kernel(op, node) } else { None };
    let own = || kernels_of(op).find(|kernel| kernel.fits(&device.kind, &node.attrs));
    host_kernel.or_else(own).ok_or_else(|| {
        let have: Vec<String> = kernels_of(op).map(|kernel| kernel.describe(op)).collect();
        let have = if have.is_empty() { "none".to_owned() } else { have.join("; ") };
        let dtype = node
            .attrs
            .find("T")
            .or_else(|| node.attrs.find("dtype"))
            .map(|dtype| format!(" with {dtype}"))
            .unwrap_or_default();
        Error::invalid_argument(format!(
            "No OpKernel was registered to support Op '{}'{dtype} on {}; registered: {have}",
            node.op(),
            device.kind
        ))
    })
}

#[cfg(test)]
mod tests {
    use kolo_graph::{ArgDef, ArgType, Gradient, Signature};

    use super::*;

    #[test]
    fn nodes_that_a_gpu_would_refuse_are_placed_elsewhere() {
        let g = graph();
        let (x, images) = (g.placeholder::<f32>("x", [2usize]), g.placeholder::<f32>("images", [1usize, 4, 4, 6]));
        let cast = |to: DType, truncate: bool| {
            g.op("Cast").input(x).attr("DstT", to).attr("Truncate", truncate).build().node().unwrap()
        };
        let pool = |op: &str, size: [i64; 4]| {
            let pool =
                g.op(op).input(images).attr("ksize", &size[..]).attr("strides", &size[..]).attr("padding", "VALID");
            pool.build().node().unwrap()
        };
        let gpu = DeviceName::local("GPU", 0);
        let device = |node: &Node| find_kernel(node, &gpu).ok().map(|kernel| kernel.device);
        assert_eq!(device(&cast(DType::BF16, false)), Some("GPU"));
        assert_eq!(device(&cast(DType::BF16, true)), None);
        assert_eq!(device(&cast(DType::Str, false)), None);
        assert_eq!(device(&pool("MaxPool", [1, 2, 2, 1])), Some("GPU"));
        assert_eq!(device(&pool("MaxPool", [1, 1, 1, 3])), None);
        let error = find_kernel(&pool("MaxPool", [1, 1, 1, 3]), &gpu).err().unwrap();
        assert!(error.message().contains("unless it pools across channels"), "{error}");
    }

    #[test]
    fn kernels_are_listed_for_dtypes_that_the_signature_allows() {
        let abs = find_op("Abs").unwrap();
        let text: Vec<String> = kernels_of(abs).map(|kernel| kernel.describe(abs)).collect();
        assert!(text.iter().any(|text| text.starts_with("GPU") && text.contains("float")), "{text:?}");
        // The table of elementwise kernels has unsigned integers, TensorFlow's Abs has not.
        assert!(!text.iter().any(|text| text.contains("uint")), "{text:?}");
    }

    #[test]
    fn every_op_states_what_it_does_on_a_gpu() {
        for op in TABLE.iter().copied().flatten() {
            let name = op.def.name;
            assert!(op.kernels.iter().all(|kernel| kernel.device == "CPU"), "{name}: `kernels` are for CPUs");
            assert_eq!(
                matches!(op.gpu, Gpu::Host),
                op.def.host == HostRule::Always,
                "{name}: `gpu` and `host` disagree"
            );
            match op.gpu {
                Gpu::Unstated => panic!("{name} does not state what it does on a GPU: see `Gpu`"),
                Gpu::Kernels(kernels) => {
                    assert!(!kernels.is_empty() && kernels.iter().all(|kernel| kernel.device == "GPU"), "{name}");
                }
                Gpu::Host | Gpu::Never(_) | Gpu::Missing => {}
            }
        }
    }

    #[test]
    fn every_op_reads_states_its_gradient_and_has_a_kernel_for_its_own_dtypes() {
        let mut names = std::collections::HashSet::new();
        for op in TABLE.iter().copied().flatten() {
            let name = op.def.name;
            assert!(names.insert(name), "{name} is in the table twice");
            let signature = Signature::parse(op.def.signature).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(!matches!(op.def.gradient, Gradient::Unstated), "{name} does not state its gradient");
            for kernel in kernels_of(op).filter(|kernel| !kernel.attr.is_empty()) {
                let attr =
                    signature.attr(kernel.attr).unwrap_or_else(|| panic!("{name} has no attribute {}", kernel.attr));
                let possible = DType::ALL.iter().any(|dtype| {
                    kernel.dtypes.contains(*dtype) && (attr.types.is_empty() || attr.types.contains(dtype))
                });
                assert!(possible, "{name}: a kernel for dtypes that the signature does not allow");
            }
        }
    }

    #[test]
    fn facts_agree_with_what_is_known_otherwise() {
        for op in TABLE.iter().copied().flatten() {
            let (name, def) = (op.def.name, &op.def);
            let signature = Signature::parse(def.signature).unwrap();
            let refers = |arg: &ArgDef| arg.is_ref || arg_dtype(&arg.ty) == Some(DType::Resource);
            // What is stateful, or takes a reference or a handle, says what it does to state.
            let is_silent = def.effects == Effects::None;
            let by_name = crate::array::in_place::STATEFUL_BY_NAME.contains(&name);
            assert!(
                !(def.stateful && is_silent) || by_name,
                "{name} is stateful and does not say what its effects are"
            );
            assert!(
                !(signature.inputs.iter().any(refers) && is_silent),
                "{name} does not say what it does to its state"
            );
            let takes_some = signature.inputs.iter().any(refers);
            if matches!(def.effects, Effects::Reads | Effects::Inspects | Effects::Writes | Effects::Forwards) {
                assert!(takes_some, "{name}: {:?}, but of what?", def.effects);
            }
            let is_source = signature.inputs.is_empty() && signature.outputs.iter().any(refers);
            assert_eq!(is_source, matches!(def.effects, Effects::Owns(_)), "{name}: {:?}", def.effects);
            for arg in def.host_args {
                let is_known = signature.inputs.iter().chain(&signature.outputs).any(|known| known.name == *arg);
                assert!(is_known, "{name} has no argument {arg}");
            }
            if def.host != HostRule::OnDevice {
                assert!(!op.kernels.is_empty(), "{name} has no kernel for the host");
            }
        }
    }

    #[test]
    fn ops_over_floats_say_whether_these_may_be_halves() {
        for op in crate::math::OPS.iter().chain(crate::nn::OPS) {
            let signature = Signature::parse(op.def.signature).unwrap();
            let takes_floats = signature.inputs.iter().any(|arg| {
                let attr = match &arg.ty {
                    ArgType::Attr(attr) => signature.attr(attr),
                    ArgType::Repeated { element, .. } => match &**element {
                        ArgType::Attr(attr) => signature.attr(attr),
                        _ => None,
                    },
                    ArgType::Fixed(_) | ArgType::List(_) => None,
                };
                attr.is_some_and(|attr| attr.types.is_empty() || attr.types.iter().any(|dtype| dtype.is_float()))
            });
            let is_stated = op.def.half != HalfSafety::Unstated;
            assert!(!takes_floats || is_stated, "{} takes floats and says nothing of halves", op.def.name);
        }
        for op in crate::optim::OPS {
            assert_eq!(op.def.half, HalfSafety::Never, "{} writes to variables", op.def.name);
        }
    }

    fn arg_dtype(ty: &ArgType) -> Option<DType> {
        match ty {
            ArgType::Fixed(dtype) => Some(*dtype),
            ArgType::Repeated { element, .. } => arg_dtype(element),
            ArgType::Attr(_) | ArgType::List(_) => None,
        }
    }
}
