//! A consumer of KV events that shares no code with the publisher: sockets of the crate zeromq, MessagePack of the crate rmpv, and an
//! index that holds publishers to the rules of vLLM's format.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::time::Duration;

pub use rmpv::Value;
use tokio::runtime::Runtime;
use zeromq::prelude::{Socket, SocketRecv, SocketSend};
use zeromq::{DealerSocket, Endpoint, SubSocket, ZmqMessage, ZmqResult};

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// A socket of the crate zeromq, without `async`.
struct Blocking<S> {
    socket: S,
    runtime: Runtime,
}

impl<S: Socket> Blocking<S> {
    fn new() -> Result<Blocking<S>, String> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        Ok(Blocking { socket: S::new(), runtime: runtime.map_err(text)? })
    }

    /// Connects over the loopback interface.
    fn connected(at: SocketAddr) -> Result<Blocking<S>, String> {
        let mut blocking = Blocking::<S>::new()?;
        let at = format!("tcp://127.0.0.1:{}", at.port());
        blocking.wait(async |socket| socket.connect(&at).await)?;
        Ok(blocking)
    }

    fn wait<T>(&mut self, act: impl AsyncFnOnce(&mut S) -> ZmqResult<T>) -> Result<T, String> {
        let socket = &mut self.socket;
        let done = self.runtime.block_on(async { tokio::time::timeout(Duration::from_secs(20), act(socket)).await });
        done.map_err(text)?.map_err(text)
    }
}

/// A blocking SUB socket.
pub struct Subscriber(Blocking<SubSocket>);

impl Subscriber {
    /// Connects to a PUB socket and subscribes to a topic.
    ///
    /// # Errors
    /// The peer is not a PUB socket, or does not accept connections.
    pub fn connect(at: SocketAddr, topic: &str) -> Result<Subscriber, String> {
        let mut socket = Blocking::<SubSocket>::connected(at)?;
        socket.wait(async |socket| socket.subscribe(topic).await)?;
        Ok(Subscriber(socket))
    }

    /// Listens for PUB sockets that connect, and subscribes to a topic. Port 0 is any free one. Returns the port too.
    ///
    /// # Errors
    /// The port is in use.
    pub fn listen(port: u16, topic: &str) -> Result<(Subscriber, u16), String> {
        let mut socket = Blocking::<SubSocket>::new()?;
        socket.wait(async |socket| socket.subscribe(topic).await)?;
        match socket.wait(async |socket| socket.bind(&format!("tcp://127.0.0.1:{port}")).await)? {
            Endpoint::Tcp(_, port) => Ok((Subscriber(socket), port)),
            other => Err(format!("listens at {other}")),
        }
    }

    /// Receives a published message: topic, sequence number and payload.
    ///
    /// # Errors
    /// Nothing comes, or it has other frames.
    pub fn message(&mut self) -> Result<(String, u64, Vec<u8>), String> {
        published(frames(self.0.wait(async |socket| socket.recv().await)?))
    }
}

/// A blocking DEALER socket, which requests replays.
pub struct Dealer(Blocking<DealerSocket>);

impl Dealer {
    /// Connects to a replay socket.
    ///
    /// # Errors
    /// The peer is not a ROUTER socket, or does not accept connections.
    pub fn connect(at: SocketAddr) -> Result<Dealer, String> {
        Ok(Dealer(Blocking::connected(at)?))
    }

    /// Sends an empty frame and a second one.
    ///
    /// # Errors
    /// The connection is closed.
    pub fn send(&mut self, request: &[u8]) -> Result<(), String> {
        let mut message = ZmqMessage::from(Vec::new());
        message.push_back(request.to_vec().into());
        self.0.wait(async |socket| socket.send(message).await)
    }

    /// Requests the messages from a sequence number on, and returns them without the end mark.
    ///
    /// # Errors
    /// The answer is malformed.
    pub fn replay(&mut self, first: u64) -> Result<Vec<(u64, Vec<u8>)>, String> {
        self.send(&first.to_be_bytes())?;
        let mut messages = Vec::new();
        loop {
            let mut frames = frames(self.0.wait(async |socket| socket.recv().await)?);
            if frames.is_empty() || !frames.remove(0).is_empty() {
                return Err("the first frame of an answer is not empty".to_string());
            }
            let (topic, seq, payload) = published(frames)?;
            if seq == u64::MAX {
                return if topic.is_empty() && payload.is_empty() {
                    Ok(messages)
                } else {
                    Err("the end mark is not empty".to_string())
                };
            }
            messages.push((seq, payload));
        }
    }
}

fn frames(message: ZmqMessage) -> Vec<Vec<u8>> {
    message.iter().map(|frame| frame.to_vec()).collect()
}

