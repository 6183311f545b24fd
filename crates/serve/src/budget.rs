//! Memory for the requests that are being read.
//!
//! A body counts from the byte that arrives to the moment when its request has become tokens; what its text, its parsed
//! form and its prompt take is estimated from its length and from the number of its parts. Where there are several
//! keys, one may have at most half of it, and its large bodies are read at a limited speed: copying them takes cores that the
//! answers to others need.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::auth::TenantId;

/// Copies of a body's text that exist at one time: as it came, parsed, and as a prompt with its tokens.
const COPIES: usize = 4;
/// A small object or text of JSON in memory, with its keys, on its way through the chat template.
const ITEM_BYTES: usize = 256;

/// Bytes a second that are read of one key's large bodies, where there are several keys.
const BYTES_PER_SECOND: usize = 64 << 20;

/// What a body of so many bytes and items takes while it becomes tokens.
pub fn cost(num_bytes: usize, num_items: usize) -> usize {
    num_bytes.saturating_mul(COPIES).saturating_add(num_items.saturating_mul(ITEM_BYTES))
}

/// How many objects, arrays and texts there are in a JSON text. What is no JSON is counted all the same.
pub fn count_items(json: &[u8]) -> usize {
    let (mut count, mut in_text, mut is_escaped) = (0, false, false);
    for &byte in json {
        if in_text {
            in_text = is_escaped || byte != b'"';
            is_escaped = !is_escaped && byte == b'\\';
            continue;
        }
        if matches!(byte, b'"' | b'{' | b'[') {
            count += 1;
            in_text = byte == b'"';
        }
    }
    count
}

#[derive(Debug)]
pub struct BodyBudget {
    limit: usize,
    share: usize,
    is_paced: bool,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    total: usize,
    by_tenant: HashMap<TenantId, usize>,
    /// When the next part of a tenant's large bodies may be read, where that is not now.
    next_read: HashMap<TenantId, Instant>,
}

/// A part of the budget, given back when dropped.
#[derive(Debug)]
pub struct Charge {
    budget: Arc<BodyBudget>,
    tenant: TenantId,
    num_bytes: usize,
}

impl BodyBudget {
    pub fn new(limit: usize, has_many_keys: bool) -> Arc<Self> {
        let share = if has_many_keys { limit / 2 } else { limit };
        Arc::new(Self { limit, share, is_paced: has_many_keys, taken: Mutex::default() })
    }

    /// The most that one request can ever have.
    pub fn share(&self) -> usize {
        self.share
    }

    pub fn charge(self: &Arc<Self>, tenant: TenantId) -> Charge {
        Charge { budget: Arc::clone(self), tenant, num_bytes: 0 }
    }

    /// How long to wait after reading so much of a large body.
    pub fn pace(&self, tenant: TenantId, num_bytes: usize, now: Instant) -> Duration {
        if !self.is_paced {
            return Duration::ZERO;
        }
        let mut taken = self.lock();
        taken.next_read.retain(|_, next| *next > now);
        let next = taken.next_read.entry(tenant).or_insert(now);
        *next += Duration::from_secs_f64(num_bytes as f64 / BYTES_PER_SECOND as f64);
        *next - now
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Charge {
    /// Takes so much more, if there is as much.
    pub fn grow(&mut self, num_bytes: usize) -> bool {
        let mut taken = self.budget.lock();
        let own = taken.by_tenant.get(&self.tenant).copied().unwrap_or(0);
        if taken.total + num_bytes > self.budget.limit || own + num_bytes > self.budget.share {
            return false;
        }
        taken.total += num_bytes;
        taken.by_tenant.insert(self.tenant, own + num_bytes);
        self.num_bytes += num_bytes;
        true
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut taken = self.budget.lock();
        taken.total -= self.num_bytes;
        if let Some(own) = taken.by_tenant.get_mut(&self.tenant) {
            *own -= self.num_bytes;
            if *own == 0 {
                taken.by_tenant.remove(&self.tenant);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_counted_outside_texts() {
        for (json, expected) in [
            (r"", 0),
            (r#"{"a": [1, 2, 3]}"#, 3),
            (r#"{"messages": [{"role": "user", "content": "{[\"x\\"}]}"#, 8),
            (r#"["\\", "a"]"#, 3),
            (r#"{"never closed"#, 2),
        ] {
            assert_eq!(count_items(json.as_bytes()), expected, "{json}");
        }
    }

    #[test]
    fn one_key_has_at_most_half_and_everything_comes_back() {
        let budget = BodyBudget::new(100, true);
        let mut one = budget.charge(TenantId(1));
        assert!(one.grow(30) && one.grow(20) && !one.grow(1));
        let mut again = budget.charge(TenantId(1));
        assert!(!again.grow(1), "the key has its share");
        let mut two = budget.charge(TenantId(2));
        assert!(two.grow(50));
        drop(one);
        assert!(again.grow(50));
        drop((again, two));
        assert_eq!(budget.lock().total, 0);
        assert!(budget.lock().by_tenant.is_empty());
        assert!(BodyBudget::new(100, false).charge(TenantId(0)).grow(100));
    }

    #[test]
    fn large_bodies_of_one_key_are_read_at_a_limited_speed() {
        let (budget, now) = (BodyBudget::new(100, true), Instant::now());
        assert_eq!(budget.pace(TenantId(1), BYTES_PER_SECOND / 4, now), Duration::from_millis(250));
        // All its connections together.
        assert_eq!(budget.pace(TenantId(1), BYTES_PER_SECOND / 4, now), Duration::from_millis(500));
        assert_eq!(budget.pace(TenantId(2), BYTES_PER_SECOND, now), Duration::from_secs(1));
        let later = now + Duration::from_secs(5);
        assert_eq!(budget.pace(TenantId(1), BYTES_PER_SECOND / 4, later), Duration::from_millis(250));
        assert_eq!(budget.lock().next_read.len(), 1, "who has caught up is forgotten");
        assert_eq!(BodyBudget::new(100, false).pace(TenantId(0), 1 << 30, now), Duration::ZERO);
    }
}
