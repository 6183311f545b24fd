//! How people name a repository: `owner/name`, `owner/name:quant`, `hf.co/owner/name`, or the address in a browser.

use std::fmt;
use std::str::FromStr;

use crate::{ErrorKind, HubError};

/// A repository of a hub, and which of its files is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoName {
    pub owner: String,
    pub name: String,
    /// The quantisation, such as `Q4_K_M`, or the name of a `.gguf` file.
    pub quant: Option<String>,
}

impl RepoName {
    /// `owner/name`.
    pub fn id(&self) -> String {
        format!("{}/{}", self.owner, self.name)
    }

    /// True where a text looks like a repository's name, so that a failure to find it should say so.
    pub fn looks_like(text: &str) -> bool {
        text.parse::<Self>().is_ok()
    }
}

impl fmt::Display for RepoName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)?;
        match &self.quant {
            Some(quant) => write!(f, ":{quant}"),
            None => Ok(()),
        }
    }
}

/// What the hub allows in a name; a name also becomes the name of a directory.
fn is_sound(part: &str) -> bool {
    let sound = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    !part.is_empty()
        && part.len() <= 96
        && part.chars().all(sound)
        && part.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
        && !part.contains("..")
        && !part.contains("--")
}

impl FromStr for RepoName {
    type Err = HubError;

    fn from_str(text: &str) -> Result<Self, HubError> {
        let wrong = || {
            HubError::new(ErrorKind::Usage, format!("{text:?} is not the name of a model"))
                .with_hint("write owner/name or owner/name:QUANT, for example Qwen/Qwen3-4B-GGUF:Q4_K_M")
        };
        let mut rest = text.trim_end_matches('/');
        for prefix in ["https://huggingface.co/", "https://hf.co/", "huggingface.co/", "hf.co/", "hf:"] {
            rest = rest.strip_prefix(prefix).unwrap_or(rest);
        }
        let (id, quant) = match rest.split_once(':') {
            Some((_, "")) => return Err(wrong()),
            Some((id, quant)) => (id, Some(quant)),
            None => (rest, None),
        };
        let (owner, name) = id.split_once('/').ok_or_else(wrong)?;
        // A quantisation is part of a file's name; a file may lie in a folder.
        let quant_is_sound = quant.is_none_or(|quant| quant.split('/').all(is_sound));
        // `./model.gguf` and `models/model.gguf` are paths, whether they exist or not.
        let is_file = name.rsplit_once('.').is_some_and(|(_, end)| {
            ["gguf", "json", "safetensors", "bin", "pt", "pth"].contains(&end.to_ascii_lowercase().as_str())
        });
        if !is_sound(owner) || !is_sound(name) || !quant_is_sound || is_file {
            return Err(wrong());
        }
        Ok(Self { owner: owner.to_owned(), name: name.to_owned(), quant: quant.map(str::to_owned) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read() {
        for (text, id, quant) in [
            ("Qwen/Qwen3-4B-GGUF", "Qwen/Qwen3-4B-GGUF", None),
            ("Qwen/Qwen3-4B-GGUF:q4_k_m", "Qwen/Qwen3-4B-GGUF", Some("q4_k_m")),
            ("hf.co/bartowski/x.y-GGUF:Q8_0", "bartowski/x.y-GGUF", Some("Q8_0")),
            ("https://huggingface.co/owner/name/", "owner/name", None),
            ("owner/name:sub/file.gguf", "owner/name", Some("sub/file.gguf")),
        ] {
            let repo: RepoName = text.parse().unwrap();
            assert_eq!((repo.id().as_str(), repo.quant.as_deref()), (id, quant), "{text}");
        }
        assert_eq!("a/b:Q4_0".parse::<RepoName>().unwrap().to_string(), "a/b:Q4_0");
    }

    #[test]
    fn paths_and_tricks_are_no_names() {
        for text in [
            "",
            "name",
            "/abs/path",
            "./model",
            "../up",
            "a/b/c",
            "a/..",
            "a/b:",
            "a/b:../x",
            "a b/c",
            "models/model.gguf",
            "models/config.json",
            "~/x",
            "a/b\0",
            "a--b/c",
            "a/b:x:y",
        ] {
            assert!(text.parse::<RepoName>().is_err(), "{text}");
        }
    }
}
