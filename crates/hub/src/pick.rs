//! Which files of a repository are the model: a GGUF file with its further parts, or a directory of safetensors with its
//! configuration.

use crate::{ErrorKind, HubError, RepoName};

/// What people mean when they name no quantisation: the first of these that is there.
const PREFERRED: [&str; 12] =
    ["Q4_K_M", "Q4_K_S", "Q4_K", "Q5_K_M", "Q8_0", "Q6_K", "Q4_1", "Q4_0", "Q5_0", "BF16", "F16", "F32"];
/// What is read besides the weights.
const SIDE_FILES: [&str; 9] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
];

/// Models are never split into more files than this.
const MAX_PARTS: u32 = 1000;

/// The files of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Picked {
    /// The first part is the one to open.
    Gguf(Vec<String>),
    /// A configuration with its safetensors.
    Directory(Vec<String>),
}

impl Picked {
    pub fn files(&self) -> &[String] {
        match self {
            Self::Gguf(files) | Self::Directory(files) => files,
        }
    }
}

/// Picks among the names of a repository's files.
pub fn pick(repo: &RepoName, names: &[&str]) -> Result<Picked, HubError> {
    let ggufs: Vec<&str> = names.iter().copied().filter(|name| is_model_gguf(name)).collect();
    if let Some(quant) = &repo.quant {
        return pick_quant(repo, &ggufs, quant);
    }
    if names.contains(&"config.json") && names.iter().any(|name| is_safetensors(name)) {
        let wanted = |name: &&str| SIDE_FILES.contains(name) || is_safetensors(name);
        return Ok(Picked::Directory(names.iter().copied().filter(wanted).map(str::to_owned).collect()));
    }
    let preferred = PREFERRED.iter().find_map(|quant| ggufs.iter().find(|name| has_quant(name, quant)));
    match preferred.or(ggufs.first()) {
        Some(name) => whole(repo, &ggufs, name),
        None => Err(nothing(repo, names)),
    }
}

fn pick_quant(repo: &RepoName, ggufs: &[&str], quant: &str) -> Result<Picked, HubError> {
    let found = ggufs.iter().find(|name| **name == quant || has_quant(name, quant));
    if let Some(name) = found {
        return whole(repo, ggufs, name);
    }
    let mut quants: Vec<String> = ggufs.iter().filter_map(|name| quant_of(name)).collect();
    quants.sort();
    quants.dedup();
    let error = HubError::new(ErrorKind::NotFound, format!("{} has no {quant}", repo.id()));
    Err(if quants.is_empty() {
        error.with_hint("it has no GGUF files: leave out the part after the colon")
    } else {
        error.with_hint(format!("it has {}", quants.join(", ")))
    })
}

fn nothing(repo: &RepoName, names: &[&str]) -> HubError {
    let has = |end: &str| names.iter().any(|name| name.ends_with(end));
    let why = if has(".bin") || has(".pt") || has(".pth") {
        "only pickled PyTorch weights, which can run code and are not read"
    } else {
        "neither GGUF files nor safetensors"
    };
    HubError::new(ErrorKind::NotFound, format!("{} has {why}", repo.id()))
        .with_hint(format!("look for a repository with GGUF files, often named {}-GGUF", repo.name))
}

/// The file with all its parts, where it is one of several: `…-00002-of-00003.gguf`.
fn whole(repo: &RepoName, ggufs: &[&str], name: &str) -> Result<Picked, HubError> {
    let Some((stem, count)) = part_of(name) else { return Ok(Picked::Gguf(vec![name.to_owned()])) };
    let parts: Vec<String> = (1..=count).map(|part| format!("{stem}-{part:05}-of-{count:05}.gguf")).collect();
    match parts.iter().find(|part| !ggufs.contains(&part.as_str())) {
        None => Ok(Picked::Gguf(parts)),
        Some(missing) => Err(HubError::new(ErrorKind::NotFound, format!("{} has no {missing}", repo.id()))
            .with_hint("a part of the model is missing there: choose another quantisation")),
    }
}

/// The name without its number, and how many parts there are.
fn part_of(name: &str) -> Option<(&str, u32)> {
    let number = |text: &str| text.parse::<u32>().ok().filter(|_| text.len() == 5);
    let (before, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, part) = before.rsplit_once('-')?;
    let (part, count) = (number(part)?, number(count)?);
    (1..=count.min(MAX_PARTS)).contains(&part).then_some((stem, count)).filter(|_| count <= MAX_PARTS)
}

/// Projectors of images and importance matrices are GGUF files too, but no models.
fn is_model_gguf(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    let file = lower.rsplit('/').next().unwrap_or(&lower);
    file.rsplit_once('.').is_some_and(|(_, end)| end == "gguf")
        && !file.contains("mmproj")
        && !file.contains("imatrix")
}

