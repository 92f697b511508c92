//! Learning-rate schedules, each in two forms that agree: a function of the step, for logs, and nodes of a graph. The nodes
//! compute in `double`, so that step numbers stay exact.

use std::f64::consts::PI;

use kolo_core::{DType, Tensor};
use kolo_graph::{Graph, Output};

use crate::ops;

/// A learning rate that depends on the global step.
///
/// ```
/// use kolo::optim::Schedule;
///
/// let schedule = Schedule::cosine(0.1, 1000).warm_up(100);
/// assert_eq!(schedule.at(50), 0.05);
/// assert_eq!(schedule.at(100), 0.1);
/// assert!(schedule.at(1100) < 1e-9);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum Schedule {
    /// Always the same.
    Constant(f64),
    /// `values[i]` up to and including step `boundaries[i]`, the last value after that.
    Piecewise {
        /// Steps, ascending.
        boundaries: Vec<u64>,
        /// One value more than boundaries.
        values: Vec<f64>,
    },
    /// `initial · rate ^ (step / steps)`.
    Exponential {
        /// The rate at step 0.
        initial: f64,
        /// The number of steps after which the rate has been multiplied once.
        steps: u64,
        /// The factor.
        rate: f64,
        /// Multiplies once every `steps` steps instead of a little every step.
        staircase: bool,
    },
    /// Half a cosine from `initial` down to `initial · alpha` in `steps` steps, constant after that.
    Cosine {
        /// The rate at step 0.
        initial: f64,
        /// How many steps the way down takes.
        steps: u64,
        /// What is left at the end, as a part of the initial rate.
        alpha: f64,
    },
    /// Half a cosine again and again, each way down `longer` times as long as the one before.
    CosineRestarts {
        /// The rate at step 0.
        initial: f64,
        /// How many steps the first way down takes.
        steps: u64,
        /// The factor of the length, 1 or more.
        longer: f64,
        /// The factor of the height.
        lower: f64,
        /// What is left at the end of each way down, as a part of the initial rate.
        alpha: f64,
    },
    /// `(initial − end) · (1 − step / steps) ^ power + end`, constant after that.
    Polynomial {
        /// The rate at step 0.
        initial: f64,
        /// How many steps the way to the end takes.
        steps: u64,
        /// The rate at the end.
        end: f64,
        /// 1 is a straight line.
        power: f64,
        /// Begins anew beyond the end, with the next multiple of `steps` as its end.
        cycle: bool,
    },
    /// `initial / (1 + rate · step / steps)`.
    InverseTime {
        /// The rate at step 0.
        initial: f64,
        /// The unit of time.
        steps: u64,
        /// How fast it falls.
        rate: f64,
    },
    /// A straight line from `start` to the first rate of another schedule, which begins after it.
    WarmUp {
        /// The rate at step 0.
        start: f64,
        /// How many steps the way up takes.
        steps: u64,
        /// What follows; its step 0 is the end of the way up.
        then: Box<Schedule>,
    },
}

impl Schedule {
    /// Always the same.
    pub fn constant(rate: f64) -> Schedule {
        Schedule::Constant(rate)
    }

    /// `values[i]` up to and including step `boundaries[i]`, the last value after that.
    pub fn piecewise(boundaries: &[u64], values: &[f64]) -> Schedule {
        Schedule::Piecewise { boundaries: boundaries.to_vec(), values: values.to_vec() }
    }

    /// The rate times `factor` every `steps` steps.
    pub fn step(initial: f64, steps: u64, factor: f64) -> Schedule {
        Schedule::Exponential { initial, steps, rate: factor, staircase: true }
    }

    /// `initial · rate ^ (step / steps)`.
    pub fn exponential(initial: f64, steps: u64, rate: f64) -> Schedule {
        Schedule::Exponential { initial, steps, rate, staircase: false }
    }

    /// Half a cosine from `initial` down to 0 in `steps` steps.
    pub fn cosine(initial: f64, steps: u64) -> Schedule {
        Schedule::Cosine { initial, steps, alpha: 0.0 }
    }

    /// Half a cosine again and again, each way down twice as long as the one before.
    pub fn cosine_restarts(initial: f64, steps: u64) -> Schedule {
        Schedule::CosineRestarts { initial, steps, longer: 2.0, lower: 1.0, alpha: 0.0 }
    }

    /// A straight line from `initial` to `end` in `steps` steps.
    pub fn linear(initial: f64, steps: u64, end: f64) -> Schedule {
        Schedule::polynomial(initial, steps, end, 1.0)
    }

    /// `(initial − end) · (1 − step / steps) ^ power + end`.
    pub fn polynomial(initial: f64, steps: u64, end: f64, power: f64) -> Schedule {
        Schedule::Polynomial { initial, steps, end, power, cycle: false }
    }

