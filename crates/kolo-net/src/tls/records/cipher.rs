//! What seals and opens a record: our own AES-GCM where the processor is made for it, which goes from one place to another, or the
//! library's ciphers, which need copies. Both make the same records.

use kolo_device::cpu::aes_gcm::AesGcm;
use tokio_rustls::rustls::crypto::cipher::{
    AeadKey, InboundOpaqueMessage, Iv, MessageDecrypter, MessageEncrypter, Nonce, OutboundPlainMessage, make_tls13_aad,
};
use tokio_rustls::rustls::{ConnectionTrafficSecrets, ContentType, Error, ProtocolVersion, Tls13CipherSuite};

use super::{HEADER, MAX_PLAIN};

/// What a record has more than its content, behind the header: the content's kind, and a tag.
pub(super) const OVERHEAD: usize = 1 + 16;

/// For sending.
pub(super) enum SealCipher {
    Own(Box<AesGcm>, Iv),
    Library(Box<dyn MessageEncrypter>),
}

/// For receiving.
pub(super) enum OpenCipher {
    Own(Box<AesGcm>, Iv),
    Library(Box<dyn MessageDecrypter>),
}

/// The parts of a key, with our own cipher if there is one for it here.
fn parts(secrets: ConnectionTrafficSecrets) -> Result<(AeadKey, Iv, Option<Box<AesGcm>>), Error> {
    match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv } | ConnectionTrafficSecrets::Aes256Gcm { key, iv } => {
            let own = own(key.as_ref());
            Ok((key, iv, own))
        }
        ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => Ok((key, iv, None)),
        _ => Err(Error::General("a cipher without keys".into())),
    }
}

fn own(key: &[u8]) -> Option<Box<AesGcm>> {
    #[cfg(test)]
    if tests::USES_LIBRARY.get() {
        return None;
    }
    AesGcm::new(key).map(Box::new)
}

impl SealCipher {
    pub fn new(suite: &Tls13CipherSuite, secrets: ConnectionTrafficSecrets) -> Result<SealCipher, Error> {
        Ok(match parts(secrets)? {
            (_, iv, Some(own)) => SealCipher::Own(own, iv),
            (key, iv, None) => SealCipher::Library(suite.aead_alg.encrypter(key, iv)),
        })
    }

    /// Makes the record with this number at the beginning of `out`, and says how long it is.
    pub fn seal(&mut self, typ: ContentType, plain: &[u8], number: u64, out: &mut [u8]) -> Result<usize, Error> {
        let n = HEADER + plain.len() + OVERHEAD;
        let out = out.get_mut(..n).ok_or(Error::EncryptError)?;
        match self {
            SealCipher::Own(key, iv) => {
                let head = make_tls13_aad(plain.len() + OVERHEAD);
                let (first, record) = out.split_at_mut(HEADER);
                first.copy_from_slice(&head);
                let is_sealed = key.seal(&Nonce::new(iv, number).0, &head, plain, typ.into(), record);
                is_sealed.then_some(n).ok_or(Error::EncryptError)
            }
            SealCipher::Library(cipher) => {
                let message = OutboundPlainMessage { typ, version: ProtocolVersion::TLSv1_2, payload: plain.into() };
                let record = cipher.encrypt(message, number)?.encode();
                if record.len() != n {
                    return Err(Error::EncryptError);
                }
                out.copy_from_slice(&record);
                Ok(n)
            }
        }
    }
}

impl OpenCipher {
    pub fn new(suite: &Tls13CipherSuite, secrets: ConnectionTrafficSecrets) -> Result<OpenCipher, Error> {
        Ok(match parts(secrets)? {
            (_, iv, Some(own)) => OpenCipher::Own(own, iv),
            (key, iv, None) => OpenCipher::Library(suite.aead_alg.decrypter(key, iv)),
        })
    }

