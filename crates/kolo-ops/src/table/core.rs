//! The table itself. Keys are strings or integers; a value is kept as its bytes, whatever its dtype.

use std::any::Any;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use bytes::Bytes;
use kolo_core::{DType, Error, Result, Shape, Tensor};
use parking_lot::RwLock;

use crate::array::elements::integers;
use crate::resource::Resource;

/// What a table is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableSpec {
    /// The dtype of the keys: strings or integers.
    pub key: DType,
    /// The dtype of the values.
    pub value: DType,
    /// It may be changed again and again; otherwise it is filled once.
    pub mutable: bool,
}

/// A table.
pub struct Table {
    name: Arc<str>,
    spec: TableSpec,
    entries: RwLock<Entries>,
}

#[derive(Default)]
struct Entries {
    is_initialized: bool,
    places: HashMap<Key, usize>,
    /// In the order in which the keys first came.
    list: Vec<(Key, Bytes)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    Text(Bytes),
    Integer(i64),
}

impl Table {
    /// An empty table.
    pub fn new(name: impl Into<Arc<str>>, spec: TableSpec) -> Arc<Table> {
        Arc::new(Table { name: name.into(), spec, entries: RwLock::default() })
    }

    /// What it is.
    pub fn spec(&self) -> &TableSpec {
        &self.spec
    }

    /// How many keys it has.
    pub fn len(&self) -> usize {
        self.entries.read().list.len()
    }

    /// True if it has no keys.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True once a table that is filled once was.
    pub fn is_initialized(&self) -> bool {
        self.entries.read().is_initialized
    }

    /// An error unless keys and values are of these dtypes.
    pub fn check_dtypes(&self, key: DType, value: DType) -> Result<()> {
        if (key, value) == (self.spec.key, self.spec.value) {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "Conflicting key/value dtypes {key}->{value} with {}->{} for table {}",
            self.spec.key, self.spec.value, self.name
        )))
    }

    /// Fills a table that is filled once. A second time changes nothing, as in TensorFlow.
    pub fn initialize(&self, keys: &Tensor, values: &Tensor) -> Result<()> {
        self.check_dtypes(keys.dtype(), values.dtype())?;
        if self.spec.mutable {
            return Err(Error::invalid_argument(format!(
                "table {} is mutable: insert into it, or import, instead of initializing it",
                self.name
            )));
        }
        check_lengths(keys, values)?;
        let (keys, values) = (keys_of(keys)?, elements(values)?);
        let mut new = Entries { is_initialized: true, ..Entries::default() };
        for (key, value) in keys.into_iter().zip(values) {
            if let Some(old) = new.put(key.clone(), value.clone())
                && old != value
            {
                return Err(Error::failed_precondition(format!(
                    "HashTable has different value for same key. Key {} occurs twice in the initializer of {}",
                    key.text(),
                    self.name
                )));
            }
        }
        let mut entries = self.entries.write();
        if !entries.is_initialized {
            *entries = new;
        }
        Ok(())
    }

    /// The values of keys, and defaults for those that it does not have: one for all, or one each.
    pub fn find(&self, keys: &Tensor, default: &Tensor) -> Result<Tensor> {
        self.check_dtypes(keys.dtype(), default.dtype())?;
        let defaults = elements(default)?;
        if defaults.len() != 1 && default.shape() != keys.shape() {
            return Err(Error::invalid_argument(format!(
                "Expected shape [] or {} for default value, got {}",
                keys.shape(),
                default.shape()
            )));
        }
        let wanted = keys_of(keys)?;
        let entries = self.entries.read();
        if !self.spec.mutable && !entries.is_initialized {
            return Err(Error::failed_precondition(format!("Table not initialized: {}", self.name)));
        }
        let found: Vec<Bytes> = wanted
            .iter()
            .enumerate()
            .map(|(i, key)| match entries.places.get(key) {
                Some(&at) => entries.list[at].1.clone(),
                None => defaults[if defaults.len() == 1 { 0 } else { i }].clone(),
            })
            .collect();
        drop(entries);
        tensor(self.spec.value, keys.shape().clone(), &found)
    }

    /// Adds keys, or changes their values.
    pub fn insert(&self, keys: &Tensor, values: &Tensor) -> Result<()> {
        self.check_dtypes(keys.dtype(), values.dtype())?;
        if !self.spec.mutable {
            return Err(Error::unimplemented(format!("insert is not supported: table {} is filled once", self.name)));
        }
        check_lengths(keys, values)?;
        let (keys, values) = (keys_of(keys)?, elements(values)?);
        let mut entries = self.entries.write();
        for (key, value) in keys.into_iter().zip(values) {
            entries.put(key, value);
        }
        Ok(())
    }

    /// Replaces all that it holds. For a table that is filled once, this is how TensorFlow 2 fills it.
    pub fn import(&self, keys: &Tensor, values: &Tensor) -> Result<()> {
        self.check_dtypes(keys.dtype(), values.dtype())?;
        if !self.spec.mutable {
            return self.initialize(keys, values);
        }
        check_lengths(keys, values)?;
        let mut new = Entries::default();
        for (key, value) in keys_of(keys)?.into_iter().zip(elements(values)?) {
            new.put(key, value);
        }
        let old = std::mem::replace(&mut *self.entries.write(), new);
        // Freed without the lock.
        drop(old);
        Ok(())
    }

    /// All keys and their values.
    pub fn export(&self) -> Result<(Tensor, Tensor)> {
        let list = self.entries.read().list.clone();
        let n = list.len();
        let keys = match self.spec.key {
            DType::Str => {
                let text = |key: &Key| if let Key::Text(text) = key { text.clone() } else { Bytes::new() };
                Tensor::from_strings([n], list.iter().map(|(key, _)| text(key)).collect())?
            }
            dtype => {
                let number = |key: &Key| if let Key::Integer(value) = key { *value } else { 0 };
                integer_keys(dtype, list.iter().map(|(key, _)| number(key)).collect())?
            }
        };
        let values: Vec<Bytes> = list.into_iter().map(|(_, value)| value).collect();
        Ok((keys, tensor(self.spec.value, Shape::new(&[n])?, &values)?))
    }
}