    /// `initial / (1 + rate · step / steps)`.
    pub fn inverse_time(initial: f64, steps: u64, rate: f64) -> Schedule {
        Schedule::InverseTime { initial, steps, rate }
    }

    /// This schedule after a straight way up from 0 that takes `steps` steps.
    #[must_use]
    pub fn warm_up(self, steps: u64) -> Schedule {
        Schedule::WarmUp { start: 0.0, steps, then: Box::new(self) }
    }

    /// Exponential schedules: in steps instead of smoothly.
    #[must_use]
    pub fn staircase(mut self) -> Schedule {
        if let Schedule::Exponential { staircase, .. } = &mut self {
            *staircase = true;
        }
        self
    }

    /// Cosine schedules: what is left at the end, as a part of the initial rate.
    #[must_use]
    pub fn alpha(mut self, left: f64) -> Schedule {
        if let Schedule::Cosine { alpha, .. } | Schedule::CosineRestarts { alpha, .. } = &mut self {
            *alpha = left;
        }
        self
    }

    /// Polynomial schedules: begin anew beyond the end.
    #[must_use]
    pub fn cycle(mut self) -> Schedule {
        if let Schedule::Polynomial { cycle, .. } = &mut self {
            *cycle = true;
        }
        self
    }

    /// The rate at a step.
    pub fn at(&self, step: u64) -> f64 {
        self.rate(&Numbers, step as f64)
    }

    /// Nodes that compute the rate, a `float`, from the step, an integer.
    #[track_caller]
    pub fn build<'g>(&self, step: Output<'g>) -> Output<'g> {
        let graph = step.graph();
        graph.name_scope("learning_rate", || {
            let rate = match self {
                // A constant needs no step.
                Schedule::Constant(rate) => return graph.constant(*rate as f32),
                _ => self.rate(&Nodes(graph), ops::cast(step, DType::F64)),
            };
            ops::cast(rate, DType::F32)
        })
    }

    /// The formula, over numbers or over nodes.
    fn rate<A: Arithmetic>(&self, a: &A, step: A::Value) -> A::Value {
        let number = |value: f64| a.number(value);
        match self {
            Schedule::Constant(rate) => number(*rate),
            Schedule::Piecewise { boundaries, values } => {
                let last = number(values.last().copied().unwrap_or(0.0));
                boundaries.iter().zip(values).rev().fold(last, |after, (&boundary, &value)| {
                    a.if_at_most(step, number(boundary as f64), number(value), after)
                })
            }
            Schedule::Exponential { initial, steps, rate, staircase } => {
                let times = a.div(step, number(at_least_one(*steps)));
                let times = if *staircase { a.floor(times) } else { times };
                a.mul(number(*initial), a.pow(number(*rate), times))
            }
            Schedule::Cosine { initial, steps, alpha } => {
                let steps = number(at_least_one(*steps));
                let done = a.div(a.min(step, steps), steps);
                a.mul(number(*initial), half_cosine(a, done, number(1.0), *alpha))
            }
            Schedule::CosineRestarts { initial, steps, longer, lower, alpha } => {
                let done = a.div(step, number(at_least_one(*steps)));
                let (restarts, done) = match *longer {
                    longer if longer > 1.0 => {
                        // The n-th way down begins after 1 + longer + longer² + … of the first.
                        let grown = a.add(number(1.0), a.mul(done, number(longer - 1.0)));
                        let restarts = a.floor(a.div(a.log(grown), number(longer.ln())));
                        let length = a.pow(number(longer), restarts);
                        let before = a.div(a.sub(length, number(1.0)), number(longer - 1.0));
                        (restarts, a.div(a.sub(done, before), length))
                    }
                    _ => {
                        let restarts = a.floor(done);
                        (restarts, a.sub(done, restarts))
                    }
                };
                let height = a.pow(number(*lower), restarts);
                a.mul(number(*initial), half_cosine(a, done, height, *alpha))
            }
            Schedule::Polynomial { initial, steps, end, power, cycle } => {
                let steps = number(at_least_one(*steps));
                let done = match cycle {
                    // At step 0 the end is one length away, as everywhere else on the first way down.
                    true => a.div(step, a.mul(steps, a.max(number(1.0), a.ceil(a.div(step, steps))))),
                    false => a.div(a.min(step, steps), steps),
                };
                let left = a.pow(a.sub(number(1.0), done), number(*power));
                a.add(a.mul(number(initial - end), left), number(*end))
            }
            Schedule::InverseTime { initial, steps, rate } => {
                let time = a.div(step, number(at_least_one(*steps)));
                a.div(number(*initial), a.add(number(1.0), a.mul(number(*rate), time)))
            }
            Schedule::WarmUp { steps: 0, then, .. } => then.rate(a, step),
            Schedule::WarmUp { start, steps, then } => {
                let n = number(*steps as f64);
                let top = then.at(0);
                let rising = a.add(number(*start), a.mul(number(top - start), a.div(step, n)));
                let after = then.rate(a, a.max(number(0.0), a.sub(step, n)));
                a.if_at_most(step, n, rising, after)
            }
        }
    }
}

