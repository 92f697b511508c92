//! Summaries: values of a step, serialised for event files. A summary is a string tensor that the client writes.

use bytes::Bytes;
use kolo_core::{Error, Result, Tensor};

use crate::Op;

pub mod audio;
pub mod histogram;
pub mod image;
pub mod merge;
pub mod proto;
pub mod scalar;
pub mod tensor;

/// The ops of this area.
pub static OPS: &[&Op] = &[
    &audio::AUDIO_SUMMARY_V2,
    &histogram::HISTOGRAM_SUMMARY,
    &image::IMAGE_SUMMARY,
    &merge::MERGE_SUMMARY,
    &scalar::SCALAR_SUMMARY,
    &tensor::TENSOR_SUMMARY,
    &tensor::TENSOR_SUMMARY_V2,
];

/// The one string of a scalar; `otherwise` is the message if it is none.
fn scalar_tag<'a>(tensor: &'a Tensor, otherwise: &str) -> Result<&'a Bytes> {
    match (tensor.shape().rank(), tensor.strings()?) {
        (0, [tag]) => Ok(tag),
        _ => Err(Error::invalid_argument(otherwise)),
    }
}

/// A tag as text, which is what event files hold.
fn tag_text(tag: &Bytes) -> Result<String> {
    let text = std::str::from_utf8(tag);
    text.map(str::to_owned).map_err(|_| Error::invalid_argument(format!("tag {tag:?} is not UTF-8")))
}

#[cfg(test)]
mod testing {
    use kolo_core::Tensor;

    /// A string tensor of the bytes that are written here as hexadecimal digits.
    pub fn bytes(digits: &str) -> Tensor {
        let byte = |i: usize| u8::from_str_radix(&digits[i..i + 2], 16).expect("a test's own literal");
        Tensor::string((0..digits.len()).step_by(2).map(byte).collect::<Vec<u8>>())
    }
}
