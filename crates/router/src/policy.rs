//! The choice of a worker: counts in, an index out. No socket and no clock.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::config::Policy;
use crate::hashing;

/// A worker that could take the request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Candidate {
    /// Of its URL: the same in every router and after a restart of this one.
    pub key: u64,
    /// Requests that it has now.
    pub num_requests: usize,
    /// Tokens that it was given to compute of late.
    pub recent_tokens: f64,
    /// Tokens of the prompt that it has cached.
    pub matched_tokens: usize,
}

/// What a request says of where it belongs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Belongs {
    pub session: Option<u64>,
    /// Of the beginning of its prompt.
    pub prefix: Option<u64>,
    pub num_prompt_tokens: usize,
}

/// Why a worker was chosen, for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    Turn,
    Load,
    Session,
    Hash,
    Prefix,
}

impl Choice {
    pub const ALL: [Self; 5] = [Self::Turn, Self::Load, Self::Session, Self::Hash, Self::Prefix];

    pub fn name(self) -> &'static str {
        match self {
            Self::Turn => "round_robin",
            Self::Load => "least_load",
            Self::Session => "session",
            Self::Hash => "prefix_hash",
            Self::Prefix => "longest_prefix",
        }
    }
}

/// Chooses by a policy.
#[derive(Debug)]
pub struct Chooser {
    policy: Policy,
    load_factor: f64,
    turn: AtomicUsize,
}

impl Chooser {
    pub fn new(policy: Policy, load_factor: f64) -> Self {
        Self { policy, load_factor: load_factor.max(1.0), turn: AtomicUsize::new(0) }
    }

    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// One of the candidates, of which there must be at least one.
    pub fn choose(&self, candidates: &[Candidate], belongs: &Belongs) -> (usize, Choice) {
        debug_assert!(!candidates.is_empty(), "there is somebody to choose from");
        match self.policy {
            Policy::RoundRobin => self.next(candidates),
            Policy::LeastLoad => self.least_load(candidates),
            Policy::Session => match belongs.session {
                Some(session) => (by_hash(candidates, session, |_| true), Choice::Session),
                None => self.least_load(candidates),
            },
            Policy::PrefixHash => self.prefix_hash(candidates, belongs),
            Policy::LongestPrefix => self.longest_prefix(candidates, belongs),
        }
    }

    fn next(&self, candidates: &[Candidate]) -> (usize, Choice) {
        (self.turn.fetch_add(1, Ordering::Relaxed) % candidates.len(), Choice::Turn)
    }

    /// Among equals, one after the other: otherwise the first would get everything while little is going on.
    fn least_load(&self, candidates: &[Candidate]) -> (usize, Choice) {
        let least = candidates.iter().map(|candidate| candidate.num_requests).min().unwrap_or(0);
        let equals = || (0..candidates.len()).filter(|&index| candidates[index].num_requests == least);
        let turn = self.turn.fetch_add(1, Ordering::Relaxed) % equals().count();
        (equals().nth(turn).expect("the turn is below the count"), Choice::Load)
    }

    fn prefix_hash(&self, candidates: &[Candidate], belongs: &Belongs) -> (usize, Choice) {
        let Some(prefix) = belongs.prefix else { return self.least_load(candidates) };
        let limits = Limits::of(candidates, self.load_factor, belongs.num_prompt_tokens);
        (by_hash(candidates, prefix, |candidate| limits.allow(candidate)), Choice::Hash)
    }

    /// Of the workers that are not much busier than the others, the one that has cached the most; among equals the one with the
    /// least work.
    fn longest_prefix(&self, candidates: &[Candidate], belongs: &Belongs) -> (usize, Choice) {
        let limits = Limits::of(candidates, self.load_factor, belongs.num_prompt_tokens);
        let allowed = || (0..candidates.len()).filter(|&index| limits.allow(&candidates[index]));
        let longest = allowed().map(|index| candidates[index].matched_tokens).max().unwrap_or(0);
        if longest == 0 {
            return self.prefix_hash(candidates, belongs);
        }
        let holders = allowed().filter(|&index| candidates[index].matched_tokens == longest);
        let work = |index: &usize| (candidates[*index].num_requests, candidates[*index].recent_tokens);
        let best = holders.min_by(|a, b| {
            let (a, b) = (work(a), work(b));
            a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
        });
        (best.expect("the longest is somebody's"), Choice::Prefix)
    }
}

/// How much a worker may have and still be given more for what it holds.
struct Limits {
    num_requests: f64,
    recent_tokens: f64,
}

impl Limits {
    fn of(candidates: &[Candidate], factor: f64, num_prompt_tokens: usize) -> Self {
        let count = candidates.len() as f64;
        let requests: usize = candidates.iter().map(|candidate| candidate.num_requests).sum();
        let tokens: f64 = candidates.iter().map(|candidate| candidate.recent_tokens).sum();
        Self {
            // With the new one, rounded up, so that somebody is always below.
            num_requests: ((requests + 1) as f64 * factor / count).ceil(),
            recent_tokens: tokens / count * factor + num_prompt_tokens as f64,
        }
    }

