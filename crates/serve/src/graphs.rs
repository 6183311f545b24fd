//! Graphs that clients have brought, by key, and how many requests for them are under way.
//!
//! The engine knows a graph by a name that no other upload has, so that keys cannot meet in it and a graph that was replaced
//! is never mistaken for its successor. A graph that goes away takes its running requests with it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use baton_graph::{GraphData, GraphError, GraphService};

use crate::auth::TenantId;
use crate::error::ApiError;
use crate::ids;

/// The graph side of a server: an engine, and limits of what is kept and computed for clients.
#[derive(Clone, Debug)]
pub struct GraphServing {
    pub service: GraphService,
    pub max_graphs: usize,
    /// Host memory of all graphs.
    pub max_bytes: usize,
    /// Requests for embeddings that are under way or wait.
    pub max_requests: usize,
}

#[derive(Debug)]
pub struct Graphs {
    pub serving: GraphServing,
    /// Where there are several keys, one may have half of everything.
    has_many_keys: bool,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    graphs: HashMap<(TenantId, String), Stored>,
    requests: HashMap<TenantId, usize>,
}

/// A graph and the name that its key calls it by.
#[derive(Clone, Debug)]
pub struct Stored {
    pub id: String,
    pub data: Arc<GraphData>,
    pub created: u64,
}

/// A request that counts until it is dropped.
#[derive(Debug)]
pub struct Running {
    graphs: Arc<Graphs>,
    tenant: TenantId,
}

impl Graphs {
    pub fn new(serving: GraphServing, has_many_keys: bool) -> Arc<Self> {
        Arc::new(Self { serving, has_many_keys, held: Mutex::default() })
    }

    /// The name that the engine is to know a new graph by.
    pub fn engine_id(tenant: TenantId, id: &str) -> String {
        format!("{}/{id}/{}", tenant.0, ids::unique())
    }

    fn share(&self, limit: usize) -> usize {
        if self.has_many_keys { limit.div_ceil(2) } else { limit }
    }

    /// Whether a graph of this name and version may come, before anything is built.
    pub fn check_version(&self, tenant: TenantId, id: &str, version: u64) -> Result<(), ApiError> {
        match self.lock().graphs.get(&(tenant, id.to_owned())) {
            Some(known) if known.data.version() >= version => {
                Err(ApiError::graph_exists(id, known.data.version()))
            }
            _ => Ok(()),
        }
    }

    /// Keeps a graph; one of a lower version makes room for it.
    pub fn insert(&self, tenant: TenantId, id: &str, data: GraphData) -> Result<Stored, ApiError> {
        let mut held = self.lock();
        let key = (tenant, id.to_owned());
        if let Some(known) = held.graphs.get(&key).filter(|known| known.data.version() >= data.version()) {
            return Err(ApiError::graph_exists(id, known.data.version()));
        }
        let others = || held.graphs.iter().filter(|(other, _)| **other != key);
        let sum = |of: &dyn Fn(TenantId) -> bool| {
            let counted = others().filter(|((owner, _), _)| of(*owner));
            counted.fold((1, data.bytes()), |(count, bytes), (_, stored)| {
                (count + 1, bytes.saturating_add(stored.data.bytes()))
            })
        };
        let (all, own) = (sum(&|_| true), sum(&|owner| owner == tenant));
        let serving = &self.serving;
        if all.0 > serving.max_graphs || own.0 > self.share(serving.max_graphs) {
            return Err(ApiError::too_many_graphs(self.share(serving.max_graphs)));
        }
        if data.bytes() > self.share(serving.max_bytes) {
            return Err(ApiError::graph_too_large(data.bytes(), self.share(serving.max_bytes)));
        }
        if all.1 > serving.max_bytes || own.1 > self.share(serving.max_bytes) {
            return Err(ApiError::no_room_for_graph(data.bytes(), self.share(serving.max_bytes)));
        }
        let stored = Stored { id: id.to_owned(), data: Arc::new(data), created: ids::unix_seconds() };
        if let Some(old) = held.graphs.insert(key, stored.clone()) {
            self.serving.service.remove_graph(old.data.id());
        }
        Ok(stored)
    }

    pub fn get(&self, tenant: TenantId, id: &str) -> Result<Stored, ApiError> {
        let found = self.lock().graphs.get(&(tenant, id.to_owned())).cloned();
        found.ok_or_else(|| ApiError::no_such_graph(id))
    }

    /// Those of one key, by name.
    pub fn list(&self, tenant: TenantId) -> Vec<Stored> {
        let held = self.lock();
        let own = held.graphs.iter().filter(|((owner, _), _)| *owner == tenant);
        let mut own: Vec<Stored> = own.map(|(_, stored)| stored.clone()).collect();
        own.sort_by(|a, b| a.id.cmp(&b.id));
        own
    }

    pub fn remove(&self, tenant: TenantId, id: &str) -> Result<(), ApiError> {
        let removed = self.lock().graphs.remove(&(tenant, id.to_owned()));
        let stored = removed.ok_or_else(|| ApiError::no_such_graph(id))?;
        self.serving.service.remove_graph(stored.data.id());
        Ok(())
    }

    /// Whether this very upload is still there.
    pub fn holds(&self, tenant: TenantId, stored: &Stored) -> bool {
        let held = self.lock();
        let now = held.graphs.get(&(tenant, stored.id.clone()));
        now.is_some_and(|now| Arc::ptr_eq(&now.data, &stored.data))
    }

    /// Counts a request, unless there are as many as may be.
    pub fn begin(self: &Arc<Self>, tenant: TenantId) -> Result<Running, ApiError> {
        let mut held = self.lock();
        let (all, limit) = (held.requests.values().sum::<usize>(), self.serving.max_requests);
        let own = held.requests.entry(tenant).or_default();
        if all >= limit || *own >= self.share(limit) {
            return Err(ApiError::busy());
        }
        *own += 1;
        Ok(Running { graphs: Arc::clone(self), tenant })
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut held = self.graphs.lock();
        if let Some(own) = held.requests.get_mut(&self.tenant) {
            *own -= 1;
            if *own == 0 {
                held.requests.remove(&self.tenant);
            }
        }
    }
}

impl From<GraphError> for ApiError {
    fn from(error: GraphError) -> Self {
        let field = match &error {
            GraphError::TargetOutOfRange { .. }
            | GraphError::DuplicateTarget { .. }
            | GraphError::NoTargets
            | GraphError::TooLarge { .. } => "nodes",
            GraphError::FanOuts { .. } | GraphError::ZeroFanOut => "fan_outs",
            GraphError::EmptyGraph
            | GraphError::TooManyNodes { .. }
            | GraphError::FeatureWidth { .. }
            | GraphError::NotFinite { .. } => "features",
            GraphError::EdgeOutOfRange { .. } | GraphError::TooManyEdges { .. } => "edges",
            GraphError::QueueFull { .. } => return Self::busy(),
            other => return Self::internal(other),
        };
        Self::invalid_field(field, error.to_string())
    }
}
