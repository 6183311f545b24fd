//! KV on a local disk: one file for each row, written beside and renamed, so that there are whole files only.
//!
//! A process that is killed at any moment leaves files with a temporary name, which the next one removes. What a lost page or
//! a bad disk makes of a file, its checksum finds. The directory belongs to one model and one process at a time. When it is
//! full, the rows that were used the longest time ago go first.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use baton_backend::HostBlocks;
use baton_engine::{BlockKey, BlockStore, KvIdentity, StoreStats, StoredRow};

use crate::ClusterError;
use crate::counters::Counters;
use crate::entry::{HEADER_BYTES, Sealer, parse_row_name, row_name};

/// Says which model and layout the directory is of.
const IDENTITY_FILE: &str = "identity";
const LOCK_FILE: &str = "lock";
const TEMPORARY: &str = ".tmp-";

#[derive(Debug)]
pub struct DiskStore {
    root: PathBuf,
    max_bytes: u64,
    sealer: Sealer,
    row_bytes: Vec<usize>,
    index: Mutex<Index>,
    next_temporary: AtomicU64,
    counters: Counters,
    /// Locked as long as this lives.
    _lock: File,
}

/// What there is, in the order of its last use.
#[derive(Debug, Default)]
struct Index {
    rows: HashMap<BlockKey, (u64, u64)>, // last use, bytes
    by_use: BTreeMap<u64, BlockKey>,
    next_use: u64,
    used_bytes: u64,
}

impl Index {
    fn touch(&mut self, key: BlockKey) -> bool {
        let Some((used, _)) = self.rows.get_mut(&key) else { return false };
        self.by_use.remove(used);
        *used = self.next_use;
        self.by_use.insert(self.next_use, key);
        self.next_use += 1;
        true
    }

    fn insert(&mut self, key: BlockKey, bytes: u64) {
        self.remove(key);
        self.rows.insert(key, (self.next_use, bytes));
        self.by_use.insert(self.next_use, key);
        self.next_use += 1;
        self.used_bytes += bytes;
    }

    fn remove(&mut self, key: BlockKey) -> bool {
        let Some((used, bytes)) = self.rows.remove(&key) else { return false };
        self.by_use.remove(&used);
        self.used_bytes -= bytes;
        true
    }
}

impl DiskStore {
    /// Opens a directory, which is made where it is not there, and finds what an earlier process has left in it.
    pub fn open(
        root: &Path,
        max_bytes: u64,
        identity: &KvIdentity,
        secret: &str,
    ) -> Result<Self, ClusterError> {
        let failed = |cause: std::io::Error| ClusterError::Disk {
            path: root.display().to_string(),
            cause: cause.to_string(),
        };
        fs::create_dir_all(root).map_err(failed)?;
        let lock = File::create(root.join(LOCK_FILE)).map_err(failed)?;
        if lock.try_lock().is_err() {
            return Err(ClusterError::InUse { path: root.display().to_string() });
        }
        let sealer = Sealer::new(identity, secret);
        let identity_path = root.join(IDENTITY_FILE);
        match fs::read_to_string(&identity_path) {
            Ok(known) if known.trim() == sealer.identity_hex() => {}
            Ok(_) => return Err(ClusterError::OtherModel { path: root.display().to_string() }),
            Err(_) => fs::write(&identity_path, sealer.identity_hex()).map_err(failed)?,
        }
        let store = Self {
            root: root.to_owned(),
            max_bytes,
            sealer,
            row_bytes: identity.row_bytes.clone(),
            index: Mutex::new(read_index(root).map_err(failed)?),
            next_temporary: AtomicU64::new(0),
            counters: Counters::default(),
            _lock: lock,
        };
        store.evict(0);
        Ok(store)
    }

    fn path(&self, key: BlockKey) -> PathBuf {
        let name = row_name(key);
        // 256 directories, so that none gets too long.
        let shard = &name[name.len() - 2..];
        self.root.join(shard).join(name)
    }

    fn index(&self) -> std::sync::MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes room for so many bytes.
    fn evict(&self, bytes: u64) {
        loop {
            let key = {
                let mut index = self.index();
                if index.used_bytes + bytes <= self.max_bytes {
                    return;
                }
                let Some((_, key)) = index.by_use.first_key_value() else { return };
                let key = *key;
                index.remove(key);
                key
            };
            let _ = fs::remove_file(self.path(key));
        }
    }

