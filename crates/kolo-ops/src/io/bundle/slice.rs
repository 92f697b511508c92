//! Boxes in tensors: their text in `shape_and_slices`, their keys in an index, and copies between them.

use std::fmt;

use kolo_core::{Error, Result, Shape};
use kolo_graph::wire::proto::{Extent, TensorSliceProto};

/// Tensors of more dimensions are a mistake or an attack; TensorFlow's own limit.
const MAX_RANK: usize = 254;

/// A box: for each dimension a start and a length, or all of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorSlice(Vec<Option<(usize, usize)>>);

impl TensorSlice {
    /// All of a tensor of this rank.
    pub fn full(rank: usize) -> TensorSlice {
        TensorSlice(vec![None; rank])
    }

    /// The box that begins at `offset` and is as large as `shape`.
    pub fn at(offset: &[usize], shape: &[usize]) -> TensorSlice {
        TensorSlice(offset.iter().copied().zip(shape.iter().copied()).map(Some).collect())
    }

    /// The message's box; an error if its numbers make no sense.
    pub fn from_proto(proto: &TensorSliceProto) -> Result<TensorSlice> {
        let extent = |extent: &Extent| match extent.length {
            None if extent.start == 0 => Ok(None),
            Some(length) => match (usize::try_from(extent.start), usize::try_from(length)) {
                (Ok(start), Ok(length)) => Ok(Some((start, length))),
                _ => Err(Error::data_loss(format!("a slice from {} of length {length}", extent.start))),
            },
            None => Err(Error::data_loss(format!("a slice from {} without a length", extent.start))),
        };
        proto.extent.iter().map(extent).collect::<Result<_>>().map(TensorSlice)
    }

    /// The message.
    pub fn to_proto(&self) -> TensorSliceProto {
        let extent = |extent: &Option<(usize, usize)>| match *extent {
            None => Extent::default(),
            Some((start, length)) => Extent { start: start as i64, length: Some(length as i64) },
        };
        TensorSliceProto { extent: self.0.iter().map(extent).collect() }
    }

    /// Start and length in each dimension of a tensor of this shape; an error if the box is not in it.
    pub fn bounds(&self, shape: &Shape) -> Result<Vec<(usize, usize)>> {
        if self.0.len() != shape.rank() {
            return Err(Error::invalid_argument(format!(
                "slice {self} of a tensor of shape {shape}: the ranks differ"
            )));
        }
        let bound = |(i, extent): (usize, &Option<(usize, usize)>)| match *extent {
            None => Ok((0, shape[i])),
            Some((start, length)) if start.checked_add(length).is_some_and(|end| end <= shape[i]) => {
                Ok((start, length))
            }
            Some(_) => Err(Error::invalid_argument(format!(
                "Extent in dimension {i} out of bounds: shape = {shape}, slice = {self}"
            ))),
        };
        self.0.iter().enumerate().map(bound).collect()
    }

    /// The shape of the box in a tensor of this shape; an error if it is not in it.
    pub fn shape_in(&self, shape: &Shape) -> Result<Shape> {
        let lengths: Vec<usize> = self.bounds(shape)?.into_iter().map(|(_, length)| length).collect();
        Shape::new(&lengths)
    }

    /// The key under which an index holds the box of the tensor `name`. It sorts before all tensors' own names.
    pub fn key(&self, name: &str) -> Vec<u8> {
        let mut key = Vec::new();
        push_number(&mut key, 0);
        push_string(&mut key, name.as_bytes());
        push_number(&mut key, self.0.len() as u64);
        for extent in &self.0 {
            // The whole dimension is from 0, of length -1.
            let (start, length) = extent.map_or((0, -1), |(start, length)| (start as i64, length as i64));
            push_signed(&mut key, start);
            push_signed(&mut key, length);
        }
        key
    }
}

/// `0,3:-`.
impl fmt::Display for TensorSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, extent) in self.0.iter().enumerate() {
            let colon = if i > 0 { ":" } else { "" };
            match extent {
                Some((start, length)) => write!(f, "{colon}{start},{length}")?,
                None => write!(f, "{colon}-")?,
            }
        }
        Ok(())
    }
}

