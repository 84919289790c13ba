//! A peer that sends bytes of its own, for what the crate zeromq cannot send or does not leave to its user.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use socket2::{Domain, Socket, Type};

/// A greeting of version 3.0 with a security mechanism.
pub fn greeting(mechanism: &str) -> Vec<u8> {
    let mut greeting = vec![0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..12 + mechanism.len()].copy_from_slice(mechanism.as_bytes());
    greeting
}

/// A READY of a socket of this type.
pub fn ready(socket_type: &str) -> Vec<u8> {
    let body = [b"\x05READY\x0bSocket-Type\0\0\0", &[socket_type.len() as u8][..], socket_type.as_bytes()].concat();
    [&[4, body.len() as u8], &body[..]].concat()
}

/// A command with less than 256 bytes.
pub fn command(name: &str, data: &[u8]) -> Vec<u8> {
    let body = [&[name.len() as u8], name.as_bytes(), data].concat();
    [&[4, body.len() as u8], &body[..]].concat()
}

pub struct Raw(pub TcpStream);

impl Raw {
    /// Connects, without a greeting. A small receive buffer is one that is soon full.
    pub fn connect(at: SocketAddr, receive_buffer: Option<usize>) -> Raw {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        receive_buffer.into_iter().for_each(|size| socket.set_recv_buffer_size(size).unwrap());
        socket.connect(&SocketAddr::from(([127, 0, 0, 1], at.port())).into()).unwrap();
        let stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
        Raw(stream)
    }

    /// Connects as a socket of a type to one of another type.
    pub fn handshake(at: SocketAddr, own: &str, theirs: &str, receive_buffer: Option<usize>) -> Raw {
        let mut raw = Raw::connect(at, receive_buffer);
        raw.0.write_all(&[greeting("NULL"), ready(own)].concat()).unwrap();
        let expected = [greeting("NULL"), ready(theirs)].concat();
        let mut found = vec![0; expected.len()];
        raw.0.read_exact(&mut found).unwrap();
        assert_eq!(found, expected, "{}", String::from_utf8_lossy(&found));
        raw
    }

    /// Connects as a SUB socket and sends a subscription, which the publisher may not have read yet.
    pub fn subscriber(at: SocketAddr, topic: &str, receive_buffer: Option<usize>) -> Raw {
        let mut raw = Raw::handshake(at, "SUB", "PUB", receive_buffer);
        raw.send(&[&[0, 1 + topic.len() as u8, 1], topic.as_bytes()].concat());
        raw
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    /// Reads a frame: its flags but for the one of a long frame, and its body.
    pub fn frame(&mut self) -> (u8, Vec<u8>) {
        let mut head = [0; 2];
        self.0.read_exact(&mut head).unwrap();
        let mut len = u64::from(head[1]);
        if head[0] & 2 != 0 {
            let mut rest = [head[1], 0, 0, 0, 0, 0, 0, 0];
            self.0.read_exact(&mut rest[1..]).unwrap();
            len = u64::from_be_bytes(rest);
        }
        let mut body = vec![0; len as usize];
        self.0.read_exact(&mut body).unwrap();
        (head[0] & !2, body)
    }

    /// Reads a published message: topic, sequence number and payload.
    pub fn message(&mut self) -> (Vec<u8>, u64, Vec<u8>) {
        let [topic, seq, payload] = [1, 1, 0].map(|flags| {
            let (found, body) = self.frame();
            assert_eq!(found, flags);
            body
        });
        (topic, u64::from_be_bytes(seq.try_into().unwrap()), payload)
    }

    /// Reads what is there, at least a byte.
    pub fn read_some(&mut self) -> usize {
        self.0.read(&mut [0; 1024]).unwrap()
    }

    /// Reads until the connection is closed or reset.
    pub fn read_to_end(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        if let Err(error) = self.0.read_to_end(&mut bytes) {
            assert_eq!(error.kind(), ErrorKind::ConnectionReset, "left open");
        }
        bytes
    }

    /// Waits until the connection is closed or reset, without reading what was sent.
    pub fn closed(&self) -> bool {
        let start = std::time::Instant::now();
        let mut stream = &self.0;
        while start.elapsed() < Duration::from_secs(20) {
            // An empty message, which is ignored.
            if stream.write_all(&[0, 0]).is_err() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        false
    }
}