    fn fetch_row(&self, row: &StoredRow, host: &dyn HostBlocks, entry: &mut Vec<u8>) -> bool {
        let Some(&row_bytes) = self.row_bytes.get(row.key.group) else { return false };
        entry.resize(HEADER_BYTES + row_bytes, 0);
        let read = File::open(self.path(row.key)).and_then(|mut file| {
            let len = file.metadata()?.len();
            file.read_exact(entry)?;
            Ok(len)
        });
        let content = match read {
            Ok(len) if len == entry.len() as u64 => self.sealer.open(row.key, entry),
            Ok(_) => None,
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => None,
            Err(_) => {
                self.counters.failures.add(1);
                self.index().remove(row.key);
                return false;
            }
        };
        let Some(content) = content else {
            self.counters.corrupt.add(1);
            self.remove(&[row.key]);
            return false;
        };
        for (block, part) in row.blocks.iter().zip(content.chunks_exact(host.block_bytes())) {
            host.write(block.0, part);
        }
        self.counters.fetched.add(1);
        self.counters.bytes_fetched.add(row_bytes);
        self.index().touch(row.key);
        true
    }

    fn store_row(
        &self,
        row: &StoredRow,
        host: &dyn HostBlocks,
        content: &mut Vec<u8>,
    ) -> std::io::Result<()> {
        let bytes = (HEADER_BYTES + row.blocks.len() * host.block_bytes()) as u64;
        if bytes > self.max_bytes {
            return Ok(());
        }
        content.resize(row.blocks.len() * host.block_bytes(), 0);
        for (block, part) in row.blocks.iter().zip(content.chunks_exact_mut(host.block_bytes())) {
            host.read(block.0, part);
        }
        self.evict(bytes);
        let path = self.path(row.key);
        let directory = path.parent().unwrap_or(&self.root);
        let number = self.next_temporary.fetch_add(1, Ordering::Relaxed);
        let temporary = directory.join(format!("{TEMPORARY}{number}"));
        let write = || {
            let mut file = File::create(&temporary)?;
            file.write_all(&self.sealer.seal(row.key, content))?;
            file.write_all(content)?;
            drop(file);
            fs::rename(&temporary, &path)
        };
        let written = match write() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                fs::create_dir_all(directory)?;
                write()
            }
            other => other,
        };
        if let Err(error) = written {
            let _ = fs::remove_file(&temporary);
            return Err(error);
        }
        self.index().insert(row.key, bytes);
        self.counters.stored.add(1);
        self.counters.bytes_stored.add(content.len());
        Ok(())
    }
}

impl BlockStore for DiskStore {
    fn name(&self) -> &'static str {
        "disk"
    }

    fn lookup(&self, keys: &[BlockKey]) -> Vec<bool> {
        let index = self.index();
        let found: Vec<bool> = keys.iter().map(|key| index.rows.contains_key(key)).collect();
        self.counters.asked.add(keys.len());
        self.counters.found.add(found.iter().filter(|found| **found).count());
        found
    }

    fn fetch(&self, rows: &[StoredRow], host: &dyn HostBlocks) -> Vec<bool> {
        let mut entry = Vec::new();
        rows.iter().map(|row| self.fetch_row(row, host, &mut entry)).collect()
    }

    fn store(&self, rows: &[StoredRow], host: &dyn HostBlocks) {
        let mut content = Vec::new();
        for row in rows {
            if self.index().touch(row.key) {
                continue;
            }
            if self.store_row(row, host, &mut content).is_err() {
                self.counters.failures.add(1);
            }
        }
    }

    fn remove(&self, keys: &[BlockKey]) {
        for &key in keys {
            if self.index().remove(key) {
                let _ = fs::remove_file(self.path(key));
            }
        }
    }

    fn stats(&self) -> StoreStats {
        StoreStats { used_bytes: self.index().used_bytes, ..self.counters.stats("disk") }
    }
}

/// Finds the rows in a directory, the least recently written first, and removes what was never finished.
fn read_index(root: &Path) -> std::io::Result<Index> {
    let mut found: Vec<(SystemTime, BlockKey, u64)> = Vec::new();
    for shard in fs::read_dir(root)? {
        let shard = shard?;
        if !shard.file_type()?.is_dir() {
            continue;
        }
        for file in fs::read_dir(shard.path())? {
            let file = file?;
            let name = file.file_name();
            let name = name.to_string_lossy();
            if name.starts_with(TEMPORARY) {
                let _ = fs::remove_file(file.path());
            } else if let (Some(key), Ok(metadata)) = (parse_row_name(&name), file.metadata()) {
                found.push((metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH), key, metadata.len()));
            }
        }
    }
    found.sort_unstable_by_key(|(time, key, _)| (*time, *key));
    let mut index = Index::default();
    for (_, key, bytes) in found {
        index.insert(key, bytes);
    }
    Ok(index)
}
