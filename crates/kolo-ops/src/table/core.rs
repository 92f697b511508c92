//! The table itself. Keys are strings or integers; a value is kept as its bytes, whatever its dtype. Text is copied, so that a
//! word does not keep the message alive that it came in.

use std::any::Any;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use bytes::Bytes;
use kolo_core::{DType, Error, Result, Shape, Tensor};
use kolo_device::Charge;
use parking_lot::RwLock;

use crate::array::elements::integers;
use crate::holdings::{Holdings, of_text};
use crate::memory::{room, string_tensor};
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
    /// Where its values lie once they are found.
    memory: Charge,
    entries: RwLock<Entries>,
}

struct Entries {
    is_initialized: bool,
    places: HashMap<Key, usize>,
    /// In the order in which the keys first came.
    list: Vec<(Key, Value)>,
    holdings: Holdings,
}

/// A value.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Value {
    Text(Bytes),
    /// The bytes of a number, at the beginning.
    Number([u8; 16]),
}

/// What the place of a key and its value takes: in the list, with room for up to twice as many, and in the map, up to seven
/// sixteenths of whose places are taken at least, each with a byte beside it.
const PLACE: usize = 2 * size_of::<(Key, Value)>() + 16 * (size_of::<(Key, usize)>() + 1) / 7;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    Text(Bytes),
    Integer(i64),
}

