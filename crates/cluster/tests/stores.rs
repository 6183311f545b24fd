//! Stores keep what they are given and nothing else: on disk, and in a real Redis server.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_backend::HostBlocks;
use baton_cluster::{BufferBlocks, ClusterError, DiskStore, Kv, KvStore, RedisOptions, RedisStore};
use baton_core::BlockId;
use baton_engine::{BlockHash, BlockKey, BlockStore, KvIdentity, StoredRow};

use common::Redis;

const ROW_BYTES: usize = 3000;

fn identity(model: &str) -> KvIdentity {
    KvIdentity { model: model.to_owned(), layout: "two lanes".to_owned(), row_bytes: vec![ROW_BYTES] }
}

fn rows(range: std::ops::Range<u32>) -> Vec<StoredRow> {
    let row = |(index, token): (usize, u32)| StoredRow {
        key: BlockKey { group: 0, hash: BlockHash::root(None).child(&[token]) },
        blocks: vec![BlockId(2 * index as u32), BlockId(2 * index as u32 + 1)],
    };
    range.enumerate().map(row).collect()
}

fn keys(rows: &[StoredRow]) -> Vec<BlockKey> {
    rows.iter().map(|row| row.key).collect()
}

/// Blocks whose bytes tell which they are.
fn filled(num_rows: usize, seed: u8) -> BufferBlocks {
    let blocks = BufferBlocks::new(2 * num_rows, ROW_BYTES / 2);
    for block in 0..2 * num_rows as u32 {
        let bytes: Vec<u8> = (0..ROW_BYTES / 2).map(|byte| byte as u8 ^ block as u8 ^ seed).collect();
        blocks.write(block, &bytes);
    }
    blocks
}

fn content(blocks: &BufferBlocks, block: u32) -> Vec<u8> {
    let mut bytes = vec![0; ROW_BYTES / 2];
    blocks.read(block, &mut bytes);
    bytes
}

/// Every store: what goes in comes out, what did not go in does not.
fn check_store(store: &dyn BlockStore) {
    let (all, source) = (rows(0..40), filled(40, 7));
    store.store(&all[..30], &source);
    let found = store.lookup(&keys(&all));
    assert_eq!(found.iter().filter(|found| **found).count(), 30, "{:?}", store.stats());
    let target = filled(40, 99);
    let fetched = store.fetch(&all, &target);
    assert_eq!(fetched, found);
    for block in 0..60 {
        assert_eq!(content(&target, block), content(&source, block), "block {block}");
    }
    store.remove(&keys(&all[..10]));
    assert_eq!(store.lookup(&keys(&all)).iter().filter(|found| **found).count(), 20);
    let stats = store.stats();
    assert_eq!((stats.num_rows_stored, stats.num_rows_fetched, stats.num_corrupt), (30, 30, 0));
}

#[test]
fn a_disk_keeps_rows_over_restarts() {
    let root = tempfile::tempdir().unwrap();
    let store = DiskStore::open(root.path(), 1 << 20, &identity("a"), "").unwrap();
    check_store(&store);
    let in_use = DiskStore::open(root.path(), 1 << 20, &identity("a"), "").unwrap_err();
    assert!(matches!(in_use, ClusterError::InUse { .. }), "{in_use}");
    drop(store);
    let other = DiskStore::open(root.path(), 1 << 20, &identity("b"), "").unwrap_err();
    assert!(matches!(other, ClusterError::OtherModel { .. }), "{other}");
    let again = DiskStore::open(root.path(), 1 << 20, &identity("a"), "").unwrap();
    assert_eq!(again.lookup(&keys(&rows(0..40))).iter().filter(|found| **found).count(), 20);
}

#[test]
fn a_disk_stays_within_its_size() {
    let root = tempfile::tempdir().unwrap();
    let store = DiskStore::open(root.path(), 10_000, &identity("a"), "").unwrap();
    let all = rows(0..8);
    store.store(&all, &filled(8, 1));
    assert!(store.stats().used_bytes <= 10_000);
    assert_eq!(store.lookup(&keys(&all)), [false, false, false, false, false, true, true, true]);
    // What was used last stays.
    let _ = store.fetch(&all[5..6], &filled(8, 0));
    store.store(&rows(100..101), &filled(1, 1));
    assert_eq!(store.lookup(&keys(&all))[5..], [true, false, true]);
}

#[test]
fn broken_files_are_misses() {
    let root = tempfile::tempdir().unwrap();
    let (all, source) = (rows(0..4), filled(4, 7));
    DiskStore::open(root.path(), 1 << 20, &identity("a"), "").unwrap().store(&all, &source);
    let mut files: Vec<_> = std::fs::read_dir(root.path())
        .unwrap()
        .filter_map(|shard| std::fs::read_dir(shard.unwrap().path()).ok())
        .flat_map(|files| files.map(|file| file.unwrap().path()))
        .collect();
    files.sort();
    assert_eq!(files.len(), 4);
    // A flipped bit, a short file, an empty one; the last is another row's.
    let mut bytes = std::fs::read(&files[0]).unwrap();
    bytes[1000] ^= 1;
    std::fs::write(&files[0], &bytes).unwrap();
    std::fs::write(&files[1], &std::fs::read(&files[1]).unwrap()[..100]).unwrap();
    std::fs::write(&files[2], b"").unwrap();
    std::fs::write(files[3].with_file_name(".tmp-7"), b"unfinished").unwrap();
    std::fs::write(&files[3], &bytes).unwrap();
    let store = DiskStore::open(root.path(), 1 << 20, &identity("a"), "").unwrap();
    assert!(!files[3].with_file_name(".tmp-7").exists());
    assert_eq!(store.lookup(&keys(&all)), [true; 4]);
    assert_eq!(store.fetch(&all, &filled(4, 0)), [false; 4]);
    assert_eq!((store.stats().num_corrupt, store.stats().used_bytes), (4, 0));
    store.store(&all, &source);
    assert_eq!(store.fetch(&all, &filled(4, 0)), [true; 4]);
}

