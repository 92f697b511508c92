//! A message in the body of an HTTP/2 request or response: a flag byte (compressed or not), four bytes of length, the
//! message.

use std::any::{Any, TypeId};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::io::Read;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue};
use http_body::{Body, Frame, SizeHint};
use kolo_core::{Error, Result, Tensor};
use prost::Message;

use super::options::ReceiveMemory;
use super::place::{HEAD_BYTES, MIN_PLACED_BYTES, Placing};
use crate::wire::limits::{room_for, too_long};
use crate::wire::proto::RecvTensorResponse;

const HEADER_BYTES: usize = 5;

/// Below this size copying the elements costs less than sending them as a separate piece.
const MIN_LENT_BYTES: usize = 16 * 1024;

/// An outgoing body: pieces, then trailers.
#[derive(Default)]
pub(crate) struct Outgoing {
    pieces: VecDeque<Bytes>,
    trailers: Option<HeaderMap>,
}

impl Outgoing {
    /// A request's body.
    pub(crate) fn request(pieces: VecDeque<Bytes>) -> Outgoing {
        Outgoing { pieces, trailers: None }
    }

    /// A response's body.
    pub(crate) fn response(pieces: VecDeque<Bytes>, trailers: HeaderMap) -> Outgoing {
        Outgoing { pieces, trailers: Some(trailers) }
    }
}

impl Body for Outgoing {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, Infallible>>> {
        let frame = match self.pieces.pop_front() {
            Some(piece) => Some(Frame::data(piece)),
            None => self.trailers.take().map(Frame::trailers),
        };
        Poll::Ready(frame.map(Ok))
    }

    fn is_end_stream(&self) -> bool {
        self.pieces.is_empty() && self.trailers.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.pieces.iter().map(|piece| piece.len() as u64).sum())
    }
}

/// Encodes a message. The elements of a large tensor in a `RecvTensorResponse` are borrowed, not copied.
pub(crate) fn write<M: Message + 'static>(message: &M, limit: usize) -> Result<VecDeque<Bytes>> {
    let n_bytes = message.encoded_len();
    let length = u32::try_from(n_bytes).ok().filter(|_| n_bytes <= limit).ok_or_else(|| too_long(n_bytes, limit))?;
    let header = |buf: &mut dyn BufMut| {
        buf.put_u8(0);
        buf.put_u32(length);
    };
    if let Some(response) = (message as &dyn Any).downcast_ref::<RecvTensorResponse>()
        && let Some((head, elements)) = lend(response, header)
    {
        return Ok(VecDeque::from([head, elements]));
    }
    let mut buf = room_for(HEADER_BYTES + n_bytes)?;
    header(&mut buf);
    message.encode_raw(&mut buf);
    Ok(VecDeque::from([Bytes::from(buf)]))
}

/// The message split into everything before the elements and the elements, if these come last and are large.
fn lend(response: &RecvTensorResponse, header: impl Fn(&mut dyn BufMut)) -> Option<(Bytes, Bytes)> {
    let tensor = response.tensor.as_ref()?.as_tensor()?;
    if tensor.n_bytes() < MIN_LENT_BYTES {
        return None;
    }
    let layout = response.layout_with_bytes()?;
    let mut head = BytesMut::with_capacity(256);
    header(&mut head);
    response.write_flags(&mut head);
    prost::encoding::encode_key(1, prost::encoding::WireType::LengthDelimited, &mut head);
    prost::encoding::encode_varint(layout.len() as u64, &mut head);
    layout.write_head(&mut head);
    Some((head.freeze(), Bytes::from_owner(HostTensor(tensor.clone()))))
}

/// A tensor whose bytes a body borrows. `layout_with_bytes` has checked that they are on the host.
struct HostTensor(Tensor);

impl AsRef<[u8]> for HostTensor {
    fn as_ref(&self) -> &[u8] {
        self.0.host_bytes().unwrap_or_default()
    }
}

