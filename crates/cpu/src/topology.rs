//! Which cores the process may use, which of them share a physical core, and which memory (NUMA node) they are near to.
//!
//! Read once from Linux's `/sys`; what a system does not say is taken as one node of cores of their own. Who works on
//! what is not decided here: that is [`crate::units`].

use std::fmt;

/// No system numbers its cores or nodes higher; a list that does is not believed.
const MAX_NUMBER: usize = 1 << 16;

/// One logical core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Core {
    /// The system's number.
    pub id: usize,
    /// The NUMA node.
    pub node: usize,
}

/// The cores this process may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// One logical core of each physical one first, so that the first so many share as little as can be.
    pub cores: Vec<Core>,
    /// Physical cores among them.
    pub num_physical: usize,
}

impl Machine {
    /// This machine; without cores where the system does not tell.
    pub fn read() -> Self {
        let read = |path: String| std::fs::read_to_string(path).ok();
        let siblings =
            |core| read(format!("/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"));
        let nodes = read("/sys/devices/system/node/online".to_owned());
        let node_cores = |node| read(format!("/sys/devices/system/node/node{node}/cpulist"));
        Self::new(&allowed_cores(), siblings, nodes.as_deref(), node_cores)
    }

    /// From the cores that are allowed, each one's list of siblings (itself among them), the list of nodes and each
    /// node's list of cores.
    fn new(
        allowed: &[usize],
        siblings: impl Fn(usize) -> Option<String>,
        nodes: Option<&str>,
        node_cores: impl Fn(usize) -> Option<String>,
    ) -> Self {
        let list = |text: Option<String>| text.and_then(|text| parse_list(&text)).unwrap_or_default();
        let nodes: Vec<(usize, Vec<usize>)> = nodes
            .and_then(parse_list)
            .unwrap_or_default()
            .into_iter()
            .map(|node| (node, list(node_cores(node))))
            .collect();
        let node_of = |id| nodes.iter().find(|(_, cores)| cores.contains(&id)).map_or(0, |(node, _)| *node);
        // How many of the allowed cores on the same physical core come before this one.
        let rank =
            |id| list(siblings(id)).iter().filter(|&&other| other < id && allowed.contains(&other)).count();
        let mut ranked: Vec<(usize, Core)> =
            allowed.iter().map(|&id| (rank(id), Core { id, node: node_of(id) })).collect();
        ranked.sort_by_key(|(rank, core)| (*rank, core.id));
        Self {
            num_physical: ranked.iter().filter(|(rank, _)| *rank == 0).count(),
            cores: ranked.into_iter().map(|(_, core)| core).collect(),
        }
    }

    /// NUMA nodes among the cores.
    pub fn num_nodes(&self) -> usize {
        let mut nodes: Vec<usize> = self.cores.iter().map(|core| core.node).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes.len().max(1)
    }

    /// Threads that use the machine best: one a physical core, and no more than the system gives time to.
    pub fn default_threads(&self) -> usize {
        let available = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        self.threads_within(available)
    }

    /// The same where the process gets the time of `available` cores.
    fn threads_within(&self, available: usize) -> usize {
        if self.num_physical == 0 { available.max(1) } else { self.num_physical.min(available).max(1) }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (logical, physical, nodes) = (self.cores.len(), self.num_physical, self.num_nodes());
        write!(f, "{logical} logical cores on {physical} physical ones, {nodes} NUMA nodes")
    }
}

/// Numbers of a list such as `0-3,8-11`; `None` where it is none.
fn parse_list(text: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    let number = |text: &str| text.trim().parse().ok().filter(|&number: &usize| number < MAX_NUMBER);
    for range in text.trim().split(',').filter(|range| !range.trim().is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

#[cfg(target_os = "linux")]
fn allowed_cores() -> Vec<usize> {
    // SAFETY: an all-zero set is a valid empty one, and the call fills at most its size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) != 0 {
            return Vec::new();
        }
        (0..libc::CPU_SETSIZE as usize).filter(|&core| libc::CPU_ISSET(core, &set)).collect()
    }
}

