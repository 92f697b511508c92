//! Summaries: numbers, distributions, pictures and texts of a training, for TensorBoard.
//!
//! ```
//! use kolo::train::summary::{self, FileWriter};
//! use kolo::{PartialShape, Session, Tensor};
//!
//! let g = kolo::graph();
//! let x = g.placeholder::<f32>("x", PartialShape::scalar());
//! let loss = x * 2.0;
//! summary::scalar("loss", loss);
//! let summaries = summary::merge_all(&g).unwrap();
//!
//! let dir = std::env::temp_dir().join("kolo-summary-example");
//! let writer = FileWriter::new(&dir)?;
//! writer.add_graph(&g)?;
//! let session = Session::new(&g)?;
//! for step in 0..3 {
//!     let values = session.run(&[summaries], &[(x, Tensor::scalar(step as f32))], &[])?;
//!     writer.add_summary(&values[0], step)?;
//!     writer.add_scalar("seconds", 0.5, step); // no graph needed
//! }
//! writer.close()?;
//! # std::fs::remove_dir_all(dir).unwrap();
//! # Ok::<(), kolo::Error>(())
//! ```
//!
//! In a graph, [`scalar`], [`histogram`], [`image`] and [`text`] add an op that gives a summary as bytes and put it into the
//! collection `summaries`; [`merge_all`] makes one of all of them. Names and tags are those that TensorFlow would give.

mod event;
mod writer;

use kolo_core::{DType, Error, Tensor};
use kolo_graph::{Graph, Output};
use kolo_ops::summary as ops;

pub use event::{Event, EventContent, SessionLog, SessionStatus, TaggedRunMetadata};
pub use kolo_ops::summary::proto::{
    Content, HistogramProto, Image, PluginData, Summary, SummaryMetadata, Value as SummaryValue,
};
pub use writer::{FileWriter, WriterOptions};

/// The collection of all summaries of a graph, as in TensorFlow.
pub const SUMMARIES: &str = "summaries";

/// A number: a loss, a learning rate. The tag is `name` with the scopes around it.
#[track_caller]
pub fn scalar<'g>(name: &str, value: Output<'g>) -> Output<'g> {
    in_scope(value, name, |scope, tag| {
        let tag = tag_constant(value.graph(), "tags", tag);
        value.graph().op("ScalarSummary").name(scope).input(tag).input(value).out()
    })
}

/// The distribution of a tensor's values: weights, gradients, activations.
#[track_caller]
pub fn histogram<'g>(name: &str, values: Output<'g>) -> Output<'g> {
    in_scope(values, name, |scope, tag| {
        let tag = tag_constant(values.graph(), "tag", tag);
        values.graph().op("HistogramSummary").name(scope).input(tag).input(values).out()
    })
}

/// Up to three pictures of a batch `[n, height, width, channels]` with 1, 3 or 4 channels; [`images`] for another number.
#[track_caller]
pub fn image<'g>(name: &str, images: Output<'g>) -> Output<'g> {
    self::images(name, images, 3)
}

/// Up to `max_images` pictures of a batch.
#[track_caller]
pub fn images<'g>(name: &str, images: Output<'g>, max_images: usize) -> Output<'g> {
    in_scope(images, name, |scope, tag| {
        let tag = tag_constant(images.graph(), "tag", tag);
        let builder = images.graph().op("ImageSummary").name(scope).input(tag).input(images);
        builder.attr("max_images", i64::try_from(max_images).unwrap_or(i64::MAX)).out()
    })
}

/// Strings, which TensorBoard shows as Markdown.
#[track_caller]
pub fn text<'g>(name: &str, strings: Output<'g>) -> Output<'g> {
    let graph = strings.graph();
    if strings.is_valid() && strings.dtype() != DType::Str {
        graph.record_error(Error::invalid_argument(format!(
            "summary '{name}': Expected tensor {} to have dtype string, got {}",
            strings.name(),
            strings.dtype()
        )));
    }
    in_scope(strings, name, |scope, tag| {
        let metadata = Tensor::string(prost::Message::encode_to_vec(&SummaryMetadata::for_plugin("text")));
        let tag = tag_constant(graph, "tag", tag);
        let metadata = graph.op("Const").name("serialized_summary_metadata").attr("value", metadata.clone());
        let metadata = metadata.attr("dtype", DType::Str).out();
        graph.op("TensorSummaryV2").name(scope).inputs([tag, strings, metadata]).out()
    })
}

