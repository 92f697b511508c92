//! Images from one format to the other.

use kolo_core::{Element, Shape};

/// The elements of NCHW images of `shape`, with the channels last.
pub fn to_nhwc<T: Element>(images: &[T], shape: &Shape) -> Vec<T> {
    let (channels, plane) = (shape[1], shape[2] * shape[3]);
    let mut out = vec![T::default(); images.len()];
    transpose(images, channels, plane, &mut out);
    out
}

/// Writes NHWC images as NCHW images of `shape`.
pub fn to_nchw<T: Element>(images: &[T], shape: &Shape, out: &mut [T]) {
    transpose(images, shape[2] * shape[3], shape[1], out);
}

/// Exchanges rows and columns of each of the matrices that `from` holds.
fn transpose<T: Element>(from: &[T], rows: usize, columns: usize, to: &mut [T]) {
    if rows * columns == 0 {
        return;
    }
    for (from, to) in from.chunks_exact(rows * columns).zip(to.chunks_exact_mut(rows * columns)) {
        for (column, to) in to.chunks_exact_mut(rows).enumerate() {
            to.iter_mut().enumerate().for_each(|(row, to)| *to = from[row * columns + column]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        let shape = Shape::from([2, 3, 1, 2]);
        let images: Vec<i32> = (0..12).collect();
        let last = to_nhwc(&images, &shape);
        assert_eq!(last, [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
        let mut back = vec![0; 12];
        to_nchw(&last, &shape, &mut back);
        assert_eq!(back, images);
    }
}
