//! Makes one bundle of several: the data files are renamed, the indexes joined.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::{Path, PathBuf};

use kolo_core::{Code, Error, Result};
use prost::Message as _;

use super::reader::Bundle;
use super::table::write_table;
use super::writer::Entries;
use super::{data_path, header, index_path};
use crate::io::FileAccess;
use crate::io::access::Directory;
use crate::io::files::{PRIVATE, file_error, name_of, sync_directory_of, write_whole_within};

/// What [`merge`] does besides.
#[derive(Clone, Debug, Default)]
pub struct MergeOptions {
    /// Removes the directories that the sources were in, if nothing else is in them.
    pub delete_old_dirs: bool,
    /// Goes on if a source does not exist.
    pub allow_missing_files: bool,
    /// Which files it may touch.
    pub access: FileAccess,
}

/// Moves the bundles `sources` into one called `destination`. The sources are gone afterwards.
pub fn merge(sources: &[String], destination: &str, options: &MergeOptions) -> Result<()> {
    options.access.check(&index_path(destination))?;
    let mut merged = Entries::new();
    // In the order in which the files first occur; that is also their number in the result.
    let mut files: Vec<PathBuf> = Vec::new();
    let mut found: Vec<&String> = Vec::new();
    for source in sources {
        let mut bundle = match Bundle::open_within(source, &options.access) {
            Ok(bundle) => bundle,
            Err(error) if error.code() == Code::NotFound && options.allow_missing_files => continue,
            // What is missing is then the caller's mistake, and TensorFlow calls it that.
            Err(error) if error.code() == Code::NotFound => {
                return Err(Error::invalid_argument(format!("{}; allow_missing_files is false", error.message())));
            }
            Err(error) => return Err(error),
        };
        // A file that is missing or cut short is found now, while all is where it was.
        bundle.check_files()?;
        found.push(source);
        add(&mut merged, &mut files, bundle)?;
    }
    if files.is_empty() {
        return Err(Error::invalid_argument(format!("there is nothing to merge into {destination}")));
    }
    for (shard, from) in files.iter().enumerate() {
        let to = data_path(destination, shard, files.len());
        let rename = || {
            let directory = options.access.make_directory_of(&to)?;
            options.access.directory_of(from)?.rename(name_of(from), &directory, name_of(&to))
        };
        rename()
            .map_err(|error| file_error("cannot rename", from, &error).and(format_args!(" (to {})", to.display())))?;
    }
    let index = index_path(destination);
    sync_directory_of(&index);
    let head = header(files.len());
    let encoded: Vec<(&[u8], Vec<u8>)> = merged.iter().map(|(key, entry)| (&**key, entry.encode_to_vec())).collect();
    let table = std::iter::once((&b""[..], &*head)).chain(encoded.iter().map(|(key, value)| (*key, &**value)));
    write_whole_within(&options.access, &index, &write_table(table), PRIVATE)?;
    for source in found {
        let old = index_path(source);
        // The new checkpoint is whole by now; what cannot be tidied up does no harm.
        if old != index {
            let _ = options.access.directory_of(&old).and_then(|directory| directory.remove(name_of(&old)));
        }
        if let (true, Some(directory)) = (options.delete_old_dirs, Path::new(source).parent()) {
            let remove = |parent: Directory| parent.remove_directory(name_of(directory));
            let _ = options.access.directory_of(directory).and_then(remove);
        }
    }
    Ok(())
}

