//! KV beyond one process, with the real binary and a real model: stores that survive their process.

mod common;

use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::Baton;
use common::worker::{Worker, free_port, prompt};
use serde_json::json;

#[test]
fn kv_on_disk_is_found_after_kill_9() {
    let baton = Baton::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().display().to_string();
    let flags = ["--kv-disk-path", path.as_str(), "--kv-disk-size", "256MiB"];
    let prompt = prompt(60);
    let first = Worker::start(&baton, &flags);
    let (text, cached) = first.complete(&prompt, "me");
    assert_eq!(cached, 0);
    first.wait_for("baton:kv_store_rows_total{store=\"disk\",kind=\"stored\"}", 20.0);
    first.kill();
    let second = Worker::start(&baton, &flags);
    let (again, cached) = second.complete(&prompt, "me");
    assert_eq!(again, text);
    assert!(cached >= 300, "{cached} tokens came from the disk");
    assert_eq!(second.complete(&prompt, "other").1, 0, "another tenant finds nothing");
    assert!(second.metric("vllm:external_prefix_cache_hits_total") >= 300.0);
    second.kill();
    // Killed while it computes and stores for others, again and again: never a wrong token.
    let body = |text: &str| json!({ "prompt": text, "max_tokens": 4, "temperature": 0, "cache_salt": "me" });
    let others: Vec<String> = (0..4).map(|number| format!("{number} {prompt}")).collect();
    let plain = Worker::start(&baton, &[]);
    let expected: Vec<String> = others.iter().map(|other| plain.complete(other, "me").0).collect();
    drop(plain);
    for round in 0..4_u64 {
        let server = Worker::start(&baton, &flags);
        let waiting: Vec<TcpStream> =
            others.iter().map(|other| server.send("/v1/completions", &body(other))).collect();
        std::thread::sleep(Duration::from_millis(30 + 90 * round));
        server.kill();
        drop(waiting);
        let server = Worker::start(&baton, &flags);
        let other = round as usize;
        assert_eq!(server.complete(&others[other], "me").0, expected[other]);
        assert_eq!(server.complete(&prompt, "me").0, text);
        assert_eq!(server.metric("baton:kv_store_errors_total{store=\"disk\",kind=\"corrupt\"}"), 0.0);
    }
}

#[test]
fn kv_in_redis_is_found_by_another_process() {
    let port = free_port();
    let redis = Command::new("redis-server")
        .args(["--bind", "127.0.0.1", "--port", &port, "--save", "", "--appendonly", "no"])
        .stdout(Stdio::null())
        .spawn();
    let mut redis = match redis {
        Ok(redis) => redis,
        Err(error) => {
            assert!(std::env::var_os("BATON_REQUIRE_REDIS").is_none(), "redis-server is needed: {error}");
            println!("passed over: there is no redis-server here (apt-get install redis-server)");
            return;
        }
    };
    let deadline = Instant::now() + Duration::from_secs(20);
    while TcpStream::connect(format!("127.0.0.1:{port}")).is_err() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
    let baton = Baton::new();
    let url = format!("redis://127.0.0.1:{port}");
    let flags = ["--kv-store", url.as_str()];
    let prompt = prompt(60);
    let first = Worker::start(&baton, &flags);
    let (text, _) = first.complete(&prompt, "me");
    first.wait_for("baton:kv_store_rows_total{store=\"redis\",kind=\"stored\"}", 20.0);
    first.kill();
    let second = Worker::start(&baton, &flags);
    let (again, cached) = second.complete(&prompt, "me");
    assert_eq!(again, text);
    assert!(cached >= 300, "{cached} tokens came from Redis");
    assert_eq!(second.complete(&prompt, "other").1, 0, "another tenant finds nothing");
    redis.kill().unwrap();
    redis.wait().unwrap();
    // Nothing fails without it.
    assert!(!second.complete(&format!("Without it: {prompt}"), "me").0.is_empty());
    assert!(second.metric("baton:kv_store_errors_total{store=\"redis\",kind=\"failed\"}") > 0.0);
}
