//! Requests by the names that their clients gave them, to be aborted by these.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use baton_serve::TenantId;
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;

/// A client aborts only what came with its own key.
type Name = (TenantId, String);

#[derive(Clone, Debug, Default)]
pub struct Running(Arc<Mutex<HashMap<Name, oneshot::Sender<()>>>>);

/// A request under way. Its name is free again when this is dropped.
#[derive(Debug)]
pub struct Abortable {
    running: Running,
    name: Name,
    /// Ready when the request is aborted.
    pub aborted: oneshot::Receiver<()>,
}

impl Running {
    /// `None` where a request of this name is under way.
    pub fn enter(&self, tenant: TenantId, id: String) -> Option<Abortable> {
        let name = (tenant, id);
        let mut running = self.lock();
        if running.contains_key(&name) {
            return None;
        }
        let (abort, aborted) = oneshot::channel();
        running.insert(name.clone(), abort);
        drop(running);
        Some(Abortable { running: self.clone(), name, aborted })
    }

    /// A request that has ended meanwhile needs no abort.
    pub fn abort(&self, tenant: TenantId, id: String) {
        if let Some(abort) = self.lock().remove(&(tenant, id)) {
            let _ = abort.send(());
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Name, oneshot::Sender<()>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Abortable {
    fn drop(&mut self) {
        let mut running = self.running.0.lock().unwrap_or_else(PoisonError::into_inner);
        // After an abort the name is nobody's, or another request's.
        if self.aborted.try_recv() == Err(TryRecvError::Empty) {
            running.remove(&self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_request_of_one_tenant() {
        let running = Running::default();
        let (one, two) = (TenantId(1), TenantId(2));
        let mut first = running.enter(one, "a".to_owned()).unwrap();
        assert!(running.enter(one, "a".to_owned()).is_none());
        let mut other = running.enter(two, "a".to_owned()).unwrap();
        running.abort(one, "a".to_owned());
        assert_eq!(first.aborted.try_recv(), Ok(()));
        assert_eq!(other.aborted.try_recv(), Err(TryRecvError::Empty));
        // The name is free at once, and the end of the first does not take it from the second.
        let second = running.enter(one, "a".to_owned()).unwrap();
        drop(first);
        assert!(running.enter(one, "a".to_owned()).is_none());
        drop((second, other));
        assert!(running.lock().is_empty());
    }
}
