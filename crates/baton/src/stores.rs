//! Where KV is kept beyond the host's memory, and attaching it to an engine.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use baton_cluster::{
    DiskStore, MemoryStore, PeerOptions, PeerStore, RedisOptions, RedisStore, TransferOptions, TransferServer,
};
use baton_engine::{BlockStore, Engine, StorePolicy};

use crate::Error;

/// Stores of KV. Without any, KV stays in the process.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// KV that the program itself puts in and takes out.
    pub memory: Option<Arc<MemoryStore>>,
    /// A directory and how many bytes it may hold.
    pub disk: Option<(PathBuf, u64)>,
    /// A Redis server.
    pub redis: Option<RedisOptions>,
    /// Keeps KV for other processes and computes prompts for them.
    pub serve: Option<TransferOptions>,
    /// Fetches KV from other processes and has them compute prompts.
    pub peers: Option<PeerOptions>,
    /// When KV goes to them.
    pub policy: StorePolicy,
    /// The longest that a request waits for an answer.
    pub time_limit: Duration,
    /// Entries that were not written with this secret are not taken.
    pub secret: String,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            memory: None,
            disk: None,
            redis: None,
            serve: None,
            peers: None,
            policy: StorePolicy::WriteThrough,
            time_limit: Duration::from_millis(100),
            secret: String::new(),
        }
    }
}

impl StoreOptions {
    /// What the engine has to know before it is made.
    pub(crate) fn policy(&self) -> StorePolicy {
        let keeps =
            self.memory.is_some() || self.disk.is_some() || self.redis.is_some() || self.serve.is_some();
        match (keeps, self.peers.is_some()) {
            (true, _) => self.policy,
            // Nothing is stored: it only comes.
            (false, true) => StorePolicy::Eviction,
            (false, false) => StorePolicy::Off,
        }
    }

    /// Opens the stores, the nearest first, and attaches them.
    pub(crate) fn attach(&self, engine: &mut Engine) -> Result<Option<Arc<TransferServer>>, Error> {
        if self.policy() == StorePolicy::Off {
            return Ok(None);
        }
        let identity = engine.kv_identity()?;
        let mut stores: Vec<Arc<dyn BlockStore>> = Vec::new();
        stores.extend(self.memory.clone().map(|memory| memory as Arc<dyn BlockStore>));
        if let Some((path, max_bytes)) = &self.disk {
            stores.push(Arc::new(DiskStore::open(path, *max_bytes, &identity, &self.secret)?));
        }
        if let Some(redis) = &self.redis {
            stores.push(Arc::new(RedisStore::open(redis.clone(), &identity, &self.secret)?));
        }
        if let Some(peers) = &self.peers {
            stores.push(Arc::new(PeerStore::new(peers.clone(), &identity)));
        }
        let server =
            self.serve.clone().map(|options| TransferServer::start(options, &identity)).transpose()?;
        stores.extend(server.clone().map(|server| server as Arc<dyn BlockStore>));
        engine.attach_stores(stores, self.time_limit)?;
        Ok(server)
    }
}