    /// Opens the record with this number, without its header, and says what it holds and how many bytes of it are at the beginning
    /// of `out` now. `out` is [`OVERHEAD`] shorter than the record.
    pub fn open(&mut self, record: &mut [u8], number: u64, out: &mut [u8]) -> Result<(ContentType, usize), Error> {
        match self {
            OpenCipher::Own(key, iv) => {
                let head = make_tls13_aad(record.len());
                let opened = key.open(&Nonce::new(iv, number).0, &head, record, out);
                let (mut kind, mut n) = (opened.ok_or(Error::DecryptError)?, out.len());
                // A record may be made longer by zeros.
                while kind == 0 {
                    n = n.checked_sub(1).ok_or(Error::General("a record without content".into()))?;
                    kind = out[n];
                }
                match n <= MAX_PLAIN {
                    true => Ok((ContentType::from(kind), n)),
                    false => Err(Error::PeerSentOversizedRecord),
                }
            }
            OpenCipher::Library(cipher) => {
                let version = ProtocolVersion::TLSv1_2;
                let record = InboundOpaqueMessage::new(ContentType::ApplicationData, version, record);
                let opened = cipher.decrypt(record, number)?;
                let out = out.get_mut(..opened.payload.len()).ok_or(Error::DecryptError)?;
                out.copy_from_slice(opened.payload);
                Ok((opened.typ, out.len()))
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::cell::Cell;

    use tokio_rustls::rustls::CipherSuite;

    use super::*;

    thread_local! {
        /// Keys that this thread makes are the library's.
        pub static USES_LIBRARY: Cell<bool> = const { Cell::new(false) };
    }

    const NUMBER: u64 = 0x1_0000_0007;

    /// Both ends of AES with keys of 256 bits.
    fn ciphers(uses_library: bool) -> (SealCipher, OpenCipher) {
        let suites = crate::tls::provider().cipher_suites.clone();
        let suite = suites.iter().find(|suite| suite.suite() == CipherSuite::TLS13_AES_256_GCM_SHA384).unwrap();
        let suite = suite.tls13().unwrap();
        let key = || ConnectionTrafficSecrets::Aes256Gcm { key: [0x5a; 32].into(), iv: [3; 12].into() };
        USES_LIBRARY.set(uses_library);
        let made = (SealCipher::new(suite, key()).unwrap(), OpenCipher::new(suite, key()).unwrap());
        USES_LIBRARY.set(false);
        made
    }

    fn record(cipher: &mut SealCipher, typ: ContentType, plain: &[u8]) -> Vec<u8> {
        let mut out = vec![0; plain.len() + 100];
        let n = cipher.seal(typ, plain, NUMBER, &mut out).unwrap();
        out[..n].to_vec()
    }

    fn opened(cipher: &mut OpenCipher, record: &[u8]) -> Result<(ContentType, Vec<u8>), Error> {
        let mut record = record[HEADER..].to_vec();
        let mut out = vec![0; record.len() - OVERHEAD];
        let (typ, n) = cipher.open(&mut record, NUMBER, &mut out)?;
        Ok((typ, out[..n].to_vec()))
    }

    #[test]
    fn our_cipher_and_the_librarys_make_the_same_records() {
        let (mut own, mut library) = (ciphers(false), ciphers(true));
        for n in (0..600).chain((600..MAX_PLAIN).step_by(199)).chain([MAX_PLAIN - 1, MAX_PLAIN]) {
            let plain: Vec<u8> = (0..n).map(|i| (i * 31 + i / 9) as u8).collect();
            for typ in [ContentType::ApplicationData, ContentType::Handshake] {
                let sealed = record(&mut own.0, typ, &plain);
                assert!(sealed == record(&mut library.0, typ, &plain), "{n}");
                let expected = Ok((typ, plain.clone()));
                assert!(opened(&mut own.1, &sealed) == expected && opened(&mut library.1, &sealed) == expected, "{n}");
            }
        }
    }

    #[test]
    fn both_take_padding_and_refuse_what_is_wrong() {
        for (mut sealer, mut opener) in [ciphers(false), ciphers(true)] {
            let nothing = ContentType::from(0);
            let padded = record(&mut sealer, nothing, b"abc\x17\0\0\0");
            assert_eq!(opened(&mut opener, &padded), Ok((ContentType::ApplicationData, b"abc".to_vec())));
            let only_zeros = record(&mut sealer, nothing, &[0; 20]);
            assert!(opened(&mut opener, &only_zeros).is_err());
            let too_long = record(&mut sealer, ContentType::ApplicationData, &[1; MAX_PLAIN + 1]);
            assert!(opened(&mut opener, &too_long).is_err());
            let mut changed = record(&mut sealer, ContentType::ApplicationData, &[1; 100]);
            changed[50] ^= 1;
            assert_eq!(opened(&mut opener, &changed), Err(Error::DecryptError));
        }
    }
}
