//! FarmHash's 64-bit fingerprint (Pike, 2014): the same number for the same bytes on every machine, and TensorFlow's choice
//! for hashing strings.

const K0: u64 = 0xc3a5_c85c_97cb_3127;
const K1: u64 = 0xb492_b66f_be98_f273;
const K2: u64 = 0x9ae1_6a3b_2f90_404f;

/// The fingerprint of some bytes.
pub fn fingerprint64(bytes: &[u8]) -> u64 {
    match bytes.len() {
        0..=16 => up_to_16(bytes),
        17..=32 => up_to_32(bytes),
        33..=64 => up_to_64(bytes),
        _ => longer(bytes),
    }
}

/// Eight bytes from `at`, the first the lowest.
fn word(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
}

fn half_word(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 4].iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
}

fn shift_mix(value: u64) -> u64 {
    value ^ value >> 47
}

fn mix(u: u64, v: u64, factor: u64) -> u64 {
    let a = shift_mix((u ^ v).wrapping_mul(factor));
    shift_mix((v ^ a).wrapping_mul(factor)).wrapping_mul(factor)
}

fn factor(length: usize) -> u64 {
    K2.wrapping_add(length as u64 * 2)
}

fn up_to_16(s: &[u8]) -> u64 {
    let n = s.len();
    if n >= 8 {
        let mul = factor(n);
        let (a, b) = (word(s, 0).wrapping_add(K2), word(s, n - 8));
        let c = b.rotate_right(37).wrapping_mul(mul).wrapping_add(a);
        let d = a.rotate_right(25).wrapping_add(b).wrapping_mul(mul);
        return mix(c, d, mul);
    }
    if n >= 4 {
        return mix((n as u64).wrapping_add(half_word(s, 0) << 3), half_word(s, n - 4), factor(n));
    }
    if n > 0 {
        let (a, b, c) = (u64::from(s[0]), u64::from(s[n >> 1]), u64::from(s[n - 1]));
        let (y, z) = (a + (b << 8), n as u64 + (c << 2));
        return shift_mix(y.wrapping_mul(K2) ^ z.wrapping_mul(K0)).wrapping_mul(K2);
    }
    K2
}

fn up_to_32(s: &[u8]) -> u64 {
    let (n, mul) = (s.len(), factor(s.len()));
    let (a, b) = (word(s, 0).wrapping_mul(K1), word(s, 8));
    let (c, d) = (word(s, n - 8).wrapping_mul(mul), word(s, n - 16).wrapping_mul(K2));
    let u = a.wrapping_add(b).rotate_right(43).wrapping_add(c.rotate_right(30)).wrapping_add(d);
    mix(u, a.wrapping_add(b.wrapping_add(K2).rotate_right(18)).wrapping_add(c), mul)
}

fn up_to_64(s: &[u8]) -> u64 {
    let (n, mul) = (s.len(), factor(s.len()));
    let (a, b) = (word(s, 0).wrapping_mul(K2), word(s, 8));
    let (c, d) = (word(s, n - 8).wrapping_mul(mul), word(s, n - 16).wrapping_mul(K2));
    let y = a.wrapping_add(b).rotate_right(43).wrapping_add(c.rotate_right(30)).wrapping_add(d);
    let z = mix(y, a.wrapping_add(b.wrapping_add(K2).rotate_right(18)).wrapping_add(c), mul);
    let (e, f) = (word(s, 16).wrapping_mul(mul), word(s, 24));
    let g = y.wrapping_add(word(s, n - 32)).wrapping_mul(mul);
    let h = z.wrapping_add(word(s, n - 24)).wrapping_mul(mul);
    let u = e.wrapping_add(f).rotate_right(43).wrapping_add(g.rotate_right(30)).wrapping_add(h);
    mix(u, e.wrapping_add(f.wrapping_add(a).rotate_right(18)).wrapping_add(g), mul)
}

/// Thirty-two bytes and two seeds, quickly.
fn weak(s: &[u8], mut a: u64, mut b: u64) -> (u64, u64) {
    let (w, x, y, z) = (word(s, 0), word(s, 8), word(s, 16), word(s, 24));
    a = a.wrapping_add(w);
    b = b.wrapping_add(a).wrapping_add(z).rotate_right(21);
    let c = a;
    a = a.wrapping_add(x).wrapping_add(y);
    b = b.wrapping_add(a.rotate_right(44));
    (a.wrapping_add(z), b.wrapping_add(c))
}

/// What is carried from block to block of 64 bytes.
struct HashState {
    x: u64,
    y: u64,
    z: u64,
    v: (u64, u64),
    w: (u64, u64),
}

impl HashState {
    /// One block. The last one mixes with another factor, and nine times as much of some parts.
    fn block(&mut self, s: &[u8], mul: u64, times: u64) {
        let HashState { x, y, z, v, w } = self;
        *x = x.wrapping_add(*y).wrapping_add(v.0).wrapping_add(word(s, 8)).rotate_right(37).wrapping_mul(mul);
        *y = y.wrapping_add(v.1).wrapping_add(word(s, 48)).rotate_right(42).wrapping_mul(mul);
        *x ^= w.1.wrapping_mul(times);
        *y = y.wrapping_add(v.0.wrapping_mul(times)).wrapping_add(word(s, 40));
        *z = z.wrapping_add(w.0).rotate_right(33).wrapping_mul(mul);
        *v = weak(s, v.1.wrapping_mul(mul), x.wrapping_add(w.0));
        *w = weak(&s[32..], z.wrapping_add(w.1), y.wrapping_add(word(s, 16)));
        std::mem::swap(z, x);
    }
}

fn longer(s: &[u8]) -> u64 {
    const SEED: u64 = 81;
    let y = SEED.wrapping_mul(K1).wrapping_add(113);
    let z = shift_mix(y.wrapping_mul(K2).wrapping_add(113)).wrapping_mul(K2);
    let x = SEED.wrapping_mul(K2).wrapping_add(word(s, 0));
    let mut state = HashState { x, y, z, v: (0, 0), w: (0, 0) };
    let n_blocks = (s.len() - 1) / 64;
    for block in s.chunks_exact(64).take(n_blocks) {
        state.block(block, K1, 1);
    }
    // The last 64 bytes, of which some were taken before.
    let mul = K1.wrapping_add((state.z & 0xff) << 1);
    state.w.0 = state.w.0.wrapping_add((s.len() as u64 - 1) & 63);
    state.v.0 = state.v.0.wrapping_add(state.w.0);
    state.w.0 = state.w.0.wrapping_add(state.v.0);
    state.block(&s[s.len() - 64..], mul, 9);
    let HashState { x, y, z, v, w } = state;
    let first = mix(v.0, w.0, mul).wrapping_add(shift_mix(y).wrapping_mul(K0)).wrapping_add(z);
    mix(first, mix(v.1, w.1, mul).wrapping_add(x), mul)
}
