//! Connections that are refused or closed.
#![allow(clippy::unwrap_used)]

use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep};

use super::*;

#[tokio::test]
async fn a_client_that_never_closes_and_keeps_sending_is_let_go_after_the_time_limit() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let stream: Stream = Box::new(listener.accept().await.unwrap().0);
    let sender = async {
        while client.write_all(b"x").await.is_ok() {
            sleep(CLOSE_TIMEOUT / 20).await;
        }
    };
    let both = async { tokio::join!(sender, close(stream)) };
    let start = Instant::now();
    timeout(CLOSE_TIMEOUT * 10, both).await.expect("the connection is still open");
    assert!(start.elapsed() >= CLOSE_TIMEOUT);
}

#[tokio::test]
async fn connections_over_the_limit_get_a_response_only_up_to_a_number() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (rejector, mut clients) = (Rejector::over(1), Vec::new());
    let mut streams = Vec::new();
    for _ in 0..MAX_REJECTIONS + 2 {
        clients.push(TcpStream::connect(address).await.unwrap());
        let stream: Stream = Box::new(listener.accept().await.unwrap().0);
        streams.push(stream);
    }
    // All permits are taken before the first response is sent.
    streams.into_iter().for_each(|stream| rejector.reject(stream.into()));
    for (i, client) in clients.iter_mut().enumerate() {
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        let has_response = i < MAX_REJECTIONS;
        assert_eq!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("retry-after: 1"), has_response, "{i}");
        assert_eq!(answer.is_empty(), !has_response, "{i}");
    }
}
