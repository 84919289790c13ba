//! A consumer of KV events that shares no code with the publisher: a ZMTP client, a MessagePack decoder, and an index that holds
//! publishers to the rules of vLLM's format.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// A blocking connection to a socket, or of a socket, that speaks ZMTP 3.0.
pub struct Client(TcpStream);

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl Client {
    /// Connects as a SUB socket and subscribes to a topic.
    ///
    /// # Errors
    /// The peer is not a PUB socket.
    pub fn subscribe(at: SocketAddr, topic: &str) -> Result<Client, String> {
        Client::subscribe_on(TcpStream::connect(local(at)).map_err(text)?, topic)
    }

    /// Accepts a PUB socket that connects, and subscribes to a topic.
    ///
    /// # Errors
    /// The peer is not a PUB socket.
    pub fn accept(listener: &TcpListener, topic: &str) -> Result<Client, String> {
        Client::subscribe_on(listener.accept().map_err(text)?.0, topic)
    }

    fn subscribe_on(stream: TcpStream, topic: &str) -> Result<Client, String> {
        let mut client = Client::greet(stream, "SUB", "PUB")?;
        client.send(&[&[&[1], topic.as_bytes()].concat()])?;
        Ok(client)
    }

    /// Connects as a DEALER socket to a replay socket.
    ///
    /// # Errors
    /// The peer is not a ROUTER socket.
    pub fn dealer(at: SocketAddr) -> Result<Client, String> {
        Client::greet(TcpStream::connect(local(at)).map_err(text)?, "DEALER", "ROUTER")
    }

    fn greet(mut stream: TcpStream, own: &str, expected: &str) -> Result<Client, String> {
        stream.set_read_timeout(Some(Duration::from_secs(20))).map_err(text)?;
        let mut greeting = [0; 64];
        (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
        greeting[12..16].copy_from_slice(b"NULL");
        stream.write_all(&greeting).map_err(text)?;
        let mut theirs = [0; 64];
        stream.read_exact(&mut theirs).map_err(text)?;
        if theirs[..12] != greeting[..12] || theirs[12..32] != greeting[12..32] {
            return Err(format!("the greeting is {theirs:x?}"));
        }
        let mut ready = vec![4, 0, 5];
        ready.extend(b"READY\x0bSocket-Type\0\0\0");
        ready.push(own.len() as u8);
        ready.extend(own.as_bytes());
        ready[1] = ready.len() as u8 - 2;
        stream.write_all(&ready).map_err(text)?;
        let mut client = Client(stream);
        let (flags, body) = client.frame()?;
        let wanted = [b"\x05READY\x0bSocket-Type\0\0\0", &[expected.len() as u8][..], expected.as_bytes()].concat();
        if flags != 4 || !body.starts_with(&wanted) {
            return Err(format!("the handshake is {}", String::from_utf8_lossy(&body)));
        }
        Ok(client)
    }

    fn frame(&mut self) -> Result<(u8, Vec<u8>), String> {
        let mut head = [0; 2];
        self.0.read_exact(&mut head).map_err(text)?;
        let mut len = u64::from(head[1]);
        if head[0] & 2 != 0 {
            let mut rest = [0; 8];
            rest[0] = head[1];
            self.0.read_exact(&mut rest[1..]).map_err(text)?;
            len = u64::from_be_bytes(rest);
        }
        let mut body = vec![0; usize::try_from(len).map_err(text)?];
        self.0.read_exact(&mut body).map_err(text)?;
        Ok((head[0] & !2, body))
    }

    /// Sends a message of short frames.
    ///
    /// # Errors
    /// The connection is closed.
    pub fn send(&mut self, frames: &[&[u8]]) -> Result<(), String> {
        let mut bytes = Vec::new();
        for (i, frame) in frames.iter().enumerate() {
            bytes.extend([u8::from(i + 1 < frames.len()), frame.len() as u8]);
            bytes.extend_from_slice(frame);
        }
        self.0.write_all(&bytes).map_err(text)
    }

    /// Sends a command.
    ///
    /// # Errors
    /// The connection is closed.
    pub fn command(&mut self, name: &str, data: &[u8]) -> Result<(), String> {
        let body = [&[name.len() as u8][..], name.as_bytes(), data].concat();
        self.0.write_all(&[&[4, body.len() as u8][..], &body].concat()).map_err(text)
    }

    /// Receives the body of a command.
    ///
    /// # Errors
    /// The connection is closed, or a message comes.
    pub fn receive_command(&mut self) -> Result<Vec<u8>, String> {
        match self.frame()? {
            (4, body) => Ok(body),
            (flags, _) => Err(format!("found a frame with the flags {flags}, expected a command")),
        }
    }

    /// Receives the frames of a message.
    ///
    /// # Errors
    /// The connection is closed, or nothing comes.
    pub fn receive(&mut self) -> Result<Vec<Vec<u8>>, String> {
        let mut frames = Vec::new();
        loop {
            let (flags, body) = self.frame()?;
            frames.push(body);
            if flags == 0 {
                return Ok(frames);
            }
        }
    }

    /// Receives a published message: topic, sequence number and payload.
    ///
    /// # Errors
    /// As [`Client::receive`], or the frames are others.
    pub fn message(&mut self) -> Result<(String, u64, Vec<u8>), String> {
        published(self.receive()?)
    }

    /// Requests the messages from a sequence number on, and returns them without the end mark.
    ///
    /// # Errors
    /// The answer is malformed.
    pub fn replay(&mut self, first: u64) -> Result<Vec<(u64, Vec<u8>)>, String> {
        self.send(&[&[], &first.to_be_bytes()])?;
        let mut messages = Vec::new();
        loop {
            let mut frames = self.receive()?;
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

/// The loopback address for one that listens on all interfaces.
fn local(at: SocketAddr) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], at.port()))
}

