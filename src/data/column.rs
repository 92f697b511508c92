//! One column of a batch: rows gathered from a tensor and turned into what a model takes.
//!
//! This is the hot path of a training loop: pixels stay bytes until here, one pass gathers, converts and scales, and a
//! batch that its consumer has let go of lends its memory to a later one.

use half::{bf16, f16};
use kolo_core::{DType, Element, Error, Result, Shape, Tensor};
use kolo_device::cpu::stream;
use kolo_device::cpu::vmath::scale_u8;

/// What happens to a column's elements when a batch is made.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) enum Convert {
    /// Nothing.
    #[default]
    Keep,
    /// `float`: `x * factor + offset`.
    Scale { factor: f32, offset: f32 },
    /// `int32`, `int64`, `float` or `double` of the same value.
    Cast(DType),
    /// A `float` row of this length, with a one where the value says.
    OneHot(usize),
}

/// How a column is made.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recipe {
    pub convert: Convert,
    /// The shape of a row, if it is not the stored one.
    pub row: Option<Shape>,
    /// Rows are windows of a list instead of the rows of a table.
    pub window: Option<Layout>,
}

/// Where in its tensor a row lies: `length` elements from `start + id * step`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub start: usize,
    pub step: usize,
    pub length: usize,
}

impl Layout {
    fn of<'a, T>(&self, elements: &'a [T], id: usize) -> &'a [T] {
        &elements[self.start + id * self.step..][..self.length]
    }
}

/// Which rows of the source are taken.
#[derive(Clone, Copy)]
pub(crate) enum Rows<'a> {
    /// `start .. start + n`.
    Span(usize, usize),
    /// These, in this order.
    Picked(&'a [u32]),
}

impl Rows<'_> {
    fn len(&self) -> usize {
        match self {
            Rows::Span(_, n) => *n,
            Rows::Picked(ids) => ids.len(),
        }
    }

    fn id(&self, i: usize) -> Option<usize> {
        match self {
            Rows::Span(start, n) => (i < *n).then_some(start + i),
            Rows::Picked(ids) => ids.get(i).map(|&id| id as usize),
        }
    }

    /// Asks for the row that will be copied a few rows after row `i`: picked rows lie anywhere, and each would be waited for.
    fn ask_ahead<T>(&self, i: usize, layout: Layout, elements: &[T]) {
        const N_AHEAD: usize = 4;
        // The processor finds the rest of a long row by itself.
        const MAX_BYTES: usize = 2048;
        if let Some(id) = self.id(i + N_AHEAD) {
            let row = layout.of(elements, id);
            stream::prefetch(&row[..row.len().min(MAX_BYTES / size_of::<T>().max(1))]);
        }
    }

    fn each(&self, mut visit: impl FnMut(usize, usize)) {
        (0..self.len()).filter_map(|i| Some((i, self.id(i)?))).for_each(|(i, id)| visit(i, id));
    }
}

impl Recipe {
    /// The shape of one row of `source` in a batch.
    pub(crate) fn row_shape(&self, source: &Tensor) -> Result<Shape> {
        let stored = match self.window {
            Some(window) => Shape::new(&[window.length])?,
            None => Shape::new(source.shape().get(1..).unwrap_or_default())?,
        };
        let shape = match &self.row {
            Some(shape) if shape.n_elements() != stored.n_elements() => {
                return Err(Error::invalid_argument(format!("rows of shape {stored} cannot be reshaped to {shape}")));
            }
            Some(shape) => shape.clone(),
            None => stored,
        };
        match self.convert {
            Convert::OneHot(depth) => Shape::new(&[shape.dims(), &[depth]].concat()),
            _ => Ok(shape),
        }
    }

