//! Top-k with error feedback: of each gradient the largest elements are exchanged, the others wait.
//!
//! ```text
//! gradient + unsent ─► KoloPackTopK ─► KoloAllGather (a bucket) ─► KoloUnpackTopK ─► clip, accumulate, update
//!                           └─► unsent
//! ```

use kolo_core::{DType, Result};
use kolo_graph::{AttrValue, Attrs, Endpoint, NodeId, Rewriter};

use super::data_parallel::{Bucket, ExchangePlace, add_collective};
use super::exchange::unsent;
use super::nodes::NodeAdder;

/// Puts the exchange behind the gradients of a bucket. `done` is the step, which waits for what is kept.
pub(super) fn exchange(graph: &mut Rewriter<'_>, bucket: &Bucket, fraction: f64, done: Option<NodeId>) -> Result<()> {
    let mut attrs = Attrs::default();
    attrs.set("fraction", AttrValue::Float(fraction as f32));
    let values: Vec<Endpoint> = bucket.values.iter().map(|exchanged| exchanged.value).collect();
    let names: Vec<String> = bucket.values.iter().map(|exchanged| unsent(&exchanged.variable)).collect();
    let means =
        with_feedback(graph, ["KoloPackTopK", "KoloUnpackTopK"], &attrs, &values, (&names, bucket.dtype), done)?;
    for (exchanged, mean) in bucket.values.iter().zip(means) {
        graph.redirect_inputs(&exchanged.readers, mean)?;
    }
    Ok(())
}

/// The means over all ranks of what these values become if they are packed, and what is not is kept in variables of these names and
/// this type until the next time.
pub(super) fn with_feedback(
    graph: &mut Rewriter<'_>,
    [pack, unpack]: [&str; 2],
    attrs: &Attrs,
    values: &[Endpoint],
    (names, dtype): (&[String], DType),
    done: Option<NodeId>,
) -> Result<Vec<Endpoint>> {
    let mut add = NodeAdder::on_host(graph, "data_parallel/packed")?;
    let handles = names.iter().map(|name| add.own_variable(name)).collect::<Result<Vec<NodeId>>>()?;
    let mut inputs = values.to_vec();
    for handle in &handles {
        inputs.push(add.read(*handle, dtype)?);
    }
    let packed = add.node(pack, &inputs, with_count(attrs, values.len()))?;
    for (i, handle) in handles.into_iter().enumerate() {
        let kept = add.assign(handle, Endpoint { node: packed, index: 1 + i as u32 })?;
        if let Some(done) = done {
            add.graph.order_after(done, kept);
        }
    }
    let bytes = Endpoint { node: packed, index: 0 };
    let name = "data_parallel/packed_gradients";
    let all = add_collective(add.graph, "KoloAllGather", name, &[bytes], Attrs::default(), ExchangePlace::Host)?;
    let inputs: Vec<Endpoint> =
        std::iter::once(Endpoint { node: all, index: 0 }).chain(values.iter().copied()).collect();
    let means = add.node(unpack, &inputs, with_count(attrs, values.len()))?;
    Ok((0..values.len() as u32).map(|index| Endpoint { node: means, index }).collect())
}

/// How many tensors, which inputs of several lists do not say.
fn with_count(attrs: &Attrs, n: usize) -> Attrs {
    let mut attrs = attrs.clone();
    attrs.set("N", AttrValue::Int(n as i64));
    attrs
}
