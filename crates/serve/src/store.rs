//! Answers of `/v1/responses` that later requests may refer to, in memory and within limits.
//!
//! Each belongs to the key that asked for it; nobody else can see that it exists. When there are too many or they are too
//! large, the oldest of the key that holds most go first, so that one key cannot push out what another one keeps. All go
//! after their time. What is still being made stays.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Map, Value};
use tokio::sync::Notify;

use crate::ServerConfig;
use crate::auth::{Tenant, TenantId};
use crate::error::ApiError;
use crate::types::responses::ResponseObject;

/// The turns of a conversation, in the words of `/v1/chat/completions`.
pub type Turns = Vec<Map<String, Value>>;

/// A response and what it takes to go on from it.
#[derive(Clone, Debug)]
pub struct Stored {
    pub response: Arc<ResponseObject>,
    /// The conversation without instructions, with this answer at its end.
    pub turns: Arc<Turns>,
    /// Stops it, while it is being made.
    pub cancel: Option<Arc<Notify>>,
}

#[derive(Debug)]
struct Entry {
    tenant: Tenant,
    stored: Stored,
    num_bytes: usize,
    since: Instant,
}

#[derive(Debug, Default)]
struct Entries {
    by_id: HashMap<String, Entry>,
    /// Oldest first. May name entries that are gone.
    order: VecDeque<String>,
    num_bytes: usize,
}

#[derive(Debug)]
pub struct ResponseStore {
    max_responses: usize,
    max_bytes: usize,
    ttl: Duration,
    entries: Mutex<Entries>,
}

