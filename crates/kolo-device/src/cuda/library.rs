//! Which CUDA libraries are installed. Must be checked before any call: the bindings panic if a library is missing.

use std::fs;
use std::sync::OnceLock;

use cudarc::driver::sys as driver;
use cudarc::{cublaslt, cudnn, nvrtc};

use super::nccl::nccl_version;

/// The result of looking for one library.
#[derive(Clone, Debug)]
pub struct LibraryReport {
    /// Its name, without prefix and version.
    pub name: &'static str,
    /// The file it was loaded from.
    pub path: Option<String>,
    /// The version that it reports.
    pub version: Option<String>,
    /// What does not work without it.
    pub without: &'static str,
    /// True if it could be opened.
    pub is_present: bool,
}

/// Why no GPU can be used, in one line; `None` if the driver is installed and has a GPU.
pub fn absent() -> Option<String> {
    if !has_driver() {
        return Some("no CUDA driver here (libcuda.so.1 was not found)".to_owned());
    }
    if let Err(error) = cudarc::driver::result::init() {
        return Some(format!("the CUDA driver does not start: {}", super::describe(error)));
    }
    match cudarc::driver::result::device::get_count() {
        Ok(0) => Some("the CUDA driver sees no GPU".to_owned()),
        Ok(_) => None,
        Err(error) => Some(format!("the CUDA driver does not list its GPUs: {}", super::describe(error))),
    }
}

macro_rules! presence {
    ($($(#[$doc:meta])* $function:ident, $path:path;)*) => {
        $($(#[$doc])*
        pub(super) fn $function() -> bool {
            static PRESENT: OnceLock<bool> = OnceLock::new();
            // SAFETY: loads the library, whose initialisation code is NVIDIA's, and calls nothing in it.
            *PRESENT.get_or_init(|| unsafe { $path() })
        })*
    };
}

presence! {
    /// Whether `libcuda` can be opened.
    has_driver, driver::is_culib_present;
    /// Whether `libnvrtc` can be opened.
    has_nvrtc, nvrtc::sys::is_culib_present;
    /// Whether `libcublasLt` can be opened.
    has_cublaslt, cublaslt::sys::is_culib_present;
    /// Whether `libcudnn` can be opened.
    has_cudnn, cudnn::sys::is_culib_present;
}

/// Reports on all libraries that Kolo can use.
pub fn libraries() -> Vec<LibraryReport> {
    let nvml = nvml_wrapper::Nvml::init();
    let nvml_version = nvml.as_ref().ok().and_then(|nvml| nvml.sys_nvml_version().ok());
    let mut reports = vec![
        LibraryReport {
            name: "cuda",
            path: None,
            version: driver_version(),
            without: "GPUs: everything runs on the CPU",
            is_present: has_driver(),
        },
        LibraryReport {
            name: "nvidia-ml",
            path: None,
            version: nvml_version,
            without: "load, temperature and processes of GPUs in listings and reports",
            is_present: nvml.is_ok(),
        },
        LibraryReport {
            name: "nvrtc",
            path: None,
            version: nvrtc_version(),
            without: "all of Kolo's kernels that are not in the kernel cache: a GPU cannot be used",
            is_present: has_nvrtc(),
        },
        LibraryReport {
            name: "cublasLt",
            path: None,
            version: cublaslt_version(),
            without: "MatMul and BatchMatMul on GPUs",
            is_present: has_cublaslt(),
        },
        LibraryReport {
            name: "cudnn",
            path: None,
            version: cudnn_version(),
            without: "convolutions on GPUs",
            is_present: has_cudnn(),
        },
        LibraryReport {
            name: "nccl",
            path: None,
            version: nccl_version(),
            without: "exchanges between the GPUs of ranks: their gradients go through host memory",
            is_present: nccl_version().is_some(),
        },
    ];
    // The version calls have loaded the libraries, so their paths are in the process's memory map.
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    for report in &mut reports {
        let file = format!("/lib{}.so", report.name);
        report.path = maps
            .lines()
            .filter_map(|line| line.find('/').map(|at| &line[at..]))
            .find(|path| path.contains(&file))
            .map(str::to_owned);
    }
    reports
}

fn driver_version() -> Option<String> {
    if !has_driver() {
        return None;
    }
    let mut version = 0;
    // SAFETY: the driver is present, and writes one int.
    unsafe { driver::cuDriverGetVersion(&mut version) }.result().ok()?;
    Some(format!("CUDA {}.{}", version / 1000, version % 1000 / 10))
}

/// NVRTC's version.
pub(super) fn nvrtc_version() -> Option<String> {
    if !has_nvrtc() {
        return None;
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is present, and writes two ints.
    unsafe { nvrtc::sys::nvrtcVersion(&mut major, &mut minor) }.result().ok()?;
    Some(format!("{major}.{minor}"))
}

fn cublaslt_version() -> Option<String> {
    if !has_cublaslt() {
        return None;
    }
    // SAFETY: the library is present; the call takes nothing.
    let version = unsafe { cublaslt::sys::cublasLtGetVersion() };
    Some(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
}

fn cudnn_version() -> Option<String> {
    if !has_cudnn() {
        return None;
    }
    let version = cudnn::result::get_version();
    Some(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asking_is_harmless_with_and_without_cuda() {
        let reports = libraries();
        assert_eq!(reports.len(), 6);
        for report in reports.iter().filter(|report| !report.is_present) {
            assert_eq!(report.version, None, "{report:?}");
        }
        if !has_driver() {
            assert!(absent().is_some_and(|why| why.contains("libcuda")));
        }
    }
}
