//! Byte strings: made, cut, joined, matched and hashed.

use bytes::Bytes;
use kolo_core::{Error, Result};

use crate::{KernelCtx, Op};

pub mod as_string;
mod farm_hash;
pub mod hash_bucket;
pub mod join;
pub mod length;
pub mod printf;
mod re2;
pub mod reduce_join;
pub mod regex;
pub mod split;
pub mod strip;
pub mod substr;
pub mod to_number;

/// The ops of this area.
pub static OPS: &[&Op] = &[
    &as_string::AS_STRING,
    &hash_bucket::STRING_TO_HASH_BUCKET_FAST,
    &join::STRING_JOIN,
    &length::STRING_LENGTH,
    &reduce_join::REDUCE_JOIN,
    &regex::REGEX_FULL_MATCH,
    &regex::REGEX_REPLACE,
    &regex::STATIC_REGEX_FULL_MATCH,
    &regex::STATIC_REGEX_REPLACE,
    &split::STRING_SPLIT,
    &split::STRING_SPLIT_V2,
    &strip::STRING_LOWER,
    &strip::STRING_STRIP,
    &strip::STRING_UPPER,
    &substr::SUBSTR,
    &to_number::STRING_TO_NUMBER,
];

/// Why strings have no gradient.
const NO_GRADIENT: kolo_graph::Gradient = kolo_graph::Gradient::None("strings are not numbers");

/// Sets output 0 to what `f` makes of each string of input 0.
fn map(ctx: &mut KernelCtx<'_>, f: impl Fn(&Bytes) -> Result<Bytes>) -> Result<()> {
    let input = ctx.input(0)?;
    let mut made = ctx.strings_made();
    input.strings()?.iter().try_for_each(|text| made.push(f(text)?))?;
    let out = made.finish(input.shape().clone())?;
    ctx.set_output(0, out);
    Ok(())
}

/// The one string of input `i`.
fn scalar<'a>(ctx: &'a KernelCtx<'_>, i: usize, what: &str) -> Result<&'a Bytes> {
    let input = ctx.input(i)?;
    match input.strings()? {
        [text] if input.shape().rank() == 0 => Ok(text),
        _ => Err(Error::invalid_argument(format!("{what} must be scalar, but received {}", input.shape()))),
    }
}

/// A string as people read it in a message.
fn shown(text: &[u8]) -> String {
    String::from_utf8_lossy(text).into_owned()
}

#[cfg(test)]
pub(crate) fn words<const N: usize>(list: [&'static str; N]) -> kolo_core::Tensor {
    kolo_core::Tensor::from_strings([N], list.iter().map(|&word| word.into()).collect()).expect("as many as there are")
}