    fn allow(&self, candidate: &Candidate) -> bool {
        (candidate.num_requests as f64) < self.num_requests && candidate.recent_tokens <= self.recent_tokens
    }
}

/// Rendezvous hashing: every candidate has a rank for this key, and the highest allowed one is taken. A worker that comes or
/// goes moves only the keys that are its own.
fn by_hash(candidates: &[Candidate], key: u64, allowed: impl Fn(&Candidate) -> bool) -> usize {
    let rank = |index: &usize| hashing::mix(key, candidates[*index].key);
    let all = 0..candidates.len();
    let best = all.clone().filter(|&index| allowed(&candidates[index])).max_by_key(rank);
    best.or_else(|| all.max_by_key(rank)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(num_requests: &[usize]) -> Vec<Candidate> {
        let candidate = |(index, &num_requests): (usize, &usize)| Candidate {
            key: hashing::of_tokens(0, &[index as u32]),
            num_requests,
            ..Candidate::default()
        };
        num_requests.iter().enumerate().map(candidate).collect()
    }

    fn choose(chooser: &Chooser, candidates: &[Candidate], belongs: Belongs) -> usize {
        chooser.choose(candidates, &belongs).0
    }

    #[test]
    fn round_robin_takes_turns() {
        let chooser = Chooser::new(Policy::RoundRobin, 1.2);
        let workers = candidates(&[5, 0, 0]);
        let turns: Vec<usize> = (0..6).map(|_| choose(&chooser, &workers, Belongs::default())).collect();
        assert_eq!(turns, [0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn least_load_takes_the_idle_one_and_shares_among_equals() {
        let chooser = Chooser::new(Policy::LeastLoad, 1.2);
        assert_eq!(choose(&chooser, &candidates(&[2, 1, 3]), Belongs::default()), 1);
        let workers = candidates(&[1, 1, 4]);
        let mut counts = [0; 3];
        for _ in 0..10 {
            counts[choose(&chooser, &workers, Belongs::default())] += 1;
        }
        assert_eq!(counts, [5, 5, 0]);
    }

    #[test]
    fn a_session_stays_and_moves_only_with_its_worker() {
        let chooser = Chooser::new(Policy::Session, 1.2);
        let workers = candidates(&[9, 0, 0, 0]);
        let of = |workers: &[Candidate], session| {
            choose(&chooser, workers, Belongs { session: Some(session), ..Belongs::default() })
        };
        let mut moved = 0;
        for session in 0..400 {
            let key = workers[of(&workers, session)].key;
            let left = &workers[1..];
            let after = left[of(left, session)].key;
            moved += usize::from(key != after);
            assert!(key == after || key == workers[0].key, "only those of the lost worker move");
        }
        assert!((60..140).contains(&moved), "{moved}");
    }

    #[test]
    fn a_prefix_stays_until_its_worker_is_much_busier() {
        let chooser = Chooser::new(Policy::PrefixHash, 1.25);
        let belongs = Belongs { prefix: Some(42), ..Belongs::default() };
        let mut workers = candidates(&[0, 0, 0]);
        let mut counts = [0; 3];
        for _ in 0..300 {
            let index = choose(&chooser, &workers, belongs);
            workers[index].num_requests += 1;
            counts[index] += 1;
        }
        // All of one prefix: no worker has more than a quarter above its share.
        assert!(counts.iter().all(|&count| count <= 126), "{counts:?}");
        assert_eq!(counts.iter().sum::<usize>(), 300);
        let idle = candidates(&[0, 0, 0]);
        let home = choose(&chooser, &idle, belongs);
        assert!((0..9).all(|_| choose(&chooser, &idle, belongs) == home));
    }

    #[test]
    fn the_longest_prefix_wins_unless_its_holder_is_overloaded() {
        let chooser = Chooser::new(Policy::LongestPrefix, 1.25);
        let belongs = Belongs { prefix: Some(1), num_prompt_tokens: 100, ..Belongs::default() };
        let mut workers = candidates(&[1, 1, 1]);
        workers[0].matched_tokens = 32;
        workers[2].matched_tokens = 64;
        assert_eq!(chooser.choose(&workers, &belongs), (2, Choice::Prefix));
        workers[2].num_requests = 9;
        assert_eq!(chooser.choose(&workers, &belongs), (0, Choice::Prefix));
        workers[2].num_requests = 1;
        workers[2].recent_tokens = 1e6;
        assert_eq!(chooser.choose(&workers, &belongs).0, 0);
        workers[0].matched_tokens = 0;
        workers[2].matched_tokens = 0;
        assert_eq!(chooser.choose(&workers, &belongs).1, Choice::Hash, "nobody has it: by hash");
    }

    #[test]
    fn equal_holders_share_the_work() {
        let chooser = Chooser::new(Policy::LongestPrefix, 1.25);
        let belongs = Belongs { num_prompt_tokens: 10, ..Belongs::default() };
        let mut workers = candidates(&[0, 0]);
        for worker in &mut workers {
            worker.matched_tokens = 16;
        }
        workers[0].recent_tokens = 5.0;
        assert_eq!(choose(&chooser, &workers, belongs), 1);
    }
}
