//! Objects that outlive a kernel call: variables, queues, accumulators, tensor arrays.
//!
//! A device has one [`ResourceStore`]; a step has one of its own. An object is found by container and name, so graphs that
//! name the same variable share it. Handles carry the object with them: a look-up happens once per handle, not per use.

use std::any::Any;
use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use kolo_core::{DType, Error, Memory, PartialShape, ResourceHandle, Result, Tensor, TensorData};
use kolo_device::Device;
use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};

use crate::collective::Groups;
use crate::io::FileAccess;

/// Anything kept in a [`ResourceStore`].
pub trait Resource: Any + Send + Sync {
    /// What a person calls it: `variable`, `FIFOQueue`, …
    fn kind(&self) -> &'static str;
    /// The object, to be downcast.
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync>;
}

/// The objects of one device (or one step), by container and name.
pub struct ResourceStore {
    device: Arc<str>,
    default_container: Arc<str>,
    containers: Mutex<HashMap<String, Container>>,
    /// Counts removals, so that a kernel that remembers an object notices when to look again.
    generation: AtomicU64,
    /// Which files ops of this device may touch; unset means all. Not an object: a reset must not lift a limit.
    file_access: OnceLock<FileAccess>,
    /// The groups of ranks that ops of this device may name. Not objects either.
    groups: Groups,
}

/// Objects by name.
type Container = HashMap<String, Arc<dyn Resource>>;

impl ResourceStore {
    /// An empty store. The default container's name is the job's.
    pub fn new(device: impl Into<Arc<str>>, default_container: impl Into<Arc<str>>) -> Arc<ResourceStore> {
        ResourceStore::with_groups(device, default_container, Groups::new())
    }

    /// As [`ResourceStore::new`], with groups of ranks.
    pub fn with_groups(
        device: impl Into<Arc<str>>,
        default_container: impl Into<Arc<str>>,
        groups: Groups,
    ) -> Arc<ResourceStore> {
        Arc::new(ResourceStore {
            device: device.into(),
            default_container: default_container.into(),
            containers: Mutex::default(),
            generation: AtomicU64::new(0),
            file_access: OnceLock::new(),
            groups,
        })
    }

    /// Limits the files that ops of this device may touch, once: later calls change nothing and say false.
    pub fn limit_file_access(&self, access: FileAccess) -> bool {
        self.file_access.set(access).is_ok()
    }

    /// The files that ops of this device may touch.
    pub fn file_access(&self) -> FileAccess {
        self.file_access.get().cloned().unwrap_or_default()
    }

    /// The groups of ranks that ops of this device may name.
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    /// A number that changes whenever an object is forgotten. Whoever keeps an object between calls compares it first: if
    /// it is still what it was before the look-up, the object is still the one the store would give.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// `container`, or the default one if it is empty.
    pub fn container<'a>(&'a self, container: &'a str) -> &'a str {
        if container.is_empty() { &self.default_container } else { container }
    }

    /// The object of this name, made by `make` on first use. An object of another kind under that name is an error.
    pub fn lookup_or_create<R: Resource>(
        &self,
        container: &str,
        name: &str,
        make: impl FnOnce() -> Result<Arc<R>>,
    ) -> Result<Arc<R>> {
        let container = self.container(container);
        let mut containers = self.containers.lock();
        let objects = containers.entry(container.to_owned()).or_default();
        if let Some(found) = objects.get(name) {
            return downcast(found, container, name);
        }
        let object = make()?;
        objects.insert(name.to_owned(), object.clone());
        Ok(object)
    }

    /// The object of this name, if it exists; an object of another kind under that name is an error.
    pub fn lookup<R: Resource>(&self, container: &str, name: &str) -> Result<Option<Arc<R>>> {
        let container = self.container(container);
        let containers = self.containers.lock();
        match containers.get(container).and_then(|objects| objects.get(name)) {
            Some(found) => downcast(found, container, name).map(Some),
            None => Ok(None),
        }
    }

    /// Forgets an object; true if it was there.
    pub fn remove(&self, container: &str, name: &str) -> bool {
        let container = self.container(container);
        let removed = self.containers.lock().get_mut(container).and_then(|objects| objects.remove(name));
        self.generation.fetch_add(1, Ordering::Release);
        // The object itself goes away here, after the lock: it may hold other objects of this store.
        removed.is_some()
    }

    /// Forgets all objects of these containers; of all containers if none is named.
    pub fn clear(&self, containers: &[String]) {
        let removed: Vec<Container> = {
            let mut all = self.containers.lock();
            match containers {
                [] => all.drain().map(|(_, objects)| objects).collect(),
                some => some.iter().filter_map(|container| all.remove(self.container(container))).collect(),
            }
        };
        self.generation.fetch_add(1, Ordering::Release);
        // The objects themselves go away here, after the lock.
        drop(removed);
    }

