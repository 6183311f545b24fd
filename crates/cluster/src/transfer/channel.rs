//! A connection whose two ends have proved to each other that they have the shared key.

use std::io::{self, BufReader, IoSlice, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::wire::{FRAME_HEAD, Message, ROW, covered, read_frame, refused};
use crate::timed::Timed;

const MAGIC: [u8; 8] = *b"BATONKV1";
const NONCE: usize = 16;
const READ_BUFFER: usize = 64 << 10;

#[derive(Debug)]
pub(crate) struct Channel {
    stream: BufReader<Timed>,
    key: [u8; 32],
    is_server: bool,
    num_sent: u64,
    num_received: u64,
    body: Vec<u8>,
}

/// What came.
#[derive(Debug)]
pub(crate) enum Frame<'a> {
    Message(Message),
    /// An entry, still to be opened.
    Row(&'a [u8]),
}

impl Channel {
    pub(crate) fn connect(socket: TcpStream, secret: &str, limit: Duration) -> io::Result<Self> {
        Self::open(socket, secret, limit, false)
    }

    pub(crate) fn accept(socket: TcpStream, secret: &str, limit: Duration) -> io::Result<Self> {
        Self::open(socket, secret, limit, true)
    }

    /// Both send a number that was never used; with the secret they make the key of this connection. Then each shows with an
    /// empty frame that it has it.
    fn open(socket: TcpStream, secret: &str, limit: Duration, is_server: bool) -> io::Result<Self> {
        socket.set_nodelay(true)?;
        let mut timed = Timed { socket, deadline: Instant::now() + limit };
        let own = nonce();
        let mut hello = [0; MAGIC.len() + NONCE];
        hello[..MAGIC.len()].copy_from_slice(&MAGIC);
        hello[MAGIC.len()..].copy_from_slice(&own);
        timed.write_all(&hello)?;
        timed.read_exact(&mut hello)?;
        let (magic, theirs) = hello.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(refused("the other end does not speak this protocol"));
        }
        let (client, server) = if is_server { (theirs, &own[..]) } else { (&own[..], theirs) };
        let mut hasher = blake3::Hasher::new_derive_key("baton kv transfer session 1");
        for part in [secret.as_bytes(), client, server] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        let mut channel = Self {
            stream: BufReader::with_capacity(READ_BUFFER, timed),
            key: *hasher.finalize().as_bytes(),
            is_server,
            num_sent: 0,
            num_received: 0,
            body: Vec::new(),
        };
        channel.send(&Message::Done(true))?;
        match channel.receive(0)? {
            Frame::Message(Message::Done(true)) => Ok(channel),
            _ => Err(refused("the other end does not have the shared key")),
        }
    }

    /// From now on there is so much time.
    pub(crate) fn set_limit(&mut self, limit: Duration) {
        self.stream.get_mut().deadline = Instant::now() + limit;
    }

    pub(crate) fn send(&mut self, message: &Message) -> io::Result<()> {
        let (kind, body) = message.encode();
        self.send_frame(kind, &body)
    }

    pub(crate) fn send_row(&mut self, entry: &[u8]) -> io::Result<()> {
        self.send_frame(ROW, entry)
    }

    fn send_frame(&mut self, kind: u8, body: &[u8]) -> io::Result<()> {
        let tag = self.tag(self.is_server, self.num_sent, kind, body);
        self.num_sent += 1;
        let mut head = [0; FRAME_HEAD];
        head[..4].copy_from_slice(&(body.len() as u32).to_le_bytes());
        head[4] = kind;
        head[5..].copy_from_slice(&tag);
        // Together, so that the head of a row is no packet of its own.
        let stream = self.stream.get_mut();
        let sent = stream.write_vectored(&[IoSlice::new(&head), IoSlice::new(body)])?;
        if sent < FRAME_HEAD {
            stream.write_all(&head[sent..])?;
        }
        stream.write_all(&body[sent.saturating_sub(FRAME_HEAD)..])
    }

    /// The next frame. A row has at most `max_row` bytes.
    pub(crate) fn receive(&mut self, max_row: usize) -> io::Result<Frame<'_>> {
        let (kind, tag) = read_frame(&mut self.stream, max_row, &mut self.body)?;
        let expected = self.tag(!self.is_server, self.num_received, kind, &self.body);
        self.num_received += 1;
        if tag.iter().zip(expected).fold(0, |differs, (got, want)| differs | (got ^ want)) != 0 {
            return Err(refused("the other end does not have the shared key"));
        }
        if kind == ROW {
            return Ok(Frame::Row(&self.body));
        }
        Message::decode(kind, &self.body)
            .map(Frame::Message)
            .ok_or_else(|| refused("a frame of no known kind"))
    }

    fn tag(&self, by_server: bool, number: u64, kind: u8, body: &[u8]) -> [u8; 16] {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&[u8::from(by_server), kind]);
        hasher.update(&number.to_le_bytes());
        hasher.update(&(body.len() as u64).to_le_bytes());
        hasher.update(covered(kind, body));
        let mut tag = [0; 16];
        tag.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        tag
    }
}

/// Never the same twice: what the system seeds its hash maps with, the time and a counter.
fn nonce() -> [u8; NONCE] {
    use std::hash::{BuildHasher, Hasher, RandomState};
    let mut nonce = [0; NONCE];
    for half in nonce.chunks_exact_mut(8) {
        let mut hasher = RandomState::new().build_hasher();
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        hasher.write_u128(now.as_nanos());
        half.copy_from_slice(&hasher.finish().to_le_bytes());
    }
    nonce
}