fn published(frames: Vec<Vec<u8>>) -> Result<(String, u64, Vec<u8>), String> {
    let [topic, seq, payload] =
        <[Vec<u8>; 3]>::try_from(frames).map_err(|frames| format!("found {} frames, expected 3", frames.len()))?;
    let seq: [u8; 8] = seq.try_into().map_err(|seq| format!("found the number {seq:?}, expected 8 bytes"))?;
    Ok((String::from_utf8(topic).map_err(text)?, u64::from_be_bytes(seq), payload))
}

/// A decoded value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// nil
    Nil,
    /// A whole number.
    Uint(u64),
    /// A number of 8 bytes.
    Float(f64),
    /// A text.
    Text(String),
    /// An array.
    Array(Vec<Value>),
    /// A map with texts as keys, in order.
    Map(Vec<(String, Value)>),
}

/// Decodes one value that takes all bytes.
///
/// # Errors
/// The bytes are no such value.
pub fn decode(bytes: &[u8]) -> Result<Value, String> {
    let mut rest = bytes;
    let value = value(&mut rest)?;
    if rest.is_empty() { Ok(value) } else { Err(format!("{} bytes follow the value", rest.len())) }
}

fn take<'a>(rest: &mut &'a [u8], len: usize) -> Result<&'a [u8], String> {
    let (taken, left) = rest.split_at_checked(len).ok_or("the bytes end within a value")?;
    *rest = left;
    Ok(taken)
}

fn number(rest: &mut &[u8], len: usize) -> Result<u64, String> {
    Ok(take(rest, len)?.iter().fold(0, |value, byte| value << 8 | u64::from(*byte)))
}

fn value(rest: &mut &[u8]) -> Result<Value, String> {
    let tag = take(rest, 1)?[0];
    let size = 1 << (tag & 3);
    let (kind, len) = match tag {
        0..=0x7f => return Ok(Value::Uint(u64::from(tag))),
        0xc0 => return Ok(Value::Nil),
        0xcb => return Ok(Value::Float(f64::from_bits(number(rest, 8)?))),
        0xcc..=0xcf => return Ok(Value::Uint(number(rest, size)?)),
        0x80..=0x8f => ('m', u64::from(tag & 15)),
        0x90..=0x9f => ('a', u64::from(tag & 15)),
        0xa0..=0xbf => ('t', u64::from(tag & 31)),
        0xd9 => ('t', number(rest, 1)?),
        0xda => ('t', number(rest, 2)?),
        0xdc => ('a', number(rest, 2)?),
        0xdd => ('a', number(rest, 4)?),
        0xde => ('m', number(rest, 2)?),
        _ => return Err(format!("found the tag {tag:#x}")),
    };
    Ok(match kind {
        't' => Value::Text(String::from_utf8(take(rest, len as usize)?.to_vec()).map_err(text)?),
        'a' => Value::Array((0..len).map(|_| value(rest)).collect::<Result<_, _>>()?),
        _ => {
            let pair = |_| match value(rest)? {
                Value::Text(key) => Ok((key, value(rest)?)),
                other => Err(format!("found the key {other:?}")),
            };
            Value::Map((0..len).map(pair).collect::<Result<_, String>>()?)
        }
    })
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
        let [Value::Float(time), Value::Array(events), Value::Uint(0)] = &batch[..] else {
            return Err(format!("found the batch {batch:?}, expected time, events and rank 0"));
        };
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
        let (kind, fields): (&str, HashMap<&str, &Value>) = match event {
            Value::Map(pairs) => match &pairs[..] {
                [(key, Value::Text(kind)), rest @ ..] if key == "type" => {
                    (kind, rest.iter().map(|(key, value)| (key.as_str(), value)).collect())
                }
                _ => return Err(format!("found {event:?}, expected the type first")),
            },
            Value::Array(values) => match &values[..] {
                [Value::Text(kind), rest @ ..] => (kind, names(kind).iter().copied().zip(rest).collect()),
                _ => return Err(format!("found {event:?}, expected the type first")),
            },
            _ => return Err(format!("found the event {event:?}")),
        };
        if let Some(unknown) = fields.keys().find(|key| !names(kind).contains(key)) {
            return Err(format!("{kind} has the field {unknown}"));
        }
        let get = |name: &str| fields.get(name).copied().ok_or_else(|| format!("{kind} lacks {name}"));
        let opt_text = |value: &Value| match value {
            Value::Nil => Ok(None),
            Value::Text(text) => Ok(Some(text.clone())),
            other => Err(format!("found {other:?}, expected a text or nil")),
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
                let mut parent = match get("parent_block_hash")? {
                    Value::Nil => None,
                    Value::Uint(parent) if self.known.contains_key(parent) => Some(*parent),
                    other => return Err(format!("the parent {other:?} was not announced")),
                };
                let (tokens, size) = (numbers(get("token_ids")?)?, get("block_size")?);
                if *size != Value::Uint((tokens.len() / hashes.len()) as u64) || tokens.len() % hashes.len() != 0 {
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
            Some(name) => keys.strip_prefix(&[Value::Text(name.clone())]).ok_or_else(wrong)?,
        };
        match keys {
            [] => Ok(None),
            [Value::Text(salt)] => Ok(Some(salt.clone())),
            _ => Err(wrong()),
        }
    };
    entries.into_iter().map(salt).collect()
}

fn numbers(value: &Value) -> Result<Vec<u64>, String> {
    let Value::Array(values) = value else { return Err(format!("found {value:?}, expected an array")) };
    let number = |value: &Value| match value {
        Value::Uint(number) => Ok(*number),
        other => Err(format!("found {other:?}, expected a whole number")),
    };
    values.iter().map(number).collect()
}
