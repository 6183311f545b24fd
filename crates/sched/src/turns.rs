//! Whose turn it is: tenants share the engine by tokens (start-time fair queueing).
//!
//! Time is counted in tokens. A request's turn comes when those of its tenant before it have had their tokens, but not
//! before the turn of what is running now. A tenant that has asked for little is therefore ahead of all that another one
//! has queued, and who was away saves nothing up. With one tenant the order is that of arrival.

use std::collections::BTreeMap;

/// What a request counts for beyond its tokens, so that empty ones are not free.
const REQUEST_TOKENS: u64 = 1;

#[derive(Clone, Debug, Default)]
pub(crate) struct Turns {
    /// The latest turn that was begun.
    now: u64,
    /// When the tenant's next turn comes, where that is later than now.
    next: BTreeMap<u32, u64>,
}

impl Turns {
    /// The turn of a request that may take so many tokens.
    pub(crate) fn assign(&mut self, tenant: u32, num_tokens: usize) -> u64 {
        let turn = self.next.get(&tenant).copied().unwrap_or(0).max(self.now);
        self.next.insert(tenant, turn.saturating_add(num_tokens as u64 + REQUEST_TOKENS));
        turn
    }

    /// A request with this turn begins to run.
    pub(crate) fn begin(&mut self, turn: u64) {
        if turn > self.now {
            self.now = turn;
            self.next.retain(|_, next| *next > turn);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_tenant_is_served_in_order_of_arrival() {
        let mut turns = Turns::default();
        let order: Vec<u64> = (0..100).map(|number| turns.assign(7, number % 5)).collect();
        assert!(order.is_sorted());
    }

    #[test]
    fn who_asks_for_little_is_ahead_of_a_backlog_and_nobody_waits_for_ever() {
        let mut turns = Turns::default();
        let backlog: Vec<u64> = (0..100).map(|_| turns.assign(1, 1000)).collect();
        turns.begin(backlog[3]);
        let small = turns.assign(2, 10);
        assert_eq!(backlog.iter().filter(|&&turn| turn < small).count(), 3);
        // As many small ones as it may send: each pushes its own next turn back.
        let later: Vec<u64> = (0..200).map(|_| turns.assign(2, 10)).collect();
        assert!(later.iter().any(|&turn| turn > backlog[4]));
    }

    #[test]
    fn tenants_that_caught_up_are_forgotten() {
        let mut turns = Turns::default();
        for tenant in 0..1000 {
            let turn = turns.assign(tenant, 10);
            turns.begin(turn + 11);
        }
        assert!(turns.next.len() <= 1, "{} are remembered", turns.next.len());
    }
}