fn at_least_one(steps: u64) -> f64 {
    steps.max(1) as f64
}

/// `(1 − alpha) · height · (1 + cos(π · done)) / 2 + alpha`.
fn half_cosine<A: Arithmetic>(a: &A, done: A::Value, height: A::Value, alpha: f64) -> A::Value {
    let cosine = a.add(a.number(1.0), a.cos(a.mul(a.number(PI), done)));
    let fallen = a.mul(a.mul(a.number(0.5), height), cosine);
    a.add(a.mul(a.number(1.0 - alpha), fallen), a.number(alpha))
}

/// What the formulas are written in.
trait Arithmetic {
    type Value: Copy;
    fn number(&self, value: f64) -> Self::Value;
    fn add(&self, x: Self::Value, y: Self::Value) -> Self::Value;
    fn sub(&self, x: Self::Value, y: Self::Value) -> Self::Value;
    fn mul(&self, x: Self::Value, y: Self::Value) -> Self::Value;
    fn div(&self, x: Self::Value, y: Self::Value) -> Self::Value;
    fn min(&self, x: Self::Value, y: Self::Value) -> Self::Value;
    fn max(&self, x: Self::Value, y: Self::Value) -> Self::Value;
    fn pow(&self, x: Self::Value, y: Self::Value) -> Self::Value;
    fn log(&self, x: Self::Value) -> Self::Value;
    fn cos(&self, x: Self::Value) -> Self::Value;
    fn floor(&self, x: Self::Value) -> Self::Value;
    fn ceil(&self, x: Self::Value) -> Self::Value;
    /// `then` if x ≤ y, else `otherwise`.
    fn if_at_most(&self, x: Self::Value, y: Self::Value, then: Self::Value, otherwise: Self::Value) -> Self::Value;
}

struct Numbers;

impl Arithmetic for Numbers {
    type Value = f64;
    fn number(&self, value: f64) -> f64 {
        value
    }
    fn add(&self, x: f64, y: f64) -> f64 {
        x + y
    }
    fn sub(&self, x: f64, y: f64) -> f64 {
        x - y
    }
    fn mul(&self, x: f64, y: f64) -> f64 {
        x * y
    }
    fn div(&self, x: f64, y: f64) -> f64 {
        x / y
    }
    fn min(&self, x: f64, y: f64) -> f64 {
        x.min(y)
    }
    fn max(&self, x: f64, y: f64) -> f64 {
        x.max(y)
    }
    fn pow(&self, x: f64, y: f64) -> f64 {
        x.powf(y)
    }
    fn log(&self, x: f64) -> f64 {
        x.ln()
    }
    fn cos(&self, x: f64) -> f64 {
        x.cos()
    }
    fn floor(&self, x: f64) -> f64 {
        x.floor()
    }
    fn ceil(&self, x: f64) -> f64 {
        x.ceil()
    }
    fn if_at_most(&self, x: f64, y: f64, then: f64, otherwise: f64) -> f64 {
        if x <= y { then } else { otherwise }
    }
}

struct Nodes<'g>(&'g Graph);

