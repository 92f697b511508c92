//! An empty folder for a case that works with files: `{dir}` in its strings stands for it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use kolo::wire::proto::{GraphDef, Value};
use kolo::{DType, Result, Tensor, wire};

const PLACE: &str = "{dir}";

/// Removed with all that is in it when dropped; none for a case that needs none.
pub struct Folder(Option<PathBuf>);

impl Folder {
    pub fn new(is_wanted: bool) -> std::io::Result<Folder> {
        if !is_wanted {
            return Ok(Folder(None));
        }
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("kolo-golden-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path)?;
        Ok(Folder(Some(path)))
    }

    /// The same graph with the folder's name in its constants.
    pub fn in_graph(&self, def: &GraphDef) -> Result<GraphDef> {
        let mut def = def.clone();
        if self.0.is_none() {
            return Ok(def);
        }
        for node in def.node.iter_mut().filter(|node| node.op == "Const") {
            if let Some(Value::Tensor(tensor)) = node.attr.get_mut("value").and_then(|attr| attr.value.as_mut()) {
                let value = wire::tensor::from_proto(tensor)?;
                if value.dtype() == DType::Str {
                    **tensor = wire::tensor::to_proto(&self.put(&value)?)?;
                }
            }
        }
        Ok(def)
    }

    /// The value with the folder's name in its strings.
    pub fn put(&self, value: &Tensor) -> Result<Tensor> {
        self.replace(value, |folder| (PLACE.as_bytes().to_vec(), folder))
    }

    /// The value without the folder's name.
    pub fn take(&self, value: &Tensor) -> Result<Tensor> {
        self.replace(value, |folder| (folder, PLACE.as_bytes().to_vec()))
    }

    fn replace(&self, value: &Tensor, pair: impl Fn(Vec<u8>) -> (Vec<u8>, Vec<u8>)) -> Result<Tensor> {
        let Some(path) = self.0.as_ref().filter(|_| value.dtype() == DType::Str) else { return Ok(value.clone()) };
        let (old, new) = pair(path.to_string_lossy().into_owned().into_bytes());
        let strings = value.strings()?.iter().map(|text| replaced(text, &old, &new).into()).collect();
        Tensor::from_strings(value.shape().clone(), strings)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            let _ = std::fs::remove_dir_all(path);
        }
    }
}

fn replaced(mut text: &[u8], old: &[u8], new: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    while let Some(at) = text.windows(old.len()).position(|part| part == old) {
        out.extend_from_slice(&text[..at]);
        out.extend_from_slice(new);
        text = &text[at + old.len()..];
    }
    out.extend_from_slice(text);
    out
}

#[test]
fn names_come_and_go() {
    let folder = Folder::new(true).unwrap();
    let path = folder.0.clone().unwrap();
    let value = Tensor::string(b"{dir}/a:{dir}\xff".to_vec());
    let there = folder.put(&value).unwrap();
    let name = path.to_str().unwrap();
    assert_eq!(there.strings().unwrap()[0], [name.as_bytes(), b"/a:", name.as_bytes(), b"\xff"].concat());
    assert!(folder.take(&there).unwrap().strings() == value.strings() && path.is_dir());
    drop(folder);
    assert!(!path.exists());
}
