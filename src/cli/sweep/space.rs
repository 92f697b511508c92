//! Which runs a sweep has: every combination of lists, or points drawn at random.

use crate::data::Random;
use crate::{Error, Result};

/// A flag and the values to try.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    flag: String,
    values: Vec<String>,
}

/// A flag and the range to draw from.
#[derive(Clone, Debug, PartialEq)]
pub struct RandomAxis {
    flag: String,
    low: f64,
    high: f64,
    is_log: bool,
    is_whole: bool,
}

/// One run: flags without their dashes, and values.
pub type Point = Vec<(String, String)>;

/// The most runs of a sweep.
const MAX_RUNS: usize = 10_000;

/// `lr=0.1,0.01`.
pub fn parse_grid(text: &str) -> std::result::Result<Axis, String> {
    let (flag, values) = name_and_rest(text, "lr=0.1,0.01")?;
    let values: Vec<String> = values.split(',').map(|value| value.trim().to_owned()).collect();
    if values.iter().any(String::is_empty) {
        return Err(format!("'{text}' has an empty value"));
    }
    if let Some(twice) = values.iter().enumerate().find(|(i, value)| values[..*i].contains(value)) {
        return Err(format!("'{text}' names {} twice", twice.1));
    }
    Ok(Axis { flag, values })
}

/// `lr=log:1e-4..1e-1` or `width=32..128`.
pub fn parse_range(text: &str) -> std::result::Result<RandomAxis, String> {
    const LIKE: &str = "lr=log:1e-4..1e-1";
    let (flag, rest) = name_and_rest(text, LIKE)?;
    let (is_log, ends) = rest.strip_prefix("log:").map_or((false, rest), |ends| (true, ends));
    let (low, high) = ends.split_once("..").ok_or_else(|| format!("'{text}' is not like {LIKE}"))?;
    let number = |end: &str| end.trim().parse::<f64>().ok().filter(|end| end.is_finite());
    let (Some(from), Some(to)) = (number(low), number(high)) else {
        return Err(format!("the ends of '{text}' are not both numbers"));
    };
    if from >= to {
        return Err(format!("'{text}' is empty: {low} is not below {high}"));
    }
    if is_log && from <= 0.0 {
        return Err(format!("'{text}': a range over magnitudes begins above 0"));
    }
    let is_whole = [low, high].iter().all(|end| end.trim().parse::<i64>().is_ok());
    Ok(RandomAxis { flag, low: from, high: to, is_log, is_whole })
}

fn name_and_rest<'a>(text: &'a str, like: &str) -> std::result::Result<(String, &'a str), String> {
    let (flag, rest) = text.split_once('=').ok_or_else(|| format!("'{text}' is not like {like}"))?;
    let flag = flag.trim().trim_start_matches("--");
    match flag.is_empty() {
        true => Err(format!("'{text}' names no flag; it is like {like}")),
        false => Ok((flag.to_owned(), rest)),
    }
}

/// Every combination, the last axis changing fastest.
pub fn grid(axes: &[Axis]) -> Result<Vec<Point>> {
    if axes.is_empty() {
        return Err(Error::invalid_argument(
            "a sweep needs values to try: --grid lr=0.1,0.01, or --random 20 --range lr=log:1e-4..1",
        ));
    }
    no_flag_twice(axes.iter().map(|axis| axis.flag.as_str()))?;
    let n = axes.iter().try_fold(1usize, |n, axis| n.checked_mul(axis.values.len()).filter(|n| *n <= MAX_RUNS));
    n.ok_or_else(|| Error::invalid_argument(format!("the grid has more than {MAX_RUNS} points; take --random")))?;
    let mut points: Vec<Point> = vec![Vec::new()];
    for axis in axes {
        let longer = |point: &Point| {
            let values = axis.values.iter();
            values.map(|value| [point.clone(), vec![(axis.flag.clone(), value.clone())]].concat()).collect::<Vec<_>>()
        };
        points = points.iter().flat_map(longer).collect();
    }
    Ok(points)
}

/// `n` points, which follow from the seed.
pub fn random(axes: &[Axis], ranges: &[RandomAxis], n: usize, seed: u64) -> Result<Vec<Point>> {
    if n == 0 || n > MAX_RUNS {
        return Err(Error::invalid_argument(format!("--random {n}: give 1 to {MAX_RUNS}")));
    }
    if axes.is_empty() && ranges.is_empty() {
        return Err(Error::invalid_argument("--random needs something to draw: --range lr=log:1e-4..1, or --grid"));
    }
    no_flag_twice(axes.iter().map(|axis| axis.flag.as_str()).chain(ranges.iter().map(|range| range.flag.as_str())))?;
    let mut random = Random::new(seed, 0);
    let mut draw = || f64::from(random.unit());
    let point = |_| {
        let chosen = axes.iter().map(|axis| {
            let at = (draw() * axis.values.len() as f64) as usize;
            (axis.flag.clone(), axis.values[at.min(axis.values.len() - 1)].clone())
        });
        let mut point: Point = chosen.collect();
        point.extend(ranges.iter().map(|range| (range.flag.clone(), range.at(draw()))));
        point
    };
    Ok((0..n).map(point).collect())
}

