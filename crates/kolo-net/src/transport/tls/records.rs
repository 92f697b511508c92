//! The TLS 1.3 record layer after the handshake, in two halves that share only the key schedule: one thread can encrypt
//! outgoing data while another one decrypts incoming data.
//!
//! `rustls` does the handshake, derives all keys, and encrypts and decrypts each record. The code here splits data into
//! records, counts them, and updates keys when the peer requests it or when a key has reached its limit. The library
//! encrypts into a buffer of its own and decrypts in place, so each side copies the data once.

use std::io::{self, IoSlice};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::BytesMut;
use parking_lot::Mutex;
use tokio_rustls::rustls::crypto::cipher::{
    AeadKey, InboundOpaqueMessage, Iv, MessageDecrypter, MessageEncrypter, OutboundChunks, OutboundPlainMessage,
};
use tokio_rustls::rustls::kernel::KernelConnection;
use tokio_rustls::rustls::{
    AlertDescription, ConnectionTrafficSecrets, ContentType, Error, ExtractedSecrets, ProtocolVersion, Tls13CipherSuite,
};

/// The size of a record's header.
const HEADER: usize = 5;

/// The bytes that a record adds to its content, after the header: the content type, and the authentication tag.
const OVERHEAD: usize = 1 + 16;

/// The version in the header of TLS 1.3 records.
const VERSION: ProtocolVersion = ProtocolVersion::TLSv1_2;

/// The maximum sizes of a record: of its plaintext, and of what follows its header.
const MAX_PLAIN: usize = 1 << 14;
const MAX_SEALED: usize = MAX_PLAIN + 256;

/// The approximate size of a batch, which is encrypted before it is handed over to be written. The first batches are
/// smaller, so that the peer can start early. Later ones are larger, since each system call wakes the peer, but still
/// fit in the core's cache.
const LEAST_BATCH: usize = 64 << 10;
pub(super) const BATCH: usize = 256 << 10;

/// The maximum size of an encrypted batch, not counting a key update.
pub(super) const SEALED_BATCH: usize = (BATCH / 2 * 3 / MAX_PLAIN + 2) * (HEADER + MAX_PLAIN + OVERHEAD);

/// The size of the read buffer: initially, and at most.
const LEAST_BUFFER: usize = 32 << 10;
const MOST_BUFFER: usize = 512 << 10;

/// A record of at least this size is worth reading directly into its destination.
const LONG: usize = 4 << 10;

/// A key is updated this many records before its limit, so that the closing alert still fits.
const RESERVE: u64 = 8;

/// The messages that update keys, and the alert that closes a connection.
const KEY_UPDATE: [u8; 5] = [24, 0, 0, 1, 0];
const KEY_UPDATE_REQUEST: [u8; 5] = [24, 0, 0, 1, 1];
const CLOSE_NOTIFY: [u8; 2] = [1, 0];

/// Derives the next keys.
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

/// The key schedule, shared by both halves.
struct Keys {
    suite: &'static Tls13CipherSuite,
    next: Mutex<Box<dyn Rekey>>,
    /// The peer has requested that we update our key before we send more.
    owes_update: AtomicBool,
}

impl Keys {
    fn encrypter(&self, secrets: ConnectionTrafficSecrets) -> Result<Box<dyn MessageEncrypter>, Error> {
        let (key, iv) = parts(secrets)?;
        Ok(self.suite.aead_alg.encrypter(key, iv))
    }

    fn decrypter(&self, secrets: ConnectionTrafficSecrets) -> Result<Box<dyn MessageDecrypter>, Error> {
        let (key, iv) = parts(secrets)?;
        Ok(self.suite.aead_alg.decrypter(key, iv))
    }
}

fn parts(secrets: ConnectionTrafficSecrets) -> Result<(AeadKey, Iv), Error> {
    match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv }
        | ConnectionTrafficSecrets::Aes256Gcm { key, iv }
        | ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => Ok((key, iv)),
        _ => Err(Error::General("a cipher without keys".into())),
    }
}