    /// The column of a batch.
    pub(crate) fn make(&self, source: &Tensor, rows: Rows<'_>, spare: &mut Spare) -> Result<Tensor> {
        let row = self.row_shape(source)?;
        let shape = Shape::new(&[&[rows.len()], row.dims()].concat())?;
        let plain = source.n_elements() / source.shape().first().copied().unwrap_or(1).max(1);
        let layout = self.window.unwrap_or(Layout { start: 0, step: plain, length: plain });
        match self.convert {
            Convert::Keep => self.keep(source, layout, rows, shape, spare),
            Convert::Cast(dtype) if dtype == source.dtype() => self.keep(source, layout, rows, shape, spare),
            Convert::Scale { .. } | Convert::Cast(DType::F32) => {
                let [factor, offset] =
                    if let Convert::Scale { factor, offset } = self.convert { [factor, offset] } else { [1.0, 0.0] };
                let tensor = spare.take(DType::F32, &shape)?;
                let done = match source.dtype() {
                    // Pixels are what there is most of, and this crate is not where loops are compiled best.
                    DType::U8 => each_row(source, layout, rows, tensor, |from, to| scale_u8(from, factor, offset, to)),
                    dtype => {
                        from_number!(dtype, T => each_row(source, layout, rows, tensor, |from: &[T], to: &mut [f32]| {
                            to.iter_mut().zip(from).for_each(|(to, from)| *to = from.to_f32() * factor + offset);
                        }))
                    }
                };
                spare.lend(done?)
            }
            Convert::Cast(dtype) => {
                let tensor = spare.take(dtype, &shape)?;
                let done = from_number!(source.dtype(), T => match dtype {
                    DType::F64 => convert::<T, f64>(source, layout, rows, tensor, |x| Some(x.to_f64())),
                    DType::I32 => convert::<T, i32>(source, layout, rows, tensor, |x| x.to_i64()?.try_into().ok()),
                    DType::I64 => convert::<T, i64>(source, layout, rows, tensor, T::to_i64),
                    other => Err(Error::unimplemented(format!(
                        "batches are cast to int32, int64, float or double, not to {other}"
                    ))),
                });
                spare.lend(done?)
            }
            Convert::OneHot(depth) => {
                let tensor = spare.take(DType::F32, &shape)?;
                let done = from_number!(source.dtype(), T => one_hot::<T>(source, layout, rows, tensor, depth));
                spare.lend(done?)
            }
        }
    }

    /// Rows as they are: a view where they lie side by side, else a copy.
    fn keep(&self, source: &Tensor, layout: Layout, rows: Rows<'_>, shape: Shape, spare: &mut Spare) -> Result<Tensor> {
        if let (Rows::Span(start, n), None) = (rows, self.window) {
            return source.rows(start, n)?.reshaped(shape);
        }
        if source.dtype() == DType::Str {
            let strings = source.strings()?;
            let mut picked = Vec::with_capacity(shape.n_elements());
            rows.each(|_, id| picked.extend_from_slice(layout.of(strings, id)));
            return Tensor::from_strings(shape, picked);
        }
        let mut tensor = spare.take(source.dtype(), &shape)?;
        let size = source.dtype().size().unwrap_or(0);
        let Layout { start, step, length } = layout;
        let in_bytes = Layout { start: start * size, step: step * size, length: length * size };
        let from = source.host_bytes()?;
        let to = tensor.host_bytes_mut()?;
        rows.each(|i, id| {
            rows.ask_ahead(i, in_bytes, from);
            to[i * in_bytes.length..][..in_bytes.length].copy_from_slice(in_bytes.of(from, id));
        });
        spare.lend(tensor)
    }
}

/// Fills the tensor row by row.
fn each_row<T: Element>(
    source: &Tensor,
    layout: Layout,
    rows: Rows<'_>,
    mut tensor: Tensor,
    fill: impl Fn(&[T], &mut [f32]),
) -> Result<Tensor> {
    let (from, to) = (source.data::<T>()?, tensor.data_mut::<f32>()?);
    rows.each(|i, id| {
        rows.ask_ahead(i, layout, from);
        fill(layout.of(from, id), &mut to[i * layout.length..][..layout.length]);
    });
    Ok(tensor)
}

fn convert<T: Number, U: Element>(
    source: &Tensor,
    layout: Layout,
    rows: Rows<'_>,
    mut tensor: Tensor,
    to_element: impl Fn(T) -> Option<U>,
) -> Result<Tensor> {
    let from = source.data::<T>()?;
    let to = tensor.data_mut::<U>()?;
    let mut wrong = None;
    rows.each(|i, id| {
        for (to, from) in to[i * layout.length..][..layout.length].iter_mut().zip(layout.of(from, id)) {
            match to_element(*from) {
                Some(element) => *to = element,
                None => wrong = Some((id, *from)),
            }
        }
    });
    match wrong {
        None => Ok(tensor),
        Some((id, value)) => {
            Err(Error::out_of_range(format!("value {value} of sample {id} does not fit {}", U::DTYPE)))
        }
    }
}

fn one_hot<T: Number>(
    source: &Tensor,
    layout: Layout,
    rows: Rows<'_>,
    mut tensor: Tensor,
    depth: usize,
) -> Result<Tensor> {
    let from = source.data::<T>()?;
    let to = tensor.data_mut::<f32>()?;
    to.fill(0.0);
    let mut wrong = None;
    rows.each(|i, id| {
        for (j, value) in layout.of(from, id).iter().enumerate() {
            match value.to_i64().and_then(|class| usize::try_from(class).ok()).filter(|&class| class < depth) {
                Some(class) => to[(i * layout.length + j) * depth + class] = 1.0,
                None => wrong = Some((id, *value)),
            }
        }
    });
    match wrong {
        None => Ok(tensor),
        Some((id, value)) => Err(Error::out_of_range(format!(
            "label {value} of sample {id} is not one of the {depth} classes 0 to {}",
            depth.saturating_sub(1)
        ))),
    }
}