impl Entries {
    /// Sets a key's value and says what it was.
    fn put(&mut self, key: Key, value: Bytes) -> Option<Bytes> {
        match self.places.entry(key) {
            Entry::Occupied(place) => Some(std::mem::replace(&mut self.list[*place.get()].1, value)),
            Entry::Vacant(place) => {
                self.list.push((place.key().clone(), value));
                place.insert(self.list.len() - 1);
                None
            }
        }
    }
}

impl Key {
    fn text(&self) -> String {
        match self {
            Key::Text(text) => String::from_utf8_lossy(text).into_owned(),
            Key::Integer(value) => value.to_string(),
        }
    }
}

fn check_lengths(keys: &Tensor, values: &Tensor) -> Result<()> {
    if keys.shape() == values.shape() {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "Expected shape {} for values, got {}: keys and values go together",
        keys.shape(),
        values.shape()
    )))
}

fn keys_of(tensor: &Tensor) -> Result<Vec<Key>> {
    match tensor.dtype() {
        DType::Str => Ok(tensor.strings()?.iter().cloned().map(Key::Text).collect()),
        _ => Ok(integers(tensor)?.into_iter().map(Key::Integer).collect()),
    }
}

fn integer_keys(dtype: DType, keys: Vec<i64>) -> Result<Tensor> {
    fn narrow<T: kolo_core::Element + TryFrom<i64>>(keys: Vec<i64>) -> Result<Tensor> {
        let key =
            |key: i64| T::try_from(key).map_err(|_| Error::internal(format!("key {key} was never of this dtype")));
        Ok(Tensor::vector(keys.into_iter().map(key).collect::<Result<Vec<T>>>()?))
    }
    match dtype {
        DType::I8 => narrow::<i8>(keys),
        DType::U8 => narrow::<u8>(keys),
        DType::I16 => narrow::<i16>(keys),
        DType::U16 => narrow::<u16>(keys),
        DType::I32 => narrow::<i32>(keys),
        DType::U32 => narrow::<u32>(keys),
        _ => Ok(Tensor::vector(keys)),
    }
}

/// Each element of a tensor, as bytes.
fn elements(tensor: &Tensor) -> Result<Vec<Bytes>> {
    if tensor.dtype() == DType::Str {
        return Ok(tensor.strings()?.to_vec());
    }
    let size = tensor.dtype().size().unwrap_or(1);
    let all = Bytes::copy_from_slice(tensor.host_bytes()?);
    Ok((0..tensor.n_elements()).map(|i| all.slice(i * size..(i + 1) * size)).collect())
}

fn tensor(dtype: DType, shape: Shape, elements: &[Bytes]) -> Result<Tensor> {
    if dtype == DType::Str {
        return Tensor::from_strings(shape, elements.to_vec());
    }
    let mut out = Tensor::zeros(dtype, shape)?;
    let size = dtype.size().unwrap_or(1);
    for (to, from) in out.host_bytes_mut()?.chunks_exact_mut(size).zip(elements) {
        to.copy_from_slice(from);
    }
    Ok(out)
}

impl Resource for Table {
    fn kind(&self) -> &'static str {
        "table"
    }
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}
