//! How fast KV goes from one process to another on this machine: `cargo run --release -p baton-cluster --example transfer_speed`
//!
//! The program starts itself a second time as the one that has the KV: 250 rows as large as those of SmolLM2-135M.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use baton_cluster::{BufferBlocks, PeerOptions, PeerStore, TransferOptions, TransferServer};
use baton_core::BlockId;
use baton_engine::{BlockHash, BlockKey, BlockStore, KvIdentity, StoredRow};

const NUM_ROWS: usize = 250;
const ROW_BYTES: usize = 16 * 23040;
const ROUNDS: usize = 8;

fn identity() -> KvIdentity {
    KvIdentity { model: "speed".to_owned(), layout: "bytes".to_owned(), row_bytes: vec![ROW_BYTES] }
}

fn rows() -> Vec<StoredRow> {
    let row = |number: usize| StoredRow {
        key: BlockKey { group: 0, hash: BlockHash::root(None).child(&[number as u32]) },
        blocks: vec![BlockId(number as u32)],
    };
    (0..NUM_ROWS).map(row).collect()
}

fn serve() -> Result<(), Box<dyn std::error::Error>> {
    let options = TransferOptions {
        listen: "127.0.0.1:0".parse()?,
        max_bytes: 1 << 30,
        keep: Duration::from_secs(600),
        secret: "speed".to_owned(),
    };
    let server = TransferServer::start(options, &identity())?;
    server.store(&rows(), &BufferBlocks::new(NUM_ROWS, ROW_BYTES));
    println!("{}", server.address());
    std::io::stdout().flush()?;
    // Until the other one has ended.
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    if std::env::args().nth(1).as_deref() == Some("serve") {
        return serve();
    }
    let mut child = Command::new(std::env::current_exe()?)
        .arg("serve")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut address = String::new();
    BufReader::new(child.stdout.take().ok_or("a pipe")?).read_line(&mut address)?;
    let options = PeerOptions {
        workers: vec![address.trim().to_owned()],
        time_limit: Duration::from_secs(5),
        prefill_limit: Duration::from_secs(5),
        secret: "speed".to_owned(),
    };
    let (peer, rows) = (PeerStore::new(options, &identity()), rows());
    let keys: Vec<BlockKey> = rows.iter().map(|row| row.key).collect();
    let host = BufferBlocks::new(NUM_ROWS, ROW_BYTES);
    let mut best = Duration::MAX;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        let found = peer.lookup(&keys);
        let fetched = peer.fetch(&rows, &host);
        best = best.min(start.elapsed());
        assert!(found.iter().chain(&fetched).all(|good| *good), "{:?}", peer.stats());
    }
    let bytes = (NUM_ROWS * ROW_BYTES) as f64;
    println!(
        "{:.0} MB in {:.1} ms: {:.2} GB/s",
        bytes / 1e6,
        best.as_secs_f64() * 1e3,
        bytes / best.as_secs_f64() / 1e9
    );
    drop(child.stdin.take());
    child.wait()?;
    Ok(())
}
