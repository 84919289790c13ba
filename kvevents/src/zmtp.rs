//! ZMTP 3.0, the protocol of ZeroMQ: greeting, NULL handshake, frames.
//!
//! ```text
//! greeting    0xff, 8 bytes, 0x7f, version 3.0, mechanism "NULL" in 20 bytes, 32 zeros
//! handshake   command READY with the property Socket-Type, in each direction
//! frame       flags (1: more, 2: long, 4: command), length in 1 byte or 8, body
//! ```
//!
//! A peer of version 3.1 or later speaks 3.0 to one that announces it. Older versions are refused. Frames of peers are limited to
//! [`MOST_BYTES`], so a stranger cannot make the process allocate more.

use std::io::{Error, ErrorKind, Result};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Greatest size of a frame that a peer may send.
const MOST_BYTES: u64 = 64 << 10;

/// Greatest number of frames of a message that a peer may send.
const MOST_FRAMES: usize = 8;

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

/// Greets the peer and checks that its socket has one of the types `expected`.
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
    if &theirs[12..17] != b"NULL\0" {
        return Err(invalid("found another security mechanism, expected NULL"));
    }
    let mut properties = Vec::new();
    for (name, value) in [("Socket-Type", socket_type), ("Identity", "")] {
        properties.push(name.len() as u8);
        properties.extend_from_slice(name.as_bytes());
        properties.extend((value.len() as u32).to_be_bytes());
        properties.extend_from_slice(value.as_bytes());
    }
    stream.write_all(&command("READY", &properties)).await?;
    let Received::Command(name, data) = receive(stream).await? else {
        return Err(invalid("found a message, expected READY"));
    };
    let found = property(&data, "socket-type").unwrap_or_default();
    if name != "READY" || !expected.iter().any(|name| name.as_bytes() == found) {
        let found = String::from_utf8_lossy(&found).into_owned();
        return Err(invalid(format!("found {name} of a socket {found:?}, expected one of {expected:?}")));
    }
    Ok(())
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
    let mut frames = Vec::new();
    loop {
        let flags = from.read_u8().await?;
        let len = if flags & LONG == 0 { u64::from(from.read_u8().await?) } else { from.read_u64().await? };
        if len > MOST_BYTES || frames.len() == MOST_FRAMES || flags > MORE | LONG | COMMAND {
            return Err(invalid(format!(
                "found a frame of {len} bytes with flags {flags:#x}, expected a short request"
            )));
        }
        let mut body = vec![0; len as usize];
        from.read_exact(&mut body).await?;
        if flags & COMMAND != 0 {
            let (&len, rest) = body.split_first().ok_or_else(|| invalid("found a command without a name"))?;
            let named = rest.split_at_checked(usize::from(len));
            let (name, data) = named.ok_or_else(|| invalid("found a command that ends within its name"))?;
            return Ok(Received::Command(String::from_utf8_lossy(name).into_owned(), data.to_vec()));
        }
        frames.push(body);
        if flags & MORE == 0 {
            return Ok(Received::Message(frames));
        }
    }
}