fn redis_options(url: &str, time_limit: Duration) -> RedisOptions {
    RedisOptions { url: url.parse().unwrap(), ttl: Duration::from_secs(60), time_limit, ca_pem: None }
}

fn open_redis(url: &str, model: &str, secret: &str) -> RedisStore {
    RedisStore::open(redis_options(url, Duration::from_secs(5)), &identity(model), secret).unwrap()
}

#[test]
fn redis_keeps_rows_for_all_of_the_same_model() {
    let Some(redis) = Redis::start(&["--requirepass", "s3cret"]) else { return };
    let url = redis.url("redis", ":s3cret@");
    check_store(&open_redis(&url, "a", "key"));
    let all = rows(0..40);
    let found = |store: &RedisStore| store.lookup(&keys(&all)).iter().filter(|found| **found).count();
    assert_eq!(found(&open_redis(&url, "a", "key")), 20, "another process");
    assert_eq!(found(&open_redis(&url, "b", "key")), 0, "another model");
    // Who does not know the secret finds entries and takes none.
    let stranger = open_redis(&url, "a", "other");
    assert_eq!(stranger.fetch(&all, &filled(40, 0)), [false; 40]);
    assert_eq!(stranger.stats().num_corrupt, 20);
    let wrong = redis.url("redis", ":guess@");
    let refused = RedisStore::open(redis_options(&wrong, Duration::from_secs(5)), &identity("a"), "");
    assert!(refused.unwrap_err().to_string().contains("BATON_KV_STORE_PASSWORD"));
}

#[test]
fn redis_under_tls() {
    let certified = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (cert, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
    std::fs::write(&cert, certified.cert.pem()).unwrap();
    std::fs::write(&key, certified.signing_key.serialize_pem()).unwrap();
    let (cert, key) = (cert.display().to_string(), key.display().to_string());
    let tls = ["--tls-cert-file", &cert, "--tls-key-file", &key, "--tls-auth-clients", "no"];
    let Some(redis) = Redis::start_tls(&tls) else { return };
    let mut options = redis_options(&redis.url("rediss", ""), Duration::from_secs(5));
    options.url.host = "localhost".to_owned();
    let distrusted = RedisStore::open(options.clone(), &identity("a"), "").unwrap();
    assert!(!distrusted.is_reachable(), "a certificate that nobody has vouched for");
    options.ca_pem = Some(certified.cert.pem().into_bytes());
    check_store(&RedisStore::open(options, &identity("a"), "").unwrap());
}

#[test]
fn a_server_that_hangs_dies_or_lies_costs_its_time_limit() {
    let Some(mut redis) = Redis::start(&[]) else { return };
    let limit = Duration::from_millis(200);
    let url = redis.url("redis", "");
    let store = RedisStore::open(redis_options(&url, limit), &identity("a"), "").unwrap();
    let (all, source) = (rows(0..40), filled(40, 7));
    store.store(&all, &source);
    assert_eq!(store.stats().num_rows_stored, 40);
    // Values of another length, of another kind, and right in all but a bit.
    redis.garble("baton:kv:*");
    let fetched = store.fetch(&all, &filled(40, 0));
    assert_eq!(fetched, [false; 40]);
    assert!(store.stats().num_corrupt > 0);
    redis.pause();
    let start = Instant::now();
    for _ in 0..10 {
        assert_eq!(store.lookup(&keys(&all)), [false; 40]);
    }
    // Three wait for the limit, then nobody asks.
    assert!(start.elapsed() < 8 * limit, "{:?}", start.elapsed());
    let stats = store.stats();
    assert!(stats.num_timeouts > 0 && stats.num_skipped > 0 && stats.is_open, "{stats:?}");
    redis.resume();
    redis.kill();
    let gone = RedisStore::open(redis_options(&url, limit), &identity("a"), "").unwrap();
    assert_eq!(gone.lookup(&keys(&all)), [false; 40]);
    assert!(gone.stats().num_failures > 0);
}

#[test]
fn kv_is_stored_and_retrieved_by_tokens() {
    let store: Arc<dyn BlockStore> = Arc::new(baton_cluster::MemoryStore::default());
    let kv_store = KvStore::new(Arc::clone(&store), &identity("a"), 4);
    let tokens: Vec<u32> = (0..11).collect();
    let kv = Kv { num_tokens: 8, rows: vec![vec![1; ROW_BYTES], vec![2; ROW_BYTES]] };
    kv_store.store(&tokens, &kv);
    assert_eq!(kv_store.retrieve(&(0..100).collect::<Vec<_>>()), kv);
    let other: Vec<u32> = (0..4).chain(50..60).collect();
    assert_eq!(kv_store.retrieve(&other).num_tokens, 4);
    assert_eq!(kv_store.clone().with_salt("other").retrieve(&tokens), Kv::default());
    kv_store.remove(&tokens);
    assert_eq!(kv_store.retrieve(&tokens), Kv::default());
}
