//! Several models in one server: one is there from the start, others are loaded when a request names them.
//!
//! Every loaded model has an [`App`] of its own over what all share. At most so many are loaded at a time: who needs another one
//! takes the place of the one that was idle for longest, or waits until one is idle. Requests for a model that is being loaded
//! wait for it; loading goes on if they leave.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::time::timeout;

use crate::ServedModel;
use crate::error::ApiError;
use crate::state::{App, Shared};

/// How often idle models are looked for.
const TICK: Duration = Duration::from_millis(250);

/// Where models come from.
pub trait ModelSource: std::fmt::Debug + Send + Sync {
    /// The models that there are now, by name.
    fn list(&self) -> Vec<AvailableModel>;
    /// Loads one; may take long. What is wrong is said in a sentence.
    fn load(&self, name: &str) -> Result<ServedModel, String>;
}

/// A model that may be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AvailableModel {
    pub name: String,
    pub bytes: u64,
}

/// Which other models a server has, and how many of them at a time.
#[derive(Clone, Debug)]
pub struct MoreModels {
    pub source: Arc<dyn ModelSource>,
    /// Besides the one that is always there.
    pub max_loaded: usize,
    /// A model that nobody has asked for this long is unloaded.
    pub idle_timeout: Duration,
    /// How long a request may wait for its model.
    pub load_timeout: Duration,
}

type Loaded = Result<Arc<App>, ApiError>;

#[derive(Debug)]
enum Entry {
    Loading(watch::Receiver<Option<Loaded>>),
    Ready { app: Arc<App>, last_used: Instant },
}

#[derive(Debug)]
pub struct Models {
    pub more: MoreModels,
    entries: Mutex<HashMap<String, Entry>>,
    /// Counts what was loaded and unloaded.
    changed: watch::Sender<Counts>,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub loads: u64,
    pub unloads: u64,
}

/// What a request has to do for its model.
enum Next {
    Use(Arc<App>),
    Wait(watch::Receiver<Option<Loaded>>),
    Load(watch::Sender<Option<Loaded>>, watch::Receiver<Option<Loaded>>, Option<Arc<App>>),
    /// Every place is taken by a model at work.
    Full,
}

impl Models {
    pub fn new(more: MoreModels) -> Self {
        Self { more, entries: Mutex::default(), changed: watch::Sender::new(Counts::default()) }
    }

    pub fn counts(&self) -> Counts {
        *self.changed.borrow()
    }

    /// Those that are loaded, by name.
    pub fn loaded(&self) -> Vec<Arc<App>> {
        let entries = self.lock();
        let mut apps: Vec<Arc<App>> = entries
            .values()
            .filter_map(|entry| match entry {
                Entry::Ready { app, .. } => Some(Arc::clone(app)),
                Entry::Loading(_) => None,
            })
            .collect();
        apps.sort_by(|a, b| a.model.name().cmp(b.model.name()));
        apps
    }

    /// The model of this name, loaded if need be.
    pub async fn get(self: &Arc<Self>, shared: &Arc<Shared>, name: &str) -> Loaded {
        let wait = async {
            loop {
                let mut changed = self.changed.subscribe();
                match self.next(name) {
                    Next::Use(app) => return Ok(app),
                    Next::Full => {
                        // Something is unloaded, or a model has become idle.
                        let _ = timeout(TICK, changed.changed()).await;
                    }
                    Next::Wait(loaded) => return wait_for(loaded, name).await,
                    Next::Load(sender, loaded, replaced) => {
                        let (models, shared, name) = (Arc::clone(self), Arc::clone(shared), name.to_owned());
                        let asked = name.clone();
                        tokio::task::spawn_blocking(move || models.load(&shared, &name, &sender, replaced));
                        return wait_for(loaded, &asked).await;
                    }
                }
            }
        };
        timeout(self.more.load_timeout, wait).await.map_err(|_| ApiError::model_not_ready(name))?
    }

