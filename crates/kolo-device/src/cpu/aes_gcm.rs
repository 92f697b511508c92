//! AES-GCM by the processor's own instructions, from one place to another.
//!
//! Libraries seal and open in place. What is sent lies in a tensor that must stay as it is, and what arrives belongs into
//! another one, so each side would need a copy more, and a copy from or to memory takes half as long as the cipher. Here memory
//! is read and written while the processor computes.
//!
//! Only for processors with 512-bit AES and carry-less products; [`AesGcm::new`] says `None` elsewhere, and a library does it.
//! The time that it takes depends on lengths alone: nothing is looked up by data or keys, only by the number of a block, and there
//! are no branches on either.

/// Bytes of the proof that nothing was changed.
pub const TAG: usize = 16;

/// The most bytes that may be covered without being encrypted.
pub const MAX_HEAD: usize = 16;

/// A key.
#[derive(Clone)]
pub struct AesGcm(imp::Key);

impl AesGcm {
    /// The key of 16 or 32 bytes; `None` for other lengths and for processors that lack what it takes.
    pub fn new(key: &[u8]) -> Option<AesGcm> {
        imp::Key::new(key).map(AesGcm)
    }

    /// Encrypts `plain` and then the byte `last` to `out`, with a tag behind it that also covers `head`. False if `out` is not
    /// `plain.len() + 1 + TAG` bytes long, or something is longer than it may be. No two calls with one key may have the same
    /// `nonce`.
    #[must_use]
    pub fn seal(&self, nonce: &[u8; 12], head: &[u8], plain: &[u8], last: u8, out: &mut [u8]) -> bool {
        if plain.len().checked_add(1 + TAG) != Some(out.len()) || !is_allowed(head, plain) {
            return false;
        }
        let (out, tag) = out.split_at_mut(plain.len() + 1);
        let n_wide = plain.len() - plain.len() % imp::WIDE;
        let (plain, plain_rest) = plain.split_at(n_wide);
        let (out, out_rest) = out.split_at_mut(n_wide);
        let mut rest = [0; imp::WIDE];
        rest[..plain_rest.len()].copy_from_slice(plain_rest);
        rest[plain_rest.len()] = last;
        tag.copy_from_slice(&self.0.run::<true>(nonce, head, plain, out, &mut rest[..out_rest.len()]));
        out_rest.copy_from_slice(&rest[..out_rest.len()]);
        true
    }

    /// Takes apart what [`AesGcm::seal`] has made, and says what `last` was. `None` if it was made with another key, nonce or
    /// head, or was changed since, or if `out` is not `1 + TAG` bytes shorter. There is nothing of it in `out` then.
    pub fn open(&self, nonce: &[u8; 12], head: &[u8], sealed: &[u8], out: &mut [u8]) -> Option<u8> {
        if out.len().checked_add(1 + TAG) != Some(sealed.len()) || !is_allowed(head, out) {
            return None;
        }
        let (sealed, tag) = sealed.split_at(out.len() + 1);
        let n_wide = out.len() - out.len() % imp::WIDE;
        let (sealed, sealed_rest) = sealed.split_at(n_wide);
        let mut rest = [0; imp::WIDE];
        let rest = &mut rest[..sealed_rest.len()];
        rest.copy_from_slice(sealed_rest);
        let expected = self.0.run::<false>(nonce, head, sealed, &mut out[..n_wide], rest);
        // All bytes are compared, whether the first ones differ or not.
        let difference = tag.iter().zip(&expected).fold(0, |all, (left, right)| all | (left ^ right));
        if std::hint::black_box(difference) != 0 {
            out.fill(0);
            return None;
        }
        let (&last, others) = rest.split_last()?;
        out[n_wide..].copy_from_slice(others);
        Some(last)
    }
}

/// The counter of blocks has 32 bits.
fn is_allowed(head: &[u8], text: &[u8]) -> bool {
    head.len() <= MAX_HEAD && text.len() < 1 << 31
}

