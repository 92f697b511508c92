//! Two ends of a connection over loopback, with valid and with manipulated bytes between them.

use std::io;
use std::time::Duration;

use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::rustls::ClientConfig;

use super::*;
use crate::transport::tls::cert::Authority;
use crate::transport::tls::{ClientTls, KOLO, ServerTls, TlsStream};

/// Long enough for a slow machine; a test that needs it has failed.
const LONG_TIME: Duration = Duration::from_secs(20);

fn certificates() -> (Authority, ServerTls, ClientTls) {
    let authority = Authority::new(1).unwrap();
    let files = authority.issue("task", &["127.0.0.1".into()], 1).unwrap();
    (authority, files.server().unwrap(), files.client().unwrap())
}

async fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (here, there) = tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
    (here.unwrap(), there.unwrap().0)
}

/// The client's and the server's end.
async fn pair() -> (TlsStream, TlsStream) {
    let (_, server, client) = certificates();
    let (here, there) = sockets().await;
    let server = async {
        assert!(server.is_offered_kolo(&there).await);
        server.accept(there).await
    };
    let (here, there) = tokio::join!(client.connect(here, "127.0.0.1:1"), server);
    (here.unwrap().expect("both speak it"), there.unwrap())
}

async fn send(stream: &TlsStream, bytes: &[u8]) -> io::Result<()> {
    let mut at = 0;
    while at < bytes.len() {
        // In two slices of odd lengths.
        let (first, second) = bytes[at..].split_at((bytes.len() - at) / 3);
        match stream.try_write_vectored(&[IoSlice::new(first), IoSlice::new(second)]) {
            Ok(n) => at += n,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => stream.flush().await?,
            Err(error) => return Err(error),
        }
    }
    stream.flush().await
}

