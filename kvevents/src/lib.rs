//! KV events: tells routers and indexers which prefixes a KV cache holds, in vLLM's wire format.
//!
//! The crate knows neither a model nor HTTP. A caller hands the [`Publisher`] plain [`Change`]s, once per step. A thread of the
//! publisher encodes them and sends them to subscribers.
//!
//! ```text
//! step ──▶ Publisher::publish ──▶ bounded queue ──▶ publisher thread: index ──▶ encode ──▶ journal ──▶ PUB socket ──▶ subscribers
//!          never waits                                                                      └─▶ replay socket
//! ```
//!
//! ```
//! use kvevents::{BlockHash, Change, KvEventsConfig, Layout, Medium, Publisher};
//!
//! let config: KvEventsConfig = r#"{"enable_kv_cache_events": true, "endpoint": "tcp://*:0"}"#.parse()?;
//! let mut publisher = Publisher::start(&config, Layout::new(2))?;
//! let stored = Change::Stored {
//!     medium: Medium::Gpu,
//!     parent: None,
//!     hashes: vec![BlockHash::new(7)],
//!     token_ids: vec![1, 2],
//!     lora_name: None,
//!     cache_salt: None,
//! };
//! publisher.publish(vec![stored], Vec::new);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | file | what it owns |
//! |---|---|
//! | `config` | the settings, with vLLM's keys |
//! | `change` | what the caller reports |
//! | `index` | which prefixes subscribers know; events from changes |
//! | `wire`, `msgpack` | batches of events as bytes |
//! | `journal` | the last messages, and how far each subscriber has read them; snapshots |
//! | `publisher` | the queue, the thread, the sequence number |
//! | `endpoint` | addresses of the form `tcp://HOST:PORT` |
//! | `limits` | deadlines and sizes that bound what peers cost |
//! | `zmtp` | greeting, handshake, frames and subscriptions of ZMTP 3.0, the protocol of ZeroMQ |
//! | `outbox` | what is written to a peer next, with a deadline |
//! | `sockets` | the PUB socket and the replay socket |

mod change;
mod config;
mod endpoint;
mod index;
mod journal;
mod limits;
mod msgpack;
mod outbox;
mod publisher;
mod sockets;
mod wire;
mod zmtp;

pub use change::{BlockHash, Change, Layout, Medium, SpecKind};
pub use config::{Format, KvEventsConfig};
pub use endpoint::EndpointError;
pub use limits::Limits;
pub use publisher::{Publisher, Sockets, StartError, Stats};
