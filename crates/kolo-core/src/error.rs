//! The error type of all crates. A [`Code`] tells programs how to react; the message says what happened; context is
//! added as the error propagates: the node by the executor, the device by the placer, the task by the network layer.
//!
//! Cloning is cheap, because one failed step fails many waiters.

use std::fmt;
use std::sync::Arc;

/// The result of every fallible function of Kolo.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The gRPC canonical codes. Programs decide on the code, never on the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Code {
    /// The step was cancelled by its caller or by another failure.
    Cancelled = 1,
    /// An error without a better code; comes only from other programs' peers.
    Unknown = 2,
    /// The graph, an attribute, a feed or a flag is wrong.
    InvalidArgument = 3,
    /// A wait passed its deadline.
    DeadlineExceeded = 4,
    /// A name, file, device or key does not exist.
    NotFound = 5,
    /// A name that should be new is taken.
    AlreadyExists = 6,
    /// The caller may not do this.
    PermissionDenied = 7,
    /// Memory, disk, threads or another bounded resource ran out.
    ResourceExhausted = 8,
    /// The state does not allow it, such as reading a variable that has no value yet.
    FailedPrecondition = 9,
    /// The state was lost; retrying from the start may work.
    Aborted = 10,
    /// Past the end, such as dequeuing from a closed, drained queue.
    OutOfRange = 11,
    /// This build does not support it.
    Unimplemented = 12,
    /// An invariant was violated: a bug in Kolo.
    Internal = 13,
    /// A peer cannot be reached now.
    Unavailable = 14,
    /// Stored bytes are corrupt.
    DataLoss = 15,
    /// The caller is not authenticated.
    Unauthenticated = 16,
}

impl Code {
    /// The code with this gRPC number, if there is one (0 is OK and so not an error).
    pub fn from_number(number: i32) -> Option<Code> {
        use Code::*;
        [
            Cancelled,
            Unknown,
            InvalidArgument,
            DeadlineExceeded,
            NotFound,
            AlreadyExists,
            PermissionDenied,
            ResourceExhausted,
            FailedPrecondition,
            Aborted,
            OutOfRange,
            Unimplemented,
            Internal,
            Unavailable,
            DataLoss,
            Unauthenticated,
        ]
        .into_iter()
        .find(|code| *code as i32 == number)
    }
}

/// The node of a graph that an error belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeContext {
    /// The node's name.
    pub node: String,
    /// Its op, such as `MatMul`.
    pub op: String,
    /// The device it ran on, or should have; empty before placement.
    pub device: String,
}

/// A code, a message, and the node where it happened.
#[derive(Clone)]
pub struct Error {
    inner: Arc<Inner>,
}

#[derive(Clone)]
struct Inner {
    code: Code,
    message: String,
    node: Option<NodeContext>,
    derived: bool,
}

