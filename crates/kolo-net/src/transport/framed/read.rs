//! The reading half of a connection: reads messages, and their bodies straight into a tensor's memory.

use std::io;

use bytes::{Buf, Bytes, BytesMut};
use kolo_core::{DType, Error, Result, Shape, Tensor};
use prost::Message as _;

use super::shared::{IncomingFiles, OnRelease};
use super::stream::Stream;
use super::{Allocate, HEADER, Header, TensorHead};
use crate::wire::limits::MessageLimits;

/// How many bytes are read at once; enough for many small messages.
const CHUNK: usize = 64 << 10;

/// While at least this much of a tensor is missing, the socket's low-water mark is raised, up to the maximum.
const MIN_LONG_READ: usize = 64 << 10;
const MAX_LOW_WATER_MARK: usize = 256 << 10;

/// A message that has arrived.
pub(super) struct Arrived {
    pub header: Header,
    pub head: Bytes,
    /// The tensor of the body, if there is one.
    pub tensor: Option<(TensorHead, Tensor)>,
}

pub(super) struct Reader<'a> {
    stream: &'a Stream,
    buffer: BytesMut,
    limits: MessageLimits,
    allocate: Allocate,
    shared: IncomingFiles,
    /// Called when a shared file is free again.
    on_release: OnRelease,
    /// The number of bytes at which the socket wakes the reader.
    low_water_mark: usize,
}

impl<'a> Reader<'a> {
    pub fn new(stream: &'a Stream, limits: MessageLimits, allocate: Allocate, on_release: OnRelease) -> Reader<'a> {
        Reader {
            stream,
            buffer: BytesMut::with_capacity(CHUNK),
            limits,
            allocate,
            shared: IncomingFiles::default(),
            on_release,
            low_water_mark: 1,
        }
    }

    /// Whether a complete message is buffered, so that [`Reader::next`] will not wait.
    pub fn has_message(&self) -> bool {
        let Some((header, rest)) = self.buffer.split_first_chunk::<HEADER>() else { return false };
        // `next` reports what is wrong with the header.
        let Ok(header) = Header::read(header) else { return true };
        let n_body = if header.is_shared { 0 } else { header.n_body };
        header.n_head.checked_add(n_body).is_some_and(|n| rest.len() >= n)
    }

    /// The next message; `None` when the other side has closed the connection between two messages.
    pub async fn next(&mut self) -> Result<Option<Arrived>> {
        if !self.fill(HEADER).await? {
            return Ok(None);
        }
        let mut bytes = [0; HEADER];
        self.buffer.copy_to_slice(&mut bytes);
        let header = Header::read(&bytes)?;
        let most = if header.n_body > 0 { self.limits.others } else { self.limits.tensors };
        if header.n_head > most || header.n_body > self.limits.tensors {
            return Err(Error::resource_exhausted(format!(
                "a message of {} and {} bytes; the limits are {most} and {}",
                header.n_head, header.n_body, self.limits.tensors
            )));
        }
        if !self.fill(header.n_head).await? && header.n_head > 0 {
            return Err(broken("in the middle of a message"));
        }
        let head = self.buffer.split_to(header.n_head).freeze();
        let tensor = match header.n_body {
            0 => None,
            n_body => Some(self.tensor(&head, n_body, header.is_shared).await?),
        };
        Ok(Some(Arrived { header, head, tensor }))
    }

    /// Reads until the buffer has `n` bytes. False if the buffer was empty and the other side has closed.
    async fn fill(&mut self, n: usize) -> Result<bool> {
        while self.buffer.len() < n {
            self.buffer.reserve(CHUNK.max(n - self.buffer.len()).min(CHUNK * 16));
            match self.stream.try_read_buf(&mut self.buffer) {
                Ok(0) if self.buffer.is_empty() => return Ok(false),
                Ok(0) => return Err(broken("in the middle of a message")),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(1).await?;
                }
                Err(error) => return Err(broken(&error.to_string())),
            }
        }
        Ok(true)
    }

    /// Waits for more data, of which `n_left` bytes are known to come.
    ///
    /// On one machine, a reader that is woken for each packet finds only that one and sleeps again, and the wakeup
    /// costs the writer more than writing a packet. With TLS the reader has enough work to be woken later, so the
    /// low-water mark is raised to half of the missing bytes: it falls towards the end, when there is no work left to
    /// overlap, and the other half exceeds what was already read of an incomplete record. Without TLS this gains
    /// nothing.
    async fn wait(&mut self, n_left: usize) -> Result<()> {
        let mark = if n_left < MIN_LONG_READ || !self.stream.is_tls() { 1 } else { MAX_LOW_WATER_MARK.min(n_left / 2) };
        if mark != self.low_water_mark {
            self.stream.set_receive_low_water_mark(mark);
            self.low_water_mark = mark;
        }
        self.stream.readable().await.map_err(|error| broken(&error.to_string()))
    }

    async fn tensor(&mut self, head: &Bytes, n_body: usize, is_shared: bool) -> Result<(TensorHead, Tensor)> {
        let invalid = |why: String| Error::data_loss(format!("a message with a tensor: {why}"));
        let head = TensorHead::decode(head.clone()).map_err(|error| invalid(error.to_string()))?;
        let dtype = DType::from_number(head.dtype)?;
        let dims = head.dims.iter().map(|&dim| usize::try_from(dim)).collect::<std::result::Result<Vec<_>, _>>();
        let shape = Shape::new(&dims.map_err(|error| invalid(error.to_string()))?)?;
        let expected = dtype.size().and_then(|size| shape.n_elements().checked_mul(size));
        if expected != Some(n_body) {
            return Err(invalid(format!("{n_body} bytes for {dtype} of shape {shape}")));
        }
        if is_shared {
            let buffer = self.shared.get(head.shared_id, &head.shared_path, n_body, &self.on_release)?;
            return Ok((head, Tensor::from_buffer(dtype, shape, buffer)?));
        }
        let mut tensor = (self.allocate)(dtype, shape)?;
        let bytes = tensor.host_bytes_mut()?;
        let n_buffered = self.buffer.len().min(n_body);
        self.buffer.copy_to_slice(&mut bytes[..n_buffered]);
        let mut at = n_buffered;
        while at < n_body {
            match self.stream.try_read(&mut bytes[at..]) {
                Ok(0) => return Err(broken("in the middle of a tensor")),
                Ok(n) => at += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(n_body - at).await?;
                }
                Err(error) => return Err(broken(&error.to_string())),
            }
        }
        Ok((head, tensor))
    }
}

fn broken(why: &str) -> Error {
    Error::unavailable(format!("the connection broke: {why}"))
}