/// Why a body was not read.
pub(crate) enum ReadError<E> {
    /// The connection failed.
    Connection(E),
    /// The message is malformed or too long.
    Message(Error),
}

/// A message that has arrived.
pub(crate) enum Received {
    /// Encoded, in chunks.
    Chunks(Chunks),
    /// Already decoded.
    Tensor(RecvTensorResponse),
}

/// How to receive a long message.
#[derive(Clone, Copy)]
pub(crate) enum Intake<'a> {
    /// Buffer all of it.
    Whole,
    /// Decode a `RecvTensorResponse` while it arrives, into a tensor from this memory, if there is one.
    Tensor(Option<&'a ReceiveMemory>),
}

/// Reads a body with at most one message, which is at most `limit` bytes long, compressed or not, and its trailers.
pub(crate) async fn read<B: Body<Data = Bytes> + Unpin>(
    mut body: B,
    limit: usize,
    encoding: Option<&HeaderValue>,
    intake: Intake<'_>,
) -> std::result::Result<(Option<Received>, HeaderMap), ReadError<B::Error>> {
    let mut chunks = Chunks::default();
    let mut header: Option<(u8, usize)> = None;
    let mut trailers = HeaderMap::new();
    let mut placing = None;
    let mut may_place = true;
    while let Some(frame) = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
        match frame.map_err(ReadError::Connection)?.into_data() {
            Ok(data) => chunks.push(data),
            Err(frame) => trailers = frame.into_trailers().unwrap_or_default(),
        }
        if header.is_none() && chunks.remaining() >= HEADER_BYTES {
            let (flag, n_bytes) = (chunks.get_u8(), chunks.get_u32() as usize);
            if n_bytes > limit {
                return Err(ReadError::Message(too_long(n_bytes, limit)));
            }
            header = Some((flag, n_bytes));
        }
        let Some((flag, n_bytes)) = header else { continue };
        match (&mut placing, intake) {
            (Some(placing), _) => Placing::take(placing, &mut chunks),
            (None, Intake::Tensor(memory))
                if may_place && n_bytes >= MIN_PLACED_BYTES && chunks.remaining() >= HEAD_BYTES =>
            {
                may_place = false;
                placing = (flag == 0).then(|| Placing::begin(&mut chunks, n_bytes, memory)).flatten();
            }
            (None, Intake::Tensor(_) | Intake::Whole) => {}
        }
        let expected = if placing.is_some() { 0 } else { n_bytes };
        if chunks.remaining() > expected {
            return Err(ReadError::Message(Error::invalid_argument("more than one message in a call")));
        }
    }
    let cut_off = || ReadError::Message(Error::internal("a message is cut off"));
    if let Some(placing) = placing {
        return Ok((Some(Received::Tensor(placing.end().ok_or_else(cut_off)?)), trailers));
    }
    match header {
        Some((0, n_bytes)) if chunks.remaining() == n_bytes => Ok((Some(Received::Chunks(chunks)), trailers)),
        Some((1, n_bytes)) if chunks.remaining() == n_bytes => {
            let chunks = decompress(chunks, limit, encoding).map_err(ReadError::Message)?;
            Ok((Some(Received::Chunks(chunks)), trailers))
        }
        None if chunks.remaining() == 0 => Ok((None, trailers)),
        Some((0 | 1, _)) | None => Err(cut_off()),
        Some((flag, _)) => {
            Err(ReadError::Message(Error::internal(format!("a message that begins with {flag} is not gRPC"))))
        }
    }
}

impl Received {
    /// Decodes the message.
    pub(crate) fn decode<M: Message + Default + 'static>(self) -> std::result::Result<M, String> {
        match self {
            Received::Chunks(chunks) => M::decode(chunks).map_err(|error| error.to_string()),
            Received::Tensor(response) => (Box::new(response) as Box<dyn Any>)
                .downcast()
                .map(|message| *message)
                .map_err(|_| "a tensor where another message was expected".to_owned()),
        }
    }
}

