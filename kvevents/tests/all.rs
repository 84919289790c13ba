//! The integration tests of the crate, in one program. Numbers such as B26 are requirements on engines behind routers, as listed in
//! `docs/routers.md`.
#![allow(clippy::unwrap_used)]

mod bytes;
mod fuzzed;
mod overflow;
mod peers;
mod replay;
mod settings;
mod sockets;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use kvevents::{BlockHash, Change, KvEventsConfig, Layout, Limits, Medium, Publisher, Sockets, Stats};
use testkit::kv_events::{Dealer, Subscriber};

/// Settings that listen on free ports.
fn config() -> KvEventsConfig {
    KvEventsConfig {
        enabled: true,
        endpoint: "tcp://*:0".into(),
        replay_endpoint: Some("tcp://*:0".into()),
        ..KvEventsConfig::default()
    }
}

/// A publisher of blocks of 2 tokens.
fn start(config: &KvEventsConfig) -> Publisher {
    Publisher::start(config, Layout::new(2)).unwrap()
}

/// A publisher with other limits.
fn start_with(config: &KvEventsConfig, limits: Limits) -> Publisher {
    Publisher::start_on(Sockets::open(config).unwrap().with_limits(limits), Layout::new(2)).unwrap()
}

fn address(publisher: &Publisher) -> SocketAddr {
    publisher.address().unwrap()
}

/// A subscriber whose subscription the publisher has read.
fn subscriber(publisher: &Publisher, topic: &str) -> Subscriber {
    let before = publisher.stats().subscribers;
    let subscriber = Subscriber::connect(address(publisher), topic).unwrap();
    wait(publisher, |stats| stats.subscribers > before);
    subscriber
}

fn dealer(publisher: &Publisher) -> Dealer {
    Dealer::connect(publisher.replay_address().unwrap()).unwrap()
}

fn wait(publisher: &Publisher, until: impl Fn(Stats) -> bool) {
    let start = Instant::now();
    while !until(publisher.stats()) {
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", publisher.stats());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until the publisher has processed all that it was handed.
fn settle(publisher: &Publisher) {
    wait(publisher, |stats| stats.processed == stats.handed);
}

fn hash(hash: u64) -> BlockHash {
    BlockHash::new(u128::from(hash))
}

/// Blocks `hashes` of 2 tokens, behind `parent`.
fn stored(parent: Option<u64>, hashes: &[u64]) -> Change {
    Change::Stored {
        medium: Medium::Gpu,
        parent: parent.map(hash),
        hashes: hashes.iter().map(|h| hash(*h)).collect(),
        token_ids: hashes.iter().flat_map(|h| [*h as u32, 7]).collect(),
        lora_name: None,
        cache_salt: None,
    }
}

fn removed(h: u64) -> Change {
    Change::Removed { medium: Medium::Gpu, hash: hash(h) }
}