/// A tensor's numbers as `float`; none if they are not numbers.
pub(crate) fn to_f32s(tensor: &Tensor) -> Vec<f32> {
    let read: Result<Vec<f32>> = from_number!(tensor.dtype(), T => {
        tensor.data::<T>().map(|values| values.iter().map(|value| value.to_f32()).collect())
    });
    read.unwrap_or_default()
}

/// A tensor's numbers as `int64`, without those that are no integers or do not fit.
pub(crate) fn to_i64s(tensor: &Tensor) -> Vec<i64> {
    let read: Result<Vec<i64>> = from_number!(tensor.dtype(), T => {
        tensor.data::<T>().map(|values| values.iter().filter_map(|value| value.to_i64()).collect())
    });
    read.unwrap_or_default()
}

/// Tensors whose memory may be used again once their consumer has let go of them.
#[derive(Default)]
pub(crate) struct Spare(Vec<Tensor>);

/// How many batches a consumer holds at most before memory is not kept for them.
const MAX_SPARE: usize = 8;

impl Spare {
    /// A tensor to write all of; its contents are undefined.
    fn take(&mut self, dtype: DType, shape: &Shape) -> Result<Tensor> {
        let fits = |tensor: &mut Tensor| tensor.dtype() == dtype && tensor.shape() == shape && tensor.is_unique();
        match self.0.iter_mut().position(fits) {
            Some(i) => Ok(self.0.swap_remove(i)),
            None => Tensor::zeros(dtype, shape.clone()),
        }
    }

    /// Remembers a tensor that goes out.
    fn lend(&mut self, tensor: Tensor) -> Result<Tensor> {
        if self.0.len() >= MAX_SPARE {
            self.0.remove(0);
        }
        self.0.push(tensor.clone());
        Ok(tensor)
    }
}

/// Every integer below it fits an `i64`, and it does not.
const TWO_TO_63: f64 = (1u64 << 63) as f64;

/// A number that can be read as others.
pub(crate) trait Number: Element {
    fn to_f32(self) -> f32;
    fn to_f64(self) -> f64;
    /// The same value as an integer; none if it has a fraction or does not fit.
    fn to_i64(self) -> Option<i64>;
}

macro_rules! integers {
    ($($ty:ty),*) => {$(
        impl Number for $ty {
            #[inline(always)]
            fn to_f32(self) -> f32 {
                self as f32
            }
            fn to_f64(self) -> f64 {
                self as f64
            }
            fn to_i64(self) -> Option<i64> {
                self.try_into().ok()
            }
        }
    )*};
}

macro_rules! floats {
    ($($ty:ty: $to_f32:expr, $to_f64:expr;)*) => {$(
        impl Number for $ty {
            #[inline(always)]
            fn to_f32(self) -> f32 {
                $to_f32(self)
            }
            fn to_f64(self) -> f64 {
                $to_f64(self)
            }
            fn to_i64(self) -> Option<i64> {
                let x = self.to_f64();
                (x.fract() == 0.0 && (-TWO_TO_63..TWO_TO_63).contains(&x))
                    .then_some(x as i64)
            }
        }
    )*};
}

integers!(u8, u16, u32, u64, i8, i16, i32, i64);
floats! {
    f32: |x| x, f64::from;
    f64: |x| x as f32, |x| x;
    f16: f16::to_f32, f16::to_f64;
    bf16: bf16::to_f32, bf16::to_f64;
}

impl Number for bool {
    fn to_f32(self) -> f32 {
        u8::from(self).into()
    }
    fn to_f64(self) -> f64 {
        u8::from(self).into()
    }
    fn to_i64(self) -> Option<i64> {
        Some(self.into())
    }
}

