//! NumPy's `.npz`: a ZIP archive of `.npy` files.

use std::io::{Cursor, Read};

use zip::ZipArchive;

use super::npy::{self, Array};

/// What a member may unpack to, beyond the archive's own size: deflate makes at most about a thousand of one.
const MAX_RATIO: u64 = 1100;

/// The first of these members, or the only one.
pub fn find(bytes: Vec<u8>, names: &[&str]) -> Result<Array, String> {
    let archive_bytes = bytes.len() as u64;
    let mut archive =
        ZipArchive::new(Cursor::new(bytes)).map_err(|error| format!("is no .npz file: {error}"))?;
    let members: Result<Vec<String>, _> =
        archive.file_names().map(|name| name.map(std::borrow::Cow::into_owned)).collect();
    let members = members.map_err(|error| format!("is no .npz file: {error}"))?;
    let named = names.iter().map(|name| format!("{name}.npy")).find(|name| members.contains(name));
    let name = match (named, &members[..]) {
        (Some(name), _) => name,
        (None, [only]) => only.clone(),
        (None, _) => return Err(format!("has none of {}, but {}", names.join(", "), members.join(", "))),
    };
    let member = archive.by_name(&name).map_err(|error| format!("cannot be unpacked: {error}"))?;
    let limit = archive_bytes.saturating_mul(MAX_RATIO);
    let mut values = Vec::new();
    let read = member.take(limit + 1).read_to_end(&mut values);
    read.map_err(|error| format!("cannot be unpacked: {error}"))?;
    if values.len() as u64 > limit {
        return Err("unpacks to more than can be true".to_owned());
    }
    npy::parse(&values).map_err(|what| format!("{name} {what}"))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn archive(members: &[(&str, &[f32])]) -> Vec<u8> {
        let mut writer = zip::ZipWriter::new(Cursor::new(Vec::new()));
        for (name, values) in members {
            writer.start_file(*name, zip::write::SimpleFileOptions::default()).expect("starts");
            let mut member = Vec::new();
            npy::write_f32(&mut member, 1, values).expect("writes");
            writer.write_all(&member).expect("writes");
        }
        writer.finish().expect("ends").into_inner()
    }

    #[test]
    fn members_are_found_by_name() {
        let both = archive(&[("x.npy", &[1.0]), ("y.npy", &[2.0, 3.0])]);
        assert_eq!(find(both.clone(), &["features", "x"]).expect("reads").shape, [1, 1]);
        assert_eq!(find(archive(&[("any.npy", &[1.0, 2.0])]), &["x"]).expect("reads").shape, [2, 1]);
        let error = find(both.clone(), &["edges"]).expect_err("none");
        assert!(error.contains("none of edges") && error.contains("y.npy"), "{error}");
        for end in 0..both.len() {
            find(both[..end].to_vec(), &["x"]).expect_err("truncated");
        }
    }
}
