//! TensorFlow's collectives: `CollectiveReduce`, `CollectiveGather`, `CollectiveBcastSend` and `CollectiveBcastRecv`, and their second
//! versions, whose group is an input. The members of a group are devices of this process.

use std::time::Duration;

use kolo_core::{DType, DeviceName, Error, PartialShape, Result, Shape, Tensor};
use kolo_device::cpu::reduce::ReduceOp;
use kolo_graph::{Attrs, Effects, Gradient, InferCtx, OpDef, ShapeFn, shape_fns};

use super::meeting::{Arrival, MeetingSpec, Together};
use crate::kernel::KernelInit;
use crate::op::{Gpu, KernelDef, Op, cpu_made};
use crate::{AsyncKernel, Cost, Done, KernelCtx, KernelMaker};

pub(crate) static COLLECTIVE_REDUCE: Op = collective(
    "CollectiveReduce",
    "(input:T) -> (data:T) ; T:type{bfloat16,float,half,double,int32,int64}, group_size:int, group_key:int, \
     instance_key:int, merge_op:string{Min|Max|Mul|Add}, final_op:string{Id|Div}, subdiv_offsets:list(int), \
     wait_for:list(int)=[], communication_hint:string=\"auto\", timeout_seconds:float=0.0",
    shape_fns::same_as_input_0,
    &[made(|init| Member::make(init, Role::Gives, reduction))],
);

pub(crate) static COLLECTIVE_REDUCE_V2: Op = collective(
    "CollectiveReduceV2",
    "(input:T, group_size:int32, group_key:int32, instance_key:int32, ordering_token:Nordering_token*resource) -> \
     (data:T) ; T:type{bfloat16,float,half,double,int32,int64}, merge_op:string{Min|Max|Mul|Add}, \
     final_op:string{Id|Div}, communication_hint:string=\"auto\", timeout_seconds:float=0.0, \
     is_stateless:bool=false, Nordering_token:int>=0=0, max_subdivs_per_device:int=-1",
    shape_fns::same_as_input_0,
    &[made(|init| Member::make(init, Role::Gives, reduction))],
);

pub(crate) static COLLECTIVE_GATHER: Op = collective(
    "CollectiveGather",
    "(input:T) -> (data:T) ; T:type{float,half,double,int32,int64}, group_size:int, group_key:int, instance_key:int, \
     shape:shape, communication_hint:string=\"auto\", timeout_seconds:float=0.0",
    shape_fns::from_shape_attr,
    &[made(|init| Member::make(init, Role::Gives, |_| Ok(Some(Together::Gather))))],
);

pub(crate) static COLLECTIVE_GATHER_V2: Op = collective(
    "CollectiveGatherV2",
    "(input:T, group_size:int32, group_key:int32, instance_key:int32, ordering_token:Nordering_token*resource) -> \
     (data:T) ; T:type{float,half,double,int32,int64}, communication_hint:string=\"auto\", \
     timeout_seconds:float=0.0, is_stateless:bool=false, Nordering_token:int>=0=0",
    gathered,
    &[made(|init| Member::make(init, Role::Gives, |_| Ok(Some(Together::Gather))))],
);

pub(crate) static COLLECTIVE_BCAST_SEND: Op = collective(
    "CollectiveBcastSend",
    "(input:T) -> (data:T) ; T:type{bool,float,half,double,int32,int64}, group_size:int, group_key:int, \
     instance_key:int, shape:shape, communication_hint:string=\"auto\", timeout_seconds:float=0.0",
    shape_fns::from_shape_attr,
    &[made(|init| Member::make(init, Role::Gives, broadcast))],
);

pub(crate) static COLLECTIVE_BCAST_RECV: Op = collective(
    "CollectiveBcastRecv",
    "() -> (data:T) ; T:type{bool,float,half,double,int32,int64}, group_size:int, group_key:int, instance_key:int, \
     shape:shape, communication_hint:string=\"auto\", timeout_seconds:float=0.0",
    shape_fns::from_shape_attr,
    &[made(|init| Member::make(init, Role::Receives, broadcast))],
);

pub(crate) static COLLECTIVE_BCAST_SEND_V2: Op = collective(
    "CollectiveBcastSendV2",
    "(input:T, group_size:int32, group_key:int32, instance_key:int32) -> (data:T) ; \
     T:type{bool,float,half,double,int32,int64}, communication_hint:string=\"auto\", timeout_seconds:float=0.0",
    shape_fns::same_as_input_0,
    &[made(|init| Member::make(init, Role::Gives, |_| Ok(None)))],
);

pub(crate) static COLLECTIVE_BCAST_RECV_V2: Op = collective(
    "CollectiveBcastRecvV2",
    "(group_size:int32, group_key:int32, instance_key:int32, shape:Tshape) -> (data:T) ; \
     T:type{bool,float,half,double,int32,int64}, Tshape:type{int32,int64}=int32, communication_hint:string=\"auto\", \
     timeout_seconds:float=0.0",
    shape_fns::unknown,
    &[made(|init| Member::make(init, Role::Receives, |_| Ok(None)))],
);

const fn collective(name: &'static str, signature: &'static str, shape: ShapeFn, kernels: &'static [KernelDef]) -> Op {
    let gradient = Gradient::Refused("devices exchange gradients; nothing is differentiated through the exchange");
    let def = OpDef { name, signature, shape, gradient, stateful: true, effects: Effects::Outside, ..OpDef::BASE };
    Op { def, kernels, gpu: Gpu::Missing, cost: Cost::Inline }
}

