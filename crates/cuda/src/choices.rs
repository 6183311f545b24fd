//! Which algorithm of cuBLASLt was the fastest for a product, kept on disk beside the compiled kernels, so that it is timed once
//! and not at every start.
//!
//! A file belongs to a device and a version of cuBLASLt, whose algorithms mean nothing to another; both are in its name and in
//! its first line. The last line is a hash of the rest. What does not fit is as if it were not there, and is written anew. A
//! folder that cannot be written is no error.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use crate::compile::store;
use crate::gemm::Shape;

/// Changes with what a choice depends on: the way of timing, the candidates, the fields of a line.
const FORMAT: &str = "baton cublaslt choices 3";

/// What cuBLASLt knows an algorithm by.
pub(crate) type Algorithm = [u64; 8];

#[derive(Debug)]
pub(crate) struct Choices {
    path: Option<PathBuf>,
    owner: String,
    known: BTreeMap<Shape, Algorithm>,
    is_changed: bool,
}

impl Choices {
    /// Those of earlier runs on a device with this version of cuBLASLt.
    pub(crate) fn load(folder: Option<&Path>, device: &str, version: usize) -> Self {
        let owner = format!("{FORMAT}, {device}, {version}");
        let hash = blake3::hash(owner.as_bytes()).to_hex();
        let path = folder.map(|folder| folder.join(format!("{}.choices", &hash[..32])));
        let text = path.as_ref().and_then(|path| fs::read_to_string(path).ok());
        let known = text.and_then(|text| parse(&text, &owner)).unwrap_or_default();
        Self { path, owner, known, is_changed: false }
    }

    pub(crate) fn get(&self, shape: &Shape) -> Option<Algorithm> {
        self.known.get(shape).copied()
    }

    pub(crate) fn insert(&mut self, shape: Shape, algorithm: Algorithm) {
        self.is_changed |= self.known.insert(shape, algorithm) != Some(algorithm);
    }

    /// Writes what is new to disk.
    pub(crate) fn save(&mut self) {
        if let Some(path) = self.path.as_ref().filter(|_| self.is_changed) {
            store(path, print(&self.known, &self.owner).as_bytes());
            self.is_changed = false;
        }
    }
}

impl Drop for Choices {
    fn drop(&mut self) {
        self.save();
    }
}

fn print(known: &BTreeMap<Shape, Algorithm>, owner: &str) -> String {
    let mut text = format!("{owner}\n");
    for (shape, algorithm) in known {
        let Shape { m, n, k, output_stride, is_f32, is_fp8, output_alignment } = shape;
        let kind = u8::from(*is_f32) + 2 * u8::from(*is_fp8);
        let _ = write!(text, "{m} {n} {k} {output_stride} {kind} {output_alignment}");
        for word in algorithm {
            let _ = write!(text, " {word:x}");
        }
        text.push('\n');
    }
    let hash = blake3::hash(text.as_bytes()).to_hex();
    text + &hash + "\n"
}

fn parse(text: &str, owner: &str) -> Option<BTreeMap<Shape, Algorithm>> {
    let (rest, hash) = text.strip_suffix('\n')?.rsplit_once('\n')?;
    let (rest, hash) = (&text[..=rest.len()], hash.trim());
    if blake3::hash(rest.as_bytes()).to_hex().as_str() != hash {
        return None;
    }
    let mut lines = rest.lines();
    if lines.next()? != owner {
        return None;
    }
    lines.map(parse_line).collect()
}

fn parse_line(line: &str) -> Option<(Shape, Algorithm)> {
    let mut fields = line.split(' ');
    let mut size = || fields.next()?.parse::<usize>().ok();
    let (m, n, k, output_stride, kind) = (size()?, size()?, size()?, size()?, size()?);
    let shape = Shape {
        m,
        n,
        k,
        output_stride,
        is_f32: kind % 2 == 1,
        is_fp8: kind / 2 == 1,
        output_alignment: u32::try_from(size()?).ok()?,
    };
    let mut algorithm = Algorithm::default();
    for word in &mut algorithm {
        *word = u64::from_str_radix(fields.next()?, 16).ok()?;
    }
    fields.next().is_none().then_some((shape, algorithm))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(m: usize) -> Shape {
        let (is_f32, is_fp8) = (m % 2 == 1, m.is_multiple_of(4));
        Shape { m, n: 4096, k: 1024, output_stride: 4096, is_f32, is_fp8, output_alignment: 16 }
    }

    /// A folder of this test alone.
    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("baton-choices-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        folder
    }

    #[test]
    fn choices_are_there_at_the_next_start() {
        let folder = folder("kept");
        let algorithm = [1, u64::MAX, 0, 3, 4, 5, 6, 0xabcd];
        let mut first = Choices::load(Some(&folder), "H200", 130_001);
        assert_eq!(first.get(&shape(8)), None);
        first.insert(shape(8), algorithm);
        first.insert(shape(9), [7; 8]);
        first.save();
        let second = Choices::load(Some(&folder), "H200", 130_001);
        assert_eq!((second.get(&shape(8)), second.get(&shape(9))), (Some(algorithm), Some([7; 8])));
        assert_eq!(second.get(&shape(10)), None);
        // Another device or library knows nothing of them.
        assert_eq!(Choices::load(Some(&folder), "H100", 130_001).get(&shape(8)), None);
        assert_eq!(Choices::load(Some(&folder), "H200", 130_002).get(&shape(8)), None);
        let _ = fs::remove_dir_all(&folder);
    }

    #[test]
    fn a_damaged_file_is_ignored_and_rewritten() {
        let folder = folder("damaged");
        let mut choices = Choices::load(Some(&folder), "H200", 1);
        choices.insert(shape(8), [7; 8]);
        choices.save();
        let path = choices.path.clone().expect("a folder was given");
        let good = fs::read_to_string(&path).unwrap();
        let digit = good.find(" 7").unwrap() + 1;
        let damaged = [
            String::new(),
            "\n".to_owned(),
            good[..good.len() / 2].to_owned(),
            format!("{}6{}", &good[..digit], &good[digit + 1..]),
            good.replace("H200", "H100"),
        ];
        for text in damaged {
            fs::write(&path, &text).unwrap();
            let mut choices = Choices::load(Some(&folder), "H200", 1);
            assert_eq!(choices.get(&shape(8)), None, "{text:?}");
            choices.insert(shape(8), [7; 8]);
            choices.save();
            assert_eq!(fs::read_to_string(&path).unwrap(), good);
        }
        fs::write(&path, [0xff, 0xfe, b'\n']).unwrap();
        assert_eq!(Choices::load(Some(&folder), "H200", 1).get(&shape(8)), None);
        let _ = fs::remove_dir_all(&folder);
    }

    #[test]
    fn without_a_folder_nothing_is_kept() {
        let mut choices = Choices::load(None, "H200", 1);
        choices.insert(shape(8), [7; 8]);
        choices.save();
        assert_eq!(choices.get(&shape(8)), Some([7; 8]));
        assert_eq!(Choices::load(None, "H200", 1).get(&shape(8)), None);
    }
}
