//! KV beyond one process, with the real binary and a real model: stores that survive their process.

mod common;

use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::Baton;
use common::worker::{Worker, free_port, prompt};

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
    // Killed in the middle of storing, again and again: never a wrong token.
    for round in 0..3_u64 {
        let server = Worker::start(&baton, &flags);
        let other = format!("{round} {prompt}");
        let expected = server.complete(&other, "me");
        std::thread::sleep(Duration::from_millis(7 * round));
        server.kill();
        let server = Worker::start(&baton, &flags);
        assert_eq!(server.complete(&other, "me").0, expected.0);
        assert_eq!(server.complete(&prompt, "me").0, text);
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
