//! A million steps over many seeds: no block leaks, is freed twice or written while shared; every request ends once,
//! with the tokens it gets when it is alone; the oldest request is never kept waiting.

use std::sync::atomic::{AtomicU64, Ordering};

use baton_sim::{Report, simulate};

const NUM_SEEDS: u64 = 500;
const STEPS_PER_SEED: usize = 2_000;

fn add(total: &mut Report, report: &Report) {
    total.num_steps += report.num_steps;
    total.num_requests += report.num_requests;
    total.num_refused += report.num_refused;
    total.num_aborted += report.num_aborted;
    total.num_failed_steps += report.num_failed_steps;
    total.num_failed_submits += report.num_failed_submits;
    total.num_copies += report.num_copies;
    total.num_swapped_blocks += report.num_swapped_blocks;
    total.num_planned_ahead += report.num_planned_ahead;
    total.num_fetches += report.num_fetches;
    total.num_drafts += report.num_drafts;
    total.num_accepted_drafts += report.num_accepted_drafts;
    total.num_from_branches += report.num_from_branches;
    total.num_dropped_drafts += report.num_dropped_drafts;
    total.num_waits += report.num_waits;
    total.num_behind_windows += report.num_behind_windows;
    total.num_saved_rows += report.num_saved_rows;
    total.num_loaded_rows += report.num_loaded_rows;
    total.num_lost_rows += report.num_lost_rows;
    total.stats.kv.host_cache_hits += report.stats.kv.host_cache_hits;
    total.stats.kv.num_offloaded_blocks += report.stats.kv.num_offloaded_blocks;
    total.stats.num_preemptions_swap += report.stats.num_preemptions_swap;
    total.stats.num_preemptions_recompute += report.stats.num_preemptions_recompute;
    total.stats.kv.prefix_cache_hits += report.stats.kv.prefix_cache_hits;
    total.stats.kv.num_evictions += report.stats.kv.num_evictions;
}

fn run_seeds(next: &AtomicU64) -> Report {
    let mut total = Report::default();
    loop {
        let seed = next.fetch_add(1, Ordering::Relaxed);
        if seed >= NUM_SEEDS {
            return total;
        }
        let outcome = std::panic::catch_unwind(|| simulate(seed, STEPS_PER_SEED, false));
        let report = outcome.unwrap_or_else(|_| {
            panic!(
                "seed {seed} failed; replay: cargo run -p baton-sim -- --seed {seed} --steps {STEPS_PER_SEED}"
            )
        });
        add(&mut total, &report);
    }
}

#[test]
fn a_million_steps() {
    let next = AtomicU64::new(0);
    let mut total = Report::default();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..2).map(|_| scope.spawn(|| run_seeds(&next))).collect();
        for worker in workers {
            add(&mut total, &worker.join().expect("a seed failed"));
        }
    });
    println!("{total:#?}");
    assert!(total.num_steps >= 1_000_000, "{} steps", total.num_steps);
    // The load must really have gone through every corner.
    for (what, count) in [
        ("requests", total.num_requests as u64),
        ("refused requests", total.num_refused as u64),
        ("aborts", total.num_aborted as u64),
        ("failed steps", total.num_failed_steps as u64),
        ("failed submits beside a step in flight", total.num_failed_submits as u64),
        ("copies on write", total.num_copies as u64),
        ("swapped blocks", total.num_swapped_blocks as u64),
        ("tokens planned ahead", total.num_planned_ahead as u64),
        ("fetches from the host tier", total.num_fetches as u64),
        ("accepted drafts", total.num_accepted_drafts as u64),
        ("accepted drafts of branches", total.num_from_branches as u64),
        ("rejected drafts", (total.num_drafts - total.num_accepted_drafts) as u64),
        ("drafts that were dropped before their step", total.num_dropped_drafts as u64),
        ("waits for masks and encoders", total.num_waits as u64),
        ("blocks given back behind windows", total.num_behind_windows as u64),
        ("blocks copied to the host tier ahead of need", total.stats.kv.num_offloaded_blocks),
        ("rows that went to the store", total.num_saved_rows as u64),
        ("rows that came from the store", total.num_loaded_rows as u64),
        ("rows that the store promised and did not bring", total.num_lost_rows as u64),
        ("tokens found in the host tier", total.stats.kv.host_cache_hits),
        ("preemptions by swap", total.stats.num_preemptions_swap),
        ("preemptions by recomputation", total.stats.num_preemptions_recompute),
        ("prefix-cache hits", total.stats.kv.prefix_cache_hits),
        ("evictions", total.stats.kv.num_evictions),
    ] {
        assert!(count > 100, "only {count} {what}");
    }
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let mut traces = std::collections::BTreeSet::new();
    for seed in 1000..1020 {
        let first = simulate(seed, 300, true);
        assert_eq!(first, simulate(seed, 300, true), "seed {seed}");
        assert!(traces.insert(first.trace.expect("a trace was asked for")), "two seeds with one trace");
    }
}
