//! MPI's functions, looked up in the library of the `mpirun` that started this process.
//!
//! There is no common binary interface yet: in Open MPI a communicator is the address of an object that the library exports, in
//! MPICH (and what follows its interface, such as Intel's library) it is a number. [`Functions`] is the same table for both.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use kolo_core::{Error, Result};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW, Symbol};

/// Whose binary interface a library has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MpiKind {
    /// Open MPI 4 and 5.
    OpenMpi,
    /// MPICH, from version 3.1 on, and libraries with its interface.
    Mpich,
}

impl MpiKind {
    /// The names that its library goes by.
    fn names(self) -> &'static [&'static str] {
        match self {
            MpiKind::OpenMpi => &["libmpi.so.40"],
            MpiKind::Mpich => &["libmpi.so.12", "libmpich.so.12"],
        }
    }

    /// How its library calls itself.
    fn is_called(self, version: &str) -> bool {
        let is_open_mpi = version.contains("Open MPI");
        match self {
            MpiKind::OpenMpi => is_open_mpi,
            MpiKind::Mpich => !is_open_mpi,
        }
    }
}

impl std::fmt::Display for MpiKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            MpiKind::OpenMpi => "Open MPI",
            MpiKind::Mpich => "MPICH",
        })
    }
}

/// The result of a call.
pub(super) type Code = c_int;
pub(super) const SUCCESS: Code = 0;

/// One thread at a time may call, whichever it is. Both libraries have this number for it.
pub(super) const SERIALIZED: c_int = 2;

/// Room for the text of an error, and for that of a version, in either library.
pub(super) const MOST_ERROR_BYTES: usize = 1024;
const MOST_VERSION_BYTES: usize = 16 << 10;

/// What a call says of a message: room for either library's. Only the library looks into it.
#[repr(C, align(16))]
pub(super) struct Status([u64; 16]);

impl Status {
    pub fn new() -> Status {
        Status([0; 16])
    }
}

/// A handle of either library, as it is kept between calls.
pub(super) type Word = u64;

/// A library's type of handles.
pub(super) trait Handle: Copy + 'static {
    fn word(self) -> Word;
    fn of(word: Word) -> Self;
}

impl Handle for c_int {
    fn word(self) -> Word {
        self as u32 as Word
    }

    fn of(word: Word) -> c_int {
        word as u32 as c_int
    }
}

impl Handle for *mut c_void {
    fn word(self) -> Word {
        self as Word
    }

    fn of(word: Word) -> *mut c_void {
        word as *mut c_void
    }
}

macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*);)*) => {
        /// The functions that are used, by their names without the prefix, for handles of type `H`.
        pub(super) struct Functions<H: Handle> {
            $(pub $field: unsafe extern "C" fn($($argument),*) -> Code,)*
            pub world: H,
            pub byte: H,
            pub errors_return: H,
            pub any_source: c_int,
            /// Keeps the functions loaded.
            _library: Library,
        }

        impl<H: Handle> Functions<H> {
            fn load(library: Library, [world, byte, errors_return]: [H; 3], any_source: c_int) -> Loaded<Functions<H>> {
                Ok(Functions {
                    // SAFETY: the types are those of the MPI standard, with handles of the kind that the caller knows the library
                    // to have.
                    $($field: unsafe { *library.get::<unsafe extern "C" fn($($argument),*) -> Code>($symbol)? },)*
                    world,
                    byte,
                    errors_return,
                    any_source,
                    _library: library,
                })
            }
        }
    };
}

type Loaded<T> = std::result::Result<T, libloading::Error>;

functions! {
    initialized = b"MPI_Initialized\0": fn(*mut c_int);
    init_thread = b"MPI_Init_thread\0": fn(*mut c_int, *mut c_void, c_int, *mut c_int);
    finalize = b"MPI_Finalize\0": fn();
    comm_set_errhandler = b"MPI_Comm_set_errhandler\0": fn(H, H);
    comm_rank = b"MPI_Comm_rank\0": fn(H, *mut c_int);
    comm_size = b"MPI_Comm_size\0": fn(H, *mut c_int);
    isend = b"MPI_Isend\0": fn(*const c_void, c_int, H, c_int, c_int, H, *mut H);
    irecv = b"MPI_Irecv\0": fn(*mut c_void, c_int, H, c_int, c_int, H, *mut H);
    test = b"MPI_Test\0": fn(*mut H, *mut c_int, *mut Status);
    iprobe = b"MPI_Iprobe\0": fn(c_int, c_int, H, *mut c_int, *mut Status);
    recv = b"MPI_Recv\0": fn(*mut c_void, c_int, H, c_int, c_int, H, *mut Status);
    get_count = b"MPI_Get_count\0": fn(*const Status, H, *mut c_int);
    error_string = b"MPI_Error_string\0": fn(c_int, *mut c_char, *mut c_int);
}

/// A library with the handles that it has.
pub(super) enum Opened {
    OpenMpi(Functions<*mut c_void>),
    Mpich(Functions<c_int>),
}

/// A library that was opened.
pub(super) struct Mpi {
    pub opened: Opened,
    /// What it says of itself, in one line.
    pub version: String,
}

