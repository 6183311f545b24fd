//! Refusals cost their sender nothing, and thousands of them a second would take the cores from everybody else's tokens: a key that
//! asks for many gets each a little later.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::auth::TenantId;

/// Refusals of one key that are answered at once: so many, and so many more with every second.
const BURST: f64 = 100.0;
const PER_SECOND: f64 = 50.0;
/// How much later all others are answered. A client sends its next request when it has its answer.
const DELAY: Duration = Duration::from_millis(250);

/// Counts refusals by key. Whoever brings no valid key is nobody, and all of these are one.
#[derive(Debug, Default)]
pub struct Refusals {
    keys: Mutex<HashMap<Option<TenantId>, Allowance>>,
}

#[derive(Clone, Copy, Debug)]
struct Allowance {
    left: f64,
    at: Instant,
}

impl Refusals {
    /// Waits as long as this refusal has to wait.
    pub async fn pace(&self, tenant: Option<TenantId>) {
        if self.is_too_many(tenant, Instant::now()) {
            tokio::time::sleep(DELAY).await;
        }
    }

    fn is_too_many(&self, tenant: Option<TenantId>, now: Instant) -> bool {
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        let allowance = keys.entry(tenant).or_insert(Allowance { left: BURST, at: now });
        let since = now.saturating_duration_since(allowance.at).as_secs_f64();
        allowance.left = (allowance.left + since * PER_SECOND).min(BURST);
        allowance.at = now;
        let is_too_many = allowance.left < 1.0;
        if !is_too_many {
            allowance.left -= 1.0;
        }
        is_too_many
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_is_refused_often_waits_and_no_other_does() {
        let (refusals, start) = (Refusals::default(), Instant::now());
        let (bad, good) = (Some(TenantId(1)), Some(TenantId(2)));
        let waits =
            |tenant, count: u32, now| (0..count).filter(|_| refusals.is_too_many(tenant, now)).count();
        assert_eq!(waits(bad, 100, start), 0, "a burst");
        assert_eq!(waits(bad, 100, start), 100);
        assert_eq!(waits(good, 100, start), 0);
        assert_eq!(waits(None, 100, start), 0);
        let later = start + Duration::from_secs(1);
        assert_eq!(waits(bad, 60, later), 10, "fifty more with every second");
        assert_eq!(waits(bad, 200, later + Duration::from_secs(3600)), 100, "and never more than a burst");
    }
}