    /// A handle to `object` under this name.
    pub fn handle<R: Resource>(&self, container: &str, name: &str, object: Arc<R>) -> ResourceHandle {
        ResourceHandle {
            device: self.device.clone(),
            container: self.container(container).into(),
            name: name.into(),
            object: Some(object.as_any()),
        }
    }

    /// The object behind a handle. A handle of another device, or to an object of another kind, is an error.
    pub fn resolve<R: Resource>(&self, handle: &ResourceHandle) -> Result<Arc<R>> {
        if let Some(object) = &handle.object {
            return object.clone().downcast::<R>().map_err(|_| {
                Error::invalid_argument(format!("resource {handle:?} is of another kind than this op works on"))
            });
        }
        if handle.device != self.device {
            return Err(Error::invalid_argument(format!("resource {handle:?} is used on {}", self.device)));
        }
        self.lookup::<R>(&handle.container, &handle.name)?
            .ok_or_else(|| Error::not_found(format!("resource {handle:?} does not exist")))
    }

    /// The variable behind a handle.
    pub fn variable(&self, handle: &ResourceHandle) -> Result<Arc<VariableCell>> {
        self.resolve(handle)
    }
}

fn downcast<R: Resource>(found: &Arc<dyn Resource>, container: &str, name: &str) -> Result<Arc<R>> {
    let kind = found.kind();
    found.clone().as_any().downcast::<R>().map_err(|_| {
        Error::invalid_argument(format!("resource {container}/{name} is a {kind}, not what this op works on"))
    })
}

/// A variable: a value that outlives steps, or none yet.
pub struct VariableCell {
    name: Arc<str>,
    dtype: DType,
    shape: PartialShape,
    value: Mutex<Option<Tensor>>,
    me: Weak<VariableCell>,
}

thread_local! {
    /// The variables that this thread has touched, while [`record_variables`] runs. Not a field of
    /// [`KernelCtx`](crate::KernelCtx): variables are also read where there is no context (the executor reads a reference
    /// before it calls the kernel, and helpers of kernels are given the variable alone), so a read that was not told would be
    /// missing from the recording without an error. A recording runs on one thread from its beginning to its end, so here
    /// none can be missed.
    static TOUCHED: RefCell<Option<Vec<Touched>>> = const { RefCell::new(None) };
}

/// A variable that a recorded step uses.
pub struct Touched {
    /// The variable.
    pub cell: Arc<VariableCell>,
    /// The step writes to it.
    pub is_written: bool,
}

/// Runs `f`, in which a step is written down rather than done, and says which variables it touched on this thread, each once.
/// Meanwhile a variable's memory stays where it is: what would replace it is an error.
pub fn record_variables<R>(f: impl FnOnce() -> R) -> (R, Vec<Touched>) {
    /// Ends the recording, also if `f` panics.
    struct Recording;
    impl Drop for Recording {
        fn drop(&mut self) {
            TOUCHED.take();
        }
    }
    TOUCHED.set(Some(Vec::new()));
    let recording = Recording;
    let result = f();
    let touched = TOUCHED.take().unwrap_or_default();
    drop(recording);
    (result, touched)
}

