//! Who connects, and what strangers may send.

use std::io::Write;
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvevents::{KvEventsConfig, Limits};
use testkit::kv_events::{Dealer, Subscriber};

use super::peers::{Raw, command, greeting, ready};
use super::{address, config, dealer, settle, start, start_with, stored, subscriber, wait};

#[test]
fn b25_a_topic_is_the_first_frame_word_for_word_and_filters_subscribers() {
    let topic = "kv@10.0.0.7:8000@org/model ü";
    let mut publisher = start(&KvEventsConfig { topic: topic.into(), ..config() });
    let mut all = subscriber(&publisher, "");
    let mut routers = subscriber(&publisher, "kv@");
    let _other = Subscriber::connect(address(&publisher), "kv@10.0.0.8").unwrap();
    publisher.publish(vec![stored(None, &[1])], Vec::new);
    assert_eq!(all.message().unwrap().0, topic);
    assert_eq!(routers.message().unwrap().0, topic);
    assert_eq!(publisher.stats().subscribers, 2, "the topic of the third is no prefix");
}

#[test]
fn b25_an_endpoint_without_a_star_is_connected_to_and_again_after_it_went_away() {
    let (collector, port) = Subscriber::listen(0, "").unwrap();
    let mut publisher = start(&KvEventsConfig { endpoint: format!("tcp://localhost:{port}"), ..config() });
    assert_eq!(publisher.address(), None);
    let mut collector = Some(collector);
    for round in 1..=2 {
        let mut collector = collector.take().unwrap_or_else(|| Subscriber::listen(port, "").unwrap().0);
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
    let greeted = |bytes: &[u8]| [&greeting("NULL")[..], bytes].concat();
    let subscribed = |socket_type: &str, bytes: &[u8]| [&greeting("NULL")[..], &ready(socket_type), bytes].concat();
    for (at, own) in [(publisher.address(), "SUB"), (publisher.replay_address(), "DEALER")] {
        let hostile = [
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
            greeted(b"\x04\x01\xff"),
            greeted(b"\x04\x00"),
            greeted(b"\x00\x01x"),
            // Lengths that nobody should allocate.
            subscribed(own, b"\x02\xff\xff\xff\xff\xff\xff\xff\xff"),
            subscribed(own, b"\x02\x00\x00\x00\x00\x40\x00\x00\x00"),
            subscribed(own, &[b"\x03\0\0\0\0\0\0\x90\0", &[7; 0x9000][..], b"\x02\0\0\0\0\0\0\x90\0"].concat()),
            subscribed(own, &b"\x01\x00".repeat(100)),
            subscribed(own, b"\xf0\x00"),
            // A command between the frames of a message, and one with more frames.
            subscribed(own, &[&b"\x01\x01x"[..], &command("PING", b"\0\x10")].concat()),
            subscribed(own, b"\x05\x07\x04PING\0\x10"),
            // A PING with a context of 17 bytes, and one without a time.
            subscribed(own, &command("PING", &[0; 19])),
            subscribed(own, &command("PING", &[0])),
        ];
        for bytes in hostile {
            let mut stranger = Raw::connect(at.unwrap(), None);
            let _ = stranger.0.write_all(&bytes);
            stranger.read_to_end();
        }
    }
    publisher.publish(vec![stored(None, &[1])], Vec::new);
    assert_eq!(honest.message().unwrap().1, 0);
}

#[test]
fn a_peer_with_another_mechanism_or_socket_is_told_why() {
    let publisher = start(&config());
    let expected = |reason: &str| command("ERROR", &[&[reason.len() as u8], reason.as_bytes()].concat());
    let mechanism = || expected("expected the security mechanism NULL");
    let cases = [
        (publisher.address(), greeting("CURVE"), mechanism()),
        (publisher.replay_address(), greeting("NULLS"), mechanism()),
        (
            publisher.address(),
            [greeting("NULL"), ready("PUSH")].concat(),
            [ready("PUB"), expected("expected READY of a socket SUB or XSUB")].concat(),
        ),
        (
            publisher.replay_address(),
            [greeting("NULL"), ready("SUB")].concat(),
            [ready("ROUTER"), expected("expected READY of a socket DEALER or REQ or ROUTER")].concat(),
        ),
    ];
    for (at, sent, answer) in cases {
        let mut peer = Raw::connect(at.unwrap(), None);
        // What follows is not understood, and does not keep the peer from reading the answer.
        peer.send(&[&sent[..], &[7; 1000]].concat());
        let found = peer.read_to_end();
        assert_eq!(found[64..], answer, "{}", String::from_utf8_lossy(&found));
    }
}

#[test]
fn subscriptions_of_version_3_1_and_heartbeats_are_understood() {
    let mut publisher = start(&KvEventsConfig { topic: "kv".into(), ..config() });
    let mut client = Raw::subscriber(address(&publisher), "kv", None);
    wait(&publisher, |stats| stats.subscribers == 1);
    client.send(b"\x00\x05\x07what");
    client.send(b"\x00\x03\x00kv");
    wait(&publisher, |stats| stats.subscribers == 0);
    client.send(&command("SUBSCRIBE", b"k"));
    wait(&publisher, |stats| stats.subscribers == 1);
    client.send(&command("PING", b"\x00\x10sixteen bytes .."));
    assert_eq!(client.frame(), (4, b"\x04PONGsixteen bytes ..".to_vec()));
    publisher.publish(vec![stored(None, &[1])], Vec::new);
    assert_eq!(client.message().1, 0);
    client.send(&command("CANCEL", b"k"));
    wait(&publisher, |stats| stats.subscribers == 0);
    let mut dealer = Raw::handshake(publisher.replay_address().unwrap(), "DEALER", "ROUTER", None);
    dealer.send(&command("PING", b"\x00\x10"));
    assert_eq!(dealer.frame(), (4, b"\x04PONG".to_vec()));
}

#[test]
fn subscriptions_are_counted_and_those_that_cannot_match_are_not_stored() {
    let publisher = start(&KvEventsConfig { topic: "kv".into(), ..config() });
    let mut client = Raw::handshake(address(&publisher), "SUB", "PUB", None);
    // Longer than the topic, or another one.
    let other = [b"\x02\0\0\0\0\0\0\x10\0\x01kv", &[b'x'; 0xffd][..], b"\x00\x02\x01x"].concat();
    client.send(&other.repeat(2000));
    client.send(&b"\x00\x03\x01kv".repeat(2));
    wait(&publisher, |stats| stats.subscribers == 1);
    // One of two, and one that was never made.
    client.send(b"\x00\x03\x00kv\x00\x01\x00");
    client.send(&command("PING", b"\x00\x10"));
    client.frame();
    assert_eq!(publisher.stats().subscribers, 1);
    client.send(b"\x00\x03\x00kv");
    wait(&publisher, |stats| stats.subscribers == 0);
}

/// Limits under which a peer is let go soon.
fn short() -> Limits {
    let (patience, stall) = (Duration::from_millis(400), Duration::from_millis(300));
    Limits { patience, stall, send_buffer: Some(4096), ..Limits::default() }
}

#[test]
fn a_subscriber_that_stops_reading_small_messages_is_let_go() {
    let mut publisher = start_with(&config(), short());
    let mut honest = subscriber(&publisher, "");
    let _deaf = Raw::subscriber(address(&publisher), "", Some(2304));
    wait(&publisher, |stats| stats.subscribers == 2);
    for block in 1..=1000 {
        publisher.publish(vec![stored(None, &[block])], Vec::new);
        assert_eq!(honest.message().unwrap().1, block - 1);
    }
    wait(&publisher, |stats| stats.subscribers == 1);
}

#[test]
#[cfg(target_os = "linux")]
fn a_subscriber_that_stops_reading_is_let_go_although_all_fits_into_the_send_buffer() {
    let mut publisher = start_with(&config(), Limits { send_buffer: Some(1 << 20), ..short() });
    let _deaf = Raw::subscriber(address(&publisher), "", Some(2304));
    wait(&publisher, |stats| stats.subscribers == 1);
    (1..=500).for_each(|block| publisher.publish(vec![stored(None, &[block])], Vec::new));
    settle(&publisher);
    wait(&publisher, |stats| stats.subscribers == 0);
}

#[test]
fn a_peer_that_sends_pings_and_reads_no_answer_is_let_go() {
    let publisher = start_with(&config(), short());
    for (at, own, theirs) in [(publisher.address(), "SUB", "PUB"), (publisher.replay_address(), "DEALER", "ROUTER")] {
        let mut deaf = Raw::handshake(at.unwrap(), own, theirs, Some(2304));
        if own == "SUB" {
            deaf.send(b"\x00\x01\x01");
        }
        let start = Instant::now();
        while deaf.0.write_all(&command("PING", &[7; 18])).is_ok() {
            assert!(start.elapsed() < Duration::from_secs(20), "the peer was kept");
            // Time to answer it: only one answer may wait.
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

#[test]
fn at_most_one_answer_to_a_ping_waits_for_a_peer() {
    let mut publisher = start_with(&config(), Limits { stall: Duration::from_secs(20), ..short() });
    let mut slow = Raw::subscriber(address(&publisher), "", Some(16 << 10));
    wait(&publisher, |stats| stats.subscribers == 1);
    (1..=1000).for_each(|block| publisher.publish(vec![stored(None, &[block])], Vec::new));
    settle(&publisher);
    slow.send(&command("PING", b"\x00\x10").repeat(5000));
    slow.send(b"\x00\x01\x00");
    wait(&publisher, |stats| stats.subscribers == 0);
    let answers = slow.read_to_end().windows(4).filter(|bytes| bytes == b"PONG").count();
    assert!(answers <= 1, "{answers} answers waited");
}

#[test]
fn a_peer_that_reads_no_replay_is_let_go() {
    let mut publisher = start_with(&config(), Limits { peers: 1, ..short() });
    publisher.publish(vec![stored(None, &(1..=50_000).collect::<Vec<_>>())], Vec::new);
    settle(&publisher);
    let mut deaf = Raw::handshake(publisher.replay_address().unwrap(), "DEALER", "ROUTER", Some(2304));
    deaf.send(&[&b"\x01\x00\x00\x08"[..], &[0; 8]].concat());
    assert!(deaf.closed());
    assert_eq!(eventually(|| Dealer::connect(publisher.replay_address().unwrap())).replay(0).unwrap().len(), 1);
}

#[test]
fn a_subscriber_that_reads_too_slowly_is_let_go() {
    let mut publisher = start_with(&config(), short());
    let mut slow = Raw::subscriber(address(&publisher), "", Some(2304));
    wait(&publisher, |stats| stats.subscribers == 1);
    publisher.publish(vec![stored(None, &(1..=50_000).collect::<Vec<_>>())], Vec::new);
    settle(&publisher);
    let start = Instant::now();
    while publisher.stats().subscribers == 1 {
        assert!(start.elapsed() < Duration::from_secs(20), "the peer was kept");
        slow.read_some();
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Tries again until a place is free.
fn eventually<T>(mut connect: impl FnMut() -> Result<T, String>) -> T {
    let start = Instant::now();
    loop {
        match connect() {
            Ok(connected) => return connected,
            Err(error) => assert!(start.elapsed() < Duration::from_secs(20), "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_peer_that_subscribes_to_nothing_here_leaves_its_place_and_an_idle_subscriber_stays() {
    let mut publisher = start_with(&KvEventsConfig { topic: "kv".into(), ..config() }, Limits { peers: 3, ..short() });
    let mut idle = subscriber(&publisher, "kv");
    let mut silent = Raw::handshake(address(&publisher), "SUB", "PUB", None);
    let mut other = Raw::subscriber(address(&publisher), "kw", None);
    let mut late = eventually(|| Subscriber::connect(address(&publisher), "kv"));
    wait(&publisher, |stats| stats.subscribers == 2);
    silent.read_to_end();
    other.read_to_end();
    // One that unsubscribes is let go too.
    let mut former = Raw::subscriber(address(&publisher), "k", None);
    wait(&publisher, |stats| stats.subscribers == 3);
    former.send(b"\x00\x02\x00k");
    former.read_to_end();
    publisher.publish(vec![stored(None, &[1])], Vec::new);
    assert_eq!((idle.message().unwrap().1, late.message().unwrap().1), (0, 0));
}

#[test]
fn an_idle_replay_connection_leaves_its_place_only_when_others_need_it() {
    let mut publisher = start_with(&config(), Limits { peers: 2, ..short() });
    publisher.publish(vec![stored(None, &[1])], Vec::new);
    settle(&publisher);
    let mut first = dealer(&publisher);
    std::thread::sleep(2 * short().patience);
    assert_eq!(first.replay(0).unwrap().len(), 1, "nobody needed its place");
    let idle = Raw::handshake(publisher.replay_address().unwrap(), "DEALER", "ROUTER", None);
    let late = eventually(|| Dealer::connect(publisher.replay_address().unwrap())).replay(0);
    assert_eq!(late.unwrap().len(), 1);
    drop((first, idle));
}

/// What the process logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn connections_that_find_no_place_are_one_line_and_not_one_each() {
    let log = Log::default();
    tracing_subscriber::fmt().with_ansi(false).with_writer(Mutex::new(log.clone())).init();
    let publisher = start_with(&config(), Limits { peers: 1, ..Limits::default() });
    let _taken = subscriber(&publisher, "");
    for _ in 0..20 {
        Raw::connect(address(&publisher), None).read_to_end();
    }
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let port = address(&publisher).port().to_string();
    let lines: Vec<&str> = text.lines().filter(|line| line.contains(&port)).collect();
    assert_eq!(lines.len(), 1, "{text}");
    assert!(lines[0].ends_with(": connections not accepted: 1, the last because 1 are open"), "{text}");
}

#[test]
fn a_dropped_publisher_closes_its_sockets() {
    let publisher = start(&config());
    let at = address(&publisher);
    let mut client = Raw::subscriber(at, "", None);
    wait(&publisher, |stats| stats.subscribers == 1);
    drop(publisher);
    assert!(client.read_to_end().is_empty());
    TcpListener::bind(("127.0.0.1", at.port())).unwrap();
}
