//! Shapes. A [`Shape`] is the shape of a value; a [`PartialShape`] is what is known statically about a value's shape.

use std::fmt;
use std::ops::Deref;

use smallvec::SmallVec;

use crate::{Error, Result};

/// The size of one dimension, if it is known.
pub type Dim = Option<usize>;

/// The sizes of a tensor's dimensions. The number of elements always fits an `isize`.
#[derive(PartialEq, Eq, Hash, Default)]
pub struct Shape(SmallVec<[usize; 4]>);

/// Copies the sizes as a block; the derived implementation copies one by one, and tensors are cloned for every
/// consumer.
impl Clone for Shape {
    #[inline]
    fn clone(&self) -> Shape {
        if self.0.is_empty() { Shape::default() } else { Shape(SmallVec::from_slice(&self.0)) }
    }
}

impl Shape {
    /// The shape with these sizes; an error if the number of elements would overflow.
    pub fn new(dims: &[usize]) -> Result<Shape> {
        let mut n_elements = Some(1usize);
        // Zero sizes must not hide an overflow in the others: strides are products of those.
        for &dim in dims.iter().filter(|&&dim| dim != 0) {
            n_elements = n_elements.and_then(|n| n.checked_mul(dim));
        }
        match n_elements {
            Some(n) if n <= isize::MAX as usize => Ok(Shape(SmallVec::from_slice(dims))),
            _ => Err(Error::invalid_argument(format!("shape {} has too many elements", ListDisplay(dims)))),
        }
    }

    /// As [`Shape::new`], from the signed sizes of the wire; negative sizes are an error.
    pub fn from_signed(dims: &[i64]) -> Result<Shape> {
        let sizes: SmallVec<[usize; 4]> = dims
            .iter()
            .map(|&dim| {
                usize::try_from(dim)
                    .map_err(|_| Error::invalid_argument(format!("shape {} has a negative size", ListDisplay(dims))))
            })
            .collect::<Result<_>>()?;
        Shape::new(&sizes)
    }

    /// The shape of a single value.
    #[inline]
    pub fn scalar() -> Shape {
        Shape::default()
    }

    /// The sizes.
    #[inline]
    pub fn dims(&self) -> &[usize] {
        &self.0
    }

    /// The number of dimensions.
    #[inline]
    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// The product of the sizes.
    #[inline]
    pub fn n_elements(&self) -> usize {
        self.0.iter().product()
    }
}

impl Deref for Shape {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        &self.0
    }
}

/// For literal shapes in a program. Panics if the number of elements overflows; use [`Shape::new`] for sizes from
/// input.
impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Shape {
        Shape::new(&dims).expect("a shape literal is small")
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        ListDisplay(&self.0).fmt(f)
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

struct ListDisplay<'a, T>(&'a [T]);

impl<T: fmt::Display> fmt::Display for ListDisplay<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, dim) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(",")?;
            }
            write!(f, "{dim}")?;
        }
        f.write_str("]")
    }
}

/// What is known statically of a shape: nothing, the rank, or some of the sizes.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct PartialShape(Option<SmallVec<[Dim; 4]>>);

impl PartialShape {
    /// Nothing is known, not even the rank.
    pub fn unknown() -> PartialShape {
        PartialShape(None)
    }

    /// The rank is known, the sizes are not.
    pub fn of_rank(rank: usize) -> PartialShape {
        PartialShape(Some(SmallVec::from_elem(None, rank)))
    }

    /// Exactly these sizes, `None` for an unknown one.
    pub fn new(dims: &[Dim]) -> PartialShape {
        PartialShape(Some(SmallVec::from_slice(dims)))
    }

    /// A single value.
    pub fn scalar() -> PartialShape {
        PartialShape::new(&[])
    }

    /// The sizes, if at least the rank is known.
    pub fn dims(&self) -> Option<&[Dim]> {
        self.0.as_deref()
    }

    /// The rank, if known.
    pub fn rank(&self) -> Option<usize> {
        self.0.as_ref().map(|dims| dims.len())
    }

    /// Size `index`, counted from the end if negative; `None` if unknown or out of range.
    pub fn dim(&self, index: isize) -> Dim {
        let dims = self.0.as_ref()?;
        let index = if index < 0 { index + dims.len() as isize } else { index };
        dims.get(usize::try_from(index).ok()?).copied().flatten()
    }

    /// The full shape, if every size is known and their product fits.
    pub fn known(&self) -> Option<Shape> {
        let dims: Option<SmallVec<[usize; 4]>> = self.0.as_ref()?.iter().copied().collect();
        Shape::new(&dims?).ok()
    }

    /// The number of elements, if every size is known.
    pub fn n_elements(&self) -> Option<usize> {
        self.known().map(|shape| shape.n_elements())
    }

    /// True if a value of `shape` is allowed here.
    pub fn admits(&self, shape: &Shape) -> bool {
        match &self.0 {
            None => true,
            Some(dims) => {
                dims.len() == shape.rank()
                    && dims.iter().zip(shape.dims()).all(|(known, dim)| known.is_none_or(|n| n == *dim))
            }
        }
    }

    /// The combined information of both; an error if they contradict each other.
    pub fn merge(&self, other: &PartialShape) -> Result<PartialShape> {
        let (Some(a), Some(b)) = (&self.0, &other.0) else {
            return Ok(if self.0.is_some() { self.clone() } else { other.clone() });
        };
        let conflict = || Error::invalid_argument(format!("shapes {self} and {other} are not compatible"));
        if a.len() != b.len() {
            return Err(conflict());
        }
        let merged: Option<SmallVec<[Dim; 4]>> = a
            .iter()
            .zip(b)
            .map(|(a, b)| match (a, b) {
                (Some(a), Some(b)) if a != b => None,
                (a, b) => Some(a.or(*b)),
            })
            .collect();
        merged.map(|dims| PartialShape(Some(dims))).ok_or_else(conflict)
    }

