//! `tf.train.Example`: the usual contents of a TFRecord, features by name. Read into tensors, and written.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kolo_core::{DType, Error, Result, Shape, Tensor};
use prost::Message as _;
use prost::bytes::Bytes;

use super::{Dataset, record};

/// A sample: features by name.
///
/// ```
/// use kolo::Tensor;
/// use kolo::data::example::{Example, Feature};
///
/// let example = Example::new().with("label", Feature::Ints(vec![3])).with("pixels", Feature::Floats(vec![0.5, 1.0]));
/// let read = Example::decode(&example.encode())?;
/// assert_eq!(read.tensors(&[("pixels", &[2])])?, [Tensor::from([0.5f32, 1.0])]);
/// # Ok::<(), kolo::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Example {
    features: BTreeMap<String, Feature>,
}

/// A list of values of one kind.
#[derive(Clone, Debug, PartialEq)]
pub enum Feature {
    /// Byte strings: texts, encoded pictures.
    Bytes(Vec<Vec<u8>>),
    /// `float`.
    Floats(Vec<f32>),
    /// `int64`.
    Ints(Vec<i64>),
}

impl Feature {
    /// How many values there are.
    pub fn len(&self) -> usize {
        match self {
            Feature::Bytes(values) => values.len(),
            Feature::Floats(values) => values.len(),
            Feature::Ints(values) => values.len(),
        }
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The values as a tensor of this shape.
    pub fn to_tensor(&self, shape: Shape) -> Result<Tensor> {
        match self {
            Feature::Bytes(values) => {
                Tensor::from_strings(shape, values.iter().map(|value| Bytes::copy_from_slice(value)).collect())
            }
            Feature::Floats(values) => Tensor::from_vec(shape, values.clone()),
            Feature::Ints(values) => Tensor::from_vec(shape, values.clone()),
        }
    }
}

impl Example {
    /// A sample without features.
    pub fn new() -> Example {
        Example::default()
    }

    /// Adds a feature, or replaces the one of that name.
    pub fn with(mut self, name: &str, feature: Feature) -> Example {
        self.features.insert(name.to_owned(), feature);
        self
    }

    /// The feature of this name.
    pub fn feature(&self, name: &str) -> Option<&Feature> {
        self.features.get(name)
    }

    /// The names of all features, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.features.keys().map(String::as_str)
    }

    /// These features as tensors of these shapes; `&[]` for a single value.
    pub fn tensors(&self, wanted: &[(&str, &[usize])]) -> Result<Vec<Tensor>> {
        let tensor = |(name, shape): &(&str, &[usize])| {
            let feature = self.feature(name).ok_or_else(|| {
                let have: Vec<&str> = self.names().collect();
                Error::not_found(format!("feature '{name}' is missing; there are: {}", have.join(", ")))
            })?;
            let tensor = Shape::new(shape).and_then(|shape| feature.to_tensor(shape));
            tensor.map_err(|error| error.context(format_args!("feature '{name}'")))
        };
        wanted.iter().map(tensor).collect()
    }

    /// The sample in these bytes.
    pub fn decode(bytes: &[u8]) -> Result<Example> {
        let proto = ExampleProto::decode(bytes)
            .map_err(|reason| Error::data_loss(format!("these {} bytes are no Example: {reason}", bytes.len())))?;
        let feature = |(name, feature): (String, FeatureProto)| match feature.kind? {
            Kind::Bytes(list) => Some((name, Feature::Bytes(list.value))),
            Kind::Floats(list) => Some((name, Feature::Floats(list.value))),
            Kind::Ints(list) => Some((name, Feature::Ints(list.value))),
        };
        let features = proto.features.unwrap_or_default().feature.into_iter().filter_map(feature);
        Ok(Example { features: features.collect() })
    }

    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let feature = |(name, feature): (&String, &Feature)| {
            let kind = match feature {
                Feature::Bytes(values) => Kind::Bytes(BytesList { value: values.clone() }),
                Feature::Floats(values) => Kind::Floats(FloatList { value: values.clone() }),
                Feature::Ints(values) => Kind::Ints(Int64List { value: values.clone() }),
            };
            (name.clone(), FeatureProto { kind: Some(kind) })
        };
        let features = FeaturesProto { feature: self.features.iter().map(feature).collect() };
        ExampleProto { features: Some(features) }.encode_to_vec()
    }
}