/// Weights at the top of the repository; a folder may hold another format or a part of a pipeline.
fn is_safetensors(name: &str) -> bool {
    name.ends_with(".safetensors") && !name.contains('/') && !name.starts_with("adapter_")
}

/// The quantisation in a file's name: what is between the last `-` or `.` and the ending.
fn quant_of(name: &str) -> Option<String> {
    let upper = name.rsplit('/').next()?.to_ascii_uppercase();
    let stem = upper.strip_suffix(".GGUF")?;
    let stem = match stem.rsplit_once("-OF-") {
        Some((before, _)) => before.rsplit_once('-')?.0,
        None => stem,
    };
    let quant = stem.rsplit(['-', '.']).next()?;
    let known = ["Q", "IQ", "F", "BF", "TQ", "MXFP"];
    let is_quant = known.iter().any(|start| {
        quant.strip_prefix(start).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    });
    is_quant.then(|| quant.to_owned())
}

fn has_quant(name: &str, quant: &str) -> bool {
    let quant = if quant.eq_ignore_ascii_case("fp16") { "F16" } else { quant };
    quant_of(name).is_some_and(|found| {
        found.eq_ignore_ascii_case(quant) || found == "FP16" && quant.eq_ignore_ascii_case("F16")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(repo: &str, names: &[&str], expect: Result<&[&str], &str>) {
        let repo: RepoName = repo.parse().unwrap();
        let picked = pick(&repo, names);
        match (picked, expect) {
            (Ok(picked), Ok(files)) => assert_eq!(picked.files(), files, "{repo}"),
            (Err(error), Err(part)) => {
                let said = format!("{error} {}", error.hint().unwrap_or_default());
                assert!(said.contains(part), "{part:?} is not in {said:?}");
            }
            (picked, expect) => panic!("{repo}: {picked:?} instead of {expect:?}"),
        }
    }

    #[test]
    fn the_file_that_is_meant_is_picked() {
        let ggufs = ["README.md", "m-Q8_0.gguf", "m-Q4_K_M.gguf", "mmproj-m-f16.gguf", "m-f16.gguf"];
        check("o/m", &ggufs, Ok(&["m-Q4_K_M.gguf"]));
        check("o/m:q8_0", &ggufs, Ok(&["m-Q8_0.gguf"]));
        check("o/m:F16", &ggufs, Ok(&["m-f16.gguf"]));
        check("o/m:m-Q8_0.gguf", &ggufs, Ok(&["m-Q8_0.gguf"]));
        check("o/m:Q2_K", &ggufs, Err("it has F16, Q4_K_M, Q8_0"));
        check("o/m", &["M.Q3_K_L.gguf", "x.imatrix.gguf"], Ok(&["M.Q3_K_L.gguf"]));
    }

    #[test]
    fn all_parts_of_a_split_file_are_picked() {
        let parts = ["q8/m-Q8_0-00001-of-00002.gguf", "q8/m-Q8_0-00002-of-00002.gguf"];
        let names = ["m-q4_k_m-00001-of-00001.gguf", parts[1], parts[0], "m-of-old.gguf"];
        check("o/m:q8_0", &names, Ok(&parts));
        check("o/m", &names, Ok(&["m-q4_k_m-00001-of-00001.gguf"]));
        check(&format!("o/m:{}", parts[1]), &names, Ok(&parts));
        check("o/m:Q8_0", &parts[..1], Err("has no q8/m-Q8_0-00002-of-00002.gguf"));
        check("o/m:Q8_0", &parts[1..], Err("has no q8/m-Q8_0-00001-of-00002.gguf"));
        check("o/m", &["m-Q8_0-00003-of-00002.gguf"], Ok(&["m-Q8_0-00003-of-00002.gguf"]));
        check("o/m", &["m-Q8_0-00001-of-99999.gguf"], Ok(&["m-Q8_0-00001-of-99999.gguf"]));
    }

    #[test]
    fn a_directory_has_what_is_read_and_no_more() {
        let names = [
            "config.json",
            "model.safetensors",
            "original/x.safetensors",
            "pytorch_model.bin",
            "tokenizer.json",
        ];
        check("o/m", &names, Ok(&["config.json", "model.safetensors", "tokenizer.json"]));
        check("o/m:Q4_0", &names, Err("it has no GGUF files"));
        check("o/m", &["config.json", "pytorch_model.bin"], Err("pickled"));
        check("o/m", &["README.md"], Err("neither GGUF files nor safetensors"));
    }
}