/// Keys are not for logs.
impl std::fmt::Debug for AesGcm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AesGcm")
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod imp {
    pub const WIDE: usize = 256;

    /// There are none here.
    #[derive(Clone)]
    pub enum Key {}

    impl Key {
        pub fn new(_key: &[u8]) -> Option<Key> {
            None
        }

        pub fn run<const SEALS: bool>(
            &self,
            _nonce: &[u8; 12],
            _head: &[u8],
            _from: &[u8],
            _to: &mut [u8],
            _rest: &mut [u8],
        ) -> [u8; super::TAG] {
            match *self {}
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod imp {
    use std::arch::x86_64::*;

    use super::TAG;

    /// Bytes of one turn of the inner loop: 16 blocks in four registers.
    pub const WIDE: usize = 256;

    /// How far ahead memory is asked for.
    const AHEAD: usize = 2048;

    /// Turns between two reductions of the hash.
    const GROUP: usize = 4;

    /// Blocks of so many turns; so many powers of the hash key are kept.
    const POWERS: usize = GROUP * WIDE / 16;

    /// Turns until the counter's last byte is what it was.
    const CYCLE: usize = 256 * 16 / WIDE;

    #[derive(Clone)]
    #[repr(C, align(64))]
    pub struct Key {
        /// By the counter's last byte, from 2 on: how it changes what the first round makes of a counter.
        first: [[u8; 16]; 256],
        /// The hash key's powers from the highest to the first, each times x, and then zeros: 64 bytes from any place on are what
        /// the last one to four blocks are multiplied with.
        powers: [[u8; 16]; POWERS + 4],
        /// Of each of them the sum of its halves, twice.
        folded: [[u8; 16]; POWERS],
        /// Round keys; those of a short key fill the first eleven.
        rounds: [[u8; 16]; 15],
        is_long: bool,
    }

    impl Drop for Key {
        fn drop(&mut self) {
            (self.rounds, self.first) = ([[0; 16]; 15], [[0; 16]; 256]);
            (self.powers, self.folded) = ([[0; 16]; POWERS + 4], [[0; 16]; POWERS]);
            std::hint::black_box(self);
        }
    }

    impl Key {
        pub fn new(key: &[u8]) -> Option<Key> {
            let has_all = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("vaes")
                && is_x86_feature_detected!("vpclmulqdq")
                && is_x86_feature_detected!("aes")
                && is_x86_feature_detected!("pclmulqdq");
            // SAFETY: the processor has these instructions.
            (has_all && matches!(key.len(), 16 | 32)).then(|| unsafe { expand(key) })
        }

        /// Encrypts or decrypts `from`, whole turns, to `to`, and then `rest` where it is. Says what the tag is.
        ///
        /// # Panics
        /// If there is less room than text.
        pub fn run<const SEALS: bool>(
            &self,
            nonce: &[u8; 12],
            head: &[u8],
            from: &[u8],
            to: &mut [u8],
            rest: &mut [u8],
        ) -> [u8; TAG] {
            // SAFETY: there is a key only where the processor has these instructions.
            unsafe {
                match self.is_long {
                    false => crypt::<SEALS, 10>(self, nonce, head, from, to, rest),
                    true => crypt::<SEALS, 14>(self, nonce, head, from, to, rest),
                }
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,vaes,vpclmulqdq,aes,pclmulqdq")]
    fn crypt<const SEALS: bool, const ROUNDS: usize>(
        key: &Key,
        nonce: &[u8; 12],
        head: &[u8],
        from: &[u8],
        to: &mut [u8],
        rest: &mut [u8],
    ) -> [u8; TAG] {
        let swap = _mm512_broadcast_i32x4(swapped());
        let round = |i: usize| _mm512_broadcast_i32x4(load(&key.rounds[i]));

        // What the first round makes of a cycle's counters, which differ in their last byte only, as if that were zero.
        let mut first = [0; 16];
        first[..12].copy_from_slice(nonce);
        let begun = |cycle: usize| {
            let mut block = first;
            block[12..].copy_from_slice(&((cycle as u32) << 8).to_be_bytes());
            _mm512_aesenc_epi128(_mm512_xor_si512(_mm512_broadcast_i32x4(load(&block)), round(0)), round(1))
        };

        // What was encrypted is hashed while the next blocks are encrypted. Before all of it comes the head, and zeros before that
        // change nothing.
        let zero = _mm512_setzero_si512();
        let mut block = [0; 16];
        block[..head.len()].copy_from_slice(head);
        let mut pending = [zero, zero, zero, _mm512_inserti32x4::<3>(zero, load(&block))];
        let (mut sums, mut hash) = (Products::none(), zero);

        let (from_turns, _) = from.as_chunks::<WIDE>();
        let (to_turns, _) = to.as_chunks_mut::<WIDE>();
        let n_turns = from_turns.len();
        let (mut base, mut next) = (zero, begun(0));
        for (turn, (from, to)) in from_turns.iter().zip(&mut to_turns[..n_turns]).enumerate() {
            // Older compilers want these blocks, newer ones do not.
            #[allow(unused_unsafe)]
            for at in (AHEAD..AHEAD + WIDE).step_by(64) {
                // SAFETY: asking for memory that is not there does nothing.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(from.as_ptr().wrapping_add(at).cast()) };
                if !SEALS {
                    // SAFETY: as above. What is sealed goes to a buffer that is in a cache; what is opened goes to a tensor.
                    unsafe { _mm_prefetch::<_MM_HINT_ET0>(to.as_ptr().wrapping_add(at).cast()) };
                }
            }
            let place = turn % CYCLE;
            if place == 0 {
                (base, next) = (next, begun(turn / CYCLE + 1));
            }
            // The first counter is 2, so the last two of a cycle belong to the next one.
            let last_base = _mm512_mask_mov_epi64(base, if place == CYCLE - 1 { 0xF0 } else { 0 }, next);
            let counters = |i: usize, base: __m512i| {
                // SAFETY: a cycle has 16 for each of its turns.
                let by_last = unsafe { _mm512_loadu_si512(key.first.as_ptr().add(16 * place + 4 * i).cast()) };
                _mm512_xor_si512(base, by_last)
            };
            let mut c = [counters(0, base), counters(1, base), counters(2, base), counters(3, last_base)];

            // So many turns of the group are to be hashed after the one that is now.
            let n_more = (n_turns - turn) % GROUP;
            let at = POWERS - 16 * (n_more + 1);
            // SAFETY: there are 16 for each of a group's turns.
            let power = |i: usize| unsafe { _mm512_loadu_si512(key.powers.as_ptr().add(at + 4 * i).cast()) };
            // SAFETY: as above.
            let folded = |i: usize| unsafe { _mm512_loadu_si512(key.folded.as_ptr().add(at + 4 * i).cast()) };
            // The processor looks only a little ahead, so both things are mixed here.
            let mut x = zero;
            for i in 2..ROUNDS {
                let k = round(i);
                c = [
                    _mm512_aesenc_epi128(c[0], k),
                    _mm512_aesenc_epi128(c[1], k),
                    _mm512_aesenc_epi128(c[2], k),
                    _mm512_aesenc_epi128(c[3], k),
                ];
                let j = (i - 2) / 2;
                if j < 4 && i % 2 == 0 {
                    x = _mm512_shuffle_epi8(pending[j], swap);
                    if j == 0 {
                        x = _mm512_xor_si512(x, hash);
                    }
                    sums.low = _mm512_xor_si512(sums.low, _mm512_clmulepi64_epi128::<0x00>(x, power(j)));
                    sums.high = _mm512_xor_si512(sums.high, _mm512_clmulepi64_epi128::<0x11>(x, power(j)));
                } else if j < 4 {
                    let x = _mm512_xor_si512(x, _mm512_shuffle_epi32::<0x4E>(x));
                    sums.middle = _mm512_xor_si512(sums.middle, _mm512_clmulepi64_epi128::<0x00>(x, folded(j)));
                }
            }
            // SAFETY: four times 64 bytes.
            let text = |i: usize| unsafe { _mm512_loadu_si512(from.as_ptr().add(64 * i).cast()) };
            let text = [text(0), text(1), text(2), text(3)];
            // The last key is added at the very end, so the text may be added to it before.
            let k = round(ROUNDS);
            let out = [
                _mm512_aesenclast_epi128(c[0], _mm512_xor_si512(k, text[0])),
                _mm512_aesenclast_epi128(c[1], _mm512_xor_si512(k, text[1])),
                _mm512_aesenclast_epi128(c[2], _mm512_xor_si512(k, text[2])),
                _mm512_aesenclast_epi128(c[3], _mm512_xor_si512(k, text[3])),
            ];
            for (i, out) in out.into_iter().enumerate() {
                // SAFETY: as above.
                unsafe { _mm512_storeu_si512(to.as_mut_ptr().add(64 * i).cast(), out) };
            }
            pending = if SEALS { out } else { text };
            hash = zero;
            if n_more == 0 {
                hash = _mm512_zextsi128_si512(sums.unfolded().sum());
                sums = Products::none();
            }
        }

        // SAFETY: three more are behind the last power.
        let power = |i: usize| unsafe { _mm512_loadu_si512(key.powers[i..i + 4].as_ptr().cast()) };
        let mut sums = sums.unfolded();
        for (i, x) in pending.into_iter().enumerate() {
            let x = _mm512_shuffle_epi8(x, swap);
            let x = if i == 0 { _mm512_xor_si512(x, hash) } else { x };
            sums = sums.plus(Products::of(x, power(POWERS - 16 + 4 * i)));
        }
        let mut hash = sums.sum();

        let n = n_turns * WIDE + rest.len();
        let numbers = _mm512_set_epi32(0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0);
        for (i, rest) in rest.chunks_mut(64).enumerate() {
            first[12..].copy_from_slice(&((n_turns * WIDE / 16 + i * 4 + 2) as u32).to_be_bytes());
            let counters = _mm512_add_epi32(_mm512_broadcast_i32x4(number(&first)), numbers);
            let mut c = _mm512_xor_si512(_mm512_shuffle_epi8(counters, swap), round(0));
            for i in 1..ROUNDS {
                c = _mm512_aesenc_epi128(c, round(i));
            }
            let mask = !0 >> (64 - rest.len());
            // SAFETY: only as many bytes as there are.
            let text = unsafe { _mm512_maskz_loadu_epi8(mask, rest.as_ptr().cast()) };
            let out = _mm512_aesenclast_epi128(c, _mm512_xor_si512(round(ROUNDS), text));
            // SAFETY: as above.
            unsafe { _mm512_mask_storeu_epi8(rest.as_mut_ptr().cast(), mask, out) };
            let x = _mm512_maskz_mov_epi8(mask, if SEALS { out } else { text });
            let x = _mm512_xor_si512(_mm512_shuffle_epi8(x, swap), _mm512_zextsi128_si512(hash));
            hash = Products::of(x, power(POWERS - rest.len().div_ceil(16))).sum();
        }

        let lengths = (u128::from(8 * head.len() as u64) << 64 | u128::from(8 * n as u64)).to_be_bytes();
        let x = _mm512_zextsi128_si512(_mm_xor_si128(number(&lengths), hash));
        hash = Products::of(x, power(POWERS - 1)).sum();
        first[12..].copy_from_slice(&[0, 0, 0, 1]);
        let mask = encrypted::<ROUNDS>(&key.rounds, load(&first));
        store(_mm_xor_si128(_mm_shuffle_epi8(hash, swapped()), mask))
    }

    #[target_feature(enable = "avx512f")]
    fn swapped() -> __m128i {
        _mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
    }

    #[target_feature(enable = "avx512f")]
    fn load(block: &[u8; 16]) -> __m128i {
        // SAFETY: it has 16 bytes.
        unsafe { _mm_loadu_si128(block.as_ptr().cast()) }
    }

    #[target_feature(enable = "avx512f")]
    fn store(block: __m128i) -> [u8; 16] {
        let mut bytes = [0; 16];
        // SAFETY: it has 16 bytes.
        unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast(), block) };
        bytes
    }

    /// A block as the number that GCM takes it for, in the processor's order of bytes.
    #[target_feature(enable = "avx512f")]
    fn number(block: &[u8; 16]) -> __m128i {
        _mm_shuffle_epi8(load(block), swapped())
    }

    /// Four products of polynomials that have not been reduced: lower halves, upper halves, and what belongs between them.
    struct Products {
        low: __m512i,
        middle: __m512i,
        high: __m512i,
    }

    impl Products {
        #[inline]
        #[target_feature(enable = "avx512f,vpclmulqdq")]
        fn of(x: __m512i, y: __m512i) -> Products {
            let crossed = [_mm512_clmulepi64_epi128::<0x01>(x, y), _mm512_clmulepi64_epi128::<0x10>(x, y)];
            Products {
                low: _mm512_clmulepi64_epi128::<0x00>(x, y),
                middle: _mm512_xor_si512(crossed[0], crossed[1]),
                high: _mm512_clmulepi64_epi128::<0x11>(x, y),
            }
        }

        #[inline]
        #[target_feature(enable = "avx512f")]
        fn none() -> Products {
            let zero = _mm512_setzero_si512();
            Products { low: zero, middle: zero, high: zero }
        }

        /// From products of halves' sums in the middle, each of which saves one product: they have the outer ones in them.
        #[inline]
        #[target_feature(enable = "avx512f")]
        fn unfolded(self) -> Products {
            let middle = _mm512_ternarylogic_epi64::<0x96>(self.middle, self.low, self.high);
            Products { middle, ..self }
        }

        #[inline]
        #[target_feature(enable = "avx512f")]
        fn plus(self, other: Products) -> Products {
            Products {
                low: _mm512_xor_si512(self.low, other.low),
                middle: _mm512_xor_si512(self.middle, other.middle),
                high: _mm512_xor_si512(self.high, other.high),
            }
        }

        /// All four added up, modulo x^128 + x^7 + x^2 + x + 1 with GCM's order of bits.
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,vpclmulqdq,pclmulqdq")]
        fn sum(self) -> __m128i {
            let modulus = _mm512_set1_epi64(0xC200_0000_0000_0000_u64 as i64);
            // The lower 64 bits are replaced by what is equal to them further up, twice.
            let fold = _mm512_clmulepi64_epi128::<0x00>(self.low, modulus);
            let low = _mm512_shuffle_epi32::<0x4E>(self.low);
            let middle = _mm512_ternarylogic_epi64::<0x96>(self.middle, low, fold);
            let fold = _mm512_clmulepi64_epi128::<0x00>(middle, modulus);
            let middle = _mm512_shuffle_epi32::<0x4E>(middle);
            let high = _mm512_ternarylogic_epi64::<0x96>(self.high, middle, fold);
            let half = _mm256_xor_si256(_mm512_castsi512_si256(high), _mm512_extracti64x4_epi64::<1>(high));
            _mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half))
        }
    }

    #[target_feature(enable = "avx512f,aes")]
    fn encrypted<const ROUNDS: usize>(rounds: &[[u8; 16]; 15], block: __m128i) -> __m128i {
        let mut block = _mm_xor_si128(block, load(&rounds[0]));
        for key in &rounds[1..ROUNDS] {
            block = _mm_aesenc_si128(block, load(key));
        }
        _mm_aesenclast_si128(block, load(&rounds[ROUNDS]))
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,vaes,vpclmulqdq,aes,pclmulqdq")]
    fn expand(key: &[u8]) -> Key {
        let (n_key, is_long) = (key.len() / 4, key.len() == 32);
        let n_words = 4 * if is_long { 15 } else { 11 };
        let mut words = [0u32; 60];
        for (word, bytes) in words.iter_mut().zip(key.as_chunks::<4>().0) {
            *word = u32::from_le_bytes(*bytes);
        }
        // The processor has the S-box.
        let substituted =
            |word: u32| _mm_cvtsi128_si32(_mm_aeskeygenassist_si128::<0>(_mm_set1_epi32(word as i32))) as u32;
        let mut constant = 1;
        for i in n_key..n_words {
            let mut word = words[i - 1];
            if i % n_key == 0 {
                word = substituted(word).rotate_right(8) ^ constant;
                constant = (constant << 1) ^ if constant & 0x80 == 0 { 0 } else { 0x11b };
            } else if is_long && i % n_key == 4 {
                word = substituted(word);
            }
            words[i] = words[i - n_key] ^ word;
        }
        let mut rounds = [[0; 16]; 15];
        for (bytes, word) in rounds.as_flattened_mut().as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *bytes = word.to_le_bytes();
        }
        let zero = _mm_setzero_si128();
        let hash_key = if is_long { encrypted::<14>(&rounds, zero) } else { encrypted::<10>(&rounds, zero) };
        // Products come out divided by x, so each power is kept multiplied by it.
        let hash_key = u128::from_be_bytes(store(hash_key));
        let carry = 0u128.wrapping_sub(hash_key >> 127) & 0xC200_0000_0000_0000_0000_0000_0000_0001;
        let mut powers = [[0; 16]; POWERS + 4];
        powers[POWERS - 1] = ((hash_key << 1) ^ carry).to_le_bytes();
        let one = _mm512_zextsi128_si512(load(&powers[POWERS - 1]));
        for i in (0..POWERS - 1).rev() {
            let power = _mm512_zextsi128_si512(load(&powers[i + 1]));
            powers[i] = store(Products::of(power, one).sum());
        }
        let mut folded = [[0; 16]; POWERS];
        for (folded, power) in folded.iter_mut().zip(&powers) {
            let power = u128::from_le_bytes(*power);
            *folded = (power ^ power.rotate_left(64)).to_le_bytes();
        }
        // A round changes each byte by itself and only then mixes them, so what the last one adds is known beforehand. Which one
        // it is, is no secret.
        let mut first = [[0; 16]; 256];
        let after = |last: u8| {
            let mut block = rounds[0];
            block[15] ^= last;
            _mm_aesenc_si128(load(&block), zero)
        };
        for (i, by_last) in first.iter_mut().enumerate() {
            *by_last = store(_mm_xor_si128(after((i as u8).wrapping_add(2)), after(0)));
        }
        Key { rounds, is_long, powers, folded, first }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap()).collect()
    }

    /// Test cases 2, 3, 14 and 15 of the specification of GCM.
    #[test]
    fn it_is_the_standard() {
        let zeros = "0".repeat(64);
        let key = "feffe9928665731c6d6a8f9467308308";
        let plain = "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72\
                     1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b391aafd255";
        let cases = [
            (
                &zeros[..32],
                &zeros[..24],
                &zeros[..32],
                "0388dace60b6a392f328c2b971b2fe78ab6e47d42cec13bdf53a67b21257bddf",
            ),
            (
                key,
                "cafebabefacedbaddecaf888",
                plain,
                "42831ec2217774244b7221b784d0d49ce3aa212f2c02a4e035c17e2329aca12e21d514b25466931c7d8f6a5aac84aa051ba30b396a0a\
                 ac973d58e091473f59854d5c2af327cd64a62cf35abd2ba6fab4",
            ),
            (&zeros, &zeros[..24], &zeros[..32], "cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919"),
            (
                &key.repeat(2),
                "cafebabefacedbaddecaf888",
                plain,
                "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa8cb08e48590dbb3da7b08b1056828838c5f61e6393ba\
                 7a0abcc9f662898015adb094dac5d93471bdec1a502270e3cc6c",
            ),
        ];
        for (key, nonce, plain, expected) in cases {
            let Some(key) = AesGcm::new(&bytes(key)) else { return };
            let (nonce, plain, expected) = (bytes(nonce).try_into().unwrap(), bytes(plain), bytes(expected));
            let (&last, plain) = plain.split_last().unwrap();
            let mut sealed = vec![0; expected.len()];
            assert!(key.seal(&nonce, &[], plain, last, &mut sealed));
            assert_eq!(sealed, expected);
            let mut opened = vec![0; plain.len()];
            assert_eq!(key.open(&nonce, &[], &sealed, &mut opened), Some(last));
            assert_eq!(opened, plain);
        }
    }

    #[test]
    fn nothing_comes_out_of_what_was_changed() {
        for n_key in [16, 32] {
            let Some(key) = AesGcm::new(&vec![7; n_key]) else { return };
            for n in [0, 1, 15, 16, 63, 64, 255, 256, 257, 1000, 3839, 4096, 4352, 16384] {
                let plain: Vec<u8> = (0..n).map(|i| (i * 31 + i / 7) as u8 | 1).collect();
                let (nonce, head) = ([n as u8; 12], [23, 3, 3, 4]);
                let mut sealed = vec![0; n + 1 + TAG];
                assert!(key.seal(&nonce, &head, &plain, 9, &mut sealed));
                let mut opened = vec![0; n];
                assert_eq!(key.open(&nonce, &head, &sealed, &mut opened), Some(9), "{n}");
                assert_eq!(opened, plain);
                let mut refuses = |nonce: &[u8; 12], head: &[u8], sealed: &[u8]| {
                    assert_eq!(key.open(nonce, head, sealed, &mut opened), None, "{n}");
                    assert!(opened.iter().all(|&byte| byte == 0), "{n}");
                };
                refuses(&[n as u8 ^ 1; 12], &head, &sealed);
                refuses(&nonce, &[23, 3, 3, 5], &sealed);
                refuses(&nonce, &head[..3], &sealed);
                for at in [0, n / 2, n, n + 1, n + TAG] {
                    let mut changed = sealed.clone();
                    changed[at] ^= 0x10;
                    refuses(&nonce, &head, &changed);
                }
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert!(AesGcm::new(&[0; 24]).is_none() && AesGcm::new(&[]).is_none());
        let Some(key) = AesGcm::new(&[0; 16]) else { return };
        assert!(!key.seal(&[0; 12], &[], &[0; 10], 0, &mut [0; 10 + TAG]));
        assert!(!key.seal(&[0; 12], &[0; MAX_HEAD + 1], &[], 0, &mut [0; 1 + TAG]));
        assert_eq!(key.open(&[0; 12], &[], &[], &mut []), None);
        assert_eq!(key.open(&[0; 12], &[], &[0; TAG], &mut []), None);
        assert_eq!(format!("{key:?}"), "AesGcm");
    }
}