impl VariableCell {
    /// A variable without a value.
    pub fn new(name: impl Into<Arc<str>>, dtype: DType, shape: PartialShape) -> Arc<VariableCell> {
        Arc::new_cyclic(|me| VariableCell { name: name.into(), dtype, shape, value: Mutex::new(None), me: me.clone() })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The shape it was declared with.
    pub fn shape(&self) -> &PartialShape {
        &self.shape
    }

    /// Its value; later writes do not change what was read.
    pub fn read(&self) -> Option<Tensor> {
        self.touch(false);
        self.value.lock().clone()
    }

    /// Its value; an error if it has none.
    pub fn value(&self) -> Result<Tensor> {
        self.read().ok_or_else(|| uninitialized(&self.name))
    }

    /// True once it has a value.
    pub fn is_initialized(&self) -> bool {
        self.value.lock().is_some()
    }

    /// Gives it a value. Sharing the value's buffer with others is safe: nobody may write to a buffer that is shared, and
    /// [`VariableCell::update`] copies one before it writes. Only a small part of a large buffer is copied at once, so
    /// that a variable does not keep the whole alive.
    pub fn assign(&self, value: Tensor) -> Result<()> {
        self.check(&value)?;
        self.must_not_move()?;
        let value = own(value)?;
        let old = self.value.lock().replace(value);
        // Freed outside of the lock.
        drop(old);
        Ok(())
    }

    /// As [`VariableCell::assign`], for a value of `device`. While the device records a step the value is copied to where the
    /// variable's own is, which must have the same shape: replays write there too.
    pub fn assign_on(&self, device: &dyn Device, value: Tensor) -> Result<()> {
        // What a device writes without recording it would be missing from replays; `assign` refuses that.
        if TOUCHED.with_borrow(Option::is_none) || device.recorder().is_none() {
            self.check(&value)?;
            return self.assign(counted_on(device, value, &self.name)?);
        }
        self.check(&value)?;
        self.update_on(device, |old| match old.shape() == value.shape() {
            true => device.copy_within(&value, 0, old, 0, value.n_bytes()),
            false => self.must_not_move(),
        })
    }

    /// Takes its value away, so that it is as if never assigned.
    pub fn clear(&self) -> Option<Tensor> {
        self.value.lock().take()
    }

    /// Runs `update` on the value in place, under the variable's lock. If somebody holds what they read earlier, the value
    /// is copied first, so that a read stays what it was.
    pub fn update<R>(&self, update: impl FnOnce(&mut Tensor) -> Result<R>) -> Result<R> {
        let mut value = self.lock_unique()?;
        update(&mut value)
    }

    /// The value, locked, held by nobody else. Apart from [`VariableCell::update`], which is compiled for every kernel.
    fn lock_unique(&self) -> Result<MappedMutexGuard<'_, Tensor>> {
        self.must_not_move()?;
        let mut value =
            MutexGuard::try_map(self.value.lock(), Option::as_mut).map_err(|_| uninitialized(&self.name))?;
        make_unique(&mut value)?;
        Ok(value)
    }

    /// As [`VariableCell::update`], for a value in the memory of `device`: the copy, if one is needed, is made there.
    pub fn update_on<R>(&self, device: &dyn Device, update: impl FnOnce(&mut Tensor) -> Result<R>) -> Result<R> {
        self.touch(true);
        let mut value = self.value.lock();
        let tensor = value.as_mut().ok_or_else(|| uninitialized(&self.name))?;
        if !tensor.is_unique() {
            self.must_not_move()?;
            *tensor = device.duplicate(tensor, &self.name)?;
        }
        update(tensor)
    }

    /// Runs `f` on the value as it is, under the variable's lock. Nobody is to write to it there.
    pub fn with_value<R>(&self, f: impl FnOnce(Option<&mut Tensor>) -> R) -> R {
        f(self.value.lock().as_mut())
    }

    fn touch(&self, is_written: bool) {
        TOUCHED.with_borrow_mut(|touched| {
            let Some(list) = touched else { return };
            if let Some(known) = list.iter_mut().find(|known| std::ptr::eq(&*known.cell, self)) {
                known.is_written |= is_written;
            } else if let Some(cell) = self.me.upgrade() {
                list.push(Touched { cell, is_written });
            }
        });
    }

    fn must_not_move(&self) -> Result<()> {
        match TOUCHED.with_borrow(Option::is_some) {
            true => {
                let name = &self.name;
                Err(Error::unimplemented(format!(
                    "the memory of variable {name} is replaced, which cannot be captured"
                )))
            }
            false => Ok(()),
        }
    }

    fn check(&self, value: &Tensor) -> Result<()> {
        if value.dtype() == self.dtype {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "variable {} is {}, found a value of {}",
            self.name,
            self.dtype,
            value.dtype()
        )))
    }
}

/// The value, copied if it is less than half of the buffer it lies in.
fn own(value: Tensor) -> Result<Tensor> {
    match value.storage() {
        TensorData::Buffer { buffer, .. } if value.n_bytes() < buffer.n_bytes() / 2 && buffer.host().is_some() => {
            copied(&value)
        }
        _ => Ok(value),
    }
}

/// Copies the elements unless this is the only handle to them.
pub fn make_unique(tensor: &mut Tensor) -> Result<()> {
    if tensor.is_unique() || tensor.dtype().size().is_none() {
        return Ok(());
    }
    *tensor = copied(tensor)?;
    Ok(())
}

/// A copy of numbers, in memory that is counted if the original's is.
fn copied(tensor: &Tensor) -> Result<Tensor> {
    let another = match tensor.storage() {
        TensorData::Buffer { buffer, .. } => buffer.another(tensor.n_bytes()),
        TensorData::Inline(_) | TensorData::Strings(_) | TensorData::Handles(_) => None,
    };
    let mut copy = match another {
        Some(buffer) => Tensor::from_buffer(tensor.dtype(), tensor.shape().clone(), buffer?)?,
        None => Tensor::zeros(tensor.dtype(), tensor.shape().clone())?,
    };
    copy.host_bytes_mut()?.copy_from_slice(tensor.host_bytes()?);
    Ok(copy)
}

