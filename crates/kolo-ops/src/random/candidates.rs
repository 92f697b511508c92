//! Classes to tell the true ones from, drawn at random, with how often each is expected to be drawn: `UniformCandidateSampler`,
//! `LogUniformCandidateSampler`, `FixedUnigramCandidateSampler`, `LearnedUnigramCandidateSampler`, `AllCandidateSampler`. Each call draws
//! the words that TensorFlow's would for the same seeds.

use std::collections::HashSet;
use std::path::Path;

use kolo_core::{DType, Error, PartialShape, Result, Shape};
use kolo_device::cpu::{looking, stop_if_asked};
use kolo_graph::{AttrValue, Attrs, Effects, Gradient, OpDef, Output};
use parking_lot::Mutex;

use super::weights::{Alias, Picker};
use crate::op::{Gpu, KernelDef, Op, cpu_made};
use crate::random::philox::Words;
use crate::random::stream::Stream;
use crate::{Cost, Kernel, KernelCtx, KernelInit, KernelMaker};

/// `n` classes below `range`, small ones more often, each once. Outputs: the classes, how often each of the true ones is expected
/// among so many, and how often each of those drawn is.
#[track_caller]
pub fn log_uniform_candidates(true_classes: Output<'_>, n: i64, range: i64, seed: Option<i64>) -> [Output<'_>; 3] {
    let graph = true_classes.graph();
    let (seed, seed2) = graph.op_seeds(seed);
    let n_true = true_classes.shape().dim(1).unwrap_or(1) as i64;
    let op = graph.op("LogUniformCandidateSampler").input(true_classes).attr("num_true", n_true);
    let op = op.attr("num_sampled", n).attr("unique", true).attr("range_max", range);
    let op = op.attr("seed", seed).attr("seed2", seed2).build();
    [0, 1, 2].map(|i| op.output(i))
}

macro_rules! signature {
    ($attrs:literal) => {
        concat!(
            "(true_classes:int64) -> (sampled_candidates:int64, true_expected_count:float, \
             sampled_expected_count:float) ; num_true:int>=1, num_sampled:int>=1, unique:bool, ",
            $attrs,
            "seed:int=0, seed2:int=0"
        )
    };
}

pub(crate) static UNIFORM_CANDIDATE_SAMPLER: Op = sampler(
    "UniformCandidateSampler",
    signature!("range_max:int>=1, "),
    &[cpu_made(KernelMaker::Object(|init| {
        let range = range(init, "range_max")?;
        Sampler::make(init, range, Law::Uniform)
    }))],
);
pub(crate) static LOG_UNIFORM_CANDIDATE_SAMPLER: Op = sampler(
    "LogUniformCandidateSampler",
    signature!("range_max:int>=1, "),
    &[cpu_made(KernelMaker::Object(|init| {
        let range = range(init, "range_max")?;
        Sampler::make(init, range, Law::LogUniform { log_range: (range as f64).ln_1p() })
    }))],
);
pub(crate) static LEARNED_UNIGRAM_CANDIDATE_SAMPLER: Op = sampler(
    "LearnedUnigramCandidateSampler",
    signature!("range_max:int>=1, "),
    &[cpu_made(KernelMaker::Object(|init| {
        let range = range(init, "range_max")?;
        Sampler::make(init, range, Law::Learned(Mutex::new(Picker::new(range)?)))
    }))],
);
pub(crate) static FIXED_UNIGRAM_CANDIDATE_SAMPLER: Op = sampler(
    "FixedUnigramCandidateSampler",
    signature!(
        "range_max:int>=1, vocab_file:string=\"\", distortion:float=1.0, num_reserved_ids:int=0, num_shards:int>=1=1, \
         shard:int>=0=0, unigrams:list(float)=[], "
    ),
    &[cpu_made(KernelMaker::Object(|init| {
        let (range, weights) = (range(init, "range_max")?, fixed_weights(init)?);
        if weights.len() != range {
            return Err(Error::invalid_argument(format!(
                "range is {range} must be equal to weights size {}",
                weights.len()
            )));
        }
        Sampler::make(init, range, Law::Fixed(Alias::new(weights)?))
    }))],
);
pub(crate) static ALL_CANDIDATE_SAMPLER: Op = sampler(
    "AllCandidateSampler",
    signature!(""),
    &[cpu_made(KernelMaker::Object(|init| {
        let range = range(init, "num_sampled")?;
        Sampler::make(init, range, Law::All)
    }))],
);

