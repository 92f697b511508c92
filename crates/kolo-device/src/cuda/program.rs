//! Kolo's own kernels: CUDA C++ source, compiled for the GPU by NVRTC on first use, and cached on disk.
//!
//! A cache file is named by a hash of its inputs (source, chip, driver, compiler), so it never has to be replaced. It
//! begins with a magic number and a checksum; an invalid file is ignored and compiled again. A cache that cannot be
//! written is not used.

use std::collections::HashMap;
use std::ffi::{CString, c_char};
use std::fs;
use std::hash::{Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cudarc::driver::{result, sys};
use cudarc::nvrtc;
use kolo_core::{DType, Error, Result};
use parking_lot::{Mutex, RwLock};

use super::check;
use super::library::{has_nvrtc, nvrtc_version};
use super::stream::Streams;

/// The source that every program begins with: number types and their conversions.
const PRELUDE: &str = include_str!("prelude.cu");

/// The name that a dtype has in CUDA sources.
pub fn c_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::F64 => "f64",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::I8 => "i8",
        DType::I16 => "i16",
        DType::I32 => "i32",
        DType::I64 => "i64",
        DType::U8 => "u8",
        DType::U16 => "u16",
        DType::U32 => "u32",
        DType::U64 => "u64",
        DType::Bool => "bool",
        _ => "void",
    }
}

/// The key of a program: its operation, element types and loop shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProgramKey {
    /// The template.
    pub family: &'static str,
    /// The op, or the variant of the template.
    pub op: &'static str,
    /// Element types, in the template's order.
    pub dtypes: [Option<DType>; 3],
    /// Further parameters of the template.
    pub variant: u32,
}

impl ProgramKey {
    /// The name of its entry point, such as `binary_add_float_v4`.
    fn entry(&self) -> String {
        let mut name = format!("{}_{}", self.family, self.op).to_lowercase();
        for dtype in self.dtypes.iter().flatten() {
            name.push('_');
            name.push_str(dtype.name());
        }
        if self.variant != 0 {
            name.push_str(&format!("_{}", self.variant));
        }
        name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect()
    }
}

/// A compiled kernel. Lives as long as its device.
#[derive(Clone, Copy)]
pub struct Function(pub(super) sys::CUfunction);

// SAFETY: a function is a handle that the driver allows any thread to launch.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

pub(super) struct Programs {
    streams: Arc<Streams>,
    capability: (i32, i32),
    /// Such as `sm_90`.
    arch: String,
    /// Everything else that the compiled image depends on.
    world: String,
    cache: Option<PathBuf>,
    functions: RwLock<HashMap<ProgramKey, Function>>,
    modules: Mutex<Vec<Module>>,
    n_compiled: std::sync::atomic::AtomicUsize,
}

struct Module(sys::CUmodule);

// SAFETY: a module is a handle that the driver allows any thread to use.
unsafe impl Send for Module {}

impl Programs {
    pub fn new(streams: Arc<Streams>, capability: (i32, i32), driver: i32, cache: Option<PathBuf>) -> Programs {
        let arch = format!("sm_{}{}", capability.0, capability.1);
        let world = format!("{arch} driver {driver} nvrtc {}", nvrtc_version().unwrap_or_default());
        Programs {
            streams,
            capability,
            arch,
            world,
            cache: cache.filter(|dir| make_private(dir).is_ok()),
            functions: RwLock::default(),
            modules: Mutex::default(),
            n_compiled: Default::default(),
        }
    }

    /// The compute capability that programs are compiled for.
    pub fn capability(&self) -> (i32, i32) {
        self.capability
    }