/// Reads an entry of `shape_and_slices`: the shape of a whole tensor and a box in it, as in `5 4 0,3:-`.
pub fn parse_shape_and_slice(text: &str) -> Result<(Shape, TensorSlice)> {
    let bad = |why: &str| Error::invalid_argument(format!("shape_and_slice specification '{text}' {why}"));
    let mut parts: Vec<&str> = text.split(' ').filter(|part| !part.is_empty()).collect();
    let slice = parts.pop().ok_or_else(|| bad("is empty"))?;
    if parts.len() > MAX_RANK {
        return Err(bad("has too many dimensions"));
    }
    let sizes = parts.iter().map(|size| size.parse::<usize>()).collect::<Result<Vec<usize>, _>>();
    let shape = Shape::new(&sizes.map_err(|_| bad("should begin with sizes, as in '5 4 0,3:-'"))?)?;
    let extent = |text: &str| match text.split_once(',') {
        None if text == "-" => Some(None),
        None => None,
        Some((start, length)) => Some(Some((start.parse().ok()?, length.parse().ok().filter(|n| *n > 0)?))),
    };
    let extents = slice.split(':').map(extent).collect::<Option<Vec<_>>>();
    let slice = TensorSlice(extents.ok_or_else(|| bad("should end with a start and a length, or -, for each size"))?);
    slice.bounds(&shape)?;
    Ok((shape, slice))
}

/// A byte that says how many follow, then those, big end first.
fn push_number(key: &mut Vec<u8>, value: u64) {
    let n_bytes = 8 - value.leading_zeros() as usize / 8;
    key.push(n_bytes as u8);
    key.extend_from_slice(&value.to_be_bytes()[8 - n_bytes..]);
}

/// The bytes, with those escaped that would end them or sort wrongly.
fn push_string(key: &mut Vec<u8>, text: &[u8]) {
    for &byte in text {
        match byte {
            0x00 => key.extend_from_slice(&[0x00, 0xff]),
            0xff => key.extend_from_slice(&[0xff, 0x00]),
            other => key.push(other),
        }
    }
    key.extend_from_slice(&[0x00, 0x01]);
}

/// Two's complement, big end first, in as few bytes as leave room for the header bits that say how many those are and
/// make the bytes sort as the numbers do.
fn push_signed(key: &mut Vec<u8>, value: i64) {
    const HEADER: [[u8; 2]; 10] = [
        [0x80, 0],
        [0xc0, 0],
        [0xe0, 0],
        [0xf0, 0],
        [0xf8, 0],
        [0xfc, 0],
        [0xfe, 0],
        [0xff, 0],
        [0xff, 0x80],
        [0xff, 0xc0],
    ];
    let magnitude = (if value < 0 { !value } else { value }) as u64;
    let n_bits = 64 - magnitude.leading_zeros() as usize;
    // The least n with magnitude < 2^(7n - 1).
    let n = (n_bits + 1).div_ceil(7).max(1);
    let wide = i128::from(value).to_be_bytes();
    let at = key.len();
    key.extend_from_slice(&wide[16 - n..]);
    key[at] ^= HEADER[n - 1][0];
    if n > 1 {
        key[at + 1] ^= HEADER[n - 1][1];
    }
}

/// Where two boxes meet: start and length in each dimension; `None` if they do not.
pub fn intersection(a: &[(usize, usize)], b: &[(usize, usize)]) -> Option<Vec<(usize, usize)>> {
    a.iter()
        .zip(b)
        .map(|(&(a, n), &(b, m))| {
            let (start, end) = (a.max(b), (a + n).min(b + m));
            (start < end).then(|| (start, end - start))
        })
        .collect()
}

