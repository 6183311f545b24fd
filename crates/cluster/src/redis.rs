//! KV in Redis: rows as values with a time to live, read and written in pipelines.
//!
//! Every wait has a limit, and a server that does not keep it, that cannot be reached or that answers nonsense is left alone
//! for a while. The names of the values carry the identity of model and layout, so that many models share a server.

mod connection;

use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_backend::HostBlocks;
use baton_engine::{BlockKey, BlockStore, KvIdentity, StoreStats, StoredRow};

use crate::breaker::Breaker;
use crate::counters::Counters;
use crate::entry::{HEADER_BYTES, Sealer, row_name};
use crate::resp::{Reply, read_bulk, read_reply, write_array, write_bulk, write_command};
use crate::{ClusterError, RedisUrl};
use connection::{Connection, Tls};

/// Look-ups that are sent before their answers are read.
const LOOKUP_BATCH: usize = 1024;
/// Bytes of values that are asked for before they are read: enough to keep the wire busy.
const WINDOW_BYTES: usize = 8 << 20;
/// Bytes of values that are sent before the answers are read.
const STORE_BYTES: usize = 16 << 20;
/// Storing may take so many times as long as an answer: nobody waits for it.
const STORE_PATIENCE: u32 = 10;
/// Connections that are kept open.
const MAX_IDLE: usize = 8;

/// How a Redis server is used.
#[derive(Clone, Debug)]
pub struct RedisOptions {
    pub url: RedisUrl,
    /// After so long without use, the server may forget a row.
    pub ttl: Duration,
    /// The longest wait for any answer.
    pub time_limit: Duration,
    /// Authorities that a `rediss://` server's certificate may be from, as PEM; the usual ones where there are none.
    pub ca_pem: Option<Vec<u8>>,
}

#[derive(Debug)]
pub struct RedisStore {
    options: RedisOptions,
    tls: Option<Tls>,
    sealer: Sealer,
    prefix: String,
    row_bytes: Vec<usize>,
    idle: Mutex<Vec<Connection>>,
    breaker: Breaker,
    counters: Counters,
}

impl RedisStore {
    /// Connects once, so that a wrong address or password is said at the start. A server that is away is no error: it may come
    /// back.
    pub fn open(options: RedisOptions, identity: &KvIdentity, secret: &str) -> Result<Self, ClusterError> {
        let wrong = |cause: String| ClusterError::Redis { url: options.url.to_string(), cause };
        let tls =
            options.url.is_tls.then(|| Tls::new(options.ca_pem.as_deref())).transpose().map_err(wrong)?;
        let sealer = Sealer::new(identity, secret);
        let store = Self {
            prefix: format!("baton:kv:{}:", sealer.identity_hex()),
            tls,
            sealer,
            row_bytes: identity.row_bytes.clone(),
            idle: Mutex::default(),
            breaker: Breaker::default(),
            counters: Counters::default(),
            options,
        };
        // Long enough for a name to be resolved and a handshake to be made.
        match store.connect(Duration::from_secs(5).max(store.options.time_limit)) {
            Ok(connection) => store.give_back(connection),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return Err(ClusterError::Redis {
                    url: store.options.url.to_string(),
                    cause: format!("{error}; the password is in the URL or in BATON_KV_STORE_PASSWORD"),
                });
            }
            Err(_) => store.note_failure(&io::ErrorKind::NotConnected.into()),
        }
        Ok(store)
    }

    /// Whether the server answers now.
    pub fn is_reachable(&self) -> bool {
        self.with_connection(self.options.time_limit, |connection, _| {
            write_command(connection, &["PING"])?;
            connection.send()?;
            read_reply(connection.reader()).map(|_| ())
        })
        .is_some()
    }

    fn name(&self, key: BlockKey) -> String {
        format!("{}{}", self.prefix, row_name(key))
    }

    fn connect(&self, limit: Duration) -> io::Result<Connection> {
        Connection::open(&self.options.url, self.tls.as_ref(), Instant::now() + limit)
    }

    fn give_back(&self, connection: Connection) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < MAX_IDLE {
            idle.push(connection);
        }
    }

    /// Makes a call on a connection. `None` where the server is left alone or the call failed, which is counted.
    fn with_connection<T>(
        &self,
        limit: Duration,
        call: impl FnOnce(&mut Connection, &Self) -> io::Result<T>,
    ) -> Option<T> {
        if !self.breaker.lets_through() {
            self.counters.skipped.add(1);
            return None;
        }
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let connection = match idle {
            Some(connection) => Ok(connection),
            None => self.connect(limit),
        };
        let result = connection.and_then(|mut connection| {
            connection.set_limit(limit);
            let answer = call(&mut connection, self)?;
            Ok((answer, connection))
        });
        match result {
            Ok((answer, connection)) => {
                self.breaker.succeeded();
                self.give_back(connection);
                Some(answer)
            }
            Err(error) => {
                self.note_failure(&error);
                None
            }
        }
    }

    fn note_failure(&self, error: &io::Error) {
        match error.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => self.counters.timeouts.add(1),
            io::ErrorKind::InvalidData => self.counters.corrupt.add(1),
            _ => self.counters.failures.add(1),
        }
        // What was opened before may be as dead as this one.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.breaker.failed();
    }

    /// Sends one command for each key and takes numbers as answers.
    fn ask(&self, keys: &[BlockKey], write: impl Fn(&mut Connection, &str) -> io::Result<()>) -> Vec<bool> {
        let mut found = vec![false; keys.len()];
        let answered = self.with_connection(self.options.time_limit, |connection, store| {
            for (keys, found) in keys.chunks(LOOKUP_BATCH).zip(found.chunks_mut(LOOKUP_BATCH)) {
                keys.iter().try_for_each(|key| write(connection, &store.name(*key)))?;
                connection.send()?;
                for found in found {
                    match read_reply(connection.reader())? {
                        Reply::Integer(count) => *found = count > 0,
                        other => return Err(unexpected(&other)),
                    }
                }
            }
            Ok(())
        });
        if answered.is_none() {
            found.fill(false);
        }
        found
    }

    /// Reads one value into its blocks. False where it is none that can be used.
    fn take_row(
        &self,
        row: &StoredRow,
        host: &dyn HostBlocks,
        connection: &mut Connection,
        entry: &mut Vec<u8>,
    ) -> io::Result<bool> {
        let row_bytes = self.row_bytes.get(row.key.group).copied().unwrap_or(0);
        match read_reply(connection.reader())? {
            Reply::Null => return Ok(false),
            Reply::Bulk(len) if len == HEADER_BYTES + row_bytes => entry.resize(len, 0),
            // Whatever it is, it is no row of ours; the rest of it is not worth reading.
            other => return Err(unexpected(&other)),
        }
        read_bulk(connection.reader(), entry)?;
        let Some(content) = self.sealer.open(row.key, entry) else {
            self.counters.corrupt.add(1);
            return Ok(false);
        };
        for (block, part) in row.blocks.iter().zip(content.chunks_exact(host.block_bytes())) {
            host.write(block.0, part);
        }
        self.counters.fetched.add(1);
        self.counters.bytes_fetched.add(row_bytes);
        Ok(true)
    }

    fn store_batch(&self, rows: &[StoredRow], host: &dyn HostBlocks) {
        let ttl = self.options.ttl.as_secs().max(1).to_string();
        let limit = self.options.time_limit * STORE_PATIENCE;
        let _ = self.with_connection(limit, |connection, store| {
            let mut content = Vec::new();
            for row in rows {
                content.resize(row.blocks.len() * host.block_bytes(), 0);
                for (block, part) in row.blocks.iter().zip(content.chunks_exact_mut(host.block_bytes())) {
                    host.read(block.0, part);
                }
                let header = store.sealer.seal(row.key, &content);
                write_array(connection, 5)?;
                write_bulk(connection, &[b"SET"])?;
                write_bulk(connection, &[store.name(row.key).as_bytes()])?;
                write_bulk(connection, &[&header, &content])?;
                write_bulk(connection, &[b"EX"])?;
                write_bulk(connection, &[ttl.as_bytes()])?;
                store.counters.bytes_stored.add(content.len());
            }
            connection.send()?;
            for _ in rows {
                match read_reply(connection.reader())? {
                    Reply::Simple(_) => store.counters.stored.add(1),
                    // It may be out of memory: the others are tried.
                    _ => store.counters.failures.add(1),
                }
            }
            Ok(())
        });
    }
}