impl RandomAxis {
    /// The value at a place from 0 to 1, in as many digits as matter.
    fn at(&self, place: f64) -> String {
        let value = match self.is_log {
            true => (self.low.ln() + place * (self.high.ln() - self.low.ln())).exp(),
            // Both ends of whole numbers are as likely as what is between them.
            false if self.is_whole => self.low + place * (self.high - self.low + 1.0),
            false => self.low + place * (self.high - self.low),
        };
        match self.is_whole {
            true if self.is_log => (value.round() as i64).to_string(),
            true => (value.floor().min(self.high) as i64).to_string(),
            false => format!("{value:.4e}"),
        }
    }
}

fn no_flag_twice<'a>(flags: impl Iterator<Item = &'a str>) -> Result<()> {
    let flags: Vec<&str> = flags.collect();
    match flags.iter().enumerate().find(|(i, flag)| flags[..*i].contains(flag)) {
        Some((_, flag)) => Err(Error::invalid_argument(format!("--{flag} is swept twice; name it once"))),
        None => Ok(()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_has_every_combination_once() {
        let axes = ["lr=0.1,0.01", "--optimizer=sgd, adam,momentum"].map(|text| parse_grid(text).unwrap());
        let points = grid(&axes).unwrap();
        assert_eq!(points.len(), 6);
        assert_eq!(points[1], [("lr".to_owned(), "0.1".to_owned()), ("optimizer".to_owned(), "adam".to_owned())]);
        let many = Axis { flag: "seed".to_owned(), values: (0..200).map(|i| i.to_string()).collect() };
        let other = Axis { flag: "batch-size".to_owned(), ..many.clone() };
        assert!(grid(&[many, other]).unwrap_err().message().contains("more than 10000 points"));
        assert!(grid(&[axes[0].clone(), axes[0].clone()]).unwrap_err().message().contains("--lr is swept twice"));
        assert!(grid(&[]).unwrap_err().message().contains("--grid lr=0.1,0.01"));
    }

    #[test]
    fn random_points_are_in_range_and_follow_from_the_seed() {
        let ranges = ["lr=log:1e-4..1e-1", "batch-size=2..5", "x=-1..0.5"].map(|text| parse_range(text).unwrap());
        let axes = [parse_grid("optimizer=sgd,adam").unwrap()];
        let points = random(&axes, &ranges, 300, 7).unwrap();
        assert_eq!(points, random(&axes, &ranges, 300, 7).unwrap());
        assert_ne!(points, random(&axes, &ranges, 300, 8).unwrap());
        let column = |i: usize| points.iter().map(|point| point[i].1.parse::<f64>().unwrap()).collect::<Vec<_>>();
        let rates = column(1);
        assert!(rates.iter().all(|rate| (1e-4..=1e-1).contains(rate)));
        // A third of them for each power of ten.
        let below = rates.iter().filter(|rate| **rate < 1e-3).count();
        assert!((70..130).contains(&below), "{below}");
        for size in 2..=5 {
            let n = column(2).iter().filter(|found| **found == f64::from(size)).count();
            assert!((45..110).contains(&n), "{size}: {n}");
        }
        assert!(column(3).iter().all(|x| (-1.0..=0.5).contains(x)));
        assert!(points.iter().any(|point| point[0].1 == "sgd") && points.iter().any(|point| point[0].1 == "adam"));
        assert!(random(&[], &[], 3, 1).is_err() && random(&axes, &[], 0, 1).is_err());
    }

    #[test]
    fn what_is_no_axis_is_refused() {
        for (text, why) in
            [("lr", "is not like"), ("=1", "names no flag"), ("lr=1,,2", "empty value"), ("lr=1,1", "twice")]
        {
            assert!(parse_grid(text).unwrap_err().contains(why), "{text}");
        }
        let wrong = [
            ("lr=1", "is not like"),
            ("lr=a..1", "not both numbers"),
            ("lr=2..1", "is empty"),
            ("lr=log:0..1", "above 0"),
        ];
        for (text, why) in wrong {
            assert!(parse_range(text).unwrap_err().contains(why), "{text}");
        }
    }
}