/// Both halves of a connection after its handshake. `plain` was received with the handshake and is already decrypted,
/// `sealed` was received and is not.
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
        cipher: keys.encrypter(secret)?,
        keys: keys.clone(),
        n_sealed,
        n_batch: LEAST_BATCH,
        limit: suite.common.confidentiality_limit.saturating_sub(RESERVE),
    };
    let (n_opened, secret) = secrets.rx;
    let (n_plain, n_arrived) = (plain.len(), plain.len() + sealed.len());
    let mut buffer = vec![0; LEAST_BUFFER.max(n_arrived + HEADER + MAX_SEALED)];
    buffer[..n_plain].copy_from_slice(plain);
    buffer[n_plain..n_arrived].copy_from_slice(sealed);
    let cipher = keys.decrypter(secret)?;
    let (plain, sealed) = (0..n_plain, n_plain..n_arrived);
    let opener = Opener { keys, cipher, n_opened, buffer, plain, sealed, is_over: false };
    Ok((sealer, opener))
}

/// The sending half.
pub(super) struct Sealer {
    keys: Arc<Keys>,
    cipher: Box<dyn MessageEncrypter>,
    /// The number of records encrypted with this key.
    n_sealed: u64,
    /// The limit of that number.
    limit: u64,
    /// The approximate size of the next batch.
    n_batch: usize,
}

impl Sealer {
    /// Encrypts a prefix of `slices`, about [`BATCH`] bytes, and returns its length. The records are appended to
    /// `batch`.
    pub fn seal(&mut self, slices: &[IoSlice<'_>], batch: &mut Vec<u8>) -> Result<usize, Error> {
        let slices: Vec<&[u8]> = slices.iter().map(|slice| &**slice).collect();
        let mut rest = OutboundChunks::new(&slices);
        let (n_all, mut n) = (rest.len(), 0);
        // A small remainder is not worth a system call of its own.
        let n_batch = if n_all / 3 <= self.n_batch / 2 { n_all } else { self.n_batch };
        while n < n_batch {
            let (plain, behind) = rest.split_at(MAX_PLAIN);
            if self.n_sealed >= self.limit || self.keys.owes_update.swap(false, Ordering::AcqRel) {
                self.change_key(&KEY_UPDATE, batch)?;
            }
            n += plain.len();
            self.record(ContentType::ApplicationData, plain, batch)?;
            rest = behind;
        }
        // Once everything is encrypted, the next data starts with a small batch again.
        self.n_batch = if n == n_all { LEAST_BATCH } else { (2 * self.n_batch).min(BATCH) };
        Ok(n)
    }

    /// The alert that closes a connection.
    pub fn goodbye(&mut self) -> Result<Vec<u8>, Error> {
        let mut batch = Vec::new();
        self.record(ContentType::Alert, CLOSE_NOTIFY[..].into(), &mut batch)?;
        Ok(batch)
    }

    fn change_key(&mut self, message: &[u8], batch: &mut Vec<u8>) -> Result<(), Error> {
        self.record(ContentType::Handshake, message.into(), batch)?;
        let (n_sealed, secret) = self.keys.next.lock().next_to_send()?;
        self.cipher = self.keys.encrypter(secret)?;
        self.n_sealed = n_sealed;
        Ok(())
    }

    fn record(&mut self, typ: ContentType, payload: OutboundChunks<'_>, batch: &mut Vec<u8>) -> Result<(), Error> {
        let record = self.cipher.encrypt(OutboundPlainMessage { typ, version: VERSION, payload }, self.n_sealed)?;
        batch.extend_from_slice(&record.encode());
        self.n_sealed += 1;
        Ok(())
    }
}

/// The receiving half.
pub(super) struct Opener {
    keys: Arc<Keys>,
    cipher: Box<dyn MessageDecrypter>,
    /// The number of records decrypted with this key.
    n_opened: u64,
    buffer: Vec<u8>,
    /// The range of `buffer` with bytes that are decrypted and not consumed.
    plain: Range<usize>,
    /// The range of `buffer` with records that are not decrypted; the last one may be incomplete.
    sealed: Range<usize>,
    /// The peer has closed the connection with an alert.
    is_over: bool,
}

impl Opener {
    /// Reads into `out` what is buffered and what `read` returns without blocking. Returns the number of bytes; 0 if
    /// the peer has closed the connection.
    pub fn read(&mut self, out: &mut [u8], mut read: impl FnMut(&mut [u8]) -> io::Result<usize>) -> io::Result<usize> {
        let mut at = 0;
        loop {
            let kept = self.take(out.len() - at);
            out[at..at + kept.len()].copy_from_slice(kept);
            at += kept.len();
            if at == out.len() || self.is_over {
                return Ok(at);
            }
            if !self.open()? && !self.fetch(at > 0, &mut read)? {
                return Ok(at);
            }
        }
    }