const fn made(make: fn(&KernelInit<'_>) -> Result<Box<dyn AsyncKernel>>) -> KernelDef {
    cpu_made(KernelMaker::Async(make))
}

/// As many rows from every member of the group.
fn gathered(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let mut dims = match ctx.input(0).dims() {
        Some(dims) => dims.to_vec(),
        None => return shape_fns::unknown(ctx),
    };
    if let Some(rows) = dims.first_mut() {
        *rows = None;
    }
    Ok(vec![PartialShape::new(&dims)])
}

fn reduction(attrs: &Attrs) -> Result<Option<Together>> {
    let merge = match attrs.str("merge_op")? {
        "Add" => ReduceOp::Sum,
        "Mul" => ReduceOp::Prod,
        "Min" => ReduceOp::Min,
        "Max" => ReduceOp::Max,
        other => return Err(Error::invalid_argument(format!("merge_op is Min, Max, Mul or Add, not {other}"))),
    };
    let divide = attrs.str("final_op")? == "Div";
    if divide && merge != ReduceOp::Sum {
        return Err(Error::unimplemented("final_op Div divides sums; the merge_op of this node is another one"));
    }
    Ok(Some(Together::Reduce { merge, divide }))
}

fn broadcast(attrs: &Attrs) -> Result<Option<Together>> {
    let shape = attrs.shape("shape")?;
    let shape = shape.known().ok_or_else(|| Error::invalid_argument(format!("the shape {shape} is not known")))?;
    Ok(Some(Together::Broadcast { shape }))
}

/// Whether a member has a tensor of its own.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Gives,
    Receives,
}

struct Member {
    /// `None` for a broadcast whose shape is an input.
    together: Option<Together>,
    dtype: DType,
    role: Role,
    place: DeviceName,
    /// The group's size and key and the instance's, where they are attributes.
    group: Option<[i32; 3]>,
    timeout: Option<Duration>,
}

impl Member {
    fn make(
        init: &KernelInit<'_>,
        role: Role,
        together: fn(&Attrs) -> Result<Option<Together>>,
    ) -> Result<Box<dyn AsyncKernel>> {
        let attrs = init.attrs();
        let number = |name: &str| {
            let number = attrs.int(name)?;
            i32::try_from(number).map_err(|_| Error::invalid_argument(format!("{name} is {number}, not an int32")))
        };
        let group = match attrs.find("group_key") {
            Some(_) => Some([number("group_size")?, number("group_key")?, number("instance_key")?]),
            None => None,
        };
        let seconds = attrs.float("timeout_seconds")?;
        let timeout = match Duration::try_from_secs_f32(seconds) {
            Ok(timeout) => Some(timeout).filter(|timeout| !timeout.is_zero()),
            Err(_) => return Err(Error::invalid_argument(format!("timeout_seconds is {seconds}"))),
        };
        Ok(Box::new(Member {
            together: together(attrs)?,
            dtype: attrs.dtype("T")?,
            role,
            place: init.device.clone(),
            group,
            timeout,
        }))
    }

    fn arrival(&self, ctx: &mut KernelCtx<'_>) -> Result<Arrival> {
        // A member that gives something has it as its first input.
        let first = usize::from(self.role == Role::Gives);
        let [size, group, instance] = match self.group {
            Some(group) => group,
            None => {
                let number = |i: usize| ctx.input(first + i).and_then(Tensor::scalar_value::<i32>);
                [number(0)?, number(1)?, number(2)?]
            }
        };
        let size = usize::try_from(size)
            .ok()
            .filter(|size| *size > 0)
            .ok_or_else(|| Error::invalid_argument(format!("group size must be positive, got {size}")))?;
        let tensor = match self.role {
            Role::Gives => Some(ctx.take_input(0)?),
            Role::Receives => None,
        };
        let together = match (&self.together, &tensor) {
            (Some(together), _) => together.clone(),
            (None, Some(tensor)) => Together::Broadcast { shape: tensor.shape().clone() },
            (None, None) => Together::Broadcast { shape: shape_of(&ctx.input(first + 3)?.integers()?)? },
        };
        let spec = MeetingSpec { together, size, dtype: self.dtype };
        Ok(Arrival { key: (group, instance), spec, place: self.place.clone(), tensor, timeout: self.timeout })
    }
}

fn shape_of(dims: &[i64]) -> Result<Shape> {
    let size = |&dim: &i64| usize::try_from(dim).map_err(|_| Error::invalid_argument(format!("a size of {dim}")));
    Shape::new(&dims.iter().map(size).collect::<Result<Vec<usize>>>()?)
}

impl AsyncKernel for Member {
    fn start(&self, ctx: &mut KernelCtx<'_>, done: Done) {
        match self.arrival(ctx) {
            Ok(arrival) => {
                let cancel = ctx.step.cancel().clone();
                ctx.step.resources().groups().meetings().arrive(arrival, &cancel, done);
            }
            Err(error) => done.finish(Err(error)),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn attributes_that_cannot_be_kept_are_refused() {
        let mut attrs = Attrs::default();
        attrs.set("merge_op", "Max");
        attrs.set("final_op", "Div");
        assert!(reduction(&attrs).unwrap_err().message().contains("final_op Div divides sums"));
        attrs.set("final_op", "Id");
        assert_eq!(reduction(&attrs).unwrap(), Some(Together::Reduce { merge: ReduceOp::Max, divide: false }));
        attrs.set("shape", PartialShape::new(&[None]));
        assert!(broadcast(&attrs).unwrap_err().message().contains("is not known"));
        attrs.set("shape", PartialShape::from([2usize]));
        assert_eq!(broadcast(&attrs).unwrap(), Some(Together::Broadcast { shape: Shape::new(&[2]).unwrap() }));
        assert!(shape_of(&[2, -1]).is_err());
    }
}