impl Table {
    /// An empty table; what it holds counts against the memory that `memory` does.
    pub fn new(name: impl Into<Arc<str>>, spec: TableSpec, memory: Charge) -> Result<Arc<Table>> {
        let entries = RwLock::new(Entries::new(&memory)?);
        Ok(Arc::new(Table { name: name.into(), spec, memory, entries }))
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
        let mut new = Entries::new(&self.memory)?;
        new.put_all(keys, values)?;
        new.is_initialized = true;
        // Only if a key came twice can a value have been replaced.
        if new.list.len() < keys.n_elements() {
            let pairs = keys_of(keys, &new.holdings)?.into_iter().zip(values_of(values, &new.holdings)?);
            for (key, value) in pairs {
                if new.places.get(&key).is_some_and(|&at| new.list[at].1 != value) {
                    return Err(Error::failed_precondition(format!(
                        "HashTable has different value for same key. Key {} occurs twice in the initializer of {}",
                        key.text(),
                        self.name
                    )));
                }
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
        let entries = self.entries.read();
        let defaults = values_of(default, &entries.holdings)?;
        if defaults.len() != 1 && default.shape() != keys.shape() {
            return Err(Error::invalid_argument(format!(
                "Expected shape [] or {} for default value, got {}",
                keys.shape(),
                default.shape()
            )));
        }
        let wanted = keys_of(keys, &entries.holdings)?;
        if !self.spec.mutable && !entries.is_initialized {
            return Err(Error::failed_precondition(format!("Table not initialized: {}", self.name)));
        }
        let mut found: Vec<Value> = list(wanted.len(), &entries.holdings)?;
        found.extend(wanted.iter().enumerate().map(|(i, key)| match entries.places.get(key) {
            Some(&at) => entries.list[at].1.clone(),
            None => defaults[if defaults.len() == 1 { 0 } else { i }].clone(),
        }));
        drop(entries);
        self.tensor(keys.shape().clone(), &found)
    }

    /// Adds keys, or changes their values.
    pub fn insert(&self, keys: &Tensor, values: &Tensor) -> Result<()> {
        self.check_dtypes(keys.dtype(), values.dtype())?;
        if !self.spec.mutable {
            return Err(Error::unimplemented(format!("insert is not supported: table {} is filled once", self.name)));
        }
        check_lengths(keys, values)?;
        self.entries.write().put_all(keys, values)
    }

    /// Replaces all that it holds. For a table that is filled once, this is how TensorFlow 2 fills it.
    pub fn import(&self, keys: &Tensor, values: &Tensor) -> Result<()> {
        self.check_dtypes(keys.dtype(), values.dtype())?;
        if !self.spec.mutable {
            return self.initialize(keys, values);
        }
        check_lengths(keys, values)?;
        let mut new = Entries::new(&self.memory)?;
        new.put_all(keys, values)?;
        let old = std::mem::replace(&mut *self.entries.write(), new);
        // Freed without the lock.
        drop(old);
        Ok(())
    }

    /// All keys and their values.
    pub fn export(&self) -> Result<(Tensor, Tensor)> {
        let entries = self.entries.read();
        let n = entries.list.len();
        let mut all: Vec<(Key, Value)> = list(n, &entries.holdings)?;
        all.extend_from_slice(&entries.list);
        drop(entries);
        let list = all;
        let keys = match self.spec.key {
            DType::Str => {
                let text = |key: &Key| if let Key::Text(text) = key { text.clone() } else { Bytes::new() };
                self.strings([n].into(), list.iter().map(|(key, _)| text(key)).collect())?
            }
            dtype => {
                let number = |key: &Key| if let Key::Integer(value) = key { *value } else { 0 };
                integer_keys(dtype, list.iter().map(|(key, _)| number(key)).collect())?
            }
        };
        let values: Vec<Value> = list.into_iter().map(|(_, value)| value).collect();
        Ok((keys, self.tensor(Shape::new(&[n])?, &values)?))
    }

    fn strings(&self, shape: Shape, strings: Vec<Bytes>) -> Result<Tensor> {
        string_tensor(shape, strings, |n_bytes| self.memory.another(n_bytes))
    }

    fn tensor(&self, shape: Shape, values: &[Value]) -> Result<Tensor> {
        if self.spec.value == DType::Str {
            let text = |value: &Value| if let Value::Text(text) = value { text.clone() } else { Bytes::new() };
            return self.strings(shape, values.iter().map(text).collect());
        }
        let mut out = self.memory.tensor(self.spec.value, shape)?;
        let size = self.spec.value.size().unwrap_or(1);
        for (to, value) in out.host_bytes_mut()?.chunks_exact_mut(size).zip(values) {
            if let Value::Number(bytes) = value {
                to.copy_from_slice(&bytes[..size]);
            }
        }
        Ok(out)
    }
}

impl Entries {
    fn new(memory: &Charge) -> Result<Entries> {
        let holdings = Holdings::new(memory.another(0)?);
        Ok(Entries { is_initialized: false, places: HashMap::new(), list: Vec::new(), holdings })
    }

    /// Sets the values of keys. All memory is asked for before anything changes.
    fn put_all(&mut self, keys: &Tensor, values: &Tensor) -> Result<()> {
        let (keys, values) = (keys_of(keys, &self.holdings)?, values_of(values, &self.holdings)?);
        let (mut asked, mut n_new) = (0usize, 0);
        for (key, value) in keys.iter().zip(&values) {
            let is_new = !self.places.contains_key(key);
            n_new += usize::from(is_new);
            asked = asked.saturating_add(value.bytes() + if is_new { PLACE + key.bytes() } else { 0 });
        }
        self.holdings.grow(asked)?;
        if self.places.try_reserve(n_new).is_err() || self.list.try_reserve(n_new).is_err() {
            self.holdings.shrink(asked);
            return Err(self.holdings.no_room());
        }
        let n_before = self.list.len();
        for (key, value) in keys.into_iter().zip(values) {
            let key_bytes = key.bytes();
            match self.places.entry(key.owned()) {
                Entry::Occupied(place) => {
                    let at = *place.get();
                    let old = std::mem::replace(&mut self.list[at].1, value.owned());
                    // A key that is new and comes twice was asked for twice.
                    let again = if at >= n_before { PLACE + key_bytes } else { 0 };
                    self.holdings.shrink(old.bytes() + again);
                }
                Entry::Vacant(place) => {
                    self.list.push((place.key().clone(), value.owned()));
                    place.insert(self.list.len() - 1);
                }
            }
        }
        Ok(())
    }
}

impl Value {
    /// What it takes besides its place.
    fn bytes(&self) -> usize {
        match self {
            Value::Text(text) => of_text(text),
            Value::Number(_) => 0,
        }
    }

    fn owned(self) -> Value {
        match self {
            Value::Text(text) => Value::Text(Bytes::copy_from_slice(&text)),
            number @ Value::Number(_) => number,
        }
    }
}

impl Key {
    /// What it takes besides its place.
    fn bytes(&self) -> usize {
        match self {
            Key::Text(text) => of_text(text),
            Key::Integer(_) => 0,
        }
    }

    fn owned(self) -> Key {
        match self {
            Key::Text(text) => Key::Text(Bytes::copy_from_slice(&text)),
            number @ Key::Integer(_) => number,
        }
    }

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

/// A list for `n` keys or values while they are looked at. It is asked for, but only counted by what is made of it.
fn list<T>(n: usize, holdings: &Holdings) -> Result<Vec<T>> {
    drop(holdings.charge().another(n.saturating_mul(size_of::<T>()))?);
    room(n, "entries of a table")
}

fn keys_of(tensor: &Tensor, holdings: &Holdings) -> Result<Vec<Key>> {
    let mut keys = list(tensor.n_elements(), holdings)?;
    match tensor.dtype() {
        DType::Str => keys.extend(tensor.strings()?.iter().cloned().map(Key::Text)),
        _ => keys.extend(integers(tensor)?.into_iter().map(Key::Integer)),
    }
    Ok(keys)
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

fn values_of(tensor: &Tensor, holdings: &Holdings) -> Result<Vec<Value>> {
    let mut values = list(tensor.n_elements(), holdings)?;
    if tensor.dtype() == DType::Str {
        values.extend(tensor.strings()?.iter().cloned().map(Value::Text));
        return Ok(values);
    }
    let size = tensor.dtype().size().unwrap_or(1);
    values.extend(tensor.host_bytes()?.chunks_exact(size).map(|bytes| {
        let mut number = [0; 16];
        number[..size].copy_from_slice(bytes);
        Value::Number(number)
    }));
    Ok(values)
}

impl Resource for Table {
    fn kind(&self) -> &'static str {
        "table"
    }
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}
