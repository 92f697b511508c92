//! A value for each replica.

/// A value for each replica of this process, in their order. Those of other processes are with these.
#[derive(Clone, Debug, PartialEq)]
pub struct PerReplica<T> {
    values: Vec<T>,
}

impl<T> PerReplica<T> {
    /// One value for each replica of this process.
    pub fn new(values: Vec<T>) -> PerReplica<T> {
        PerReplica { values }
    }

    /// The values.
    pub fn local(&self) -> &[T] {
        &self.values
    }

    /// The values, to keep.
    pub fn into_local(self) -> Vec<T> {
        self.values
    }

    /// What `change` makes of each value, such as one part of it.
    pub fn map<R>(&self, change: impl Fn(&T) -> R) -> PerReplica<R> {
        PerReplica { values: self.values.iter().map(change).collect() }
    }
}
