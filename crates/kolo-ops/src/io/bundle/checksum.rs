//! Castagnoli checksums as they are stored: rotated and shifted, so that a checksum of data that holds checksums is sound.

use crc32c::{crc32c, crc32c_append};

/// The stored form.
pub fn mask(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// A checksum that grows with what is written or read.
#[derive(Clone, Copy, Debug, Default)]
pub struct Checksum(u32);

impl Checksum {
    /// Of these bytes.
    pub fn of(bytes: &[u8]) -> Checksum {
        Checksum(crc32c(bytes))
    }

    /// Adds bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0 = crc32c_append(self.0, bytes);
    }

    /// The stored form.
    pub fn masked(self) -> u32 {
        mask(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        // RFC 3720, B.4; the masked form is of LevelDB's rule: rotate right by 15, add 0xa282ead8.
        assert_eq!(crc32c(&[0u8; 32]), 0x8a91_36aa);
        assert_eq!(Checksum::of(&[0xff; 32]).0, 0x62a8_ab43);
        assert_eq!(mask(0), 0xa282_ead8);
        assert_eq!(mask(0x0000_8000), 0xa282_ead9);
        let mut grown = Checksum::default();
        grown.add(b"ab");
        grown.add(b"c");
        assert_eq!(grown.masked(), Checksum::of(b"abc").masked());
    }
}
