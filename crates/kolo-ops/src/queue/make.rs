//! `FIFOQueue`, `RandomShuffleQueue`, `PaddingFIFOQueue`, `PriorityQueue`, in both handle kinds.

use std::sync::Arc;

use kolo_core::{DType, Error, PartialShape, Result};
use kolo_device::Charge;
use kolo_graph::{Attrs, Effects, Gradient, OpDef, OwnedState, ShapeFn, shape_fns};

use super::core::Queue;
use super::elements::Order;
use super::source::{Described, Source};
use super::spec::QueueSpec;
use crate::kernel::KernelInit;
use crate::op::{Gpu, KernelDef, Op, cpu_made};
use crate::{Cost, Kernel, KernelMaker};

macro_rules! queue_ops {
    ($($old:ident, $new:ident, $name:literal, $attrs:literal, $kernels:ident;)*) => {
        $(pub(crate) static $old: Op =
            make($name, concat!("() -> (handle:Ref(string)) ; ", $attrs, COMMON!()), pair, $kernels);
        pub(crate) static $new: Op =
            make(concat!($name, "V2"), concat!("() -> (handle:resource) ; ", $attrs, COMMON!()), shape_fns::scalars, $kernels);)*
    };
}

macro_rules! COMMON {
    () => {
        ", container:string=\"\", shared_name:string=\"\""
    };
}

queue_ops! {
    FIFO_QUEUE, FIFO_QUEUE_V2, "FIFOQueue",
        "component_types:list(type)>=1, shapes:list(shape)>=0=[], capacity:int=-1", FIFO;
    RANDOM_SHUFFLE_QUEUE, RANDOM_SHUFFLE_QUEUE_V2, "RandomShuffleQueue",
        "component_types:list(type)>=1, shapes:list(shape)>=0=[], capacity:int=-1, min_after_dequeue:int=0, seed:int=0, \
         seed2:int=0", SHUFFLE;
    PADDING_FIFO_QUEUE, PADDING_FIFO_QUEUE_V2, "PaddingFIFOQueue",
        "component_types:list(type)>=1, shapes:list(shape)>=0=[], capacity:int=-1", PADDING;
    PRIORITY_QUEUE, PRIORITY_QUEUE_V2, "PriorityQueue",
        "component_types:list(type)>=0=[], shapes:list(shape)>=0, capacity:int=-1", PRIORITY;
}

const fn make(name: &'static str, signature: &'static str, shape: ShapeFn, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape,
            gradient: Gradient::None("a handle has no inputs"),
            stateful: true,
            effects: Effects::Owns(OwnedState::Other),
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::OBJECTS,
        cost: Cost::Inline,
    }
}

/// The shape of an old handle: container and name.
pub(super) fn pair(_: &kolo_graph::InferCtx<'_>) -> Result<Vec<PartialShape>> {
    Ok(vec![PartialShape::from([2usize])])
}

const FIFO: &[KernelDef] = &[cpu_made(KernelMaker::Object(|init| kernel(init, Order::Fifo)))];
const PADDING: &[KernelDef] = &[cpu_made(KernelMaker::Object(|init| kernel(init, Order::PaddingFifo)))];
const PRIORITY: &[KernelDef] = &[cpu_made(KernelMaker::Object(|init| kernel(init, Order::Priority)))];
const SHUFFLE: &[KernelDef] = &[cpu_made(KernelMaker::Object(|init| kernel(init, shuffle(init.attrs())?)))];

fn shuffle(attrs: &Attrs) -> Result<Order> {
    let (least, capacity) = (attrs.int("min_after_dequeue")?, attrs.int("capacity")?);
    let min_after_dequeue = usize::try_from(least)
        .map_err(|_| Error::invalid_argument(format!("min_after_dequeue {least} must be >= 0")))?;
    if capacity >= 0 && least >= capacity {
        return Err(Error::invalid_argument(format!("min_after_dequeue {least} must be < capacity {capacity}")));
    }
    Ok(Order::Shuffle { min_after_dequeue, seeds: (attrs.int("seed")?, attrs.int("seed2")?) })
}

fn kernel(init: &KernelInit<'_>, order: Order) -> Result<Box<dyn Kernel>> {
    let attrs = init.attrs();
    let mut dtypes = attrs.dtypes("component_types")?;
    let mut shapes: Vec<PartialShape> = attrs.shapes("shapes")?.into_iter().cloned().collect();
    if !shapes.is_empty() && shapes.len() != dtypes.len() {
        return Err(Error::invalid_argument(format!(
            "Different number of component types and shapes: {} and {}",
            dtypes.len(),
            shapes.len()
        )));
    }
    match order {
        // The key comes first, though the attributes do not list it.
        Order::Priority => {
            shapes.resize(dtypes.len(), PartialShape::unknown());
            dtypes.insert(0, DType::I64);
            shapes.insert(0, PartialShape::scalar());
        }
        Order::PaddingFifo if shapes.is_empty() => {
            return Err(Error::invalid_argument("All PaddingFIFOQueue components must have a declared shape"));
        }
        Order::Fifo | Order::PaddingFifo | Order::Shuffle { .. } => {}
    }
    let capacity = usize::try_from(attrs.int("capacity")?).ok();
    Source::<Queue>::make(init, QueueSpec { order, capacity, dtypes, shapes })
}

impl Described for Queue {
    type Spec = QueueSpec;

    fn make(name: &Arc<str>, spec: &QueueSpec, memory: Charge) -> Result<Arc<Queue>> {
        Queue::new(name.clone(), spec.clone(), memory)
    }

    fn agree(&self, name: &str, spec: &QueueSpec) -> Result<()> {
        let disagree = |what: &str, has: String, asked: String| {
            Error::invalid_argument(format!("Shared queue '{name}' has {what} {has} but requested {what} was {asked}."))
        };
        let mine = self.spec();
        if let (
            Order::Shuffle { min_after_dequeue: has, seeds: has_seeds },
            Order::Shuffle { min_after_dequeue: asked, seeds },
        ) = (&mine.order, &spec.order)
        {
            if has != asked {
                return Err(disagree("min_after_dequeue", has.to_string(), asked.to_string()));
            }
            // Whoever asks for no seeds takes those that the queue has.
            if *seeds != (0, 0) && has_seeds != seeds {
                return Err(disagree("random seeds", format!("{has_seeds:?}"), format!("{seeds:?}")));
            }
        } else if mine.order != spec.order {
            return Err(disagree("kind", mine.order.queue_name().to_owned(), spec.order.queue_name().to_owned()));
        }
        if mine.capacity != spec.capacity {
            let text = |capacity: Option<usize>| capacity.map_or("-1".to_owned(), |n| n.to_string());
            return Err(disagree("capacity", text(mine.capacity), text(spec.capacity)));
        }
        if mine.dtypes != spec.dtypes {
            let text = |dtypes: &[DType]| dtypes.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(", ");
            return Err(disagree("component types", text(&mine.dtypes), text(&spec.dtypes)));
        }
        if mine.shapes != spec.shapes {
            return Err(disagree("component shapes", format!("{:?}", mine.shapes), format!("{:?}", spec.shapes)));
        }
        Ok(())
    }
}
