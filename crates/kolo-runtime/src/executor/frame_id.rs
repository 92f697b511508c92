//! Ids of loop instances, which are the same in every task of a step: transfers inside of loops carry them.
//!
//! They are TensorFlow's ids. There are two kinds, and tasks that share a loop must use the same one.

/// The kind of ids that loop instances have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FrameIds {
    /// As in TensorFlow 2: a hash of the parent's id, its iteration and the frame's name.
    #[default]
    Mixed,
    /// As in TensorFlow 1: the hash of all names and iterations on the path to the frame.
    Path,
}

/// One instance of a frame.
#[derive(Clone, Debug, Default)]
pub(crate) struct FrameInstance {
    id: u64,
    /// For [`FrameIds::Path`].
    path: String,
}

impl FrameInstance {
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The instance of frame `name` that is entered in an iteration of this one.
    pub fn child(&self, iteration: u32, name: &str, ids: FrameIds) -> FrameInstance {
        match ids {
            FrameIds::Mixed => {
                let id = combine(self.id, combine(u64::from(iteration), hash64(name.as_bytes())));
                FrameInstance { id, path: String::new() }
            }
            FrameIds::Path => {
                let path = format!("{};{iteration};{name}", self.path);
                FrameInstance { id: hash64(path.as_bytes()), path }
            }
        }
    }
}

fn combine(a: u64, b: u64) -> u64 {
    a ^ b.wrapping_add(0x9e37_79b9_7f4a_7800).wrapping_add(a << 10).wrapping_add(a >> 4)
}

/// MurmurHash64A with the seed that TensorFlow uses.
fn hash64(bytes: &[u8]) -> u64 {
    const M: u64 = 0xc6a4_a793_5bd1_e995;
    const SEED: u64 = 0x00DE_CAFC_AFFE;
    let mut hash = SEED ^ (bytes.len() as u64).wrapping_mul(M);
    let mut words = bytes.chunks_exact(8);
    for word in &mut words {
        let mut k = little_endian(word).wrapping_mul(M);
        k = (k ^ (k >> 47)).wrapping_mul(M);
        hash = (hash ^ k).wrapping_mul(M);
    }
    if !words.remainder().is_empty() {
        hash = (hash ^ little_endian(words.remainder())).wrapping_mul(M);
    }
    hash = (hash ^ (hash >> 47)).wrapping_mul(M);
    hash ^ (hash >> 47)
}

fn little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_tensorflows() {
        assert_eq!(hash64(b""), 0x8176_9421_199f_9e3b);
        assert_eq!(hash64(b"abc"), 0x4e86_5c82_2fec_8db6);
        assert_eq!(hash64(b"hello world"), 0x8cfe_ded7_1670_33ef);
    }

    /// Ids that were observed in running TensorFlow tasks.
    #[test]
    fn instances_are_numbered_as_tensorflow_does() {
        let child = |parent: &FrameInstance, i, name: &str, ids| parent.child(i, name, ids);
        let root = FrameInstance::default();
        assert_eq!(child(&root, 0, "wl/while_context", FrameIds::Path).id(), 4631698018473495634);
        assert_eq!(child(&root, 0, "wl/while_context", FrameIds::Mixed).id(), 5189404682685958103);
        let inner = |ids, i| child(&child(&root, 0, "out/while_context", ids), i, "out/in/while_context", ids).id();
        let path = [8938996621691498761, 14165726676734493473, 7182447320906213215];
        let mixed = [419804632738088497, 419804632738087474, 419804632738090551];
        for i in 0..3 {
            assert_eq!(inner(FrameIds::Path, i), path[i as usize]);
            assert_eq!(inner(FrameIds::Mixed, i), mixed[i as usize]);
        }
    }
}
