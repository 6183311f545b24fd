//! Files as bytes: memory-mapped weights, and small files read whole under a limit. The only `unsafe` of this crate.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use baton_backend::SharedBytes;

use crate::ModelError;

/// A file mapped into memory; it must not be changed while a model is loaded from it.
struct MappedFile(memmap2::Mmap);

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// Maps a regular, non-empty file.
pub(crate) fn map(path: &Path) -> Result<SharedBytes, ModelError> {
    let file = open_regular(path)?;
    let len = file.metadata().map_err(|cause| io_error(path, cause))?.len();
    if len == 0 {
        return Err(malformed(path, "the file is empty; the download may be incomplete".to_owned()));
    }
    say_why_on_bus_error();
    // SAFETY: the mapping is private and read-only, so nothing in this process writes through it. Another process that
    // truncates or rewrites the file while it is mapped can still disturb us; no interface of the system prevents
    // that, and reading checkpoints of many gigabytes any other way would double their memory.
    #[allow(unsafe_code)]
    let mapping = unsafe { memmap2::Mmap::map(&file) }.map_err(|cause| io_error(path, cause))?;
    Ok(SharedBytes::new(Arc::new(MappedFile(mapping))))
}

/// A page of a mapped file that is no longer there, because the file was cut short or its disk failed, is a SIGBUS
/// wherever it is read. Nothing can go on from there; but the process ends with a sentence.
#[cfg(unix)]
fn say_why_on_bus_error() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    const WHY: &[u8] = b"error: a model file was cut short, or its disk failed, while the model was in use; hint: put \
        the file back and start again, and replace files of a running server by renaming, not by writing over them\n";
    extern "C" fn end(_signal: libc::c_int) {
        // SAFETY: both may be called in a signal handler, and the text is a constant.
        #[allow(unsafe_code)]
        unsafe {
            libc::write(2, WHY.as_ptr().cast(), WHY.len());
            libc::_exit(1);
        }
    }
    ONCE.call_once(|| {
        // SAFETY: the action is zeroed, which is a valid one, and gets a handler that only makes calls which may be made
        // there. A handler of somebody else is replaced; there is none in this process.
        #[allow(unsafe_code)]
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = end as extern "C" fn(libc::c_int) as usize;
            libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
        }
    });
}

#[cfg(not(unix))]
fn say_why_on_bus_error() {}

/// Reads a whole file of at most `limit` bytes.
pub(crate) fn read_bounded(path: &Path, limit: u64) -> Result<Vec<u8>, ModelError> {
    let file = open_regular(path)?;
    let len = file.metadata().map_err(|cause| io_error(path, cause))?.len();
    if len > limit {
        return Err(malformed(path, format!("the file has {len} bytes, more than the limit of {limit}")));
    }
    // The file may grow while it is read, so the limit is kept by the reader too.
    let mut bytes = Vec::with_capacity(usize::try_from(len).unwrap_or(0));
    file.take(limit).read_to_end(&mut bytes).map_err(|cause| io_error(path, cause))?;
    Ok(bytes)
}

/// Like [`read_bounded`], with `None` for a file that does not exist.
pub(crate) fn read_if_present(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, ModelError> {
    if path.exists() { read_bounded(path, limit).map(Some) } else { Ok(None) }
}

fn open_regular(path: &Path) -> Result<File, ModelError> {
    // Asked before opening: opening a named pipe would wait for a writer.
    let metadata = fs::metadata(path).map_err(|cause| io_error(path, cause))?;
    if !metadata.is_file() {
        return Err(malformed(path, "it is not a regular file".to_owned()));
    }
    File::open(path).map_err(|cause| io_error(path, cause))
}

fn io_error(path: &Path, cause: std::io::Error) -> ModelError {
    ModelError::Io { path: path.to_owned(), cause }
}

pub(crate) fn malformed(path: &Path, cause: String) -> ModelError {
    ModelError::Malformed { path: path.to_owned(), cause }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_within_the_limit_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.json");
        assert!(matches!(map(&path), Err(ModelError::Io { .. })));
        fs::write(&path, b"").unwrap();
        assert!(map(&path).unwrap_err().to_string().contains("the file is empty"));
        fs::write(&path, b"12345").unwrap();
        assert_eq!(map(&path).unwrap().as_slice(), b"12345");
        assert_eq!(read_bounded(&path, 5).unwrap(), b"12345");
        assert!(read_bounded(&path, 4).unwrap_err().to_string().contains("more than the limit of 4"));
        assert!(map(directory.path()).unwrap_err().to_string().contains("not a regular file"));
        assert!(read_if_present(&directory.path().join("b"), 5).unwrap().is_none());
    }

    /// Only does something in the process that the next test starts.
    #[cfg(unix)]
    #[test]
    fn reads_what_is_no_longer_there() {
        let Some(path) = std::env::var_os("BATON_TEST_CUT_FILE") else { return };
        let bytes = map(Path::new(&path)).expect("a file");
        File::options().write(true).open(&path).and_then(|file| file.set_len(1)).expect("cut short");
        let sum: u64 = bytes.as_slice().iter().map(|&byte| u64::from(byte)).sum();
        panic!("read all the same: {sum}");
    }

    #[cfg(unix)]
    #[test]
    fn a_file_that_is_cut_short_under_us_ends_the_process_with_a_sentence() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("weights");
        fs::write(&path, vec![1; 1 << 20]).unwrap();
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "mapped_file::tests::reads_what_is_no_longer_there", "--nocapture"])
            .env("BATON_TEST_CUT_FILE", &path)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("error: a model file was cut short"), "{said}");
    }
}
