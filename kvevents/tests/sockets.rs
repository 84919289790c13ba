//! Who connects, and what strangers may send.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use kvevents::KvEventsConfig;
use testkit::kv_events::Client;

use super::{config, start, stored, subscriber, wait};

#[test]
fn b25_a_topic_is_the_first_frame_word_for_word_and_filters_subscribers() {
    let topic = "kv@10.0.0.7:8000@org/model ü";
    let mut publisher = start(&KvEventsConfig { topic: topic.into(), ..config() });
    let mut all = subscriber(&publisher, "");
    let mut routers = subscriber(&publisher, "kv@");
    let _other = Client::subscribe(publisher.address().unwrap(), "kv@10.0.0.8").unwrap();
    publisher.publish(vec![stored(None, &[1])], Vec::new);
    assert_eq!(all.message().unwrap().0, topic);
    assert_eq!(routers.message().unwrap().0, topic);
    assert_eq!(publisher.stats().subscribers, 2, "the topic of the third is no prefix");
}

#[test]
fn b25_an_endpoint_without_a_star_is_connected_to_and_again_after_it_went_away() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let mut publisher = start(&KvEventsConfig { endpoint: format!("tcp://localhost:{}", at.port()), ..config() });
    assert_eq!(publisher.address(), None);
    for round in 1..=2 {
        let mut collector = Client::accept(&listener, "").unwrap();
        wait(&publisher, |stats| stats.subscribers == 1);
        publisher.publish(vec![stored(None, &[round])], Vec::new);
        assert_eq!(collector.message().unwrap().1, round - 1);
        drop(collector);
        wait(&publisher, |stats| stats.subscribers == 0);
    }
}

#[test]
fn strangers_are_disconnected_and_subscribers_notice_nothing() {
    let mut publisher = start(&config());
    let mut honest = subscriber(&publisher, "");
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    let mut curve = greeting;
    curve[12..17].copy_from_slice(b"CURVE");
    let ready = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB".to_vec();
    let greeted = |bytes: &[u8]| [&greeting[..], bytes].concat();
    let subscribed = |bytes: &[u8]| [&greeting[..], &ready, bytes].concat();
    let hostile = [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
        curve.to_vec(),
        greeted(b"\x04\x1a\x05READY\x0bSocket-Type\0\0\0\x04PUSH"),
        greeted(b"\x04\x01\xff"),
        greeted(b"\x04\x00"),
        greeted(b"\x00\x01x"),
        // Lengths that nobody should allocate.
        subscribed(b"\x02\xff\xff\xff\xff\xff\xff\xff\xff"),
        subscribed(b"\x02\x00\x00\x00\x00\x40\x00\x00\x00"),
        subscribed(&b"\x01\x00".repeat(100)),
        subscribed(b"\xf0\x00"),
    ];
    for bytes in hostile {
        for at in [publisher.address().unwrap(), publisher.replay_address().unwrap()] {
            let mut stream = TcpStream::connect(("127.0.0.1", at.port())).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            let _ = stream.write_all(&bytes);
            let mut answer = Vec::new();
            // Closed or reset, not left open.
            if let Err(error) = stream.read_to_end(&mut answer) {
                assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{bytes:x?}");
            }
        }
    }
    publisher.publish(vec![stored(None, &[1])], Vec::new);
    assert_eq!(honest.message().unwrap().1, 0);
}

#[test]
fn subscriptions_of_version_3_1_and_heartbeats_are_understood() {
    let mut publisher = start(&KvEventsConfig { topic: "kv".into(), ..config() });
    let mut client = subscriber(&publisher, "kv");
    // As a message, because the client frames no commands: an unknown first byte is ignored.
    client.send(&[b"\x07what"]).unwrap();
    client.send(&[b"\x00kv"]).unwrap();
    wait(&publisher, |stats| stats.subscribers == 0);
    client.command("SUBSCRIBE", b"k").unwrap();
    wait(&publisher, |stats| stats.subscribers == 1);
    client.command("PING", b"\x00\x10hello").unwrap();
    let pong = client.receive_command().unwrap();
    assert_eq!(pong, b"\x04PONGhello");
    publisher.publish(vec![stored(None, &[1])], Vec::new);
    assert_eq!(client.message().unwrap().1, 0);
    client.command("CANCEL", b"k").unwrap();
    wait(&publisher, |stats| stats.subscribers == 0);
}

#[test]
fn a_dropped_publisher_closes_its_sockets() {
    let publisher = start(&config());
    let at = publisher.address().unwrap();
    let mut client = subscriber(&publisher, "");
    drop(publisher);
    assert!(client.message().is_err());
    TcpListener::bind(("127.0.0.1", at.port())).unwrap();
}