const fn sampler(name: &'static str, signature: &'static str, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape: |ctx| {
                let n_true = usize::try_from(ctx.attrs().int("num_true")?).ok();
                let n = usize::try_from(ctx.attrs().int("num_sampled")?).ok();
                let classes = ctx.input_of_rank(0, 2)?.merge(&PartialShape::new(&[None, n_true]))?;
                Ok(vec![PartialShape::new(&[n]), classes, PartialShape::new(&[n])])
            },
            gradient: Gradient::None("classes are whole numbers"),
            stateful: true,
            effects: Effects::Random,
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Missing,
        cost: Cost::Elements,
    }
}

/// The classes there are, from an attribute.
fn range(init: &KernelInit<'_>, attr: &str) -> Result<usize> {
    let range = init.attrs().int(attr)?;
    usize::try_from(range)
        .ok()
        .filter(|&range| range > 0)
        .ok_or_else(|| Error::invalid_argument(format!("{attr} must be at least 1, found {range}")))
}

/// The weights that a node lists or has in a file, of its shard alone.
fn fixed_weights(init: &KernelInit<'_>) -> Result<Vec<f32>> {
    let attrs = init.attrs();
    let (file, listed) = (attrs.str("vocab_file")?, floats(attrs, "unigrams")?);
    let distortion = attrs.float("distortion")?;
    let (n_shards, shard) = (attrs.int("num_shards")?, attrs.int("shard")?);
    if !(0..n_shards).contains(&shard) {
        return Err(Error::invalid_argument(format!("shard {shard} is not below num_shards, {n_shards}")));
    }
    if file.is_empty() == listed.is_empty() {
        return Err(Error::invalid_argument("Must provide exactly one of vocab_file or unigrams"));
    }
    let reserved = attrs.int("num_reserved_ids")?.max(0);
    let n_reserved = reserved / n_shards + i64::from(reserved % n_shards > shard);
    let mut weights = crate::memory::filled(n_reserved as usize, 0.0f32, "weights of reserved classes")?;
    let first = weights.len() as i64;
    let mut add = |i: usize, weight: f32| {
        if (first + i as i64) % n_shards == shard {
            weights.push(weight.powf(distortion));
        }
    };
    if file.is_empty() {
        listed.iter().enumerate().for_each(|(i, &weight)| add(i, weight));
        return Ok(weights);
    }
    let text = crate::io::whole_file::contents(Path::new(file), &init.resources.file_access())?;
    let text = String::from_utf8_lossy(&text);
    for (i, line) in text.lines().enumerate() {
        // A word's weight is what follows the last comma.
        let weight = line.rsplit(',').next().unwrap_or_default().trim();
        let weight: f32 = weight
            .parse()
            .map_err(|_| Error::invalid_argument(format!("Wrong vocabulary format at line {}: {line}", i + 1)))?;
        add(i, weight);
    }
    Ok(weights)
}

/// A `list(float)` attribute.
fn floats(attrs: &Attrs, name: &str) -> Result<Vec<f32>> {
    let values = match attrs.find(name) {
        Some(AttrValue::List(values)) => values.iter().map(|value| match value {
            AttrValue::Float(value) => Some(*value),
            _ => None,
        }),
        _ => return Err(Error::invalid_argument(format!("attribute {name} is not a list of floats"))),
    };
    values
        .collect::<Option<Vec<f32>>>()
        .ok_or_else(|| Error::invalid_argument(format!("attribute {name} is not a list of floats")))
}

/// How likely each class is.
enum Law {
    Uniform,
    LogUniform { log_range: f64 },
    Learned(Mutex<Picker>),
    Fixed(Alias),
    All,
}

struct Sampler {
    stream: Stream,
    range: usize,
    law: Law,
}

impl Sampler {
    fn make(init: &KernelInit<'_>, range: usize, law: Law) -> Result<Box<dyn Kernel>> {
        Ok(Box::new(Sampler { stream: Stream::new(init)?, range, law }))
    }

    fn draw(&self, words: &mut Words) -> i64 {
        match &self.law {
            Law::Uniform => uniform(words, self.range as u64) as i64,
            // Rounding may lead one beyond the last.
            Law::LogUniform { log_range } => ((double(words) * log_range).exp() as i64 - 1) % self.range as i64,
            Law::Learned(picker) => {
                let picker = picker.lock();
                picker.at(uniform_word(words, picker.total()))
            }
            Law::Fixed(alias) => alias.draw(words),
            Law::All => 0,
        }
    }

