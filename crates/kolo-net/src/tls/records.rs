//! Records of TLS 1.3 after the handshake, in two halves that share nothing but the way to new keys: what is sent is sealed
//! by one thread while another one opens what arrives.
//!
//! `rustls` makes the handshake and derives all keys; its ciphers seal and open. What is left to do here is to cut bytes into
//! records, to count them, and to change keys when a peer asks for it or when a key has sealed as much as it may.

use std::io::{self, IoSlice};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use tokio_rustls::rustls::crypto::cipher::{
    AeadKey, InboundOpaqueMessage, Iv, MessageDecrypter, MessageEncrypter, OutboundChunks, OutboundPlainMessage,
};
use tokio_rustls::rustls::kernel::KernelConnection;
use tokio_rustls::rustls::{
    AlertDescription, ConnectionTrafficSecrets, ContentType, Error, ExtractedSecrets, ProtocolVersion, Tls13CipherSuite,
};

/// Bytes before a record.
const HEADER: usize = 5;

/// The most plain bytes of a record, and the most that may follow its header.
const MAX_PLAIN: usize = 1 << 14;
const MAX_SEALED: usize = MAX_PLAIN + 256;

/// About how much is sealed before it is handed on to be written: so little that it stays in a core's cache, so much that
/// handing it on does not count.
pub(super) const BATCH: usize = 128 << 10;

/// The most bytes that it has when it is sealed, but for a change of keys.
pub(super) const SEALED_BATCH: usize = (BATCH / MAX_PLAIN + 1) * (HEADER + MAX_SEALED);

/// How much is read at once: at first, and when there is much to read.
const LEAST_BUFFER: usize = 32 << 10;
const MOST_BUFFER: usize = 256 << 10;

/// A key is changed so many records before it must be; what ends a connection still fits.
const RESERVE: u64 = 8;

/// The messages that change keys, and the one that ends a connection.
const KEY_UPDATE: [u8; 5] = [24, 0, 0, 1, 0];
const KEY_UPDATE_REQUEST: [u8; 5] = [24, 0, 0, 1, 1];
const CLOSE_NOTIFY: [u8; 2] = [1, 0];

