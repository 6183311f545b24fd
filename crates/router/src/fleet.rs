//! The workers there are. The list is replaced as a whole, so that whoever reads it sees one state of it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::config::{ConfigError, Role, RouterConfig, WorkerSpec, check_unique};
use crate::worker::Worker;

#[derive(Debug)]
pub struct Fleet {
    workers: RwLock<Arc<Vec<Arc<Worker>>>>,
    next_id: AtomicU32,
}

/// What a change of the list changed.
#[derive(Debug, Default)]
pub struct Changes {
    pub added: Vec<Arc<Worker>>,
    pub removed: Vec<Arc<Worker>>,
}

impl Fleet {
    pub fn new() -> Self {
        Self { workers: RwLock::default(), next_id: AtomicU32::new(0) }
    }

    pub fn all(&self) -> Arc<Vec<Arc<Worker>>> {
        Arc::clone(&self.workers.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn find(&self, url: &str) -> Option<Arc<Worker>> {
        let url = url.trim_end_matches('/');
        self.all().iter().find(|worker| worker.url() == url).cloned()
    }

    pub fn by_id(&self, id: u32) -> Option<Arc<Worker>> {
        self.all().iter().find(|worker| worker.id == id).cloned()
    }

    /// Makes this the list. A worker that stays keeps its counts; one that goes finishes what it has.
    pub fn set(&self, specs: &[WorkerSpec], config: &RouterConfig) -> Result<Changes, ConfigError> {
        check_unique(specs)?;
        let mut workers = self.workers.write().unwrap_or_else(PoisonError::into_inner);
        let mut changes = Changes::default();
        let mut next = Vec::with_capacity(specs.len());
        for spec in specs {
            let same = |worker: &&Arc<Worker>| {
                worker.spec.url == spec.url
                    && worker.spec.role == spec.role
                    && worker.spec.events == spec.events
            };
            if let Some(known) = workers.iter().find(same) {
                known.set_draining(spec.drain);
                next.push(Arc::clone(known));
            } else {
                let id = self.next_id.fetch_add(1, Ordering::Relaxed);
                let worker = Arc::new(Worker::new(id, spec.clone(), config));
                changes.added.push(Arc::clone(&worker));
                next.push(worker);
            }
        }
        let stays = |worker: &&Arc<Worker>| next.iter().any(|other| other.id == worker.id);
        changes.removed = workers.iter().filter(|worker| !stays(worker)).cloned().collect();
        for worker in &changes.removed {
            worker.set_draining(true);
            worker.upstream.forget_idle();
        }
        *workers = Arc::new(next);
        Ok(changes)
    }

    /// Whether requests visit a prefill and a decode worker.
    pub fn is_disaggregated(&self) -> bool {
        self.all().iter().any(|worker| worker.role() == Role::Prefill)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specs(urls: &[&str]) -> Vec<WorkerSpec> {
        urls.iter().map(|url| url.parse().unwrap()).collect()
    }

    #[test]
    fn what_stays_keeps_its_state() {
        let config = RouterConfig::default();
        let fleet = Fleet::new();
        assert_eq!(fleet.set(&specs(&["http://a:1", "http://b:1"]), &config).unwrap().added.len(), 2);
        let first = fleet.find("http://a:1/").unwrap();
        let taken = first.take(10, 0);
        let mut changed = specs(&["http://a:1", "http://c:1"]);
        changed[0].drain = true;
        let changes = fleet.set(&changed, &config).unwrap();
        assert_eq!((changes.added.len(), changes.removed.len()), (1, 1));
        assert_eq!(changes.removed[0].url(), "http://b:1");
        let again = fleet.find("http://a:1").unwrap();
        assert!(again.id == first.id && again.is_draining() && again.num_requests() == 1);
        drop(taken);
        assert_eq!(again.num_requests(), 0);
        assert!(fleet.by_id(2).is_some_and(|worker| worker.url() == "http://c:1"));
        assert!(fleet.set(&specs(&["http://a:1", "http://a:1"]), &config).is_err());
    }
}