    fn probability(&self, class: i64) -> f32 {
        match &self.law {
            Law::Uniform => (1.0 / self.range as f64) as f32,
            Law::LogUniform { log_range } => (((class as f64 + 2.0) / (class as f64 + 1.0)).ln() / log_range) as f32,
            Law::Learned(picker) => {
                let picker = picker.lock();
                picker.weight(class) as f32 / picker.total() as f32
            }
            Law::Fixed(alias) => alias.probability(class),
            Law::All => 1.0,
        }
    }
}

/// A whole number below `n`, of two words for each try.
fn uniform(words: &mut Words, n: u64) -> u64 {
    let mut next = || u64::from(words.draw()) | u64::from(words.draw()) << 32;
    if n.is_power_of_two() {
        return next() & (n - 1);
    }
    // So many of the smallest are drawn again that the others divide evenly.
    let uneven = (u64::MAX % n) + 1;
    loop {
        let drawn = next();
        if drawn >= uneven {
            return drawn % n;
        }
        stop_if_asked();
    }
}

/// The same of one word for each try.
pub(super) fn uniform_word(words: &mut Words, n: u32) -> u32 {
    if n.is_power_of_two() || n == 0 {
        return words.draw() & n.wrapping_sub(1);
    }
    let uneven = (u32::MAX % n) + 1;
    loop {
        let drawn = words.draw();
        if drawn >= uneven {
            return drawn % n;
        }
        stop_if_asked();
    }
}

/// A number from 0 to below 1, of two words.
fn double(words: &mut Words) -> f64 {
    let (high, low) = (words.draw() & 0xf_ffff, words.draw());
    f64::from_bits(1023 << 52 | u64::from(high) << 32 | u64::from(low)) - 1.0
}

/// How often a class of probability `p` is expected among `n` that took so many tries.
fn expected(p: f32, n: usize, tries: usize) -> f32 {
    if tries == n { p * n as f32 } else { -(tries as f32 * (-p).ln_1p()).exp_m1() }
}

impl Kernel for Sampler {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        let n_true = ctx.attrs().int("num_true")?;
        let n = range_of(ctx.attrs().int("num_sampled")?)?;
        let unique = ctx.attrs().bool("unique")?;
        let classes = ctx.input(0)?;
        let shape = classes.shape().clone();
        let &[_, columns] = shape.dims() else {
            return Err(Error::invalid_argument("true_classes must be a matrix"));
        };
        if columns as i64 != n_true {
            return Err(Error::invalid_argument(format!(
                "true_classes must have num_true columns, expected: {n_true} was: {columns}"
            )));
        }
        if unique && n > self.range {
            return Err(Error::invalid_argument("Sampler's range is too small."));
        }
        let classes = classes.data::<i64>()?;
        if let Some(class) = classes.iter().find(|class| !(0..self.range as i64).contains(class)) {
            return Err(Error::invalid_argument(format!(
                "`true_candidate` out of range [0, {}), received {class}",
                self.range
            )));
        }
        let mut sampled = ctx.allocate(DType::I64, Shape::new(&[n])?)?;
        let mut of_true = ctx.allocate(DType::F32, shape)?;
        let mut of_sampled = ctx.allocate(DType::F32, Shape::new(&[n])?)?;
        // As many words as TensorFlow sets aside, so that the next call begins where its would.
        let mut words = Words::new(self.stream.reserve((n as u64).saturating_mul(512)));
        let drawn = sampled.data_mut::<i64>()?;
        let mut tries = n;
        match self.law {
            Law::All => {
                drawn.iter_mut().zip(0..).for_each(|(class, i)| *class = i);
                of_true.data_mut::<f32>()?.fill(1.0);
                of_sampled.data_mut::<f32>()?.fill(1.0);
            }
            _ => {
                if unique {
                    let mut seen = HashSet::new();
                    tries = 0;
                    for class in looking(drawn.iter_mut()) {
                        loop {
                            *class = self.draw(&mut words);
                            tries += 1;
                            if seen.insert(*class) {
                                break;
                            }
                            if tries >= i32::MAX as usize {
                                return Err(Error::resource_exhausted(format!(
                                    "{n} different classes were not found in {tries} tries: too few have a weight"
                                )));
                            }
                            if tries.is_multiple_of(4096) {
                                stop_if_asked();
                            }
                        }
                    }
                } else {
                    looking(drawn.iter_mut()).for_each(|class| *class = self.draw(&mut words));
                }
                let count = |class: &i64| expected(self.probability(*class), n, tries);
                of_true.data_mut::<f32>()?.iter_mut().zip(classes).for_each(|(y, class)| *y = count(class));
                of_sampled.data_mut::<f32>()?.iter_mut().zip(&*drawn).for_each(|(y, class)| *y = count(class));
            }
        }
        if let Law::Learned(picker) = &self.law {
            let mut picker = picker.lock();
            classes.iter().for_each(|&class| picker.add(class));
        }
        ctx.set_output(0, sampled);
        ctx.set_output(1, of_true);
        ctx.set_output(2, of_sampled);
        Ok(())
    }
}

