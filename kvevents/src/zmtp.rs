//! ZMTP 3.0, the protocol of ZeroMQ: greeting, NULL handshake, frames.
//!
//! ```text
//! greeting    0xff, 8 bytes, 0x7f, version 3.0, mechanism "NULL" in 20 bytes, 32 zeros
//! handshake   command READY with the property Socket-Type, in each direction
//! frame       flags (1: more, 2: long, 4: command), length in 1 byte or 8, body
//! ```
//!
//! A peer of version 3.1 or later speaks 3.0 to one that announces it, but may send the commands of 3.1. Older versions are refused.
//! Messages and commands of peers are limited to [`MOST_BYTES`], so a stranger cannot make the process allocate more.

use std::io::{Error, ErrorKind, Result};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Greatest size in bytes of a message or a command that a peer may send.
pub const MOST_BYTES: u64 = 64 << 10;

/// Greatest number of frames of a message that a peer may send.
pub const MOST_FRAMES: usize = 8;

/// Greatest size in bytes of what a PING asks to be returned.
pub const MOST_CONTEXT: usize = 16;

/// Greatest size in bytes of what is read after a refusal.
const MOST_IGNORED: u64 = 64 << 10;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// What a peer sent.
pub enum Received {
    /// The frames of a message.
    Message(Vec<Vec<u8>>),
    /// Name and data of a command.
    Command(String, Vec<u8>),
}

fn invalid(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidData, what.into())
}

/// Appends a frame of a message; `more` unless it is the last one.
pub fn push_frame(to: &mut Vec<u8>, body: &[u8], more: bool) {
    push_head(to, body.len(), if more { MORE } else { 0 });
    to.extend_from_slice(body);
}

/// Appends the head of a frame whose body follows.
pub fn push_head(to: &mut Vec<u8>, len: usize, flags: u8) {
    match u8::try_from(len) {
        Ok(len) => to.extend([flags, len]),
        Err(_) => {
            to.push(flags | LONG);
            to.extend((len as u64).to_be_bytes());
        }
    }
}

/// Returns the bytes of a command.
pub fn command(name: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    push_head(&mut bytes, 1 + name.len() + data.len(), COMMAND);
    bytes.push(name.len() as u8);
    bytes.extend_from_slice(name.as_bytes());
    bytes.extend_from_slice(data);
    bytes
}

/// Greets the peer and checks that its socket has one of the types `expected`. Tells a peer that is refused why, so that it does not try
/// again for ever.
pub async fn handshake(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    socket_type: &str,
    expected: &[&str],
) -> Result<()> {
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    stream.write_all(&greeting).await?;
    // The version comes before the rest: an older peer sends no more.
    let mut theirs = [0; 64];
    stream.read_exact(&mut theirs[..11]).await?;
    if theirs[0] != 0xff || theirs[9] & 1 == 0 || theirs[10] < 3 {
        return Err(invalid("found another protocol or an older version, expected ZMTP 3"));
    }
    stream.read_exact(&mut theirs[11..]).await?;
    if theirs[12..32] != greeting[12..32] {
        return refuse(stream, "expected the security mechanism NULL").await;
    }
    let mut ready = vec![11];
    ready.extend_from_slice(b"Socket-Type");
    ready.extend((socket_type.len() as u32).to_be_bytes());
    ready.extend_from_slice(socket_type.as_bytes());
    stream.write_all(&command("READY", &ready)).await?;
    let Received::Command(name, data) = receive(stream).await? else {
        return Err(invalid("found a message, expected READY"));
    };
    let found = property(&data, "socket-type").unwrap_or_default();
    if name != "READY" || !expected.iter().any(|name| name.as_bytes() == found) {
        return refuse(stream, &format!("expected READY of a socket {}", expected.join(" or "))).await;
    }
    Ok(())
}

/// Sends an ERROR. Reads what the peer sends until it closes: closing first would discard the ERROR that it has not read.
async fn refuse(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), reason: &str) -> Result<()> {
    let data = [&[reason.len() as u8], reason.as_bytes()].concat();
    stream.write_all(&command("ERROR", &data)).await?;
    stream.shutdown().await?;
    tokio::io::copy(&mut stream.take(MOST_IGNORED), &mut tokio::io::sink()).await?;
    Err(invalid(reason))
}

