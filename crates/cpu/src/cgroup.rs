//! How much memory the process's own control group may have: systemd's `MemoryMax`, containers, nested slices.
//!
//! A process is in a group, which is in others, and each may have a limit: the tightest counts. `/proc/self/cgroup` says
//! which group it is, in the one tree of version 2 or in the memory tree of version 1.

use std::path::{Path, PathBuf};

/// A group that has a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::struct_field_names, reason = "units stand at the end of names")]
pub(crate) struct Group {
    pub(crate) limit_bytes: u64,
    pub(crate) used_bytes: u64,
    /// Of files, given back when memory is short.
    pub(crate) cached_bytes: u64,
}

impl Group {
    /// What may still be taken. Mapped weights are cache, so they do not count as used.
    pub(crate) fn free_bytes(self) -> u64 {
        self.limit_bytes.saturating_sub(self.used_bytes.saturating_sub(self.cached_bytes))
    }
}

/// The names of a version's files.
struct Names {
    limit: &'static str,
    used: &'static str,
    cached: [&'static str; 2],
}

const VERSION_2: Names =
    Names { limit: "memory.max", used: "memory.current", cached: ["inactive_file ", "active_file "] };
const VERSION_1: Names = Names {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cached: ["total_inactive_file ", "total_active_file "],
};

/// All groups of this process that have a limit.
pub(crate) fn groups() -> Vec<Group> {
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    groups_of(&own, Path::new("/sys/fs/cgroup"))
}

fn groups_of(own: &str, root: &Path) -> Vec<Group> {
    let mut found = Vec::new();
    for line in own.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        if controllers.is_empty() {
            read_upwards(root, path, &VERSION_2, &mut found);
        } else if controllers.split(',').any(|controller| controller == "memory") {
            read_upwards(&root.join("memory"), path, &VERSION_1, &mut found);
        }
    }
    if found.is_empty() {
        // In a container the path may be the host's, and its own group the root of what it sees.
        found.extend(read(root, &VERSION_2));
        found.extend(read(&root.join("memory"), &VERSION_1));
    }
    found
}

/// The group at `path` and all that it is in.
fn read_upwards(root: &Path, path: &str, names: &Names, found: &mut Vec<Group>) {
    let mut relative = PathBuf::from(path.trim_start_matches('/'));
    loop {
        found.extend(read(&root.join(&relative), names));
        if !relative.pop() {
            return;
        }
    }
}

fn read(folder: &Path, names: &Names) -> Option<Group> {
    let text = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap_or_default();
    // `max` is no number; version 1 says a number no machine has.
    let limit_bytes = text(names.limit).trim().parse().ok().filter(|&limit| limit < 1 << 62)?;
    let statistics = text("memory.stat");
    let cached =
        names.cached.iter().filter_map(|name| statistics.lines().find_map(|line| line.strip_prefix(name)));
    Some(Group {
        limit_bytes,
        used_bytes: text(names.used).trim().parse().unwrap_or(0),
        cached_bytes: cached
            .filter_map(|number| number.trim().parse::<u64>().ok())
            .fold(0, u64::saturating_add),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, files: &[(&str, &str)]) {
        for (path, text) in files {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
            std::fs::write(path, text).expect("a file");
        }
    }

    fn limits(own: &str, files: &[(&str, &str)]) -> Vec<u64> {
        let root = tempfile::tempdir().expect("a folder");
        write(root.path(), files);
        groups_of(own, root.path()).iter().map(|group| group.limit_bytes).collect()
    }

    #[test]
    fn every_group_that_the_process_is_in_counts() {
        // A systemd service with MemoryMax in a slice with one of its own; the root of version 2 has no such file.
        let files = [
            ("system.slice/memory.max", "8000\n"),
            ("system.slice/baton.service/memory.max", "3000\n"),
            ("system.slice/other.service/memory.max", "10\n"),
        ];
        assert_eq!(limits("0::/system.slice/baton.service\n", &files), [3000, 8000]);
        let nested = [("a/memory.max", "500"), ("a/b/memory.max", "max\n"), ("a/b/c/memory.max", "max")];
        assert_eq!(limits("0::/a/b/c\n", &nested), [500]);
    }

    #[test]
    fn version_1_has_a_tree_for_memory() {
        let own = "12:cpu,cpuacct:/x\n5:memory:/docker/abc\n1:name=systemd:/x\n";
        let files = [
            ("memory/docker/abc/memory.limit_in_bytes", "4096\n"),
            ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ];
        assert_eq!(limits(own, &files), [4096]);
    }

    #[test]
    fn a_container_that_sees_only_its_own_group_reads_it() {
        assert_eq!(limits("0::/\n", &[("memory.max", "777")]), [777]);
        assert_eq!(limits("0::/docker/of/the/host\n", &[("memory.max", "777")]), [777]);
        assert_eq!(limits("", &[("memory/memory.limit_in_bytes", "55")]), [55]);
        assert!(limits("0::/a\n", &[]).is_empty());
    }

    #[test]
    fn files_in_memory_are_not_counted_as_used() {
        let root = tempfile::tempdir().expect("a folder");
        let statistics = "anon 50\ninactive_file 150\nactive_file 100\n";
        write(root.path(), &[("memory.max", "500"), ("memory.current", "300"), ("memory.stat", statistics)]);
        let groups = groups_of("0::/\n", root.path());
        assert_eq!(groups, [Group { limit_bytes: 500, used_bytes: 300, cached_bytes: 250 }]);
        assert_eq!(groups[0].free_bytes(), 450);
    }
}