/// The value where `device` counts it: fed values, constants and the like lie elsewhere, and a variable keeps them.
fn counted_on(device: &dyn Device, value: Tensor, tag: &Arc<str>) -> Result<Tensor> {
    match value.storage() {
        TensorData::Buffer { buffer, .. }
            if device.memory().is_host() && buffer.memory() == Memory::Host && !buffer.is_counted() =>
        {
            device.duplicate(&value, tag)
        }
        _ => Ok(value),
    }
}

fn uninitialized(name: &str) -> Error {
    Error::failed_precondition(format!("Attempting to use uninitialized value {name}"))
}

impl fmt::Debug for VariableCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "variable {}", self.name)
    }
}

impl Resource for VariableCell {
    fn kind(&self) -> &'static str {
        "variable"
    }
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::{Code, DeviceName};
    use kolo_device::{CpuConfig, CpuDevice};

    use super::*;

    fn cell(store: &ResourceStore, name: &str) -> Arc<VariableCell> {
        store
            .lookup_or_create("", name, || Ok(VariableCell::new(name, DType::F32, PartialShape::unknown())))
            .expect("a name has one kind here")
    }

    #[test]
    fn a_device_that_does_not_record_refuses_to_assign_in_a_recorded_step() {
        let cpu = CpuDevice::new(DeviceName::local("CPU", 0), &CpuConfig::default());
        let store = ResourceStore::new("/job:a", "a");
        let v = cell(&store, "v");
        v.assign_on(&*cpu, Tensor::scalar(1.0f32)).unwrap();
        // Replays would not write there.
        let (result, _) = record_variables(|| v.assign_on(&*cpu, Tensor::scalar(2.0f32)));
        assert_eq!(result.unwrap_err().code(), Code::Unimplemented);
        assert_eq!(v.value().unwrap(), Tensor::scalar(1.0f32));
        v.assign_on(&*cpu, Tensor::scalar(3.0f32)).unwrap();
        assert_eq!(v.value().unwrap(), Tensor::scalar(3.0f32));
    }

    #[test]
    fn a_device_counts_what_its_variables_hold() {
        let cpu = CpuDevice::new(DeviceName::local("CPU", 0), &CpuConfig::default());
        let store = ResourceStore::new("/job:a", "a");
        let v = cell(&store, "v");
        let in_use = || kolo_device::Device::memory_stats(&*cpu).in_use;
        // A value from elsewhere, and a copy because of a reader.
        v.assign_on(&*cpu, Tensor::zeros(DType::F32, [10_000]).unwrap()).unwrap();
        assert!(in_use() >= 40_000, "{}", in_use());
        let read = v.read();
        v.update(|value| value.data_mut::<f32>().map(|data| data.fill(1.0))).unwrap();
        assert!(in_use() >= 80_000, "{}", in_use());
        drop((read, store, v));
        assert_eq!(in_use(), 0);
    }

    #[test]
    fn removing_changes_the_generation_and_making_does_not() {
        let store = ResourceStore::new("/job:a", "a");
        let before = store.generation();
        let first = cell(&store, "v");
        assert!(Arc::ptr_eq(&first, &cell(&store, "v")));
        assert_eq!(store.generation(), before);
        assert!(store.remove("a", "v"));
        assert_ne!(store.generation(), before);
        assert!(!Arc::ptr_eq(&first, &cell(&store, "v")));
        let before = store.generation();
        store.clear(&[]);
        assert_ne!(store.generation(), before);
    }

    #[test]
    fn an_update_leaves_what_was_read_as_it_was() {
        let cell = VariableCell::new("v", DType::F32, PartialShape::unknown());
        let value = Tensor::from(vec![1.0f32; 100]);
        cell.assign(value.clone()).expect("same dtype");
        cell.update(|tensor| tensor.data_mut::<f32>().map(|values| values.fill(2.0))).expect("has a value");
        assert_eq!(value, Tensor::from(vec![1.0f32; 100]));
        assert_eq!(cell.read(), Some(Tensor::from(vec![2.0f32; 100])));
    }

    #[test]
    fn a_row_does_not_keep_the_matrix_alive() {
        let cell = VariableCell::new("v", DType::F32, PartialShape::unknown());
        let mut matrix = Tensor::zeros(DType::F32, [100, 100]).expect("small");
        cell.assign(matrix.rows(3, 1).expect("in range")).expect("same dtype");
        assert!(matrix.is_unique());
    }
}
