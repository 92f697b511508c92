//! Random numbers, the same as TensorFlow's for the same seeds, whatever the number of threads.
//!
//! A stateful op owns a [`stream::Stream`] of [`philox::Philox`] words, which goes on from run to run; each call takes its
//! part of it and [`distribution::fill`]s a tensor from there.

use kolo_core::{Error, Result, Shape};

use crate::{KernelCtx, Op};

pub mod accidental_hits;
pub mod candidates;
pub mod distribution;
pub mod gamma;
mod gpu;
pub mod multinomial;
pub mod philox;
pub mod shuffle;
pub mod standard;
pub mod stateless;
pub mod stream;
#[cfg(test)]
mod testing;
pub mod truncated;
pub mod uniform_int;
mod weights;

/// The shape that integer vector input 0 holds.
pub(crate) fn shape_in(ctx: &KernelCtx<'_>) -> Result<Shape> {
    let found = ctx.input(0)?.shape();
    match found.rank() {
        1 => Shape::from_signed(&ctx.integers(0)?),
        _ => Err(Error::invalid_argument(format!("shape must be a vector of int32 or int64, found {found}"))),
    }
}

/// The ops of this area.
pub static OPS: &[&Op] = &[
    &accidental_hits::COMPUTE_ACCIDENTAL_HITS,
    &candidates::ALL_CANDIDATE_SAMPLER,
    &candidates::FIXED_UNIGRAM_CANDIDATE_SAMPLER,
    &candidates::LEARNED_UNIGRAM_CANDIDATE_SAMPLER,
    &candidates::LOG_UNIFORM_CANDIDATE_SAMPLER,
    &candidates::UNIFORM_CANDIDATE_SAMPLER,
    &gamma::RANDOM_GAMMA,
    &multinomial::MULTINOMIAL,
    &shuffle::RANDOM_SHUFFLE,
    &standard::RANDOM_STANDARD_NORMAL,
    &standard::RANDOM_UNIFORM,
    &standard::TRUNCATED_NORMAL,
    &stateless::STATELESS_RANDOM_NORMAL,
    &stateless::STATELESS_RANDOM_UNIFORM,
    &stateless::STATELESS_TRUNCATED_NORMAL,
    &truncated::PARAMETERIZED_TRUNCATED_NORMAL,
    &uniform_int::RANDOM_UNIFORM_INT,
];