impl ResponseStore {
    pub fn new(config: &ServerConfig) -> Self {
        Self {
            max_responses: config.max_stored_responses,
            max_bytes: config.max_stored_bytes,
            ttl: config.stored_response_ttl,
            entries: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        // Nothing in here can panic half-way through a change that matters.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a response, in the place of one with the same id. Refused if there is no room even without all that is done.
    pub fn put(&self, tenant: &Tenant, stored: Stored) -> Result<(), ApiError> {
        let id = stored.response.id.clone();
        let num_bytes = size_of_json(&*stored.response) + size_of_json(&*stored.turns);
        let mut entries = self.lock();
        entries.remove(&id);
        entries.forget_old(self.ttl);
        while entries.by_id.len() >= self.max_responses || entries.num_bytes + num_bytes > self.max_bytes {
            if !entries.forget_for(tenant, num_bytes) {
                return Err(ApiError::busy());
            }
        }
        entries.num_bytes += num_bytes;
        entries.order.push_back(id.clone());
        entries.by_id.insert(id, Entry { tenant: tenant.clone(), stored, num_bytes, since: Instant::now() });
        Ok(())
    }

    /// What this key asked for under this id.
    pub fn get(&self, tenant: &Tenant, id: &str, param: &str) -> Result<Stored, ApiError> {
        let mut entries = self.lock();
        entries.forget_old(self.ttl);
        let entry = entries.by_id.get(id).filter(|entry| entry.tenant == *tenant);
        entry.map(|entry| entry.stored.clone()).ok_or_else(|| ApiError::no_such_response(param, id))
    }

    /// True where it is still kept.
    pub fn contains(&self, id: &str) -> bool {
        self.lock().by_id.contains_key(id)
    }

    pub fn remove(&self, id: &str) {
        self.lock().remove(id);
    }
}

impl Entries {
    fn remove(&mut self, id: &str) {
        if let Some(entry) = self.by_id.remove(id) {
            self.num_bytes -= entry.num_bytes;
            self.order.retain(|other| other != id);
        }
    }

    fn forget_old(&mut self, ttl: Duration) {
        while let Some(oldest) = self.order.front().and_then(|id| self.by_id.get(id)) {
            if oldest.since.elapsed() <= ttl || oldest.stored.cancel.is_some() {
                return;
            }
            self.forget_oldest();
        }
    }

    /// Makes room for a response of this size: the oldest of the key that would hold most goes. False where there is
    /// nothing that may be forgotten.
    fn forget_for(&mut self, tenant: &Tenant, num_bytes: usize) -> bool {
        let mut held: HashMap<TenantId, (usize, usize)> = HashMap::from([(tenant.id(), (num_bytes, 1))]);
        for entry in self.by_id.values() {
            let held = held.entry(entry.tenant.id()).or_default();
            held.0 += entry.num_bytes;
            held.1 += 1;
        }
        // By bytes, then by number, then by who asks: a key that is alone pays for itself.
        let weight = |id: &TenantId| (held[id], *id == tenant.id(), *id);
        let done = self.order.iter().filter_map(|id| self.by_id.get_key_value(id));
        let done = done.filter(|(_, entry)| entry.stored.cancel.is_none());
        let mut victim: Option<(&String, TenantId)> = None;
        for (id, entry) in done {
            let of = entry.tenant.id();
            if victim.is_none_or(|(_, best)| weight(&of) > weight(&best)) {
                victim = Some((id, of));
            }
        }
        let Some(id) = victim.map(|(id, _)| id.clone()) else { return false };
        self.remove(&id);
        true
    }

    /// False where there is nothing that may be forgotten.
    fn forget_oldest(&mut self) -> bool {
        let is_done = |id: &&String| self.by_id.get(*id).is_some_and(|entry| entry.stored.cancel.is_none());
        let Some(id) = self.order.iter().find(is_done).cloned() else { return false };
        self.remove(&id);
        true
    }
}

fn size_of_json(value: &impl serde::Serialize) -> usize {
    struct Count(usize);
    impl std::io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    serde_json::to_writer(&mut count, value).expect("our types serialise, and counting does not fail");
    count.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::Keys;

    fn store(max_responses: usize, max_bytes: usize, ttl: Duration) -> ResponseStore {
        let config = ServerConfig {
            max_stored_responses: max_responses,
            max_stored_bytes: max_bytes,
            stored_response_ttl: ttl,
            ..ServerConfig::default()
        };
        ResponseStore::new(&config)
    }

    fn stored(id: &str, running: bool) -> Stored {
        let response = ResponseObject { id: id.to_owned(), ..ResponseObject::default() };
        let cancel = running.then(|| Arc::new(Notify::new()));
        Stored { response: Arc::new(response), turns: Arc::default(), cancel }
    }

    #[test]
    fn the_oldest_goes_first_and_the_unfinished_stays() {
        let (store, nobody) = (store(2, 1 << 20, Duration::from_secs(60)), Tenant::default());
        store.put(&nobody, stored("a", true)).unwrap();
        store.put(&nobody, stored("b", false)).unwrap();
        store.put(&nobody, stored("c", true)).unwrap();
        let kept = |id: &str| store.get(&nobody, id, "id").is_ok();
        assert_eq!((kept("a"), kept("b"), kept("c")), (true, false, true));
        assert!(store.put(&nobody, stored("d", false)).is_err(), "nothing may be forgotten");
        store.put(&nobody, stored("a", false)).unwrap();
        store.put(&nobody, stored("d", false)).unwrap();
        assert_eq!((kept("a"), kept("c"), kept("d")), (false, true, true));
    }

    #[test]
    fn bytes_and_time_are_limits() {
        let nobody = Tenant::default();
        assert!(store(2, 10, Duration::from_secs(60)).put(&nobody, stored("a", false)).is_err());
        let store = store(2, 1 << 20, Duration::ZERO);
        store.put(&nobody, stored("a", false)).unwrap();
        std::thread::sleep(Duration::from_millis(2));
        assert!(store.get(&nobody, "a", "id").is_err());
        assert_eq!(store.lock().num_bytes, 0);
    }

    #[test]
    fn one_key_does_not_push_out_what_another_keeps() {
        let keys = Keys::new(&["one".to_owned(), "two".to_owned()]);
        let (one, two) = (keys.check(Some("one")).unwrap(), keys.check(Some("two")).unwrap());
        let store = store(4, 1 << 20, Duration::from_secs(60));
        store.put(&one, stored("kept", false)).unwrap();
        for number in 0..100 {
            store.put(&two, stored(&format!("many-{number}"), false)).unwrap();
        }
        assert!(store.get(&one, "kept", "id").is_ok());
        assert!(store.get(&two, "many-99", "id").is_ok() && store.get(&two, "many-96", "id").is_err());
        // Nor does the other push back further than to its own share.
        for number in 0..100 {
            store.put(&one, stored(&format!("more-{number}"), false)).unwrap();
        }
        assert!(store.get(&one, "more-99", "id").is_ok() && store.get(&two, "many-99", "id").is_ok());
    }

    #[test]
    fn keys_see_only_their_own() {
        let keys = Keys::new(&["one".to_owned(), "two".to_owned()]);
        let (one, two) = (keys.check(Some("one")).unwrap(), keys.check(Some("two")).unwrap());
        let store = store(2, 1 << 20, Duration::from_secs(60));
        store.put(&one, stored("a", false)).unwrap();
        assert!(store.get(&one, "a", "id").is_ok());
        assert!(store.get(&two, "a", "id").is_err());
    }
}