fn published(frames: Vec<Vec<u8>>) -> Result<(String, u64, Vec<u8>), String> {
    let [topic, seq, payload] =
        <[Vec<u8>; 3]>::try_from(frames).map_err(|frames| format!("found {} frames, expected 3", frames.len()))?;
    let seq: [u8; 8] = seq.try_into().map_err(|seq| format!("found the number {seq:?}, expected 8 bytes"))?;
    Ok((String::from_utf8(topic).map_err(text)?, u64::from_be_bytes(seq), payload))
}

/// Decodes one value that takes all bytes.
///
/// # Errors
/// The bytes are no such value.
pub fn decode(mut bytes: &[u8]) -> Result<Value, String> {
    let value = rmpv::decode::read_value(&mut bytes).map_err(text)?;
    if bytes.is_empty() { Ok(value) } else { Err(format!("{} bytes follow the value", bytes.len())) }
}

/// A cached prefix, as an index knows it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Known {
    /// Hash of the prefix before the block.
    pub parent: Option<u64>,
    /// Tokens of the block.
    pub tokens: Vec<u64>,
    /// The adapter.
    pub lora_name: Option<String>,
    /// The cache salt, for the first block of a sequence.
    pub salt: Option<String>,
}

/// What a router knows of one engine: for each hash its prefix and the media that hold it.
#[derive(Debug, Default)]
pub struct Router {
    /// The prefixes by hash.
    pub known: BTreeMap<u64, Known>,
    /// The media of each.
    pub media: BTreeMap<u64, BTreeSet<String>>,
    /// Number of BlockStored events.
    pub stored: usize,
    /// Number of AllBlocksCleared events.
    pub cleared: usize,
}

/// Names of the fields of an event, in the order of an array.
fn names(kind: &str) -> &'static [&'static str] {
    match kind {
        "BlockStored" => &[
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "medium",
            "lora_name",
            "extra_keys",
            "group_idx",
            "kv_cache_spec_kind",
            "kv_cache_spec_sliding_window",
        ],
        "BlockRemoved" => &["block_hashes", "medium", "group_idx"],
        _ => &[],
    }
}

impl Router {
    /// Applies a payload, in either format.
    ///
    /// # Errors
    /// It breaks a rule of the format: the message says which.
    pub fn apply(&mut self, payload: &[u8]) -> Result<(), String> {
        let Value::Array(batch) = decode(payload)? else { return Err("the batch is no array".to_string()) };
        let [Value::F64(time), Value::Array(events), rank] = &batch[..] else {
            return Err(format!("found the batch {batch:?}, expected time, events and rank"));
        };
        if rank.as_u64() != Some(0) {
            return Err(format!("found the rank {rank}, expected 0"));
        }
        if *time < 1e9 {
            return Err(format!("found the time {time}, expected seconds since 1970"));
        }
        events.iter().try_for_each(|event| self.event(event))
    }

    /// Number of tokens at the start of a prompt that the engine has cached, as far as the router knows.
    pub fn cached_tokens(
        &self,
        prompt: &[u32],
        block_size: usize,
        lora_name: Option<&str>,
        salt: Option<&str>,
    ) -> usize {
        let mut parent = None;
        let blocks = prompt.chunks_exact(block_size).take_while(|tokens| {
            let is_next = |known: &Known| {
                known.parent == parent
                    && known.tokens.iter().copied().eq(tokens.iter().map(|token| u64::from(*token)))
                    && known.lora_name.as_deref() == lora_name
                    && (parent.is_some() || known.salt.as_deref() == salt)
            };
            let next = self.known.iter().find(|(_, known)| is_next(known)).map(|(hash, _)| *hash);
            parent = next;
            next.is_some()
        });
        blocks.count() * block_size
    }