    /// The number of programs that were compiled and not found in the cache.
    pub fn n_compiled(&self) -> usize {
        self.n_compiled.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// The kernel of this name; `source` is called on first use. The source defines a kernel called `KOLO_ENTRY`.
    pub fn function(&self, key: &ProgramKey, source: impl FnOnce() -> String) -> Result<Function> {
        if let Some(function) = self.functions.read().get(key) {
            return Ok(*function);
        }
        // Threads compile concurrently. Two that need the same kernel at once both compile it; that is rare and
        // harmless.
        let entry = key.entry();
        let source = format!("#define KOLO_ENTRY {entry}\n{PRELUDE}\n{}", source());
        let image = self.image(&entry, &source)?;
        let mut modules = self.modules.lock();
        if let Some(function) = self.functions.read().get(key) {
            return Ok(*function);
        }
        self.streams.bind()?;
        // SAFETY: the image is a whole program for this chip, from NVRTC or from a file with a valid checksum.
        let module = check("loading a kernel", unsafe { result::module::load_data(image.as_ptr().cast()) })?;
        modules.push(Module(module));
        let name = CString::new(entry.clone()).map_err(|_| Error::internal("a kernel's name has a zero in it"))?;
        // SAFETY: the module was just loaded and is kept until `self` is dropped.
        let function = unsafe { result::module::get_function(module, name) };
        let function = Function(check(&format!("finding kernel {entry}"), function)?);
        self.functions.write().insert(*key, function);
        Ok(function)
    }

    fn image(&self, entry: &str, source: &str) -> Result<Vec<u8>> {
        let file = self.cache.as_ref().map(|dir| dir.join(format!("{entry}-{:016x}.cubin", self.digest(source))));
        if let Some(image) = file.as_ref().and_then(|file| read_cached(file)) {
            return Ok(image);
        }
        let image = compile(entry, source, &self.arch)?;
        self.n_compiled.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        if let Some(file) = file {
            // A cache that cannot be written only costs time.
            let _ = write_cached(&file, &image);
        }
        Ok(image)
    }

    fn digest(&self, source: &str) -> u64 {
        digest(self.world.as_bytes()) ^ digest(source.as_bytes()).rotate_left(17)
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        if self.streams.bind().is_err() {
            return;
        }
        // Running kernels must end before their code is unloaded. An error means that the GPU is lost.
        let _ = self.streams.compute.synchronize();
        for module in self.modules.get_mut().drain(..) {
            // SAFETY: its functions are not used after `self`. An error means that the GPU is lost.
            let _ = unsafe { result::module::unload(module.0) };
        }
    }
}

const MARK: &[u8; 8] = b"kolocub1";

/// The image in a cache file, if it is valid.
fn read_cached(file: &Path) -> Option<Vec<u8>> {
    let bytes = fs::read(file).ok()?;
    let (mark, rest) = bytes.split_at_checked(8)?;
    let (sum, image) = rest.split_at_checked(8)?;
    let is_whole = mark == MARK && sum == digest(image).to_le_bytes() && !image.is_empty();
    is_whole.then(|| image.to_vec())
}

/// Writes to a temporary file and renames it, so that a reader never sees a partial file.
fn write_cached(file: &Path, image: &[u8]) -> std::io::Result<()> {
    let draft = file.with_extension(format!("{}.tmp", std::process::id()));
    let mut out = fs::File::create(&draft)?;
    out.write_all(MARK)?;
    out.write_all(&digest(image).to_le_bytes())?;
    out.write_all(image)?;
    out.sync_all()?;
    fs::rename(&draft, file)
}

/// Creates the folder, for its owner only: its contents are run on the GPU.
fn make_private(dir: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// A hash that is the same in every process: the standard hasher with its fixed keys.
fn digest(bytes: &[u8]) -> u64 {
    #[allow(deprecated)]
    let mut hasher = std::hash::SipHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

/// Compiles a source for a chip (`sm_90`) without a GPU, as [`super::CudaDevice::function`] would: for tests. An error
/// contains the compiler's log; `None` if the compiler is not installed.
pub fn compile_only(key: &ProgramKey, source: &str, arch: &str) -> Option<Result<Vec<u8>>> {
    let entry = key.entry();
    has_nvrtc().then(|| compile(&entry, &format!("#define KOLO_ENTRY {entry}\n{PRELUDE}\n{source}"), arch))
}

fn compile(entry: &str, source: &str, arch: &str) -> Result<Vec<u8>> {
    if !has_nvrtc() {
        return Err(Error::failed_precondition(format!(
            "kernel {entry} must be compiled, and NVRTC is not here (libnvrtc.so.13 or .12 was not found)"
        )));
    }
    let failed = |what: &str, error: nvrtc::result::NvrtcError| Error::internal(format!("{what} {entry}: {error:?}"));
    let text = CString::new(source).map_err(|_| Error::internal("a kernel's source has a zero in it"))?;
    let name = CString::new(format!("{entry}.cu")).map_err(|_| Error::internal("a kernel's name has a zero in it"))?;
    let program = nvrtc::result::create_program(&text, Some(&name)).map_err(|e| failed("reading", e))?;
    let options = [format!("--gpu-architecture={arch}"), "--std=c++17".to_owned(), "-default-device".to_owned()];
    // SAFETY: the program was just made and is destroyed once, below.
    let compiled = unsafe { nvrtc::result::compile_program(program, &options) };
    let image = match compiled {
        Ok(()) => cubin(program).map_err(|e| failed("taking the code of", e)),
        Err(error) => {
            // SAFETY: as above.
            let log = unsafe { nvrtc::result::get_program_log(program) }.unwrap_or_default();
            let log: Vec<u8> = log.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
            let log = String::from_utf8_lossy(&log).into_owned();
            Err(failed("compiling", error).and(format!("\n{log}")))
        }
    };
    // SAFETY: as above; the last use. There is nothing to do about a failure.
    let _ = unsafe { nvrtc::result::destroy_program(program) };
    image
}

fn cubin(program: nvrtc::sys::nvrtcProgram) -> std::result::Result<Vec<u8>, nvrtc::result::NvrtcError> {
    let mut n_bytes = 0usize;
    // SAFETY: the caller's program was compiled; the library writes the size.
    unsafe { nvrtc::sys::nvrtcGetCUBINSize(program, &mut n_bytes) }.result()?;
    let mut image = vec![0u8; n_bytes];
    // SAFETY: the buffer has the size that the library asked for.
    unsafe { nvrtc::sys::nvrtcGetCUBIN(program, image.as_mut_ptr().cast::<c_char>()) }.result()?;
    Ok(image)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_a_kernel_is() {
        let key =
            ProgramKey { family: "binary", op: "Add", dtypes: [Some(DType::F32), Some(DType::BF16), None], variant: 2 };
        assert_eq!(key.entry(), "binary_add_float_bfloat16_2");
        let plain = ProgramKey { family: "row", op: "Soft-max", dtypes: [None; 3], variant: 0 };
        assert_eq!(plain.entry(), "row_soft_max");
    }

    #[test]
    fn only_whole_files_of_the_cache_are_believed() {
        let dir = std::env::temp_dir().join(format!("kolo-cubin-{}", std::process::id()));
        make_private(&dir).unwrap();
        let file = dir.join("a.cubin");
        assert_eq!(read_cached(&file), None);
        write_cached(&file, b"code").unwrap();
        assert_eq!(read_cached(&file).as_deref(), Some(&b"code"[..]));
        let whole = fs::read(&file).unwrap();
        for cut in 0..whole.len() {
            fs::write(&file, &whole[..cut]).unwrap();
            assert_eq!(read_cached(&file), None, "{cut}");
            let mut changed = whole.clone();
            changed[cut] ^= 1;
            fs::write(&file, &changed).unwrap();
            assert_eq!(read_cached(&file), None, "{cut}");
        }
        fs::remove_dir_all(&dir).unwrap();
    }
}
