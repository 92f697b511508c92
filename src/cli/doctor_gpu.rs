//! `kolo doctor gpu`: the libraries that GPUs need, and what stops working without each.

use crate::cuda::{self, LibraryReport};
use crate::{Error, Result};

use super::print;

/// Prints which libraries were searched for and found. An error if GPUs cannot be used.
pub fn run() -> Result<()> {
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let reports = cuda::libraries();
    reports.iter().try_for_each(|report| print(line(report)))?;
    let found = cuda::discover(visible.as_deref());
    match &visible {
        Some(list) => print(format_args!("CUDA_VISIBLE_DEVICES is '{list}'"))?,
        None => print("CUDA_VISIBLE_DEVICES is not set: all GPUs are visible")?,
    }
    found.warnings.iter().try_for_each(|warning| print(format_args!("warning: {warning}")))?;
    for gpu in &found.gpus {
        let state = gpu.refused.as_ref().map_or_else(|| "can be used".to_owned(), |why| format!("refused: {why}"));
        print(format_args!("{}, {}: {state}", gpu.label(), gpu.name))?;
    }
    match found.absent {
        Some(why) => Err(Error::unavailable(format!("GPUs cannot be used: {why}; everything runs on the CPU"))),
        None => print("GPUs can be used."),
    }
}

/// A library in a line or two.
fn line(report: &LibraryReport) -> String {
    let LibraryReport { name, path, version, without, is_present } = report;
    let path = path.as_deref().unwrap_or("in a place the system does not tell");
    let version = version.as_deref().unwrap_or("of unknown version");
    match is_present {
        true => format!("ok       lib{name} {version}, {path}"),
        false => format!(
            "missing  lib{name}, looked for where the system looks (LD_LIBRARY_PATH, ldconfig)\n         without it: {without}"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_says_what_stops_working() {
        let mut report =
            LibraryReport { name: "cudnn", path: None, version: None, without: "convolution", is_present: false };
        assert!(line(&report).contains("missing  libcudnn") && line(&report).ends_with("without it: convolution"));
        report = LibraryReport {
            path: Some("/lib/x".to_owned()),
            version: Some("9.14".to_owned()),
            is_present: true,
            ..report
        };
        assert_eq!(line(&report), "ok       libcudnn 9.14, /lib/x");
    }
}
