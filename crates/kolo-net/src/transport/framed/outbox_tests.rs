//! Tests of the outbox.

use std::sync::Arc;
use std::time::Duration;

use kolo_core::Error;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;

use super::outbox::{Outbox, WireMessage};
use super::stream::Stream;

fn bytes(text: &str) -> WireMessage {
    WireMessage { head: text.as_bytes().to_vec(), body: None }
}

async fn pair() -> (Arc<Outbox>, TcpStream) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (here, there) = tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
    (Arc::new(Outbox::new(Arc::new(Stream::Plain(here.unwrap())))), there.unwrap().0)
}

async fn expect(stream: &mut TcpStream, text: &str) {
    let mut found = vec![0; text.len()];
    let read = tokio::time::timeout(Duration::from_secs(20), stream.read_exact(&mut found)).await;
    read.expect("it comes").unwrap();
    assert_eq!(found, text.as_bytes());
}

#[tokio::test]
async fn messages_keep_their_order_and_deferred_ones_are_sent_in_time() {
    let (outbox, mut there) = pair().await;
    let task = tokio::spawn(outbox.clone().drain());
    outbox.push_later(bytes("one ")).unwrap();
    outbox.push(bytes("two ")).unwrap();
    expect(&mut there, "one two ").await;
    // Nothing is sent after it: the tick flushes it.
    outbox.push_later(bytes("three ")).unwrap();
    expect(&mut there, "three ").await;
    outbox.hold();
    outbox.push(bytes("four ")).unwrap();
    assert_eq!(outbox.queue.lock().messages.len(), 1, "held");
    outbox.push(bytes("five")).unwrap();
    outbox.release();
    expect(&mut there, "four five").await;
    outbox.close(Error::cancelled("enough"));
    assert!(outbox.push(bytes("six")).is_err() && outbox.push_later(bytes("six")).is_err());
    tokio::time::timeout(Duration::from_secs(20), task).await.expect("it ends").unwrap();
}

#[tokio::test]
async fn more_than_the_socket_takes_arrives_whole() {
    let (outbox, mut there) = pair().await;
    let task = tokio::spawn(outbox.clone().drain());
    let text = "0123456789abcdef".repeat(1 << 16);
    for _ in 0..20 {
        outbox.push(bytes(&text)).unwrap();
    }
    for _ in 0..20 {
        expect(&mut there, &text).await;
    }
    outbox.close(Error::cancelled("enough"));
    tokio::time::timeout(Duration::from_secs(20), task).await.expect("it ends").unwrap();
}

#[tokio::test]
async fn closing_ends_the_writing_task_though_the_peer_reads_nothing() {
    let (outbox, there) = pair().await;
    let task = tokio::spawn(outbox.clone().drain());
    let text = "0123456789abcdef".repeat(1 << 16);
    // Far more than the buffers of both sockets hold.
    for _ in 0..64 {
        outbox.push(bytes(&text)).unwrap();
    }
    // The task takes the wake-up and waits for room.
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    outbox.close(Error::cancelled("enough"));
    tokio::time::timeout(Duration::from_secs(20), task).await.expect("it ends").unwrap();
    drop(there);
}
