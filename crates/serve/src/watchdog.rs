//! Watches the engine's heartbeat and says in the log what it was doing when it got stuck.
//!
//! `/health` reads the same heartbeat itself; this is only for the person who reads the log afterwards.

use std::sync::Arc;
use std::time::Duration;

use crate::state::App;

const INTERVAL: Duration = Duration::from_secs(1);

pub async fn watch(app: Arc<App>) {
    let mut was_failing = false;
    loop {
        tokio::time::sleep(INTERVAL).await;
        let failure = app.failure();
        match (was_failing, failure) {
            (false, Some(why)) => report(&app, why),
            (true, None) => tracing::warn!("the engine moves again"),
            _ => {}
        }
        was_failing = failure.is_some();
    }
}

fn report(app: &App, why: &str) {
    let heartbeat = app.model.engine.heartbeat();
    let (snapshot, stats) = (heartbeat.snapshot(), heartbeat.stats());
    tracing::error!(
        phase = snapshot.phase.name(),
        for_seconds = snapshot.for_time.as_secs_f64(),
        step = snapshot.step,
        step_tokens = snapshot.num_tokens,
        step_sequences = snapshot.num_seqs,
        running = stats.scheduler.num_running,
        waiting = stats.scheduler.num_waiting,
        swapped = stats.scheduler.num_swapped,
        kv_blocks_used = stats.scheduler.kv.num_device_blocks_used,
        last_failure = stats.last_failure.as_deref().unwrap_or("none"),
        "{why}: /health says 503 from now on"
    );
}