fn range_of(n: i64) -> Result<usize> {
    usize::try_from(n).map_err(|_| Error::invalid_argument(format!("num_sampled must be positive, found {n}")))
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;
    use kolo_graph::AttrValue;

    use crate::testing::{OpTest, check_op};

    fn case(op: &str, n: i64, unique: bool, range: i64) -> OpTest {
        let test = check_op(op).attr("num_true", 1i64).attr("num_sampled", n).attr("unique", unique);
        test.attr("range_max", range).attr("seed", 7i64).attr("seed2", 5i64).input([[0i64], [1]])
    }

    fn run(test: OpTest) -> (Vec<i64>, Vec<f32>, Vec<f32>) {
        let found = test.run(false).unwrap();
        let floats = |i: usize| found[i].data::<f32>().unwrap().to_vec();
        (found[0].data::<i64>().unwrap().to_vec(), floats(1), floats(2))
    }

    #[test]
    fn frequencies_are_those_that_are_expected() {
        for op in ["UniformCandidateSampler", "LogUniformCandidateSampler", "LearnedUnigramCandidateSampler"] {
            let (drawn, of_true, _) = run(case(op, 20_000, false, 6));
            assert!(drawn.iter().all(|class| (0..6).contains(class)), "{op}");
            for class in [0i64, 1] {
                let n = drawn.iter().filter(|&&other| other == class).count() as f32;
                let expected = of_true[class as usize];
                assert!((n - expected).abs() < 5.0 * expected.sqrt(), "{op}: {n}, expected {expected}");
            }
        }
    }

    #[test]
    fn unique_classes_differ() {
        let (mut drawn, of_true, _) = run(case("LogUniformCandidateSampler", 6, true, 6));
        drawn.sort_unstable();
        assert_eq!(drawn, [0, 1, 2, 3, 4, 5]);
        assert!(of_true.iter().all(|&x| x > 0.0 && x <= 1.0), "{of_true:?}");
        case("LogUniformCandidateSampler", 7, true, 6).fails("Sampler's range is too small");
    }

    #[test]
    fn weights_decide() {
        let fixed = |weights: Vec<f32>, range: i64| {
            case("FixedUnigramCandidateSampler", 1000, false, range)
                .attr("unigrams", AttrValue::List(weights.into_iter().map(AttrValue::Float).collect()))
        };
        let (drawn, of_true, of_sampled) = run(fixed(vec![0.0, 3.0, 1.0], 3));
        assert!(!drawn.contains(&0));
        assert_eq!(of_true, [0.0, 750.0]);
        assert!(of_sampled.iter().all(|&x| x == 750.0 || x == 250.0));
        fixed(vec![1.0; 2], 3).fails("range is 3 must be equal to weights size 2");
        case("FixedUnigramCandidateSampler", 1, false, 3).fails("exactly one of vocab_file or unigrams");
        check_op("AllCandidateSampler")
            .attr("num_true", 1i64)
            .attr("num_sampled", 3i64)
            .attr("unique", true)
            .input([[2i64]])
            .gives_all([Tensor::from([0i64, 1, 2]), Tensor::from([[1.0f32]]), Tensor::from([1.0f32; 3])]);
    }

    #[test]
    fn bad_classes() {
        let test = case("UniformCandidateSampler", 2, false, 1);
        test.fails("`true_candidate` out of range [0, 1), received 1");
        let test = check_op("UniformCandidateSampler").attr("num_true", 2i64).attr("num_sampled", 1i64);
        test.attr("unique", false).attr("range_max", 3i64).input([[1i64]]).fails("");
    }
}