fn add(merged: &mut Entries, files: &mut Vec<PathBuf>, bundle: Bundle) -> Result<()> {
    let (prefix, n_shards) = (bundle.prefix().to_owned(), bundle.n_shards());
    let mut new_number: BTreeMap<i32, i32> = BTreeMap::new();
    for (key, mut entry) in bundle.into_entries() {
        let number = new_number.entry(entry.shard_id).or_insert_with(|| {
            files.push(data_path(&prefix, entry.shard_id.max(0) as usize, n_shards));
            files.len() as i32 - 1
        });
        entry.shard_id = *number;
        match merged.entry(key) {
            Entry::Vacant(vacant) => drop(vacant.insert(entry)),
            Entry::Occupied(mut occupied) => {
                let name = String::from_utf8_lossy(occupied.key()).into_owned();
                let old = occupied.get_mut();
                let joins = !old.slices.is_empty() && !entry.slices.is_empty();
                if !joins || old.dtype != entry.dtype || old.shape != entry.shape {
                    return Err(Error::invalid_argument(format!(
                        "'{name}' is in more than one of the checkpoints to merge, {prefix} among them"
                    )));
                }
                old.slices.extend(entry.slices);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use kolo_core::{DType, Tensor};

    use super::*;
    use crate::io::bundle::{Item, TensorSlice, save};
    use crate::io::files::TestDir;

    fn merge(sources: &[String], destination: &str, allow_missing_files: bool) -> Result<()> {
        let options = MergeOptions { delete_old_dirs: true, allow_missing_files, access: FileAccess::everything() };
        super::merge(sources, destination, &options)
    }

    fn item(name: &str, tensor: impl Into<Tensor>) -> Item {
        Item { name: name.to_owned(), slice: None, tensor: tensor.into() }
    }

    fn half(offset: usize, tensor: impl Into<Tensor>) -> Item {
        let slice = Some(([4].into(), TensorSlice::at(&[offset], &[2])));
        Item { name: "p".into(), slice, tensor: tensor.into() }
    }

    #[test]
    fn two_shards_become_what_tensorflow_writes() {
        // What TensorFlow 2.21's sharded Saver wrote for v1 = 1 and v2 = 2 on two devices.
        const INDEX: &str = "00000608021a02080100020b76310801120028043581a5da2b01010d3208011200180128043510fd784f00000000\
            01000000004734d1f4000000000100000000c0f2a1b000010277003200000000010000000064f9f1113708440e00000000000000000000\
            000000000000000000000000000000000000000000000000000057fb808b247547db";
        let dir = TestDir::new("merge");
        let sources = [dir.text("sh_temp/part-00000-of-00002"), dir.text("sh_temp/part-00001-of-00002")];
        save(&sources[0], &[item("v1", 1.0f32)], None).unwrap();
        save(&sources[1], &[item("v2", 2.0f32)], None).unwrap();
        merge(&sources, &dir.text("sh"), false).unwrap();
        assert_eq!(dir.names(), ["sh.data-00000-of-00002", "sh.data-00001-of-00002", "sh.index"]);
        let index: String = fs::read(dir.join("sh.index")).unwrap().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(index, INDEX);
    }

    #[test]
    fn slices_of_one_tensor_join() {
        let dir = TestDir::new("merge-slices");
        let sources = [dir.text("a"), dir.text("b")];
        save(&sources[0], &[half(0, [1i32, 2]), item("x", 5i32)], None).unwrap();
        save(&sources[1], &[half(2, [3i32, 4])], None).unwrap();
        merge(&sources, &dir.text("m"), false).unwrap();
        let mut bundle = Bundle::open(&dir.text("m")).unwrap();
        assert_eq!(bundle.names().collect::<Vec<_>>(), ["p", "x"]);
        assert_eq!(bundle.read("p").unwrap(), Tensor::from([1i32, 2, 3, 4]));
        assert_eq!(bundle.read("x").unwrap(), Tensor::scalar(5i32));
        assert_eq!(bundle.verify(), []);
    }

    #[test]
    fn what_does_not_fit_is_refused_and_left_alone() {
        let dir = TestDir::new("merge-refused");
        let sources = [dir.text("a"), dir.text("b")];
        save(&sources[0], &[item("v", 1i32)], None).unwrap();
        let error = merge(&sources, &dir.text("m"), false).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        save(&sources[1], &[item("v", Tensor::zeros(DType::F32, [2]).unwrap())], None).unwrap();
        let before = dir.names();
        let error = merge(&sources, &dir.text("m"), false).unwrap_err();
        assert!(error.message().contains("'v' is in more than one"), "{error}");
        assert_eq!(dir.names(), before);
        fs::remove_file(dir.join("b.index")).unwrap();
        merge(&sources, &dir.text("m"), true).unwrap();
        assert_eq!(Bundle::open(&dir.text("m")).unwrap().read("v").unwrap(), Tensor::scalar(1i32));
    }
}