#[cfg(not(target_os = "linux"))]
fn allowed_cores() -> Vec<usize> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sockets of four physical cores; core `c` and `c + 8` are siblings.
    fn two_sockets(allowed: &[usize]) -> Machine {
        let siblings = |core: usize| Some(format!("{},{}\n", core % 8, core % 8 + 8));
        let node_cores = |node: usize| match node {
            0 => Some("0-3,8-11\n".to_owned()),
            1 => Some("4-7,12-15\n".to_owned()),
            _ => None,
        };
        Machine::new(allowed, siblings, Some("0-1\n"), node_cores)
    }

    fn ids(machine: &Machine) -> Vec<usize> {
        machine.cores.iter().map(|core| core.id).collect()
    }

    #[test]
    fn lists_are_read() {
        assert_eq!(parse_list("0-3,8-11\n"), Some(vec![0, 1, 2, 3, 8, 9, 10, 11]));
        assert_eq!(parse_list("5"), Some(vec![5]));
        assert_eq!(parse_list(" 1 , 3-3 "), Some(vec![1, 3]));
        // A node of memory alone has no cores.
        assert_eq!(parse_list("\n"), Some(vec![]));
        for wrong in ["x", "3-1", "1-", "-1", "1-2-3", "0-99999999999", "0-18446744073709551615"] {
            assert_eq!(parse_list(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn cores_of_their_own_come_first() {
        let all: Vec<usize> = (0..16).collect();
        let machine = two_sockets(&all);
        assert_eq!(ids(&machine), all);
        assert_eq!((machine.num_physical, machine.num_nodes()), (8, 2));
        let nodes: Vec<usize> = machine.cores.iter().map(|core| core.node).collect();
        assert_eq!(nodes, [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]);

        // Neighbours are siblings: the order changes.
        let siblings = |core: usize| Some(format!("{}-{}", core / 2 * 2, core / 2 * 2 + 1));
        let machine = Machine::new(&[0, 1, 2, 3, 4, 5], siblings, Some("0"), |_| Some("0-5".to_owned()));
        assert_eq!(ids(&machine), [0, 2, 4, 1, 3, 5]);
        assert_eq!((machine.num_physical, machine.num_nodes()), (3, 1));
    }

    #[test]
    fn only_allowed_cores_count() {
        // Core 9 is the second sibling of core 1, which is not ours: it has its physical core to itself.
        let machine = two_sockets(&[0, 2, 8, 9, 12]);
        assert_eq!(ids(&machine), [0, 2, 9, 12, 8]);
        assert_eq!((machine.num_physical, machine.num_nodes()), (4, 2));
        assert_eq!(two_sockets(&[2, 3]).num_nodes(), 1);
    }

    #[test]
    fn a_silent_system_has_one_node_of_separate_cores() {
        let machine = Machine::new(&[0, 1, 2], |_| None, None, |_| None);
        assert_eq!((machine.num_physical, machine.num_nodes()), (3, 1));
        let machine = Machine::new(&[0, 1], |_| Some("nonsense".to_owned()), Some("?"), |_| None);
        assert_eq!((machine.num_physical, machine.num_nodes()), (2, 1));
    }

    #[test]
    fn threads_are_physical_cores_within_the_quota() {
        let machine = two_sockets(&(0..16).collect::<Vec<_>>());
        assert_eq!(machine.threads_within(16), 8);
        assert_eq!(machine.threads_within(3), 3);
        assert_eq!(machine.threads_within(0), 1);
        let unknown = Machine::new(&[], |_| None, None, |_| None);
        assert_eq!((unknown.threads_within(6), unknown.num_nodes()), (6, 1));
        let here = Machine::read();
        let available = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        assert!((1..=available).contains(&here.default_threads()), "{here}");
    }
}