impl<'g> Arithmetic for Nodes<'g> {
    type Value = Output<'g>;
    fn number(&self, value: f64) -> Output<'g> {
        self.0.constant(Tensor::scalar(value))
    }
    fn add(&self, x: Output<'g>, y: Output<'g>) -> Output<'g> {
        x + y
    }
    fn sub(&self, x: Output<'g>, y: Output<'g>) -> Output<'g> {
        x - y
    }
    fn mul(&self, x: Output<'g>, y: Output<'g>) -> Output<'g> {
        x * y
    }
    fn div(&self, x: Output<'g>, y: Output<'g>) -> Output<'g> {
        x / y
    }
    fn min(&self, x: Output<'g>, y: Output<'g>) -> Output<'g> {
        ops::minimum(x, y)
    }
    fn max(&self, x: Output<'g>, y: Output<'g>) -> Output<'g> {
        ops::maximum(x, y)
    }
    fn pow(&self, x: Output<'g>, y: Output<'g>) -> Output<'g> {
        ops::pow(x, y)
    }
    fn log(&self, x: Output<'g>) -> Output<'g> {
        ops::log(x)
    }
    fn cos(&self, x: Output<'g>) -> Output<'g> {
        ops::cos(x)
    }
    fn floor(&self, x: Output<'g>) -> Output<'g> {
        ops::floor(x)
    }
    fn ceil(&self, x: Output<'g>) -> Output<'g> {
        ops::ceil(x)
    }
    fn if_at_most(&self, x: Output<'g>, y: Output<'g>, then: Output<'g>, otherwise: Output<'g>) -> Output<'g> {
        ops::select(ops::less_equal(x, y), then, otherwise)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_runtime::Session;

    use super::*;

    const STEPS: [u64; 9] = [0, 1, 5, 9, 10, 11, 25, 40, 100];

    /// Both forms give these rates at [`STEPS`].
    #[track_caller]
    fn check(schedule: &Schedule, expected: [f64; 9]) {
        let g = kolo_ops::graph();
        let step = g.placeholder::<i64>("step", kolo_core::PartialShape::scalar());
        let rate = schedule.build(step);
        assert_eq!((rate.dtype(), rate.shape().rank()), (DType::F32, Some(0)));
        let session = Session::new(&g).unwrap();
        for (at, expected) in STEPS.into_iter().zip(expected) {
            let number = schedule.at(at);
            assert!((number - expected).abs() <= 3e-7, "{schedule:?} at {at}: {number} is not {expected}");
            let found = session.run(&[rate], &[(step, Tensor::scalar(at as i64))], &[]).unwrap();
            let found = f64::from(found[0].scalar_value::<f32>().unwrap());
            assert!((found - number).abs() <= 1e-7, "{schedule:?} at {at}: {found} in the graph is not {number}");
        }
    }

    #[test]
    fn rates_are_tensorflows() {
        // tf.compat.v1.train.exponential_decay, piecewise_constant, polynomial_decay, cosine_decay, cosine_decay_restarts and
        // inverse_time_decay with the same arguments, TensorFlow 2.21.
        check(&Schedule::constant(0.5), [0.5; 9]);
        check(
            &Schedule::exponential(0.5, 10, 0.5),
            [0.5, 0.4665165, 0.35355338, 0.26794335, 0.25, 0.23325825, 0.088388346, 0.03125, 0.00048828125],
        );
        let stairs = [0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.125, 0.03125, 0.00048828125];
        check(&Schedule::exponential(0.5, 10, 0.5).staircase(), stairs);
        check(&Schedule::step(0.5, 10, 0.5), stairs);
        check(&Schedule::piecewise(&[5, 10], &[1.0, 0.5, 0.1]), [1.0, 1.0, 1.0, 0.5, 0.5, 0.1, 0.1, 0.1, 0.1]);
        check(&Schedule::polynomial(0.5, 10, 0.1, 2.0), [0.5, 0.42399997, 0.2, 0.104, 0.1, 0.1, 0.1, 0.1, 0.1]);
        check(
            &Schedule::polynomial(0.5, 10, 0.1, 2.0).cycle(),
            [0.5, 0.42399997, 0.2, 0.104, 0.1, 0.181, 0.11111111, 0.1, 0.1],
        );
        check(
            &Schedule::cosine(0.5, 10).alpha(0.1),
            [0.5, 0.4889877, 0.27499998, 0.061012264, 0.05, 0.05, 0.05, 0.05, 0.05],
        );
        let restarts = |longer| Schedule::CosineRestarts { initial: 0.5, steps: 10, longer, lower: 0.5, alpha: 0.1 };
        check(
            &restarts(2.0),
            [0.5, 0.4889877, 0.27499998, 0.061012264, 0.275, 0.27361494, 0.08295049, 0.14602476, 0.088887975],
        );
        check(
            &restarts(1.0),
            [0.5, 0.4889877, 0.27499998, 0.061012264, 0.275, 0.26949385, 0.106249996, 0.078125, 0.050439455],
        );
        check(
            &Schedule::inverse_time(0.5, 10, 0.5),
            [0.5, 0.4761905, 0.4, 0.34482756, 0.33333334, 0.32258067, 0.22222222, 0.16666667, 0.083333336],
        );
    }

    #[test]
    fn a_warm_up_comes_before_any_other() {
        // A straight line to 0.5 at step 10, then 0.5 · 0.5 ^ ((step − 10) / 10).
        check(
            &Schedule::exponential(0.5, 10, 0.5).warm_up(10),
            [0.0, 0.05, 0.25, 0.45, 0.5, 0.4665165, 0.1767767, 0.0625, 0.0009765625],
        );
        check(&Schedule::constant(0.5).warm_up(0), [0.5; 9]);
        check(
            &Schedule::WarmUp { start: 0.1, steps: 5, then: Box::new(Schedule::linear(0.5, 20, 0.1)) },
            [0.1, 0.18, 0.5, 0.42, 0.4, 0.38, 0.1, 0.1, 0.1],
        );
    }
}
