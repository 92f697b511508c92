//! The learning rate: a number, a tensor, or a schedule.

use kolo_graph::Output;

use super::Schedule;

/// How far an update goes along the gradient.
///
/// ```
/// use kolo::optim::{Adam, Schedule};
///
/// let g = kolo::graph();
/// let by_hand = g.placeholder::<f32>("rate", kolo::PartialShape::scalar());
/// let number = Adam::new(0.001);
/// let tensor = Adam::new(by_hand);
/// let schedule = Adam::new(Schedule::cosine(0.001, 10_000).warm_up(500));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum LearningRate {
    /// Always the same.
    Constant(f64),
    /// The value of a scalar of the graph, by its name.
    Tensor(String),
    /// A function of the global step.
    Schedule(Schedule),
}

impl LearningRate {
    /// The rate at a step, where it can be known without running the graph.
    pub fn at(&self, step: u64) -> Option<f64> {
        match self {
            LearningRate::Constant(rate) => Some(*rate),
            LearningRate::Tensor(_) => None,
            LearningRate::Schedule(schedule) => Some(schedule.at(step)),
        }
    }
}

impl From<f64> for LearningRate {
    fn from(rate: f64) -> LearningRate {
        LearningRate::Constant(rate)
    }
}

impl From<f32> for LearningRate {
    fn from(rate: f32) -> LearningRate {
        LearningRate::Constant(rate.into())
    }
}

impl From<Output<'_>> for LearningRate {
    fn from(rate: Output<'_>) -> LearningRate {
        LearningRate::Tensor(rate.name())
    }
}

impl From<Schedule> for LearningRate {
    fn from(schedule: Schedule) -> LearningRate {
        LearningRate::Schedule(schedule)
    }
}
