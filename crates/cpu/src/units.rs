//! Who does which piece of an op: numbers that workers take, each once.
//!
//! [`Units`] go to whoever asks first. [`GroupUnits`] are cut into shares of groups of workers, of one worker each while there are
//! not too many: a worker goes through one span of a weight, which memory delivers faster than pieces here and there, and then
//! helps the others. Weights are written for the first time, and so placed in memory, by workers of the group that will
//! read them, so that they lie on its NUMA node.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::pool::Worker;

/// The most groups that are told apart; further ones are taken together.
pub const MAX_GROUPS: usize = 32;

/// Hands out the numbers below a limit, each once, to whichever worker asks first.
#[derive(Debug)]
pub struct Units {
    next: AtomicUsize,
    end: usize,
}

impl Units {
    pub fn new(end: usize) -> Self {
        Self { next: AtomicUsize::new(0), end }
    }

    pub fn take(&self) -> Option<usize> {
        let unit = self.next.fetch_add(1, Ordering::Relaxed);
        (unit < self.end).then_some(unit)
    }

    /// [`Self::take`] that leaves the counter alone when nothing is left: for those who come to see whether there is.
    fn take_if_any(&self) -> Option<usize> {
        if self.next.load(Ordering::Relaxed) < self.end { self.take() } else { None }
    }
}

/// How a pool's workers are spread over groups. Only groups with workers count, numbered from zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    num_groups: usize,
    /// Workers of a group and of those before it.
    ends: [usize; MAX_GROUPS],
}

impl Groups {
    /// From any number for each worker; also the group that each has here.
    pub fn new(of_workers: &[usize]) -> (Self, Vec<usize>) {
        let mut numbers = of_workers.to_vec();
        numbers.sort_unstable();
        numbers.dedup();
        let num_groups = numbers.len().clamp(1, MAX_GROUPS);
        let place = |number: &usize| numbers.partition_point(|other| other < number);
        let groups: Vec<usize> =
            of_workers.iter().map(|number| place(number) * num_groups / numbers.len()).collect();
        let mut ends = [0; MAX_GROUPS];
        for (group, end) in ends.iter_mut().enumerate().take(num_groups) {
            *end = groups.iter().filter(|&&of_worker| of_worker <= group).count();
        }
        (Self { num_groups, ends }, groups)
    }

    pub fn num_groups(&self) -> usize {
        self.num_groups
    }

    /// The part of `count` things in a row that is a group's: as large as its part of the workers.
    pub fn share(&self, group: usize, count: usize) -> Range<usize> {
        let total = self.ends[self.num_groups - 1].max(1);
        let until = |workers: usize| count * workers / total;
        until(if group == 0 { 0 } else { self.ends[group - 1] })..until(self.ends[group])
    }
}

/// A group's own counter, on a cache line of its own.
#[derive(Debug)]
#[repr(align(64))]
struct Share(Units);

/// Units in shares of groups.
#[derive(Debug)]
pub struct GroupUnits {
    num_groups: usize,
    shares: [Share; MAX_GROUPS],
}

impl GroupUnits {
    /// `num_units(group)` of each group.
    pub fn new(groups: &Groups, num_units: impl Fn(usize) -> usize) -> Self {
        let units = |group| if group < groups.num_groups { num_units(group) } else { 0 };
        Self {
            num_groups: groups.num_groups,
            shares: std::array::from_fn(|group| Share(Units::new(units(group)))),
        }
    }

    /// How many a group has.
    #[cfg(test)]
    pub fn len_of(&self, group: usize) -> usize {
        self.shares[group].0.end
    }

    /// The next number of the worker's group.
    pub fn take_own(&self, worker: &Worker<'_>) -> Option<usize> {
        self.shares[worker.group].0.take_if_any()
    }

    /// A group and the next number of it: of the worker's group, else of one that has not finished.
    pub fn take(&self, worker: &Worker<'_>) -> Option<(usize, usize)> {
        let groups = (worker.group..self.num_groups).chain(0..worker.group);
        groups.into_iter().find_map(|group| Some((group, self.shares[group].0.take_if_any()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Pool;

    #[test]
    fn units_are_taken_once() {
        let pool = Pool::new(3, false).expect("threads");
        let taken: Vec<AtomicUsize> = (0..1000).map(|_| AtomicUsize::new(0)).collect();
        let units = Units::new(taken.len());
        pool.run(&|_| {
            while let Some(unit) = units.take() {
                taken[unit].fetch_add(1, Ordering::Relaxed);
            }
        });
        assert!(taken.iter().all(|count| count.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn shares_cover_everything_in_proportion() {
        let (groups, of_workers) = Groups::new(&[3, 3, 7, 3]);
        assert_eq!(of_workers, [0, 0, 1, 0]);
        assert_eq!((groups.share(0, 100), groups.share(1, 100)), (0..75, 75..100));
        assert_eq!((groups.share(0, 1), groups.share(1, 1)), (0..0, 0..1));
        let (one, of_workers) = Groups::new(&[5, 5]);
        assert_eq!((one.num_groups(), one.share(0, 7), of_workers), (1, 0..7, vec![0, 0]));
        // More groups than are told apart: neighbours are taken together.
        let (groups, of_workers) = Groups::new(&(0..2 * MAX_GROUPS + 4).collect::<Vec<_>>());
        assert_eq!(groups.num_groups(), MAX_GROUPS);
        assert!(of_workers.is_sorted() && of_workers.last() == Some(&(MAX_GROUPS - 1)));
        for count in [0, 1, 5, 8, 1001] {
            let mut end = 0;
            for group in 0..MAX_GROUPS {
                let share = groups.share(group, count);
                assert_eq!(share.start, end);
                end = share.end;
            }
            assert_eq!(end, count);
        }
    }

    #[test]
    fn every_unit_of_every_group_is_taken_once() {
        // Group 2 has units but a slow worker: the others steal them.
        let pool = Pool::with_groups(&[0, 0, 1, 2]).expect("threads");
        let counts = [40, 25, 300];
        let taken = counts.map(|count| (0..count).map(|_| AtomicUsize::new(0)).collect::<Vec<_>>());
        let units = GroupUnits::new(pool.groups(), |group| counts[group]);
        pool.run(&|worker| {
            while let Some((group, unit)) = units.take(worker) {
                taken[group][unit].fetch_add(1, Ordering::Relaxed);
                if worker.group == 2 {
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
            }
        });
        assert!(taken.iter().flatten().all(|count| count.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn workers_take_their_own_groups_units_first() {
        let pool = Pool::with_groups(&[0, 0, 1, 1]).expect("threads");
        let units = GroupUnits::new(pool.groups(), |group| pool.groups().share(group, 200).len());
        let done = AtomicUsize::new(0);
        pool.run(&|worker| {
            // As many each as an even split has: nobody has to steal.
            for _ in 0..50 {
                let (group, unit) = units.take(worker).expect("there are as many");
                assert_eq!(group, worker.group);
                assert!(unit < 100);
                done.fetch_add(1, Ordering::Relaxed);
            }
            worker.barrier();
            assert_eq!(units.take(worker), None);
            assert_eq!(units.take_own(worker), None);
        });
        assert_eq!(done.into_inner(), 200);
    }
}