macro_rules! constructors {
    ($($(#[$doc:meta])* $name:ident => $code:ident;)*) => {
        impl Error {
            $($(#[$doc])*
            pub fn $name(message: impl Into<String>) -> Error {
                Error::new(Code::$code, message)
            })*
        }
    };
}

constructors! {
    /// A [`Code::Cancelled`] error.
    cancelled => Cancelled;
    /// A [`Code::InvalidArgument`] error.
    invalid_argument => InvalidArgument;
    /// A [`Code::DeadlineExceeded`] error.
    deadline_exceeded => DeadlineExceeded;
    /// A [`Code::NotFound`] error.
    not_found => NotFound;
    /// A [`Code::AlreadyExists`] error.
    already_exists => AlreadyExists;
    /// A [`Code::ResourceExhausted`] error.
    resource_exhausted => ResourceExhausted;
    /// A [`Code::FailedPrecondition`] error.
    failed_precondition => FailedPrecondition;
    /// A [`Code::Aborted`] error.
    aborted => Aborted;
    /// A [`Code::OutOfRange`] error.
    out_of_range => OutOfRange;
    /// A [`Code::Unimplemented`] error.
    unimplemented => Unimplemented;
    /// A [`Code::Internal`] error.
    internal => Internal;
    /// A [`Code::Unavailable`] error.
    unavailable => Unavailable;
    /// A [`Code::DataLoss`] error.
    data_loss => DataLoss;
}

impl Error {
    /// An error with this code and message, and no node yet.
    pub fn new(code: Code, message: impl Into<String>) -> Error {
        Error { inner: Arc::new(Inner { code, message: message.into(), node: None, derived: false }) }
    }

    /// The code.
    pub fn code(&self) -> Code {
        self.inner.code
    }

    /// What happened, without the node it happened in.
    pub fn message(&self) -> &str {
        &self.inner.message
    }

    /// The node it happened in, if the executor or the placer has set it.
    pub fn node(&self) -> Option<&NodeContext> {
        self.inner.node.as_ref()
    }

    /// True for an error that is only a consequence of another one, such as the cancellation that a first failure
    /// causes. Reports prefer errors that are not derived.
    pub fn is_derived(&self) -> bool {
        self.inner.derived
    }

    /// The same error, marked as derived from another one.
    pub fn into_derived(mut self) -> Error {
        Arc::make_mut(&mut self.inner).derived = true;
        self
    }

    /// Sets the node, unless one is set: the first is nearest to the cause.
    pub fn with_node(mut self, node: &str, op: &str, device: &str) -> Error {
        if self.inner.node.is_none() {
            Arc::make_mut(&mut self.inner).node =
                Some(NodeContext { node: node.to_owned(), op: op.to_owned(), device: device.to_owned() });
        }
        self
    }

    /// Prepends `context: ` to the message.
    pub fn context(mut self, context: impl fmt::Display) -> Error {
        let inner = Arc::make_mut(&mut self.inner);
        inner.message = format!("{context}: {}", inner.message);
        self
    }

    /// Prepends `text` to the message, verbatim.
    pub fn prefixed(mut self, text: impl fmt::Display) -> Error {
        let inner = Arc::make_mut(&mut self.inner);
        inner.message = format!("{text}{}", inner.message);
        self
    }

    /// Appends `text` to the message.
    pub fn and(mut self, text: impl fmt::Display) -> Error {
        let inner = Arc::make_mut(&mut self.inner);
        inner.message = format!("{}{text}", inner.message);
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(place) = &self.inner.node {
            write!(f, "{} '{}'", place.op, place.node)?;
            if !place.device.is_empty() {
                write!(f, " on {}", place.device)?;
            }
            f.write_str(": ")?;
        }
        f.write_str(&self.inner.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.inner.code)
    }
}

impl std::error::Error for Error {}

impl PartialEq for Error {
    fn eq(&self, other: &Error) -> bool {
        self.inner.code == other.inner.code
            && self.inner.message == other.inner.message
            && self.inner.node == other.inner.node
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_names_op_node_and_device() {
        let error =
            Error::invalid_argument("inner sizes differ: 784 and 512").with_node("dense/MatMul", "MatMul", "/gpu:0");
        assert_eq!(error.to_string(), "MatMul 'dense/MatMul' on /gpu:0: inner sizes differ: 784 and 512");
        assert_eq!(format!("{error:?}"), format!("InvalidArgument: {error}"));
    }

    #[test]
    fn the_node_nearest_to_the_cause_wins() {
        let error = Error::internal("x").with_node("a", "A", "").with_node("b", "B", "");
        assert_eq!(error.node().map(|place| place.node.as_str()), Some("a"));
    }

    #[test]
    fn codes_carry_grpc_numbers() {
        assert_eq!(Code::from_number(3), Some(Code::InvalidArgument));
        assert_eq!(Code::from_number(16), Some(Code::Unauthenticated));
        assert_eq!(Code::from_number(0), None);
        assert_eq!(Code::from_number(17), None);
    }
}