/// Derives the keys that follow those in use.
trait Rekey: Send {
    fn next_to_send(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error>;
    fn next_to_receive(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error>;
}

impl<Data: Send> Rekey for KernelConnection<Data> {
    fn next_to_send(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error> {
        self.update_tx_secret()
    }
    fn next_to_receive(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error> {
        self.update_rx_secret()
    }
}

/// What both halves need now and then.
struct Keys {
    suite: &'static Tls13CipherSuite,
    next: Mutex<Box<dyn Rekey>>,
    /// The other side wants us to change our key before we send on.
    owes_update: AtomicBool,
}

/// Both halves of a connection whose handshake is done. `plain` is what came with the handshake and was opened already,
/// `sealed` what came and was not.
pub(super) fn halves<Data: Send + 'static>(
    secrets: ExtractedSecrets,
    connection: KernelConnection<Data>,
    plain: &[u8],
    sealed: &[u8],
) -> Result<(Sealer, Opener), Error> {
    let suite = connection.negotiated_cipher_suite().tls13();
    let suite = suite.ok_or_else(|| Error::General("not TLS 1.3".into()))?;
    let next: Mutex<Box<dyn Rekey>> = Mutex::new(Box::new(connection));
    let keys = Arc::new(Keys { suite, next, owes_update: AtomicBool::new(false) });
    let (n_sealed, secret) = secrets.tx;
    let sealer = Sealer {
        cipher: encrypter(suite, secret)?,
        keys: keys.clone(),
        n_sealed,
        limit: suite.common.confidentiality_limit.saturating_sub(RESERVE),
    };
    let (n_opened, secret) = secrets.rx;
    let mut buffer = vec![0; LEAST_BUFFER.max(plain.len() + sealed.len() + HEADER + MAX_SEALED)];
    let end = plain.len() + sealed.len();
    buffer[..plain.len()].copy_from_slice(plain);
    buffer[plain.len()..end].copy_from_slice(sealed);
    let opener = Opener {
        cipher: decrypter(suite, secret)?,
        keys,
        n_opened,
        buffer,
        sealed: plain.len()..end,
        plain: 0..plain.len(),
        is_over: false,
    };
    Ok((sealer, opener))
}

fn parts(secrets: ConnectionTrafficSecrets) -> Result<(AeadKey, Iv), Error> {
    match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv }
        | ConnectionTrafficSecrets::Aes256Gcm { key, iv }
        | ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => Ok((key, iv)),
        _ => Err(Error::General("a cipher without keys".into())),
    }
}

fn encrypter(suite: &Tls13CipherSuite, secrets: ConnectionTrafficSecrets) -> Result<Box<dyn MessageEncrypter>, Error> {
    parts(secrets).map(|(key, iv)| suite.aead_alg.encrypter(key, iv))
}

fn decrypter(suite: &Tls13CipherSuite, secrets: ConnectionTrafficSecrets) -> Result<Box<dyn MessageDecrypter>, Error> {
    parts(secrets).map(|(key, iv)| suite.aead_alg.decrypter(key, iv))
}

/// The sending half.
pub(super) struct Sealer {
    keys: Arc<Keys>,
    cipher: Box<dyn MessageEncrypter>,
    /// Records under this key.
    n_sealed: u64,
    /// How many there may be.
    limit: u64,
}

impl Sealer {
    /// Seals the beginning of what `slices` hold, about [`BATCH`] bytes of it, and says how much that was. The records are
    /// copied behind what `sealed` holds: they are of the library's making, and to keep them as they are until they have been
    /// written costs more than the copy, since the allocator then asks the system for memory and gives it back all the time.
    pub fn seal(&mut self, slices: &[IoSlice<'_>], sealed: &mut Vec<u8>) -> Result<usize, Error> {
        let slices: Vec<&[u8]> = slices.iter().map(|slice| &**slice).collect();
        let (mut rest, mut n) = (OutboundChunks::new(&slices), 0);
        while n < BATCH && !rest.is_empty() {
            if self.n_sealed >= self.limit || self.keys.owes_update.swap(false, Ordering::AcqRel) {
                self.change_key(&KEY_UPDATE, sealed)?;
            }
            let (first, others) = rest.split_at(MAX_PLAIN);
            n += first.len();
            sealed.extend(self.record(ContentType::ApplicationData, first)?);
            rest = others;
        }
        Ok(n)
    }

    /// The record that ends a connection.
    pub fn goodbye(&mut self) -> Result<Vec<u8>, Error> {
        self.record(ContentType::Alert, CLOSE_NOTIFY[..].into())
    }

    fn change_key(&mut self, message: &[u8], sealed: &mut Vec<u8>) -> Result<(), Error> {
        sealed.extend(self.record(ContentType::Handshake, message.into())?);
        let (n_sealed, secret) = self.keys.next.lock().next_to_send()?;
        self.cipher = encrypter(self.keys.suite, secret)?;
        self.n_sealed = n_sealed;
        Ok(())
    }

    fn record(&mut self, typ: ContentType, payload: OutboundChunks<'_>) -> Result<Vec<u8>, Error> {
        let plain = OutboundPlainMessage { typ, version: ProtocolVersion::TLSv1_2, payload };
        let record = self.cipher.encrypt(plain, self.n_sealed)?.encode();
        self.n_sealed += 1;
        Ok(record)
    }
}

/// The receiving half.
pub(super) struct Opener {
    keys: Arc<Keys>,
    cipher: Box<dyn MessageDecrypter>,
    /// Records under this key.
    n_opened: u64,
    buffer: Vec<u8>,
    /// Where in it records are that have not been opened, the last one perhaps not whole.
    sealed: Range<usize>,
    /// Where bytes are that were opened and not taken. Records are opened in place, one at a time.
    plain: Range<usize>,
    /// The other side has said that nothing more will come.
    is_over: bool,
}

impl Opener {
    /// Gives `take` up to `want` bytes, in pieces, of what has arrived and of what `read` brings without waiting. Says how
    /// many; 0 if the other side has ended the connection.
    pub fn read(
        &mut self,
        want: usize,
        mut take: impl FnMut(&[u8]),
        mut read: impl FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let mut n_taken = 0;
        loop {
            let n = self.plain.len().min(want - n_taken);
            if n > 0 {
                take(&self.buffer[self.plain.start..][..n]);
                self.plain.start += n;
                n_taken += n;
            }
            if n_taken == want || self.is_over {
                return Ok(n_taken);
            }
            if self.open()? {
                continue;
            }
            self.make_room();
            match read(&mut self.buffer[self.sealed.end..]) {
                // Anybody on the way can end a connection; only the other side can say that it is complete.
                Ok(0) => {
                    let why = "it was cut off; the other side may have ended";
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, why));
                }
                Ok(n) => self.sealed.end += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && n_taken > 0 => return Ok(n_taken),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Moves a record that is not whole to the front. A buffer that was full has become too small.
    fn make_room(&mut self) {
        let was_full = self.sealed.end == self.buffer.len();
        if self.sealed.start > 0 {
            self.buffer.copy_within(self.sealed.clone(), 0);
            self.sealed = 0..self.sealed.len();
        }
        if was_full && self.buffer.len() < MOST_BUFFER {
            self.buffer.resize(MOST_BUFFER, 0);
        }
    }

    /// Opens the next record, if all of it is there.
    fn open(&mut self) -> io::Result<bool> {
        let Some(&[kind, major, minor, high, low]) = self.buffer[self.sealed.clone()].first_chunk::<HEADER>() else {
            return Ok(false);
        };
        let n = usize::from(u16::from_be_bytes([high, low]));
        if ContentType::from(kind) != ContentType::ApplicationData || (major, minor) != (3, 3) || n > MAX_SEALED {
            return Err(invalid(Error::General("what arrived is not a record of TLS 1.3".into())));
        }
        let start = self.sealed.start + HEADER;
        if self.sealed.end - start < n {
            return Ok(false);
        }
        let record = &mut self.buffer[start..start + n];
        let record = InboundOpaqueMessage::new(ContentType::ApplicationData, ProtocolVersion::TLSv1_2, record);
        let opened = self.cipher.decrypt(record, self.n_opened).map_err(invalid)?;
        self.n_opened += 1;
        self.sealed.start = start + n;
        match (opened.typ, opened.payload) {
            (ContentType::ApplicationData, plain) => self.plain = start..start + plain.len(),
            (ContentType::Alert, [_, 0]) => self.is_over = true,
            (ContentType::Alert, &[_, why]) => {
                return Err(invalid(Error::AlertReceived(AlertDescription::from(why))));
            }
            (ContentType::Handshake, message) if message == KEY_UPDATE => self.change_key()?,
            (ContentType::Handshake, message) if message == KEY_UPDATE_REQUEST => {
                self.change_key()?;
                self.keys.owes_update.store(true, Ordering::Release);
            }
            (typ, _) => return Err(invalid(Error::General(format!("a record of kind {typ:?} after the handshake")))),
        }
        Ok(true)
    }

    fn change_key(&mut self) -> io::Result<()> {
        let (n_opened, secret) = self.keys.next.lock().next_to_receive().map_err(invalid)?;
        self.cipher = decrypter(self.keys.suite, secret).map_err(invalid)?;
        self.n_opened = n_opened;
        Ok(())
    }
}

fn invalid(error: Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests;