/// One summary of these: what a training step fetches. `None` if there are none.
#[track_caller]
pub fn merge<'g>(summaries: &[Output<'g>]) -> Option<Output<'g>> {
    let (first, others) = summaries.split_first()?;
    Some(first.graph().name_scope("Merge", || ops::merge::merge_summary(*first, others)))
}

/// One summary of all that were added to the graph so far; `None` if there are none.
#[track_caller]
pub fn merge_all(graph: &Graph) -> Option<Output<'_>> {
    let find = |name: &String| match graph.output(name) {
        Ok(output) => Some(output),
        Err(error) => {
            graph.record_error(error.context("collection 'summaries'"));
            None
        }
    };
    let summaries: Vec<Output<'_>> = graph.collection(SUMMARIES).iter().filter_map(find).collect();
    merge(&summaries)
}

/// Makes a summary in a scope of its own, whose name is also the op's name and the tag, and remembers it.
#[track_caller]
fn in_scope<'g>(values: Output<'g>, name: &str, make: impl FnOnce(&str, &str) -> Output<'g>) -> Output<'g> {
    let graph = values.graph();
    let summary = graph.name_scope(&clean(name), || {
        let scope = graph.current_scope();
        make(&scope, scope.trim_end_matches('/'))
    });
    if summary.is_valid() {
        graph.add_to_collection(SUMMARIES, &summary.name());
    }
    summary
}

fn tag_constant<'g>(graph: &'g Graph, name: &str, tag: &str) -> Output<'g> {
    graph.op("Const").name(name).attr("value", Tensor::from(tag)).attr("dtype", DType::Str).out()
}

/// A name that can be a tag: other characters become underscores, and slashes at the beginning go.
fn clean(name: &str) -> String {
    let keep = |c: char| if c.is_ascii_alphanumeric() || "-/_.".contains(c) { c } else { '_' };
    let cleaned: String = name.chars().map(keep).collect();
    cleaned.trim_start_matches('/').to_owned()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_runtime::Session;

    use super::*;

    #[test]
    fn names_and_tags_are_tensorflow_s() {
        let g = kolo_ops::graph();
        let one = g.constant(1.0f32);
        g.name_scope("layer", || {
            scalar("loss", one);
            scalar("loss", one);
            histogram("w x", g.constant([1.0f32]));
            image("pic", g.constant(Tensor::zeros(DType::F32, [1, 2, 2, 1]).unwrap()));
        });
        let names: Vec<String> = g.nodes().iter().map(|(_, node)| node.name.to_string()).collect();
        let expected = [
            "layer/loss/tags",
            "layer/loss",
            "layer/loss_1/tags",
            "layer/loss_1",
            "layer/w_x/tag",
            "layer/w_x",
            "layer/pic/tag",
            "layer/pic",
        ];
        assert!(expected.iter().all(|name| names.iter().any(|have| have == name)), "{names:?}");
        assert_eq!(g.collection(SUMMARIES), ["layer/loss:0", "layer/loss_1:0", "layer/w_x:0", "layer/pic:0"]);
        let merged = merge_all(&g).unwrap();
        assert_eq!(merged.name(), "Merge/MergeSummary:0");
        let value = Session::new(&g).unwrap().fetch(merged).unwrap();
        let summary = Summary::from_bytes(&value.strings().unwrap()[0]).unwrap();
        let tags: Vec<&str> = summary.value.iter().map(|value| value.tag.as_str()).collect();
        assert_eq!(tags, ["layer/loss", "layer/loss_1", "layer/w_x", "layer/pic/image/0"]);
    }

    #[test]
    fn texts_are_for_the_text_plugin() {
        let g = kolo_ops::graph();
        let summary = text("words", g.constant("hi"));
        let value = Session::new(&g).unwrap().fetch(summary).unwrap();
        let summary = Summary::from_bytes(&value.strings().unwrap()[0]).unwrap();
        let plugin = summary.value[0].metadata.clone().unwrap().plugin_data.unwrap();
        assert_eq!(plugin.plugin_name, "text");
        text("number", g.constant(1.0f32));
        assert!(g.check().unwrap_err().message().contains("to have dtype string, got float"));
    }

    #[test]
    fn nothing_to_merge_is_nothing() {
        let g = kolo_ops::graph();
        assert!(merge_all(&g).is_none());
        assert!(merge(&[]).is_none());
        g.add_to_collection(SUMMARIES, "gone:0");
        assert!(merge_all(&g).is_none());
        assert!(g.check().unwrap_err().message().contains("collection 'summaries'"));
    }
}