    fn event(&mut self, event: &Value) -> Result<(), String> {
        let wrong = || format!("found {event}, expected a map or an array with the type first");
        let (kind, fields): (&str, HashMap<&str, &Value>) = match event {
            Value::Map(pairs) => match &pairs[..] {
                [(key, kind), rest @ ..] if key.as_str() == Some("type") => {
                    let fields: Option<_> = rest.iter().map(|(key, value)| Some((key.as_str()?, value))).collect();
                    (kind.as_str().ok_or_else(wrong)?, fields.ok_or_else(wrong)?)
                }
                _ => return Err(wrong()),
            },
            Value::Array(values) => {
                let (kind, rest) = values.split_first().ok_or_else(wrong)?;
                let kind = kind.as_str().ok_or_else(wrong)?;
                (kind, names(kind).iter().copied().zip(rest).collect())
            }
            _ => return Err(wrong()),
        };
        if let Some(unknown) = fields.keys().find(|key| !names(kind).contains(key)) {
            return Err(format!("{kind} has the field {unknown}"));
        }
        let get = |name: &str| fields.get(name).copied().ok_or_else(|| format!("{kind} lacks {name}"));
        let opt_text = |value: &Value| match (value, value.as_str()) {
            (Value::Nil, _) => Ok(None),
            (_, Some(text)) => Ok(Some(text.to_string())),
            (other, None) => Err(format!("found {other}, expected a text or nil")),
        };
        if kind == "AllBlocksCleared" {
            self.known.clear();
            self.media.clear();
            self.cleared += 1;
            return Ok(());
        }
        let hashes = numbers(get("block_hashes")?)?;
        let distinct: BTreeSet<_> = hashes.iter().collect();
        if hashes.is_empty() || distinct.len() != hashes.len() || hashes.contains(&0) {
            return Err(format!("found the hashes {hashes:?}, expected distinct ones that are not 0"));
        }
        let medium = opt_text(get("medium")?)?.filter(|medium| ["GPU", "CPU"].contains(&medium.as_str()));
        let medium = medium.ok_or("the medium is neither GPU nor CPU")?;
        match kind {
            "BlockStored" => {
                self.stored += 1;
                let parent = get("parent_block_hash")?;
                let mut parent = match parent.as_u64() {
                    None if parent.is_nil() => None,
                    Some(known) if self.known.contains_key(&known) => Some(known),
                    _ => return Err(format!("the parent {parent} was not announced")),
                };
                let (tokens, size) = (numbers(get("token_ids")?)?, get("block_size")?);
                if size.as_u64() != Some((tokens.len() / hashes.len()) as u64) || tokens.len() % hashes.len() != 0 {
                    return Err(format!("found {} tokens for {} blocks of {size:?}", tokens.len(), hashes.len()));
                }
                if *get("lora_id")? != Value::Nil {
                    return Err("lora_id is not nil".to_string());
                }
                let lora_name = opt_text(get("lora_name")?)?;
                let salts = salts(fields.get("extra_keys").copied(), hashes.len(), lora_name.as_ref())?;
                for ((hash, salt), tokens) in hashes.iter().zip(salts).zip(tokens.chunks(tokens.len() / hashes.len())) {
                    if salt.is_some() && parent.is_some() {
                        return Err(format!("{hash} has a salt, but is no first block"));
                    }
                    let known = Known { parent, tokens: tokens.to_vec(), lora_name: lora_name.clone(), salt };
                    if self.known.insert(*hash, known.clone()).is_some_and(|before| before != known) {
                        return Err(format!("{hash} was announced with other contents"));
                    }
                    if !self.media.entry(*hash).or_default().insert(medium.clone()) {
                        return Err(format!("{hash} was announced twice on {medium}"));
                    }
                    parent = Some(*hash);
                }
                Ok(())
            }
            "BlockRemoved" => hashes.iter().try_for_each(|hash| {
                let media = self.media.get_mut(hash).ok_or_else(|| format!("{hash} was removed, but not known"))?;
                if !media.remove(&medium) {
                    return Err(format!("{hash} was removed from {medium}, where it was not"));
                }
                if media.is_empty() {
                    self.media.remove(hash);
                    self.known.remove(hash);
                    if self.known.values().any(|known| known.parent == Some(*hash)) {
                        return Err(format!("{hash} was removed before a prefix behind it"));
                    }
                }
                Ok(())
            }),
            other => Err(format!("found an event of type {other}")),
        }
    }
}

/// The salt of each block in `extra_keys`. The adapter comes first in all of them.
fn salts(extra: Option<&Value>, blocks: usize, lora_name: Option<&String>) -> Result<Vec<Option<String>>, String> {
    let wrong = || format!("found extra keys {extra:?}, expected {blocks} with the adapter {lora_name:?}");
    let entries = match extra {
        None | Some(Value::Nil) => vec![&Value::Nil; blocks],
        Some(Value::Array(entries)) if entries.len() == blocks => entries.iter().collect(),
        Some(_) => return Err(wrong()),
    };
    let salt = |entry: &Value| {
        let keys = match entry {
            Value::Nil => &[][..],
            Value::Array(keys) if !keys.is_empty() => keys,
            _ => return Err(wrong()),
        };
        let keys = match lora_name {
            None => keys,
            Some(name) => keys.strip_prefix(&[Value::from(name.as_str())]).ok_or_else(wrong)?,
        };
        match keys {
            [] => Ok(None),
            [salt] => Ok(Some(salt.as_str().ok_or_else(wrong)?.to_string())),
            _ => Err(wrong()),
        }
    };
    entries.into_iter().map(salt).collect()
}

fn numbers(value: &Value) -> Result<Vec<u64>, String> {
    let Value::Array(values) = value else { return Err(format!("found {value:?}, expected an array")) };
    let number = |value: &Value| value.as_u64().ok_or_else(|| format!("found {value}, expected a whole number"));
    values.iter().map(number).collect()
}