/// Reads up to `n` bytes, fewer if the connection is closed before.
async fn receive(stream: &TlsStream, n: usize) -> io::Result<Vec<u8>> {
    let (mut bytes, mut at) = (vec![0; n], 0);
    while at < n {
        match stream.try_read(&mut bytes[at..]) {
            Ok(0) => break,
            Ok(n) => at += n,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => stream.tcp().readable().await?,
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(at);
    Ok(bytes)
}

fn pattern(n: usize, seed: u64) -> Vec<u8> {
    (0..n as u64).map(|i| (i.wrapping_add(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

/// Sends in both directions concurrently, and checks what was received.
async fn exchange(here: &TlsStream, there: &TlsStream, sizes: &[usize]) {
    let both = async {
        for (i, &n) in sizes.iter().enumerate() {
            let (up, down) = (pattern(n, i as u64), pattern(n / 2 + 1, !(i as u64)));
            let (sent, got, returned, received) =
                tokio::join!(send(here, &up), receive(there, up.len()), send(there, &down), receive(here, down.len()));
            sent.and(returned).unwrap();
            assert!(got.unwrap() == up && received.unwrap() == down, "{n} bytes");
        }
    };
    tokio::time::timeout(LONG_TIME, both).await.expect("nothing hangs");
}

#[tokio::test]
async fn bytes_arrive_as_they_were_sent() {
    let (here, there) = pair().await;
    let sizes = [1, 5, MAX_PLAIN - 1, MAX_PLAIN, MAX_PLAIN + 1, 3 * BATCH + 17, MOST_BUFFER, 10_000_019, 2];
    exchange(&here, &there, &sizes).await;
    // A clean close is distinguished from a cut connection.
    drop(here);
    assert_eq!(receive(&there, 1).await.unwrap(), b"");
}

/// Content type 0 is invalid: it counts as padding after the record's content.
#[tokio::test]
async fn padding_is_taken_off() {
    let nothing = ContentType::from(0);
    let (here, there) = pair().await;
    let mut records = Vec::new();
    here.sealer.lock().record(nothing, b"abc\x17\0\0\0"[..].into(), &mut records).unwrap();
    here.sealer.lock().record(nothing, [0; 20][..].into(), &mut records).unwrap();
    here.tcp().try_write(&records).unwrap();
    assert_eq!(receive(&there, 3).await.unwrap(), b"abc");
    let read = tokio::time::timeout(LONG_TIME, receive(&there, 1)).await.expect("it does not hang");
    assert_eq!(read.unwrap_err().kind(), io::ErrorKind::InvalidData);
}

#[tokio::test]
async fn what_is_longer_than_a_record_may_be_is_refused() {
    let (here, there) = pair().await;
    let mut record = Vec::new();
    let plain = [1; MAX_PLAIN + 1];
    here.sealer.lock().record(ContentType::ApplicationData, plain[..].into(), &mut record).unwrap();
    here.tcp().try_write(&record).unwrap();
    let read = tokio::time::timeout(LONG_TIME, receive(&there, 1)).await.expect("it does not hang");
    assert_eq!(read.unwrap_err().kind(), io::ErrorKind::InvalidData);
}

#[tokio::test]
async fn a_long_record_behind_a_short_one_is_left_to_be_read_to_its_place() {
    let (here, there) = pair().await;
    let long = pattern(MAX_PLAIN, 7);
    send(&here, b"one ").await.unwrap();
    send(&here, b"two").await.unwrap();
    send(&here, &long).await.unwrap();
    let all = async {
        let mut buffer = BytesMut::with_capacity(1 << 20);
        while buffer.len() < 7 {
            match there.try_read_buf(&mut buffer) {
                Ok(n) => assert!(n > 0),
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
            there.readable().await.unwrap();
        }
        assert_eq!(&buffer[..], b"one two");
        assert!(receive(&there, MAX_PLAIN).await.unwrap() == long);
        // With nothing read before it, it is read up to the buffer's capacity.
        send(&here, &long).await.unwrap();
        let mut buffer = BytesMut::with_capacity(1000);
        while buffer.len() < buffer.capacity() {
            if there.try_read_buf(&mut buffer).is_err() {
                there.readable().await.unwrap();
            }
        }
        assert!(buffer[..] == long[..buffer.len()]);
        assert!(receive(&there, MAX_PLAIN - buffer.len()).await.unwrap() == long[buffer.len()..]);
    };
    tokio::time::timeout(LONG_TIME, all).await.expect("nothing hangs");
}

#[tokio::test]
async fn keys_are_changed_before_they_have_sealed_too_much() {
    let (here, there) = pair().await;
    here.sealer.lock().limit = 3;
    there.sealer.lock().limit = 5;
    exchange(&here, &there, &[10, 1_000_003, 1, 500_000]).await;
    assert!(here.sealer.lock().n_sealed <= 4 && there.opener.lock().n_opened <= 4);
    // The peer may request a key update, too.
    here.sealer.lock().limit = u64::MAX;
    there.sealer.lock().limit = u64::MAX;
    let mut request = Vec::new();
    here.sealer.lock().change_key(&KEY_UPDATE_REQUEST, &mut request).unwrap();
    here.tcp().try_write(&request).unwrap();
    exchange(&here, &there, &[100, 100_000]).await;
    assert!(!there.sealer.lock().keys.owes_update.load(Ordering::Acquire), "it was answered");
}

#[tokio::test]
async fn a_connection_that_is_cut_is_not_taken_for_a_complete_one() {
    let (here, there) = pair().await;
    send(&here, b"whole").await.unwrap();
    here.tcp().try_write(&[23, 3, 3, 0, 100, 1, 2, 3]).unwrap();
    socket2::SockRef::from(here.tcp()).shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(receive(&there, 5).await.unwrap(), b"whole");
    let cut = tokio::time::timeout(LONG_TIME, receive(&there, 1)).await.expect("it does not hang").unwrap_err();
    assert_eq!(cut.kind(), io::ErrorKind::UnexpectedEof);
}

#[tokio::test]
async fn bytes_that_were_not_sealed_end_the_connection() {
    for seed in 0..40 {
        let (here, there) = pair().await;
        let mut bytes = pattern(1 + seed * 97, seed as u64);
        if seed % 2 == 0 {
            // With a record's header.
            let n = bytes.len() as u16;
            bytes.splice(..0, [23, 3, 3, (n >> 8) as u8, n as u8]);
        }
        here.tcp().try_write(&bytes).unwrap();
        socket2::SockRef::from(here.tcp()).shutdown(std::net::Shutdown::Write).unwrap();
        let read = tokio::time::timeout(LONG_TIME, receive(&there, 1)).await.expect("it does not hang");
        assert!(read.is_err(), "{seed}");
    }
}

#[tokio::test]
async fn a_record_that_was_changed_on_the_way_is_refused() {
    let (here, there) = pair().await;
    let mut record = Vec::new();
    here.sealer.lock().seal(&[IoSlice::new(b"a tensor's bytes")], &mut record).unwrap();
    record[9] ^= 1;
    here.tcp().try_write(&record).unwrap();
    let read = tokio::time::timeout(LONG_TIME, receive(&there, 1)).await.expect("it does not hang");
    assert_eq!(read.unwrap_err().kind(), io::ErrorKind::InvalidData);
}

#[tokio::test]
async fn who_shows_no_certificate_is_refused_and_told_so() {
    let (authority, server, with) = certificates();
    let files = authority.issue("task", &["127.0.0.1".into()], 1).unwrap();
    let mut config = ClientConfig::builder_with_provider(crate::transport::tls::provider())
        .with_protocol_versions(&[&tokio_rustls::rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(files.roots().unwrap())
        .with_no_client_auth();
    config.alpn_protocols = vec![KOLO.to_vec()];
    config.enable_secret_extraction = true;
    let without = ClientTls { own: Arc::new(config), ..with };
    let (here, there) = sockets().await;
    let client = async {
        let stream = without.connect(here, "127.0.0.1:1").await.unwrap().expect("the server reads certificates last");
        // The client sends data at once, which the server does not read.
        let _ = send(&stream, b"hello").await;
        receive(&stream, 1).await
    };
    let (refused, accepted) = tokio::join!(tokio::time::timeout(LONG_TIME, client), server.accept(there));
    assert!(accepted.is_err());
    let error = crate::transport::tls::failed(&refused.expect("it does not hang").unwrap_err());
    assert_eq!(error.code(), kolo_core::Code::Unauthenticated, "{error}");
    assert!(error.message().contains("it refuses our certificate"), "{error}");
}

#[tokio::test]
async fn a_handshake_that_was_changed_on_the_way_fails_and_does_not_hang() {
    let (_, server, client) = certificates();
    // A `ClientHello`.
    let (here, mut there) = sockets().await;
    let caller = tokio::spawn(async move { client.connect(here, "127.0.0.1:1").await.map(drop) });
    let mut hello = vec![0; 4096];
    let n = there.read(&mut hello).await.unwrap();
    hello.truncate(n);
    drop(there);
    assert!(tokio::time::timeout(LONG_TIME, caller).await.expect("it does not hang").unwrap().is_err());
    for at in (0..hello.len()).step_by(7) {
        let (here, there) = sockets().await;
        let mut changed = hello.clone();
        changed[at] ^= 0x55;
        changed.extend(pattern(at, 3));
        here.writable().await.unwrap();
        here.try_write(&changed).unwrap();
        socket2::SockRef::from(&here).shutdown(std::net::Shutdown::Write).unwrap();
        let accepted = tokio::time::timeout(LONG_TIME, server.accept(there)).await.expect("it does not hang");
        assert!(accepted.is_err(), "{at}");
    }
}

#[tokio::test]
async fn who_says_nothing_in_a_handshake_is_not_waited_for() {
    let (_, server, client) = certificates();
    let ((here, _silent_server), (_silent_caller, there)) = (sockets().await, sockets().await);
    let both = async { tokio::join!(client.connect(here, "127.0.0.1:1"), server.accept(there)) };
    let (connected, accepted) = tokio::time::timeout(2 * LONG_TIME, both).await.expect("it does not hang");
    let error = connected.err().expect("nobody answered");
    assert_eq!(error.code(), kolo_core::Code::Unavailable);
    assert!(error.message().contains("no TLS handshake in"), "{error}");
    assert_eq!(accepted.err().expect("nobody called").kind(), io::ErrorKind::TimedOut);
}

/// The encrypting task blocks its thread, so another thread must run the pump.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_sealed_is_written_by_another_thread() {
    let (here, there) = pair().await;
    let here = std::sync::Arc::new(here);
    let writer = here.clone();
    let pump = tokio::spawn(async move { writer.pump().await });
    let bytes = pattern(4 * BATCH, 3);
    let expected = bytes.clone();
    let sealing = tokio::spawn(async move {
        let (mut at, start) = (0, std::time::Instant::now());
        // Each time after the pump has most likely gone to sleep.
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(5));
            at += here.try_write_vectored(&[IoSlice::new(&bytes[at..])]).unwrap();
            while !here.is_empty() && start.elapsed() < LONG_TIME {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        (at, here.is_empty(), here)
    });
    let (n, is_empty, _here) = sealing.await.unwrap();
    assert!(n > 0 && n < expected.len() && is_empty, "{n} bytes");
    let received = tokio::time::timeout(LONG_TIME, receive(&there, n)).await.expect("it was written").unwrap();
    assert!(received == expected[..n]);
    pump.abort();
}