impl<'a> Intake<'a> {
    /// The intake for messages of this type.
    pub(crate) fn of<M: 'static>(memory: Option<&'a ReceiveMemory>) -> Intake<'a> {
        match TypeId::of::<M>() == TypeId::of::<RecvTensorResponse>() {
            true => Intake::Tensor(memory),
            false => Intake::Whole,
        }
    }
}

fn decompress(chunks: Chunks, limit: usize, encoding: Option<&HeaderValue>) -> Result<Chunks> {
    let reader = chunks.reader();
    let decoder: Box<dyn Read> = match encoding.map(HeaderValue::as_bytes) {
        Some(b"gzip") => Box::new(flate2::read::GzDecoder::new(reader)),
        Some(b"deflate") => Box::new(flate2::read::ZlibDecoder::new(reader)),
        other => {
            let name = other.map_or("nothing".into(), String::from_utf8_lossy);
            return Err(Error::unimplemented(format!(
                "a message is compressed with {name}; gzip and deflate are known"
            )));
        }
    };
    let mut message = Vec::new();
    let read = decoder.take(limit as u64 + 1).read_to_end(&mut message);
    read.map_err(|error| Error::invalid_argument(format!("a compressed message is damaged: {error}")))?;
    if message.len() > limit {
        return Err(too_long(message.len(), limit));
    }
    let mut chunks = Chunks::default();
    chunks.push(message.into());
    Ok(chunks)
}

/// A message in the chunks in which it arrived.
#[derive(Default)]
pub(crate) struct Chunks {
    chunks: VecDeque<Bytes>,
    n_bytes: usize,
}

impl Chunks {
    fn push(&mut self, chunk: Bytes) {
        if !chunk.is_empty() {
            self.n_bytes += chunk.len();
            self.chunks.push_back(chunk);
        }
    }

    /// A copy of the first bytes, or of all if there are fewer.
    pub(super) fn peek(&self, n_bytes: usize) -> Vec<u8> {
        let mut head = Vec::with_capacity(n_bytes);
        for chunk in &self.chunks {
            let missing = n_bytes - head.len();
            head.extend_from_slice(&chunk[..missing.min(chunk.len())]);
        }
        head
    }
}

impl Buf for Chunks {
    fn remaining(&self) -> usize {
        self.n_bytes
    }

    fn chunk(&self) -> &[u8] {
        self.chunks.front().map_or(&[], |chunk| chunk)
    }

    fn advance(&mut self, mut n_bytes: usize) {
        assert!(n_bytes <= self.n_bytes, "a caller looks at `remaining` first");
        self.n_bytes -= n_bytes;
        while let Some(chunk) = self.chunks.front_mut() {
            if n_bytes < chunk.len() {
                chunk.advance(n_bytes);
                return;
            }
            n_bytes -= chunk.len();
            self.chunks.pop_front();
        }
    }