/// A data set of the examples in these TFRecord files, one after the other: one column for each wanted feature. `int64`
/// features stay that; say [`Dataset::cast`] for others.
pub fn dataset(paths: &[impl AsRef<Path>], wanted: &[(&str, &[usize])]) -> Dataset {
    let paths: Vec<PathBuf> = paths.iter().map(|path| path.as_ref().to_owned()).collect();
    let wanted: Vec<(String, Vec<usize>)> =
        wanted.iter().map(|(name, shape)| ((*name).to_owned(), shape.to_vec())).collect();
    Dataset::stream(move || {
        let wanted = wanted.clone();
        let records = paths.clone().into_iter().flat_map(|path| {
            let name = path.display().to_string();
            let records: Box<dyn Iterator<Item = Result<Vec<u8>>> + Send> = match record::read(path) {
                Ok(records) => Box::new(records),
                Err(error) => Box::new(std::iter::once(Err(error))),
            };
            records.enumerate().map(move |(i, record)| (record, i, name.clone()))
        });
        Ok(records.map(move |(record, i, name)| {
            let wanted: Vec<(&str, &[usize])> =
                wanted.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())).collect();
            let example = Example::decode(&record?);
            let tensors = example.and_then(|example| example.tensors(&wanted));
            tensors.map_err(|error| error.context(format_args!("{name}: record {i}")))
        }))
    })
}

impl From<&Tensor> for Feature {
    /// The elements of a tensor, as the kind that holds them best: strings as bytes, integers and bools as `int64`, other
    /// numbers as `float`. What cannot be held is left out.
    fn from(tensor: &Tensor) -> Feature {
        match tensor.dtype() {
            DType::Str => Feature::Bytes(tensor.strings().unwrap_or_default().iter().map(|s| s.to_vec()).collect()),
            dtype if dtype.is_float() => Feature::Floats(super::column::to_f32s(tensor)),
            _ => Feature::Ints(super::column::to_i64s(tensor)),
        }
    }
}

#[derive(Clone, PartialEq, prost::Message)]
struct ExampleProto {
    #[prost(message, optional, tag = "1")]
    features: Option<FeaturesProto>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct FeaturesProto {
    #[prost(btree_map = "string, message", tag = "1")]
    feature: BTreeMap<String, FeatureProto>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct FeatureProto {
    #[prost(oneof = "Kind", tags = "1, 2, 3")]
    kind: Option<Kind>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum Kind {
    #[prost(message, tag = "1")]
    Bytes(BytesList),
    #[prost(message, tag = "2")]
    Floats(FloatList),
    #[prost(message, tag = "3")]
    Ints(Int64List),
}

#[derive(Clone, PartialEq, prost::Message)]
struct BytesList {
    #[prost(bytes = "vec", repeated, tag = "1")]
    value: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct FloatList {
    #[prost(float, repeated, tag = "1")]
    value: Vec<f32>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Int64List {
    #[prost(int64, repeated, tag = "1")]
    value: Vec<i64>,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn features_come_back_as_tensors() {
        let example = Example::new()
            .with("b", Feature::Bytes(vec![b"x".to_vec()]))
            .with("f", Feature::Floats(vec![1.0, 2.0, 3.0, 4.0]))
            .with("i", Feature::Ints(vec![-1]));
        let read = Example::decode(&example.encode()).unwrap();
        assert_eq!(read, example);
        assert_eq!(read.names().collect::<Vec<_>>(), ["b", "f", "i"]);
        let tensors = read.tensors(&[("i", &[]), ("f", &[2, 2]), ("b", &[1])]).unwrap();
        assert_eq!(tensors[0], Tensor::scalar(-1i64));
        assert_eq!(tensors[1], Tensor::from([[1.0f32, 2.0], [3.0, 4.0]]));
        assert_eq!(tensors[2].strings().unwrap()[0], "x");
        let error = read.tensors(&[("x", &[])]).unwrap_err();
        assert_eq!(error.message(), "feature 'x' is missing; there are: b, f, i");
        let error = read.tensors(&[("f", &[3])]).unwrap_err();
        assert_eq!(error.message(), "feature 'f': shape [3] needs 3 elements, found 4");
    }

    #[test]
    fn tensors_become_features() {
        assert_eq!(Feature::from(&Tensor::from([1u8, 2])), Feature::Ints(vec![1, 2]));
        assert_eq!(Feature::from(&Tensor::from([1.5f64])), Feature::Floats(vec![1.5]));
        assert_eq!(Feature::from(&Tensor::from("a")), Feature::Bytes(vec![b"a".to_vec()]));
        assert!(Feature::from(&Tensor::from(Vec::<i64>::new())).is_empty());
    }

    #[test]
    fn what_is_cut_off_is_no_example() {
        let bytes = Example::new().with("f", Feature::Floats(vec![1.0, 2.0])).encode();
        for cut in 1..bytes.len() {
            assert!(Example::decode(&bytes[..cut]).is_err(), "cut at {cut}");
        }
        assert_eq!(Example::decode(&[]).unwrap(), Example::new());
    }
}
