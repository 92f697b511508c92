//! TensorFlow's summary messages, with TensorFlow's names and field numbers.

use kolo_core::{Error, Result, Tensor};
use kolo_graph::wire::proto::TensorProto;
use prost::Message as _;

/// `tensorflow.Summary`: named values of one step.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Summary {
    /// The values.
    #[prost(message, repeated, tag = "1")]
    pub value: Vec<Value>,
}

/// `tensorflow.Summary.Value`: one named value.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Value {
    /// Its name; TensorBoard groups by what is before the first slash.
    #[prost(string, tag = "1")]
    pub tag: String,
    /// What it is.
    #[prost(oneof = "Content", tags = "2, 4, 5, 6, 8")]
    pub content: Option<Content>,
    /// The node that made it, which old summaries have instead of a tag.
    #[prost(string, tag = "7")]
    pub node_name: String,
    /// What shows it, and how.
    #[prost(message, optional, tag = "9")]
    pub metadata: Option<SummaryMetadata>,
}

/// The kinds of value.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Content {
    /// A number.
    #[prost(float, tag = "2")]
    SimpleValue(f32),
    /// A picture.
    #[prost(message, tag = "4")]
    Image(Image),
    /// How numbers are distributed.
    #[prost(message, tag = "5")]
    Histo(HistogramProto),
    /// A sound.
    #[prost(message, tag = "6")]
    Audio(Audio),
    /// Anything; the metadata says what shows it.
    #[prost(message, boxed, tag = "8")]
    Tensor(Box<TensorProto>),
}

/// `tensorflow.Summary.Image`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Image {
    /// Rows.
    #[prost(int32, tag = "1")]
    pub height: i32,
    /// Columns.
    #[prost(int32, tag = "2")]
    pub width: i32,
    /// 1 for grey, 3 for colour, 4 for colour with opacity.
    #[prost(int32, tag = "3")]
    pub colorspace: i32,
    /// A PNG.
    #[prost(bytes = "vec", tag = "4")]
    pub encoded_image_string: Vec<u8>,
}

/// `tensorflow.Summary.Audio`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Audio {
    /// Samples in a second.
    #[prost(float, tag = "1")]
    pub sample_rate: f32,
    /// Sounds side by side.
    #[prost(int64, tag = "2")]
    pub num_channels: i64,
    /// Samples of each channel.
    #[prost(int64, tag = "3")]
    pub length_frames: i64,
    /// A WAV file.
    #[prost(bytes = "vec", tag = "4")]
    pub encoded_audio_string: Vec<u8>,
    /// What the file is.
    #[prost(string, tag = "5")]
    pub content_type: String,
}

/// `tensorflow.HistogramProto`. Numbers are left out where they are plain zero, as TensorFlow does: minus zero is not.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HistogramProto {
    /// The least value.
    #[prost(double, optional, tag = "1")]
    pub min: Option<f64>,
    /// The greatest value.
    #[prost(double, optional, tag = "2")]
    pub max: Option<f64>,
    /// How many there are.
    #[prost(double, optional, tag = "3")]
    pub num: Option<f64>,
    /// Their sum.
    #[prost(double, optional, tag = "4")]
    pub sum: Option<f64>,
    /// The sum of their squares.
    #[prost(double, optional, tag = "5")]
    pub sum_squares: Option<f64>,
    /// The upper ends of the buckets.
    #[prost(double, repeated, tag = "6")]
    pub bucket_limit: Vec<f64>,
    /// How many values fall into each.
    #[prost(double, repeated, tag = "7")]
    pub bucket: Vec<f64>,
}

/// `tensorflow.SummaryMetadata`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SummaryMetadata {
    /// Which of TensorBoard's plugins shows it.
    #[prost(message, optional, tag = "1")]
    pub plugin_data: Option<PluginData>,
    /// A name for people.
    #[prost(string, tag = "2")]
    pub display_name: String,
    /// A text for people.
    #[prost(string, tag = "3")]
    pub summary_description: String,
    /// The class of data: 1 scalars, 2 tensors, 3 blobs.
    #[prost(int32, tag = "4")]
    pub data_class: i32,
}

/// `tensorflow.SummaryMetadata.PluginData`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PluginData {
    /// The plugin, such as `text`.
    #[prost(string, tag = "1")]
    pub plugin_name: String,
    /// What the plugin alone understands.
    #[prost(bytes = "vec", tag = "2")]
    pub content: Vec<u8>,
}

impl Summary {
    /// Its bytes, as the summary ops give them.
    pub fn to_tensor(&self) -> Tensor {
        Tensor::string(self.encode_to_vec())
    }

    /// Reads the bytes that a summary op gave.
    pub fn from_bytes(bytes: &[u8]) -> Result<Summary> {
        Summary::decode(bytes).map_err(|reason| Error::invalid_argument(format!("not a summary: {reason}")))
    }
}

impl From<Vec<Value>> for Summary {
    fn from(value: Vec<Value>) -> Summary {
        Summary { value }
    }
}

impl Value {
    /// A value of this name, without metadata.
    pub fn new(tag: impl Into<String>, content: Content) -> Value {
        Value { tag: tag.into(), content: Some(content), ..Value::default() }
    }
}

impl SummaryMetadata {
    /// For this plugin of TensorBoard.
    pub fn for_plugin(name: &str) -> SummaryMetadata {
        let plugin_data = PluginData { plugin_name: name.to_owned(), content: Vec::new() };
        SummaryMetadata { plugin_data: Some(plugin_data), ..SummaryMetadata::default() }
    }
}