    fn copy_to_bytes(&mut self, n_bytes: usize) -> Bytes {
        match self.chunks.front_mut() {
            Some(chunk) if n_bytes < chunk.len() => {
                self.n_bytes -= n_bytes;
                chunk.split_to(n_bytes)
            }
            _ => {
                let mut copy = BytesMut::with_capacity(n_bytes);
                copy.put(self.take(n_bytes));
                copy.freeze()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::DType;
    use proptest::prelude::*;

    use super::*;
    use crate::wire::proto::{RunStepRequest, RunStepResponse};
    use crate::wire::tensor_wire::WireTensor;

    fn block_on<F: Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
    }

    fn read_all(pieces: Vec<Bytes>, limit: usize, encoding: Option<&'static str>) -> Result<Option<Vec<u8>>> {
        let encoding = encoding.map(HeaderValue::from_static);
        match block_on(read(Outgoing::request(pieces.into()), limit, encoding.as_ref(), Intake::Whole)) {
            Ok((None, _)) => Ok(None),
            Ok((Some(Received::Chunks(mut chunks)), _)) => Ok(Some(chunks.copy_to_bytes(chunks.remaining()).to_vec())),
            Ok((Some(Received::Tensor(_)), _)) => panic!("nobody asked for a tensor"),
            Err(ReadError::Message(error)) => Err(error),
            Err(ReadError::Connection(never)) => match never {},
        }
    }

    #[test]
    fn lent_elements_are_the_bytes_that_copying_would_give() {
        for n in [0, 3, 5000, 100_000] {
            let tensor = Tensor::from((0..n).map(|i| i as f32).collect::<Vec<_>>());
            let response = RecvTensorResponse {
                tensor: Some(WireTensor::from(tensor)),
                send_start_micros: 12345,
                is_dead: n == 5000,
                ..RecvTensorResponse::default()
            };
            let pieces = write(&response, usize::MAX).unwrap();
            assert_eq!(pieces.len(), if n * 4 >= MIN_LENT_BYTES { 2 } else { 1 });
            let message = read_all(pieces.into(), usize::MAX, None).unwrap().unwrap();
            assert_eq!(message, response.encode_to_vec());
        }
    }

    #[test]
    fn limits_hold_both_ways() {
        let request = RunStepRequest { session_handle: "x".repeat(100), ..RunStepRequest::default() };
        assert!(write(&request, 101).unwrap_err().message().contains("the limit is 101"));
        let pieces: Vec<_> = write(&request, 102).unwrap().into();
        assert!(read_all(pieces.clone(), 102, None).is_ok());
        assert_eq!(read_all(pieces, 101, None).unwrap_err().code(), kolo_core::Code::ResourceExhausted);
    }

    #[test]
    fn compressed_messages_are_read_within_the_limit() {
        let compress = |n: usize| {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            std::io::Write::write_all(&mut encoder, &vec![0; n]).unwrap();
            let message = encoder.finish().unwrap();
            let mut body = vec![1];
            body.extend((message.len() as u32).to_be_bytes());
            body.extend(message);
            vec![Bytes::from(body)]
        };
        assert_eq!(read_all(compress(1000), 1000, Some("gzip")), Ok(Some(vec![0; 1000])));
        let bomb = read_all(compress(10_000_000), 1 << 16, Some("gzip"));
        assert_eq!(bomb.unwrap_err().code(), kolo_core::Code::ResourceExhausted);
        assert!(read_all(compress(10), 1000, Some("snappy")).unwrap_err().message().contains("snappy"));
        assert!(read_all(compress(10), 1000, None).is_err());
        assert!(read_all(compress(10), 1000, Some("deflate")).is_err());
    }

    #[test]
    fn what_is_not_one_message_is_refused() {
        let body = |bytes: &'static [u8]| vec![Bytes::from_static(bytes)];
        assert_eq!(read_all(vec![], 10, None), Ok(None));
        assert_eq!(read_all(body(b"\0\0\0\0\0"), 10, None), Ok(Some(vec![])));
        assert!(read_all(body(b"\0\0\0\0"), 10, None).is_err());
        assert!(read_all(body(b"\0\0\0\0\x02a"), 10, None).is_err());
        assert!(read_all(body(b"\0\0\0\0\x01ab"), 10, None).is_err());
        assert!(read_all(body(b"\x07\0\0\0\x01a"), 10, None).is_err());
    }

    fn receive(pieces: Vec<Bytes>) -> Option<Received> {
        block_on(read(Outgoing::request(pieces.into()), usize::MAX, None, Intake::Tensor(None))).ok()?.0
    }

    fn response(tensor: Tensor) -> RecvTensorResponse {
        let tensor = Some(WireTensor::from(tensor));
        RecvTensorResponse { tensor, send_start_micros: 99, require_ack: true, ..RecvTensorResponse::default() }
    }

    #[test]
    fn large_tensors_are_placed_as_they_come_and_others_are_not() {
        let check = |message: &RecvTensorResponse, placed: bool| {
            let mut whole = BytesMut::new();
            write(message, usize::MAX).unwrap().iter().for_each(|piece| whole.extend_from_slice(piece));
            let whole = whole.freeze();
            for cut in [whole.len(), 1, 7, 40, 5000] {
                let pieces = (0..whole.len()).step_by(cut).map(|at| whole.slice(at..whole.len().min(at + cut)));
                let read = receive(pieces.collect()).unwrap();
                assert_eq!(matches!(read, Received::Tensor(_)), placed);
                assert_eq!(&read.decode::<RecvTensorResponse>().unwrap(), message);
            }
            // A byte too few, or too many.
            assert!(receive(vec![whole.slice(..whole.len() - 1)]).is_none());
            assert!(receive(vec![whole.clone(), Bytes::from_static(b"x")]).is_none());
        };
        let floats = |n: usize| Tensor::from((0..n).map(|i| i as f32).collect::<Vec<_>>());
        check(&response(floats(20_000)), true);
        check(&RecvTensorResponse { is_dead: true, ..response(floats(20_000)) }, true);
        check(&response(floats(20_000).reshaped([10, 1, 2000].into()).unwrap()), true);
        check(&response(floats(10)), false);
        check(&response(Tensor::from(vec![true; 100_000])), false);
        check(&response(Tensor::from("x".repeat(100_000).as_str())), false);
        let other = crate::wire::proto::Any { type_url: "x".into(), ..crate::wire::proto::Any::default() };
        check(&RecvTensorResponse { transport_options: Some(other), ..response(floats(20_000)) }, false);
    }

    #[test]
    fn a_field_after_the_elements_is_read_in_the_ordinary_way() {
        let tensor = Tensor::from(vec![3i32; 20_000]);
        let mut fields = WireTensor::from(tensor.clone()).encode_to_vec();
        fields.extend([0x18, 7]);
        let mut message = Vec::new();
        prost::encoding::bytes::encode(1, &fields, &mut message);
        let mut whole = vec![0];
        whole.extend((message.len() as u32).to_be_bytes());
        whole.extend(message);
        let read = receive(vec![whole.into()]).unwrap().decode::<RecvTensorResponse>().unwrap();
        assert_eq!(read.tensor.unwrap().into_tensor(), Ok(tensor));
    }

    proptest! {
        /// A corrupt head is refused, or decoded as the usual decoder does.
        #[test]
        fn placing_reads_what_decoding_reads(at in 5usize..45, byte: u8, cut in 1usize..3000) {
            let mut whole = BytesMut::new();
            let message = response(Tensor::from(vec![1i32; 17_000]).reshaped([17, 1000].into()).unwrap());
            write(&message, usize::MAX).unwrap().iter().for_each(|piece| whole.extend_from_slice(piece));
            whole[at] = byte;
            let whole = whole.freeze();
            let expected = RecvTensorResponse::decode(&whole[5..]).ok();
            let pieces = (0..whole.len()).step_by(cut).map(|at| whole.slice(at..whole.len().min(at + cut)));
            let found = receive(pieces.collect()).unwrap().decode::<RecvTensorResponse>();
            prop_assert!(found.ok() == expected);
        }

        /// However a body is split, the message is the same.
        #[test]
        fn pieces_do_not_matter(n in 0usize..400, cuts in proptest::collection::vec(1usize..50, 0..20)) {
            let tensor = WireTensor::from(Tensor::zeros(DType::F32, [n]).unwrap());
            let named = crate::wire::proto::NamedTensorProto { name: "x:0".into(), tensor: Some(tensor) };
            let message = RunStepResponse { tensor: vec![named], ..RunStepResponse::default() };
            let mut rest = write(&message, usize::MAX).unwrap().remove(0).unwrap();
            let mut pieces = Vec::new();
            for cut in cuts {
                pieces.push(rest.split_to(cut.min(rest.len())));
            }
            pieces.push(rest);
            let Ok((Some(read), _)) = block_on(read(Outgoing::request(pieces.into()), usize::MAX, None, Intake::Whole)) else {
                panic!("a whole message");
            };
            prop_assert_eq!(read.decode::<RunStepResponse>().unwrap(), message);
        }
    }
}