    /// The same, appending to `buffer` up to its capacity. Stops before a long record once it has read something, so
    /// that the caller can read that record directly into its destination.
    pub fn read_buf(
        &mut self,
        buffer: &mut BytesMut,
        mut read: impl FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let n_before = buffer.len();
        loop {
            let kept = self.take(buffer.capacity() - buffer.len());
            buffer.extend_from_slice(kept);
            let n = buffer.len() - n_before;
            if buffer.len() == buffer.capacity() || self.is_over || (n > 0 && self.is_long_next()) {
                return Ok(n);
            }
            if !self.open()? {
                // The next call finds out whether there is more.
                if n > 0 {
                    return Ok(n);
                }
                self.fetch(false, &mut read)?;
            }
        }
    }

    /// Up to `most` decrypted bytes.
    fn take(&mut self, most: usize) -> &[u8] {
        let start = self.plain.start;
        self.plain.start += most.min(self.plain.len());
        &self.buffer[start..self.plain.start]
    }

    /// Reads more. False if the read would block, which is an error if nothing was read before.
    fn fetch(&mut self, has_some: bool, read: &mut impl FnMut(&mut [u8]) -> io::Result<usize>) -> io::Result<bool> {
        self.make_room();
        match read(&mut self.buffer[self.sealed.end..]) {
            // Anyone on the network path can cut a connection; only the peer's alert proves that the data is complete.
            Ok(0) => {
                let why = "it was cut off; the other side may have ended";
                Err(io::Error::new(io::ErrorKind::UnexpectedEof, why))
            }
            Ok(n) => {
                self.sealed.end += n;
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && has_some => Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Moves an incomplete record to the front of the buffer; all decrypted bytes must have been consumed. Grows a
    /// buffer that was full.
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

    /// The length of the next record after its header, if the header has arrived.
    fn next_length(&self) -> io::Result<Option<usize>> {
        let Some(&[kind, major, minor, high, low]) = self.buffer[self.sealed.clone()].first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let n = usize::from(u16::from_be_bytes([high, low]));
        if ContentType::from(kind) != ContentType::ApplicationData || (major, minor) != (3, 3) || n > MAX_SEALED {
            return Err(invalid(Error::General("what arrived is not a record of TLS 1.3".into())));
        }
        Ok(Some(n))
    }

    fn is_long_next(&self) -> bool {
        // An invalid header is reported when the record is decrypted.
        self.next_length().is_ok_and(|n| n.is_some_and(|n| n >= LONG))
    }

    /// Decrypts the next record in place, or returns `false` if it is incomplete. All bytes decrypted before must have
    /// been consumed.
    fn open(&mut self) -> io::Result<bool> {
        let start = self.sealed.start + HEADER;
        let Some(n) = self.next_length()?.filter(|&n| self.sealed.end - start >= n) else { return Ok(false) };
        let sealed = &mut self.buffer[start..start + n];
        let record = InboundOpaqueMessage::new(ContentType::ApplicationData, VERSION, sealed);
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
        self.cipher = self.keys.decrypter(secret).map_err(invalid)?;
        self.n_opened = n_opened;
        Ok(())
    }
}

fn invalid(error: Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests;