/// Calls `copy(from, to, n)` for each run of elements of `common` that lies side by side both in the box `from` and in the
/// box `to`; the numbers are elements from the beginning of each.
pub fn for_each_run(
    common: &[(usize, usize)],
    from: &[(usize, usize)],
    to: &[(usize, usize)],
    copy: &mut dyn FnMut(usize, usize, usize),
) {
    let rank = common.len();
    // Trailing dimensions that are whole in both boxes join into one run.
    let mut inner = rank;
    let mut run = 1;
    while inner > 0 {
        inner -= 1;
        run *= common[inner].1;
        if common[inner].1 != from[inner].1 || common[inner].1 != to[inner].1 {
            break;
        }
    }
    let position = |within: &[(usize, usize)], index: &[usize]| {
        (0..rank).fold(0, |at, i| at * within[i].1 + common[i].0 + index[i] - within[i].0)
    };
    let mut index = vec![0; rank];
    loop {
        copy(position(from, &index), position(to, &index), run);
        // The next index over the dimensions before the run.
        let mut i = inner;
        loop {
            if i == 0 {
                return;
            }
            i -= 1;
            index[i] += 1;
            if index[i] < common[i].1 {
                break;
            }
            index[i] = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn keys_are_tensorflow_s() {
        // From the specification, and from an index that TensorFlow wrote.
        let slice = TensorSlice(vec![Some((0, 100)), None]);
        assert_eq!(hex(&slice.key("p")), "00700001010280c064807f");
        assert_eq!(hex(&TensorSlice::at(&[3, 0], &[2, 4]).key("part")), "007061727400010102".to_owned() + "83828084");
        let mut key = Vec::new();
        push_string(&mut key, b"a\x00\xff");
        assert_eq!(hex(&key), "6100ffff000001");
        for (value, expected) in
            [(63, "bf"), (64, "c040"), (-64, "40"), (-65, "3fbf"), (8191, "dfff"), (8192, "e02000")]
        {
            let mut key = Vec::new();
            push_signed(&mut key, value);
            assert_eq!(hex(&key), expected, "{value}");
        }
        for (value, expected) in [(i64::MAX, "ffc07fffffffffffffff"), (i64::MIN, "003f8000000000000000")] {
            let mut key = Vec::new();
            push_signed(&mut key, value);
            assert_eq!(hex(&key), expected, "{value}");
        }
    }

    #[test]
    fn specifications_are_read_or_refused() {
        let (shape, slice) = parse_shape_and_slice("5 4 0,3:-").unwrap();
        assert_eq!((shape.dims(), slice.to_string().as_str()), (&[5usize, 4][..], "0,3:-"));
        assert_eq!(slice.shape_in(&shape).unwrap().dims(), [3, 4]);
        assert_eq!(TensorSlice::from_proto(&slice.to_proto()).unwrap(), slice);
        let error = parse_shape_and_slice("2 3 0,3:-").unwrap_err();
        assert_eq!(error.message(), "Extent in dimension 0 out of bounds: shape = [2,3], slice = 0,3:-");
        for bad in ["", " ", "5", "5 4", "5 0,2:-", "x 0,1", "5 0,0", "5 -1,2", "5 1,99999999999999999999", "5 5,1"] {
            assert!(parse_shape_and_slice(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn boxes_are_copied_run_by_run() {
        // A 4x3 tensor; the stored box is rows 1..4, the wanted one columns 1..3.
        let (from, to) = ([(1, 3), (0, 3)], [(0, 4), (1, 2)]);
        let common = intersection(&from, &to).unwrap();
        assert_eq!(common, [(1, 3), (1, 2)]);
        let mut runs = Vec::new();
        for_each_run(&common, &from, &to, &mut |from, to, n| runs.push((from, to, n)));
        assert_eq!(runs, [(1, 2, 2), (4, 4, 2), (7, 6, 2)]);
        // Whole rows are one run.
        let (from, to) = ([(1, 3), (0, 3)], [(0, 4), (0, 3)]);
        let mut runs = Vec::new();
        for_each_run(&intersection(&from, &to).unwrap(), &from, &to, &mut |from, to, n| runs.push((from, to, n)));
        assert_eq!(runs, [(0, 3, 9)]);
        assert!(intersection(&[(0, 2)], &[(2, 2)]).is_none());
        let mut scalar = Vec::new();
        for_each_run(&[], &[], &[], &mut |from, to, n| scalar.push((from, to, n)));
        assert_eq!(scalar, [(0, 0, 1)]);
    }
}
