//! NCCL's functions, looked up in `libnccl.so.2` when a group first meets. `cudarc` has bindings, too, but does not find the library
//! under the only name that most installations give it.

use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys::CUstream;
use kolo_core::{DType, Error, Result};
use libloading::Library;

use crate::cpu::reduce::ReduceOp;

/// The names that the library goes by.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// One rank's end of a group.
pub(super) type Comm = *mut c_void;

/// A result of NCCL's: zero is success.
pub(super) type Status = c_int;
pub(super) const SUCCESS: Status = 0;
pub(super) const IN_PROGRESS: Status = 7;

/// How ranks find each other.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId(pub [u8; UNIQUE_ID_BYTES]);

pub(super) const UNIQUE_ID_BYTES: usize = 128;

/// The options of a communicator as of NCCL 2.18. Later versions take the defaults for what they have added.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cluster_size: c_int,
    least_blocks: c_int,
    most_blocks: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// The defaults, but calls return before they are done: only so can another thread end them.
    pub fn polled() -> Config {
        const UNDEFINED: c_int = c_int::MIN;
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 21_800,
            blocking: 0,
            cluster_size: UNDEFINED,
            least_blocks: UNDEFINED,
            most_blocks: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

macro_rules! functions {
    ($($(#[$doc:meta])* $field:ident = $symbol:literal: fn($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions that are used, by their names without the prefix.
        pub(super) struct Nccl {
            $($(#[$doc])* pub $field: unsafe extern "C" fn($($argument),*) -> $result,)*
            /// Keeps the functions loaded.
            _library: Library,
        }

        impl Nccl {
            fn load(library: Library) -> std::result::Result<Nccl, libloading::Error> {
                Ok(Nccl {
                    // SAFETY: the types are those of nccl.h, which has kept them since NCCL 2.18.
                    $($field: unsafe { *library.get::<unsafe extern "C" fn($($argument),*) -> $result>($symbol)? },)*
                    _library: library,
                })
            }
        }
    };
}

functions! {
    get_version = b"ncclGetVersion\0": fn(*mut c_int) -> Status;
    get_unique_id = b"ncclGetUniqueId\0": fn(*mut UniqueId) -> Status;
    comm_init_rank_config = b"ncclCommInitRankConfig\0": fn(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> Status;
    comm_get_async_error = b"ncclCommGetAsyncError\0": fn(Comm, *mut Status) -> Status;
    comm_finalize = b"ncclCommFinalize\0": fn(Comm) -> Status;
    comm_destroy = b"ncclCommDestroy\0": fn(Comm) -> Status;
    comm_abort = b"ncclCommAbort\0": fn(Comm) -> Status;
    get_error_string = b"ncclGetErrorString\0": fn(Status) -> *const c_char;
    get_last_error = b"ncclGetLastError\0": fn(Comm) -> *const c_char;
    group_start = b"ncclGroupStart\0": fn() -> Status;
    group_end = b"ncclGroupEnd\0": fn() -> Status;
    all_reduce = b"ncclAllReduce\0": fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, CUstream) -> Status;
    reduce_scatter = b"ncclReduceScatter\0": fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, CUstream) -> Status;
    all_gather = b"ncclAllGather\0": fn(*const c_void, *mut c_void, usize, c_int, Comm, CUstream) -> Status;
    broadcast = b"ncclBroadcast\0": fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, CUstream) -> Status;
    send = b"ncclSend\0": fn(*const c_void, usize, c_int, c_int, Comm, CUstream) -> Status;
    recv = b"ncclRecv\0": fn(*mut c_void, usize, c_int, c_int, Comm, CUstream) -> Status;
}

/// The library, opened on first use.
pub(super) fn nccl() -> Result<&'static Nccl> {
    static NCCL: OnceLock<std::result::Result<Nccl, String>> = OnceLock::new();
    let found = NCCL.get_or_init(|| {
        let mut errors = Vec::new();
        for name in NAMES {
            // SAFETY: loads the library, whose initialisation code is NVIDIA's, and calls nothing in it.
            match unsafe { Library::new(name) }.and_then(Nccl::load) {
                Ok(nccl) => return Ok(nccl),
                Err(error) => {
                    let why = error.source().map_or_else(|| error.to_string(), |source| source.to_string());
                    errors.push(format!("{name}: {why}"));
                }
            }
        }
        Err(errors.join("; "))
    });
    found.as_ref().map_err(|why| Error::failed_precondition(format!("NCCL cannot be used: {why}")))
}

/// The version of the library, if it is here.
pub(in crate::cuda) fn nccl_version() -> Option<String> {
    let mut version = 0;
    // SAFETY: the library writes one int.
    match unsafe { (nccl().ok()?.get_version)(&mut version) } {
        SUCCESS => Some(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)),
        _ => None,
    }
}

impl Nccl {
    /// What a status means, in the library's words, with what it last complained about.
    pub fn describe(&self, status: Status, comm: Comm) -> String {
        let text = |text: *const c_char| match text.is_null() {
            true => String::new(),
            // SAFETY: the library returns strings that end in zero and live as long as it.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        };
        // SAFETY: both calls only read; the communicator may be null.
        let (what, last) = unsafe { ((self.get_error_string)(status), (self.get_last_error)(comm)) };
        match (text(what), text(last)) {
            (what, last) if last.is_empty() => what,
            (what, last) => format!("{what} ({last})"),
        }
    }
}

/// The number that NCCL has for a type.
pub(super) fn data_type(dtype: DType) -> Option<c_int> {
    Some(match dtype {
        DType::I8 => 0,
        DType::U8 | DType::Bool => 1,
        DType::I32 => 2,
        DType::U32 => 3,
        DType::I64 => 4,
        DType::U64 => 5,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
        _ => return None,
    })
}

/// Bytes, for what is only moved.
pub(super) const BYTES: c_int = 1;

/// The number that NCCL has for a reduction.
pub(super) fn reduction(op: ReduceOp) -> c_int {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Prod => 1,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
        ReduceOp::Mean => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_has_the_layout_of_the_header() {
        let config = Config::polled();
        assert_eq!((size_of::<Config>(), std::mem::offset_of!(Config, blocking)), (48, 16));
        assert_eq!((std::mem::offset_of!(Config, net_name), std::mem::offset_of!(Config, split_share)), (32, 40));
        assert_eq!((config.size, config.blocking), (48, 0));
    }

    #[test]
    fn asking_for_the_library_is_harmless_without_it() {
        if let Err(error) = nccl() {
            assert!(error.message().contains("libnccl.so"), "{error}");
            assert_eq!(nccl_version(), None);
        }
    }
}