    /// Only what both agree on: sizes that differ become unknown, and so does the rank.
    pub fn relax(&self, other: &PartialShape) -> PartialShape {
        match (&self.0, &other.0) {
            (Some(a), Some(b)) if a.len() == b.len() => {
                PartialShape(Some(a.iter().zip(b).map(|(a, b)| if a == b { *a } else { None }).collect()))
            }
            _ => PartialShape::unknown(),
        }
    }

    /// This shape followed by another.
    pub fn concat(&self, tail: &PartialShape) -> PartialShape {
        match (&self.0, &tail.0) {
            (Some(a), Some(b)) => PartialShape(Some(a.iter().chain(b).copied().collect())),
            _ => PartialShape::unknown(),
        }
    }

    /// The broadcast shape of two inputs of an elementwise op, by NumPy's rules.
    pub fn broadcast(&self, other: &PartialShape) -> Result<PartialShape> {
        let (Some(a), Some(b)) = (&self.0, &other.0) else { return Ok(PartialShape::unknown()) };
        let rank = a.len().max(b.len());
        let mut dims: SmallVec<[Dim; 4]> = SmallVec::with_capacity(rank);
        for i in 0..rank {
            let of = |dims: &SmallVec<[Dim; 4]>| match (i + dims.len()).checked_sub(rank) {
                Some(at) => dims[at],
                None => Some(1),
            };
            dims.push(match (of(a), of(b)) {
                (Some(1), dim) | (dim, Some(1)) => dim,
                (Some(x), Some(y)) if x == y => Some(x),
                (Some(_), Some(_)) => {
                    return Err(Error::invalid_argument(format!("shapes {self} and {other} do not broadcast")));
                }
                // The unknown one is either the same or 1.
                (Some(x), None) | (None, Some(x)) => Some(x),
                (None, None) => None,
            });
        }
        Ok(PartialShape(Some(dims)))
    }
}

impl From<&Shape> for PartialShape {
    fn from(shape: &Shape) -> PartialShape {
        PartialShape(Some(shape.iter().map(|&dim| Some(dim)).collect()))
    }
}

impl From<Shape> for PartialShape {
    fn from(shape: Shape) -> PartialShape {
        PartialShape::from(&shape)
    }
}

impl<const N: usize> From<[usize; N]> for PartialShape {
    fn from(dims: [usize; N]) -> PartialShape {
        PartialShape(Some(dims.into_iter().map(Some).collect()))
    }
}

impl<const N: usize> From<[Dim; N]> for PartialShape {
    fn from(dims: [Dim; N]) -> PartialShape {
        PartialShape::new(&dims)
    }
}

impl fmt::Display for PartialShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(dims) = &self.0 else { return f.write_str("<unknown>") };
        f.write_str("[")?;
        for (i, dim) in dims.iter().enumerate() {
            if i > 0 {
                f.write_str(",")?;
            }
            match dim {
                Some(dim) => write!(f, "{dim}")?,
                None => f.write_str("?")?,
            }
        }
        f.write_str("]")
    }
}

impl fmt::Debug for PartialShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn partial(dims: &[i64]) -> PartialShape {
        PartialShape::new(&dims.iter().map(|&dim| usize::try_from(dim).ok()).collect::<Vec<_>>())
    }

    #[test]
    fn too_many_elements_is_an_error_even_beside_a_zero() {
        assert!(Shape::new(&[1 << 40, 1 << 40]).is_err());
        assert!(Shape::new(&[0, 1 << 40, 1 << 40]).is_err());
        assert_eq!(Shape::new(&[0, 7]).map(|shape| shape.n_elements()), Ok(0));
        assert!(Shape::from_signed(&[2, -1]).is_err());
    }

    #[test]
    fn broadcasting_follows_numpy() {
        let check = |a: &[i64], b: &[i64], expect: Option<&[i64]>| {
            assert_eq!(partial(a).broadcast(&partial(b)).ok(), expect.map(partial), "{a:?} {b:?}");
        };
        check(&[2, 3], &[3], Some(&[2, 3]));
        check(&[2, 1], &[1, 3], Some(&[2, 3]));
        check(&[2, 3], &[], Some(&[2, 3]));
        check(&[-1, 3], &[1, 3], Some(&[-1, 3]));
        check(&[-1], &[4], Some(&[4]));
        check(&[2], &[3], None);
        check(&[0], &[1], Some(&[0]));
    }

    #[test]
    fn merging_keeps_what_either_knows() {
        assert_eq!(partial(&[-1, 3]).merge(&partial(&[2, -1])), Ok(partial(&[2, 3])));
        assert!(partial(&[2]).merge(&partial(&[3])).is_err());
        assert!(partial(&[2]).merge(&partial(&[2, 1])).is_err());
        assert_eq!(PartialShape::unknown().merge(&partial(&[2])), Ok(partial(&[2])));
        assert_eq!(partial(&[2, 3]).relax(&partial(&[2, 4])), partial(&[2, -1]));
    }

    #[test]
    fn shapes_print_as_in_messages() {
        assert_eq!(Shape::from([2, 3]).to_string(), "[2,3]");
        assert_eq!(partial(&[-1, 784]).to_string(), "[?,784]");
        assert_eq!(PartialShape::unknown().to_string(), "<unknown>");
    }
}