impl Mpi {
    /// The library at `path`, or else the one that lies beside the launcher that started this process, or else that of the system.
    pub fn open(kind: MpiKind, path: Option<&Path>) -> Result<Mpi> {
        let candidates = match path {
            Some(path) => vec![path.to_owned()],
            None => candidates(kind, beside_launcher().as_deref()),
        };
        let mut tried = Vec::new();
        for candidate in candidates {
            // SAFETY: runs the library's initialisation code. It is the MPI library that the user's launcher belongs to, or that the
            // user has named. Its plug-ins look for its symbols among the global ones.
            let library = match unsafe { Library::open(Some(&candidate), RTLD_NOW | RTLD_GLOBAL) } {
                Ok(library) => library,
                Err(error) => {
                    tried.push(format!("{}: {}", candidate.display(), first_line(&error)));
                    continue;
                }
            };
            let wrong = |error: libloading::Error| {
                let what = format!("{} is no library of {kind}: {}", candidate.display(), first_line(&error));
                Error::failed_precondition(what)
            };
            let version = version(&library).map_err(wrong)?;
            if !kind.is_called(&version) {
                return Err(Error::failed_precondition(format!(
                    "this process was started by the mpirun of {kind}, and {} is another library: {version}; set KOLO_MPI_LIBRARY to \
                     the libmpi.so of that mpirun",
                    candidate.display()
                )));
            }
            let opened = match kind {
                MpiKind::OpenMpi => {
                    let of = |name: &[u8]| -> Loaded<*mut c_void> {
                        // SAFETY: only the address of the object is taken, which is the handle.
                        let symbol: Symbol<*mut c_void> = unsafe { library.get(name)? };
                        Ok(symbol.into_raw())
                    };
                    let world = of(b"ompi_mpi_comm_world\0").map_err(wrong)?;
                    let byte = of(b"ompi_mpi_byte\0").map_err(wrong)?;
                    let errors_return = of(b"ompi_mpi_errors_return\0").map_err(wrong)?;
                    Opened::OpenMpi(Functions::load(library, [world, byte, errors_return], -1).map_err(wrong)?)
                }
                MpiKind::Mpich => {
                    let [world, byte, errors_return] = [0x4400_0000, 0x4c00_010d, 0x5400_0001];
                    Opened::Mpich(Functions::load(library, [world, byte, errors_return], -2).map_err(wrong)?)
                }
            };
            return Ok(Mpi { opened, version });
        }
        Err(Error::failed_precondition(format!(
            "this process was started by the mpirun of {kind}, but its library was not found ({}); set KOLO_MPI_LIBRARY to its libmpi.so",
            tried.join("; ")
        )))
    }
}

/// The text of an error without what follows its first line.
fn first_line(error: &libloading::Error) -> String {
    let source = std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string);
    source.lines().next().unwrap_or_default().to_owned()
}

/// Where the launcher's library would be.
fn beside_launcher() -> Option<PathBuf> {
    let launcher = std::fs::read_link(format!("/proc/{}/exe", std::os::unix::process::parent_id())).ok()?;
    Some(launcher.parent()?.parent()?.join("lib"))
}

fn candidates(kind: MpiKind, folder: Option<&Path>) -> Vec<PathBuf> {
    let beside = kind.names().iter().filter_map(|name| folder.map(|folder| folder.join(name)));
    let there = beside.filter(|path| path.exists());
    there.chain(kind.names().iter().map(PathBuf::from)).collect()
}

fn version(library: &Library) -> Loaded<String> {
    // SAFETY: the type is that of the MPI standard, in which this function has no handles, and may be called before all others.
    let get =
        unsafe { library.get::<unsafe extern "C" fn(*mut c_char, *mut c_int) -> Code>(b"MPI_Get_library_version\0")? };
    let (mut text, mut n) = (vec![0u8; MOST_VERSION_BYTES], 0);
    // SAFETY: there is room for the longest version of either library, which ends with a zero.
    let code = unsafe { get(text.as_mut_ptr().cast(), &mut n) };
    Ok(if code == SUCCESS { line_of(&text) } else { String::new() })
}

/// The first line of a text that ends with a zero.
pub(super) fn line_of(text: &[u8]) -> String {
    let text = CStr::from_bytes_until_nul(text).map(CStr::to_string_lossy).unwrap_or_default();
    text.lines().next().unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_looked_for_beside_its_launcher_first() {
        let folder = std::env::temp_dir().join(format!("kolo-mpi-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("libmpi.so.12"), "").unwrap();
        let found = candidates(MpiKind::Mpich, Some(&folder));
        let other = candidates(MpiKind::OpenMpi, Some(&folder));
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found, [folder.join("libmpi.so.12"), "libmpi.so.12".into(), "libmpich.so.12".into()]);
        assert_eq!(other, [PathBuf::from("libmpi.so.40")]);
    }

    #[test]
    fn a_file_that_is_no_library_of_mpi_is_named() {
        let none = Mpi::open(MpiKind::OpenMpi, Some(Path::new("/there/is/none.so"))).err().unwrap().to_string();
        assert!(none.contains("/there/is/none.so") && none.contains("KOLO_MPI_LIBRARY"), "{none}");
        let other = Mpi::open(MpiKind::Mpich, Some(Path::new("libc.so.6"))).err().unwrap().to_string();
        assert!(other.contains("libc.so.6 is no library of MPICH"), "{other}");
    }

    #[test]
    fn handles_of_both_kinds_keep_their_value() {
        for number in [0, -1, 0x4c00_010d, c_int::MIN] {
            assert_eq!(c_int::of(number.word()), number);
        }
        let address = std::ptr::dangling_mut::<c_void>();
        assert_eq!(<*mut c_void as Handle>::of(address.word()), address);
    }

    #[test]
    fn versions_are_told_apart() {
        assert!(MpiKind::OpenMpi.is_called("Open MPI v5.0.11, package: Open MPI"));
        assert!(MpiKind::Mpich.is_called("MPICH Version:\t5.0.2") && !MpiKind::Mpich.is_called("Open MPI v4.1.4"));
        assert_eq!(line_of(b"MPICH Version: 5\nand more\0\0"), "MPICH Version: 5");
    }
}
