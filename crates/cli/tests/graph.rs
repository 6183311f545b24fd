//! `baton graph` as a user runs it: files in, a NumPy file out, errors that name the file.

mod common;

use std::path::{Path, PathBuf};

use common::Baton;

fn golden(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../graph/tests/data").join(name).display().to_string()
}

struct Files {
    folder: tempfile::TempDir,
}

impl Files {
    /// A ring of 30 nodes with 20 features each.
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let files = Self { folder };
        let edges: Vec<String> = (0..30).map(|node| format!("{node},{}", (node + 1) % 30)).collect();
        files.write("edges.csv", format!("source,target\n{}\n", edges.join("\n")).as_bytes());
        let row = |node: usize| {
            (0..20).map(|col| format!("{}", (node * 7 + col * 3) % 11)).collect::<Vec<_>>().join(",")
        };
        files.write("x.csv", (0..30).map(|node| row(node) + "\n").collect::<String>().as_bytes());
        files.write("targets.csv", b"node\n3\n17\n");
        files
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.path(name), bytes).expect("writes");
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn arg(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    fn run<'a>(&'a self, extra: &[&'a str]) -> Vec<String> {
        let mut args = ["graph", "run"].map(str::to_owned).to_vec();
        args.push(golden("sage-mean.safetensors"));
        for (flag, file) in [("--edges", "edges.csv"), ("--features", "x.csv"), ("--out", "out.npy")] {
            args.extend([flag.to_owned(), self.arg(file)]);
        }
        args.extend(extra.iter().map(|&arg| arg.to_owned()));
        args
    }

    /// The floats after the header of 64 or 128 bytes.
    fn output(&self) -> Vec<f32> {
        let bytes = std::fs::read(self.path("out.npy")).expect("reads");
        let start = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
        bytes[start..].as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect()
    }
}

fn ok(args: &[String]) -> String {
    Baton::new().ok(&args.iter().map(String::as_str).collect::<Vec<_>>())
}

fn fails(args: &[String], expect: &str) {
    Baton::new().fails(&args.iter().map(String::as_str).collect::<Vec<_>>(), expect);
}

#[test]
fn embeddings_are_written_as_numpy() {
    let files = Files::new();
    let said = ok(&files.run(&[]));
    assert!(said.contains("30 embeddings of 12 values"), "{said}");
    let all = files.output();
    assert_eq!(all.len(), 30 * 12);
    let targets = files.arg("targets.csv");
    ok(&files.run(&["--targets", &targets]));
    let some = files.output();
    assert_eq!(some, [&all[3 * 12..4 * 12], &all[17 * 12..18 * 12]].concat());
    // A pool that is too small for the graph gives the same.
    let said = ok(&files.run(&["--graph-memory", "2500", "--graph-block-size", "4"]));
    assert!(said.contains("blocks went to the host"), "{said}");
    assert_eq!(files.output(), all);
    ok(&files.run(&["--fan-outs", "1,-1", "--seed", "3"]));
    assert_eq!(files.output(), all, "every node has one neighbour");
    ok(&files.run(&["--undirected", "--feature-cache-rows", "50", "--feature-cache-policy", "static"]));
    assert_ne!(files.output(), all);
}

#[test]
fn wrong_files_are_named() {
    let files = Files::new();
    files.write("bad.csv", b"0,1\n2,99\n");
    files.write("short.npy", b"\x93NUMPY\x01\x00");
    files.write("lie.parquet", b"PAR1 this is none PAR1");
    let with = |flag: &str, value: &str| {
        let mut args = files.run(&[]);
        args.extend([flag.to_owned(), value.to_owned()]);
        args
    };
    fails(&with("--edges", &files.arg("bad.csv")), "edge 1 goes from node 2 to node 99");
    fails(&with("--edges", &files.arg("short.npy")), "short.npy: is no whole NumPy file");
    fails(&with("--edges", &files.arg("lie.parquet")), "lie.parquet: is no Parquet file");
    fails(&with("--edges", &files.arg("none.csv")), "none.csv: cannot be read");
    fails(&with("--edges", &files.arg("x.dat")), "of no known kind");
    fails(&with("--fan-outs", "3"), "1 fan-outs, but the model has 2 layers");
    fails(&with("--graph-device", "tpu"), "no such device");
    fails(&with("--graph-memory", "100"), "at least 2 are needed");
    files.write("targets.csv", b"30\n");
    fails(&with("--targets", &files.arg("targets.csv")), "target 30 is not a node");
}

#[test]
fn the_benchmark_reports_json() {
    let small = ["graph", "bench", "--nodes", "200", "--edges", "2000", "--widths", "8,8,4", "--repeat", "1"];
    let result = Baton::new().json(&small);
    assert_eq!((result["nodes"].as_u64(), result["edges"].as_u64()), (Some(200), Some(2000)));
    assert!(result["median_seconds"].as_f64().is_some_and(|seconds| seconds > 0.0));
    let result = Baton::new().json(&[&small[..], &["--overlap", "4"]].concat());
    assert!(result["shared_rows"].as_u64() < result["unshared_rows"].as_u64(), "{result}");
}