    fn next(&self, name: &str) -> Next {
        let mut entries = self.lock();
        match entries.get_mut(name) {
            Some(Entry::Ready { app, last_used }) if app.failure().is_none() => {
                *last_used = Instant::now();
                return Next::Use(Arc::clone(app));
            }
            Some(Entry::Loading(loaded)) => return Next::Wait(loaded.clone()),
            // Its engine has stopped: it is loaded anew in its place.
            Some(Entry::Ready { .. }) | None => {}
        }
        let mut replaced = match entries.remove(name) {
            Some(Entry::Ready { app, .. }) => Some(app),
            _ => None,
        };
        if replaced.is_none() && entries.len() >= self.more.max_loaded {
            match longest_idle(&entries) {
                Some((idle, _)) => {
                    if let Some(Entry::Ready { app, .. }) = entries.remove(&idle) {
                        replaced = Some(app);
                    }
                }
                None => return Next::Full,
            }
        }
        let (sender, loaded) = watch::channel(None);
        entries.insert(name.to_owned(), Entry::Loading(loaded.clone()));
        Next::Load(sender, loaded, replaced)
    }

    /// On a thread that may wait. What makes room goes first: both would not fit.
    fn load(
        &self,
        shared: &Arc<Shared>,
        name: &str,
        sender: &watch::Sender<Option<Loaded>>,
        replaced: Option<Arc<App>>,
    ) {
        if let Some(app) = replaced {
            self.unload(&app);
        }
        let start = Instant::now();
        let loading = std::panic::AssertUnwindSafe(|| self.more.source.load(name));
        let result =
            std::panic::catch_unwind(loading).unwrap_or_else(|_| Err("loading it failed".to_owned()));
        let loaded = match result {
            Ok(model) => {
                tracing::info!(model = name, seconds = start.elapsed().as_secs_f64(), "loaded");
                Ok(App::beside(shared, model))
            }
            Err(cause) => {
                tracing::error!(model = name, cause, "a model could not be loaded");
                Err(ApiError::model_failed(name, &cause))
            }
        };
        let mut entries = self.lock();
        match &loaded {
            Ok(app) => {
                let entry = Entry::Ready { app: Arc::clone(app), last_used: Instant::now() };
                entries.insert(name.to_owned(), entry);
            }
            // The next request tries again.
            Err(_) => drop(entries.remove(name)),
        }
        drop(entries);
        sender.send_replace(Some(loaded));
        self.changed.send_modify(|counts| counts.loads += 1);
    }

    fn unload(&self, app: &App) {
        app.model.engine.shutdown();
        tracing::info!(model = app.model.name(), "unloaded");
        self.changed.send_modify(|counts| counts.unloads += 1);
    }

    /// Unloads what nobody has asked for in a while. Runs for as long as the server.
    pub async fn watch(self: Arc<Self>) {
        loop {
            tokio::time::sleep(TICK).await;
            for app in self.take_idle() {
                let models = Arc::clone(&self);
                let _ = tokio::task::spawn_blocking(move || models.unload(&app)).await;
            }
        }
    }

    fn take_idle(&self) -> Vec<Arc<App>> {
        let mut entries = self.lock();
        let now = Instant::now();
        for entry in entries.values_mut() {
            if let Entry::Ready { app, last_used } = entry
                && !is_idle(app)
            {
                *last_used = now;
            }
        }
        let limit = self.more.idle_timeout;
        let mut taken = Vec::new();
        while let Some((name, _)) = longest_idle(&entries).filter(|(_, since)| now - *since >= limit) {
            if let Some(Entry::Ready { app, .. }) = entries.remove(&name) {
                taken.push(app);
            }
        }
        taken
    }

    /// Ends every engine but that of the model that is always there.
    pub fn shutdown(&self) {
        let apps: Vec<Arc<App>> = self.loaded();
        for app in apps {
            app.model.engine.shutdown();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whoever works on a request of a model holds its `App`.
fn is_idle(app: &Arc<App>) -> bool {
    Arc::strong_count(app) == 1
}

fn longest_idle(entries: &HashMap<String, Entry>) -> Option<(String, Instant)> {
    let idle = entries.iter().filter_map(|(name, entry)| match entry {
        Entry::Ready { app, last_used } if is_idle(app) => Some((name.clone(), *last_used)),
        _ => None,
    });
    idle.min_by_key(|(_, last_used)| *last_used)
}

async fn wait_for(mut loaded: watch::Receiver<Option<Loaded>>, name: &str) -> Loaded {
    let result = loaded.wait_for(Option::is_some).await;
    let result = result.ok().and_then(|result| result.clone());
    result.unwrap_or_else(|| Err(ApiError::model_failed(name, "loading it was broken off")))
}
