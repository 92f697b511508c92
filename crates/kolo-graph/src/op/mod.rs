//! What an op is, apart from how it is computed: signature, attributes, shapes, gradient, facts.

mod attr;
pub(crate) mod def;
mod facts;
pub(crate) mod infer;
pub(crate) mod registry;
pub mod shape_fns;
pub(crate) mod signature;
pub(crate) mod unknown;

pub use attr::{AttrValue, Attrs};
pub use def::{Flow, Grad, Gradient, GradientFn, HandleRule, IndexedSlices, OpDef, ShapeFn};
pub use facts::{
    BatchNormHalf, Combine, Effects, Elements, Elementwise, HalfSafety, HostRule, Literal, OwnedState, ShapesFit,
    SplitRule, TransferEnd, Update, UpdateRule, Work,
};
pub use infer::InferCtx;
pub use registry::OpRegistry;
pub use signature::{ArgDef, ArgType, AttrDef, AttrKind, Signature};
pub use unknown::UnknownOp;
