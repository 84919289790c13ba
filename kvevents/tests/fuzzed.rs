//! The property of any bytes that a peer may send, checked by the ordinary tests and by libFuzzer (`fuzz/src/bin/peer.rs`): what is read is
//! bounded, and subscriptions are those of a model that stores all of them.

#[allow(dead_code)]
#[path = "../src/zmtp.rs"]
mod zmtp;

use std::sync::OnceLock;

use tokio::io::AsyncWriteExt;
use tokio::runtime::Runtime;
use zmtp::{MOST_BYTES, MOST_CONTEXT, MOST_FRAMES, Received, Subscriptions};

const TOPIC: &str = "kv@a";

/// What an honest subscriber sends first.
fn greeted(bytes: &[u8]) -> Vec<u8> {
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    [&greeting[..], &b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB"[..], bytes].concat()
}

/// Reads the bytes of a peer. The first one says whether an honest handshake precedes the others.
pub fn peer(bytes: &[u8]) {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    let runtime = || tokio::runtime::Builder::new_current_thread().build();
    let runtime = RUNTIME.get_or_init(|| runtime().unwrap_or_else(|error| panic!("{error}")));
    let Some((first, rest)) = bytes.split_first() else { return };
    let sent = if first % 8 == 0 { rest.to_vec() } else { greeted(rest) };
    runtime.block_on(async {
        let (mut ours, mut theirs) = tokio::io::duplex(sent.len() + 1024);
        theirs.write_all(&sent).await.unwrap_or_else(|error| panic!("{error}"));
        theirs.shutdown().await.unwrap_or_else(|error| panic!("{error}"));
        if zmtp::handshake(&mut ours, "PUB", &["SUB", "XSUB"]).await.is_err() {
            return;
        }
        let (mut subscriptions, mut model) = (Subscriptions::new(TOPIC), Vec::new());
        while let Ok(received) = zmtp::receive(&mut ours).await {
            let (adds, prefix) = match &received {
                Received::Message(frames) => {
                    let size: usize = frames.iter().map(Vec::len).sum();
                    assert!((1..=MOST_FRAMES).contains(&frames.len()) && size as u64 <= MOST_BYTES);
                    (frames[0].first().copied(), frames[0].get(1..).unwrap_or_default())
                }
                Received::Command(name, data) => {
                    assert!(data.len() as u64 <= MOST_BYTES);
                    assert_eq!(zmtp::pong(data).is_ok(), (2..=2 + MOST_CONTEXT).contains(&data.len()));
                    let adds = [("CANCEL", 0), ("SUBSCRIBE", 1)].into_iter().find(|(known, _)| known == name);
                    (adds.map(|(_, adds)| adds), &data[..])
                }
            };
            match adds {
                Some(1) => model.push(prefix.to_vec()),
                Some(0) => {
                    if let Some(at) = model.iter().position(|known| known == prefix) {
                        model.swap_remove(at);
                    }
                }
                _ => {}
            }
            let matches = model.iter().any(|prefix| TOPIC.as_bytes().starts_with(prefix));
            assert_eq!(subscriptions.apply(&received), matches);
        }
    });
}

#[cfg(test)]
mod properties {
    use proptest::prelude::*;

    /// A frame that is well-formed but for its flags.
    fn frame() -> impl Strategy<Value = Vec<u8>> {
        let flags = prop_oneof![6 => Just(0u8), 2 => Just(4), 1 => Just(1), 1 => 0..16u8];
        let topic = (0..2u8, 0..6usize).prop_map(|(adds, len)| [&[adds], &b"kv@a/b"[..len]].concat());
        let command = ("(SUBSCRIBE|CANCEL|PING|[A-Z]{0,3})", "[kv]{0,2}|.{0,20}")
            .prop_map(|(name, data)| [&[name.len() as u8], name.as_bytes(), data.as_bytes()].concat());
        (flags, prop_oneof![4 => topic, 2 => command, 1 => prop::collection::vec(any::<u8>(), 0..300)]).prop_map(
            |(flags, body)| match u8::try_from(body.len()) {
                Ok(len) if flags & 2 == 0 => [&[flags, len], &body[..]].concat(),
                _ => [&[flags | 2], &(body.len() as u64).to_be_bytes()[..], &body].concat(),
            },
        )
    }

    proptest! {
        #[test]
        fn what_libfuzzer_tries_holds_for_any_bytes_of_a_peer(
            first in any::<u8>(),
            frames in prop::collection::vec(frame(), 0..20),
            bytes in prop::collection::vec(any::<u8>(), 0..80),
        ) {
            super::peer(&[&[first], &frames.concat()[..]].concat());
            super::peer(&[&[first], &bytes[..]].concat());
        }
    }
}
