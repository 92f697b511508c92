//! The executor's synchronisation primitives: those of parking_lot and the standard library, or, with the feature
//! `shuttle`, those of [shuttle](https://docs.rs/shuttle), with which `tests/executor_interleavings.rs` runs steps
//! under many schedules.

#[cfg(not(feature = "shuttle"))]
mod plain {
    pub(crate) use std::sync::atomic;
    pub(crate) use std::sync::mpsc;
    pub(crate) use std::thread;
    pub(crate) use std::thread_local;
    use std::time::Duration;

    pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};

    /// Lets a waiting thread take the lock first, if there is one.
    pub(crate) fn bump<T>(guard: &mut MutexGuard<'_, T>) {
        MutexGuard::bump(guard);
    }

    /// Releases the lock, to a thread that waits for it if there is one.
    pub(crate) fn pass_on<T>(guard: MutexGuard<'_, T>) {
        MutexGuard::unlock_fair(guard);
    }

    /// How long a thread spins for work.
    pub(crate) const fn patience(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }
}

#[cfg(feature = "shuttle")]
mod shuttled {
    use std::ops::{Deref, DerefMut};
    use std::sync::{PoisonError, TryLockError};
    use std::time::Duration;

    pub(crate) use shuttle::sync::atomic;
    pub(crate) use shuttle::sync::mpsc;
    pub(crate) use shuttle::thread;
    pub(crate) use shuttle::thread_local;

    /// Zero: shuttle has no clock, and a schedule must not depend on one.
    pub(crate) const fn patience(_: u64) -> Duration {
        Duration::ZERO
    }

    /// A mutex with parking_lot's signatures.
    #[derive(Default)]
    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub const fn new(value: T) -> Mutex<T> {
            Mutex(shuttle::sync::Mutex::new(value))
        }

        pub fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard { held: Some(self.0.lock().unwrap_or_else(PoisonError::into_inner)), mutex: &self.0 }
        }

        pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            let held = match self.0.try_lock() {
                Ok(held) => held,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return None,
            };
            Some(MutexGuard { held: Some(held), mutex: &self.0 })
        }

        pub fn into_inner(self) -> T {
            self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
        }
    }

    /// Lets any thread take the lock first.
    pub(crate) fn bump<T>(guard: &mut MutexGuard<'_, T>) {
        guard.held = None;
        guard.held = Some(guard.mutex.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Releases the lock: any thread may take it next.
    pub(crate) fn pass_on<T>(guard: MutexGuard<'_, T>) {
        drop(guard);
    }

    pub(crate) struct MutexGuard<'a, T> {
        /// `None` only inside [`Condvar::wait`] and [`bump`].
        held: Option<shuttle::sync::MutexGuard<'a, T>>,
        mutex: &'a shuttle::sync::Mutex<T>,
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.held.as_ref().expect("locked")
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.held.as_mut().expect("locked")
        }
    }

    #[derive(Default)]
    pub(crate) struct Condvar(shuttle::sync::Condvar);

    impl Condvar {
        pub fn new() -> Condvar {
            Condvar::default()
        }

        pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            let held = guard.held.take().expect("locked");
            guard.held = Some(self.0.wait(held).unwrap_or_else(PoisonError::into_inner));
        }

        pub fn notify_one(&self) {
            self.0.notify_one();
        }

        pub fn notify_all(&self) {
            self.0.notify_all();
        }
    }
}

#[cfg(not(feature = "shuttle"))]
pub(crate) use plain::*;
#[cfg(feature = "shuttle")]
pub(crate) use shuttled::*;