/// Returns the value of a property in the data of READY. Names have no case.
fn property(mut data: &[u8], name: &str) -> Option<Vec<u8>> {
    loop {
        let (&len, rest) = data.split_first()?;
        let (found, rest) = rest.split_at_checked(usize::from(len))?;
        let (len, rest) = rest.split_first_chunk::<4>()?;
        let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*len) as usize)?;
        if found.eq_ignore_ascii_case(name.as_bytes()) {
            return Some(value.to_vec());
        }
        data = rest;
    }
}

/// Receives a message or a command.
pub async fn receive(from: &mut (impl AsyncRead + Unpin)) -> Result<Received> {
    let (mut frames, mut bytes) = (Vec::new(), 0);
    loop {
        let flags = from.read_u8().await?;
        let len = if flags & LONG == 0 { u64::from(from.read_u8().await?) } else { from.read_u64().await? };
        let (is_command, more) = (flags & COMMAND != 0, flags & MORE != 0);
        // A command is one frame, and never comes between the frames of a message.
        let is_misplaced = is_command && (more || !frames.is_empty());
        let is_known = flags <= MORE | LONG | COMMAND;
        if len > MOST_BYTES - bytes || frames.len() == MOST_FRAMES || !is_known || is_misplaced {
            return Err(invalid(format!(
                "found a frame of {len} bytes with flags {flags:#x} behind {} others, expected a short request",
                frames.len()
            )));
        }
        bytes += len;
        let mut body = vec![0; len as usize];
        from.read_exact(&mut body).await?;
        if is_command {
            let (&len, rest) = body.split_first().ok_or_else(|| invalid("found a command without a name"))?;
            let named = rest.split_at_checked(usize::from(len));
            let (name, data) = named.ok_or_else(|| invalid("found a command that ends within its name"))?;
            return Ok(Received::Command(String::from_utf8_lossy(name).into_owned(), data.to_vec()));
        }
        frames.push(body);
        if !more {
            return Ok(Received::Message(frames));
        }
    }
}

/// Returns the PONG that answers the data of a PING: a time in 2 bytes, and what to return.
pub fn pong(ping: &[u8]) -> Result<Vec<u8>> {
    match ping.split_at_checked(2) {
        Some((_, context)) if context.len() <= MOST_CONTEXT => Ok(command("PONG", context)),
        _ => Err(invalid(format!("found a PING of {} bytes, expected 2 to {}", ping.len(), 2 + MOST_CONTEXT))),
    }
}

/// Subscriptions of a peer to a topic. A subscription matches if it is a prefix of the topic, so its length says which one it is. All
/// others match nothing and are not stored.
pub struct Subscriptions {
    topic: String,
    /// Number of subscriptions to the prefix of each length.
    counts: Vec<u32>,
}

impl Subscriptions {
    pub fn new(topic: &str) -> Subscriptions {
        Subscriptions { topic: topic.to_string(), counts: vec![0; topic.len() + 1] }
    }

    /// Applies a subscription or its end, as a message or as a command. Others are ignored. Returns whether a subscription matches.
    pub fn apply(&mut self, received: &Received) -> bool {
        let change = match received {
            Received::Message(frames) => match frames.first().and_then(|frame| frame.split_first()) {
                Some((1, prefix)) => Some((true, prefix)),
                Some((0, prefix)) => Some((false, prefix)),
                _ => None,
            },
            Received::Command(name, prefix) if name == "SUBSCRIBE" => Some((true, &prefix[..])),
            Received::Command(name, prefix) if name == "CANCEL" => Some((false, &prefix[..])),
            Received::Command(..) => None,
        };
        if let Some((adds, prefix)) = change
            && self.topic.as_bytes().starts_with(prefix)
        {
            let count = &mut self.counts[prefix.len()];
            *count = if adds { count.saturating_add(1) } else { count.saturating_sub(1) };
        }
        self.counts.iter().any(|count| *count > 0)
    }
}