fn unexpected(reply: &Reply) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("an answer that was not asked for: {reply:?}"))
}

impl BlockStore for RedisStore {
    fn name(&self) -> &'static str {
        "redis"
    }

    fn lookup(&self, keys: &[BlockKey]) -> Vec<bool> {
        let found = self.ask(keys, |connection, name| write_command(connection, &["EXISTS", name]));
        self.counters.asked.add(keys.len());
        self.counters.found.add(found.iter().filter(|found| **found).count());
        found
    }

    fn fetch(&self, rows: &[StoredRow], host: &dyn HostBlocks) -> Vec<bool> {
        let mut is_fetched = vec![false; rows.len()];
        let _ = self.with_connection(self.options.time_limit, |connection, store| {
            let mut entry = Vec::new();
            let (mut num_sent, mut num_taken, mut bytes) = (0, 0, 0);
            let row_bytes = |row: &StoredRow| store.row_bytes.get(row.key.group).copied().unwrap_or(0);
            while num_taken < rows.len() {
                while num_sent < rows.len() && (bytes < WINDOW_BYTES || num_sent == num_taken) {
                    write_command(connection, &["GET", &store.name(rows[num_sent].key)])?;
                    bytes += row_bytes(&rows[num_sent]);
                    num_sent += 1;
                }
                connection.send()?;
                // Each value has the whole limit: a server that goes on answering is not cut off.
                connection.set_limit(store.options.time_limit);
                is_fetched[num_taken] = store.take_row(&rows[num_taken], host, connection, &mut entry)?;
                bytes -= row_bytes(&rows[num_taken]);
                num_taken += 1;
            }
            Ok(())
        });
        is_fetched
    }

    fn store(&self, rows: &[StoredRow], host: &dyn HostBlocks) {
        let keys: Vec<BlockKey> = rows.iter().map(|row| row.key).collect();
        let ttl = self.options.ttl.as_secs().max(1).to_string();
        // What is there lives on, and need not be sent again.
        let is_there = self.ask(&keys, |connection, name| write_command(connection, &["EXPIRE", name, &ttl]));
        let missing: Vec<StoredRow> =
            rows.iter().zip(is_there).filter(|(_, is_there)| !is_there).map(|(row, _)| row.clone()).collect();
        let per_row = self.row_bytes.iter().copied().max().unwrap_or(1).max(1);
        for batch in missing.chunks((STORE_BYTES / per_row).max(1)) {
            self.store_batch(batch, host);
        }
    }

    fn remove(&self, keys: &[BlockKey]) {
        self.ask(keys, |connection, name| write_command(connection, &["DEL", name]));
    }

    fn stats(&self) -> StoreStats {
        StoreStats { is_open: self.breaker.is_open(), ..self.counters.stats("redis") }
    }
}