/// Evaluates an expression with `T` as the Rust type of a dtype of numbers.
macro_rules! from_number {
    ($dtype:expr, $T:ident => $body:expr) => {{
        use kolo_core::DType::*;
        macro_rules! with {
            ($ty:ty) => {{
                type $T = $ty;
                $body
            }};
        }
        match $dtype {
            U8 => with!(u8),
            U16 => with!(u16),
            U32 => with!(u32),
            U64 => with!(u64),
            I8 => with!(i8),
            I16 => with!(i16),
            I32 => with!(i32),
            I64 => with!(i64),
            F16 => with!(half::f16),
            BF16 => with!(half::bf16),
            F32 => with!(f32),
            F64 => with!(f64),
            Bool => with!(bool),
            Str | Resource | Variant | Complex64 | Complex128 | QI8 | QU8 | QI16 | QU16 | QI32 => {
                Err(kolo_core::Error::invalid_argument(format!("{} elements are not numbers", $dtype)))
            }
        }
    }};
}
use from_number;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn make(recipe: &Recipe, source: impl Into<Tensor>, rows: Rows<'_>) -> Result<Tensor> {
        recipe.make(&source.into(), rows, &mut Spare::default())
    }

    fn converting(convert: Convert) -> Recipe {
        Recipe { convert, ..Recipe::default() }
    }

    #[test]
    fn rows_are_gathered_and_converted() {
        let source = [[1u8, 2], [3, 4], [5, 6]];
        let picked = Rows::Picked(&[2, 0]);
        assert_eq!(make(&converting(Convert::Keep), source, picked), Ok(Tensor::from([[5u8, 6], [1, 2]])));
        let scale = converting(Convert::Scale { factor: 0.5, offset: -1.0 });
        assert_eq!(make(&scale, source, picked), Ok(Tensor::from([[1.5f32, 2.0], [-0.5, 0.0]])));
        let cast = converting(Convert::Cast(DType::I64));
        assert_eq!(make(&cast, source, Rows::Span(1, 2)), Ok(Tensor::from([[3i64, 4], [5, 6]])));
        let one_hot = converting(Convert::OneHot(3));
        assert_eq!(make(&one_hot, [2u8, 0], Rows::Span(0, 2)), Ok(Tensor::from([[0.0f32, 0.0, 1.0], [1.0, 0.0, 0.0]])));
        let flat = Recipe { row: Some(Shape::from([1, 2])), ..Recipe::default() };
        assert_eq!(make(&flat, source, picked).unwrap().shape().dims(), [2, 1, 2]);
        assert!(make(&Recipe { row: Some(Shape::from([3])), ..flat }, source, picked).is_err());
        let texts = Tensor::from_strings([2], vec!["a".into(), "b".into()]).unwrap();
        assert_eq!(make(&converting(Convert::Keep), texts, Rows::Picked(&[1])).unwrap().strings().unwrap()[0], "b");
    }

    #[test]
    fn rows_side_by_side_are_not_copied() {
        let source = Tensor::from((0..100).map(|i| i as f32).collect::<Vec<_>>());
        let view = make(&converting(Convert::Keep), source.clone(), Rows::Span(10, 20)).unwrap();
        assert_eq!(view.host_bytes().unwrap().as_ptr(), source.host_bytes().unwrap()[40..].as_ptr());
    }

    #[test]
    fn memory_comes_back_when_its_batch_is_dropped() {
        let (mut spare, recipe) = (Spare::default(), converting(Convert::Scale { factor: 1.0, offset: 0.0 }));
        let source = Tensor::from((0..100).collect::<Vec<u8>>());
        let mut make = |start| recipe.make(&source, Rows::Span(start, 50), &mut spare).unwrap();
        let place = |tensor: &Tensor| tensor.host_bytes().unwrap().as_ptr();
        let first = make(0);
        let second = make(50);
        assert_ne!(place(&first), place(&second));
        assert_eq!(first.data::<f32>().unwrap()[..2], [0.0, 1.0]);
        let freed = place(&first);
        drop(first);
        let third = make(10);
        assert_eq!(place(&third), freed);
        assert_eq!(third.data::<f32>().unwrap()[..2], [10.0, 11.0]);
        assert_eq!(second.data::<f32>().unwrap()[..2], [50.0, 51.0]);
    }

    #[test]
    fn values_that_do_not_fit_name_their_sample() {
        let says = |convert, source: Tensor, text: &str| {
            let error = make(&converting(convert), source, Rows::Span(0, 2)).unwrap_err();
            assert!(error.message().contains(text), "{error}");
        };
        says(Convert::OneHot(10), Tensor::from([1u8, 10]), "label 10 of sample 1 is not one of the 10 classes 0 to 9");
        says(Convert::OneHot(10), Tensor::from([-1i32, 0]), "label -1 of sample 0");
        says(Convert::Cast(DType::I32), Tensor::from([1i64 << 40, 0]), "of sample 0 does not fit int32");
        says(Convert::Cast(DType::I32), Tensor::from([0.0, 0.5f32]), "value 0.5 of sample 1 does not fit int32");
        says(Convert::Cast(DType::U8), Tensor::from([0i32, 0]), "not to uint8");
        let texts = Tensor::from_strings([2], vec!["a".into(), "b".into()]).unwrap();
        says(Convert::OneHot(10), texts, "string elements are not numbers");
        assert_eq!((f64::NAN.to_i64(), f32::INFINITY.to_i64(), u64::MAX.to_i64()), (None, None, None));
    }
}
