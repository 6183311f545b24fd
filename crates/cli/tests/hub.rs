//! Models from a hub, against a small server that speaks its API.

mod common;

use std::path::PathBuf;

use common::hub::{COMMIT, Faults, Hub, sha256};
use common::{Baton, Ran, finish};

/// What a GGUF file could be; `pull` does not look inside.
fn weights() -> Vec<u8> {
    (0..300_000u32).flat_map(u32::to_le_bytes).collect()
}

fn gguf_hub(faults: Faults) -> Hub {
    let weights = weights();
    Hub::start(&[("README.md", b"hello"), ("m-Q8_0.gguf", b"other"), ("m-Q4_K_M.gguf", &weights)], faults)
}

fn run(baton: &Baton, hub: &Hub, args: &[&str], variables: &[(&str, &str)]) -> Ran {
    let mut command = baton.command(args);
    command.env("HF_ENDPOINT", &hub.url).envs(variables.iter().copied());
    finish(command, "")
}

fn ok(baton: &Baton, hub: &Hub, args: &[&str]) -> String {
    let ran = run(baton, hub, args, &[]);
    assert_eq!(ran.code, 0, "{args:?}: {ran:?}");
    ran.stdout
}

fn fails(baton: &Baton, hub: &Hub, args: &[&str], variables: &[(&str, &str)], expect: &str) {
    let ran = run(baton, hub, args, variables);
    assert_eq!(ran.code, 1, "{args:?}: {ran:?}");
    common::assert_is_error(&ran, expect);
}

fn blobs(baton: &Baton) -> PathBuf {
    baton.home.path().join("hub/models--owner--name/blobs")
}

#[test]
fn a_gguf_file_is_fetched_once_and_kept_as_the_hubs_tools_keep_it() {
    let (baton, hub) = (Baton::new(), gguf_hub(Faults::default()));
    let said = ok(&baton, &hub, &["pull", "owner/name"]);
    let snapshot = baton.home.path().join("hub/models--owner--name/snapshots").join(COMMIT);
    assert!(said.contains("owner/name: ") && said.contains("m-Q4_K_M.gguf"), "{said}");
    assert_eq!(std::fs::read(snapshot.join("m-Q4_K_M.gguf")).unwrap(), weights());
    assert_eq!(
        std::fs::read_link(snapshot.join("m-Q4_K_M.gguf")).unwrap(),
        PathBuf::from(format!("../../blobs/{}", sha256(&weights())))
    );
    let main = baton.home.path().join("hub/models--owner--name/refs/main");
    assert_eq!(std::fs::read_to_string(main).unwrap(), COMMIT);
    assert!(!snapshot.join("m-Q8_0.gguf").exists() && !baton.home.path().join("evil.gguf").exists());
    let list = ok(&baton, &hub, &["list"]);
    assert!(list.contains("owner/name") && list.contains("1.14 MiB"), "{list}");
    // Again: nothing is transferred.
    let before = hub.log().iter().filter(|line| line.contains("/cdn/")).count();
    ok(&baton, &hub, &["pull", "owner/name:q4_k_m"]);
    assert_eq!(hub.log().iter().filter(|line| line.contains("/cdn/")).count(), before);
    assert_eq!(ok(&baton, &hub, &["rm", "owner/name"]), "removed owner/name\n");
    assert!(ok(&baton, &hub, &["list"]).starts_with("No models have been fetched."));
    fails(&baton, &hub, &["rm", "owner/name"], &[], "no model \"owner/name\" has been fetched");
}

#[test]
fn all_parts_of_a_split_file_are_fetched() {
    let parts = [
        ("q8/m-Q8_0-00001-of-00002.gguf", &weights()[..600_000]),
        ("q8/m-Q8_0-00002-of-00002.gguf", b"rest"),
    ];
    let (baton, hub) = (Baton::new(), Hub::start(&parts, Faults::default()));
    let said = ok(&baton, &hub, &["pull", "owner/name:q8_0"]);
    assert!(said.contains("m-Q8_0-00001-of-00002.gguf"), "{said}");
    let snapshot = baton.home.path().join("hub/models--owner--name/snapshots").join(COMMIT);
    for (name, bytes) in parts {
        assert_eq!(std::fs::read(snapshot.join(name)).unwrap(), bytes, "{name}");
    }
    let (baton, hub) = (Baton::new(), Hub::start(&parts[1..], Faults::default()));
    fails(&baton, &hub, &["pull", "owner/name:q8_0"], &[], "has no q8/m-Q8_0-00001-of-00002.gguf");
}

#[test]
fn a_directory_of_safetensors_runs() {
    let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/data/golden/llama");
    let (mut names, mut files) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(golden).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let extension = path.extension();
        if extension.is_some_and(|extension| extension == "json" || extension == "safetensors") {
            names.push(name);
            files.push(std::fs::read(path).unwrap());
        }
    }
    let files: Vec<(&str, &[u8])> =
        names.iter().map(String::as_str).zip(files.iter().map(Vec::as_slice)).collect();
    let (baton, hub) = (Baton::new(), Hub::start(&files, Faults::default()));
    let args = ["complete", "owner/name", "--prompt-token-ids", "1,2,3", "--max-tokens", "2", "--json"];
    let first = ok(&baton, &hub, &args);
    assert!(
        serde_json::from_str::<serde_json::Value>(&first).unwrap()["choices"].is_array()
            || first.contains("token_ids"),
        "{first}"
    );
    let asked = hub.log().len();
    // The second time without the hub.
    let ran = run(&baton, &hub, &args, &[("HF_HUB_OFFLINE", "1")]);
    assert_eq!((ran.code, hub.log().len()), (0, asked), "{ran:?}");
}

#[test]
fn a_broken_transfer_goes_on_where_it_stopped() {
    let hub = gguf_hub(Faults { cut_after: Some(500_000), ..Faults::default() });
    let baton = Baton::new();
    ok(&baton, &hub, &["pull", "owner/name"]);
    let parts: Vec<String> = hub.log().into_iter().filter(|line| line.contains("/cdn/")).collect();
    assert_eq!(parts.len(), 3, "{parts:?}");
    assert!(parts[1].ends_with("from 500000") && parts[2].ends_with("from 1000000"), "{parts:?}");
}

#[test]
fn what_an_earlier_run_left_is_used() {
    let (baton, hub) = (Baton::new(), gguf_hub(Faults::default()));
    std::fs::create_dir_all(blobs(&baton)).unwrap();
    std::fs::write(blobs(&baton).join(format!("{}.incomplete", sha256(&weights()))), &weights()[..700_000])
        .unwrap();
    ok(&baton, &hub, &["pull", "owner/name"]);
    assert!(hub.log().iter().any(|line| line.ends_with("from 700000")), "{:?}", hub.log());
    // A hub that does not continue begins anew.
    let (baton, hub) = (Baton::new(), gguf_hub(Faults { no_ranges: true, ..Faults::default() }));
    std::fs::create_dir_all(blobs(&baton)).unwrap();
    std::fs::write(blobs(&baton).join(format!("{}.incomplete", sha256(&weights()))), b"nonsense").unwrap();
    ok(&baton, &hub, &["pull", "owner/name"]);
}

#[test]
fn hubs_that_lie_or_hang_are_found_out() {
    for (faults, expect) in [
        (Faults { damages: true, ..Faults::default() }, "its checksum is"),
        (Faults { lies_by: 7, ..Faults::default() }, "the hub sends 1200000 bytes"),
        (Faults { lies_by: -7, ..Faults::default() }, "the hub sends 1200000 bytes"),
        (Faults { sends_more: 9, ..Faults::default() }, "the hub sends more"),
        (Faults { cut_after: Some(0), ..Faults::default() }, "broke off at byte 0 of 1200000"),
        (Faults { hangs: true, ..Faults::default() }, "nothing came for 1 s"),
    ] {
        let (baton, hub) = (Baton::new(), gguf_hub(faults));
        fails(&baton, &hub, &["pull", "owner/name"], &[("HF_HUB_DOWNLOAD_TIMEOUT", "1")], expect);
        assert!(ok(&baton, &hub, &["list"]).starts_with("No models have been fetched."), "{faults:?}");
    }
}

#[test]
fn a_busy_hub_is_asked_again() {
    let (baton, hub) = (Baton::new(), gguf_hub(Faults { busy_once: true, ..Faults::default() }));
    ok(&baton, &hub, &["pull", "owner/name"]);
}

#[test]
fn tokens_open_the_hub_and_go_nowhere_else() {
    let hub = gguf_hub(Faults { token: Some("good"), ..Faults::default() });
    let baton = Baton::new();
    fails(&baton, &hub, &["pull", "owner/name"], &[], "does not give owner/name at main to everyone");
    fails(&baton, &hub, &["pull", "owner/name"], &[("HF_TOKEN", "bad")], "to this token");
    let ran = run(&baton, &hub, &["pull", "owner/name"], &[("HF_TOKEN", "good")]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(
        hub.log().iter().all(|line| !line.contains("/cdn/") || !line.ends_with("token")),
        "{:?}",
        hub.log()
    );
}

#[test]
fn names_that_do_not_exist_are_said() {
    let (baton, hub) = (Baton::new(), gguf_hub(Faults::default()));
    fails(&baton, &hub, &["pull", "owner/other"], &[], "has no owner/other at main");
    fails(&baton, &hub, &["pull", "owner/name:Q2_K"], &[], "owner/name has no Q2_K");
    fails(&baton, &hub, &["pull", "owner/name", "--revision", "v9"], &[], "has no owner/name at v9");
    ok(&baton, &hub, &["pull", "owner/name", "--revision", "v1"]);
    fails(&baton, &hub, &["inspect", "owner/typo"], &[], "there is no file or directory owner/typo, and");
    fails(
        &baton,
        &hub,
        &["serve", "owner/name:q8_0", "--revision", "v3", "--port", "0"],
        &[],
        "has no owner/name at v3",
    );
}

#[test]
fn several_fetches_at_once_do_no_harm() {
    let (baton, hub) = (Baton::new(), gguf_hub(Faults::default()));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| ok(&baton, &hub, &["pull", "owner/name"]));
        }
    });
    let left: Vec<_> =
        std::fs::read_dir(blobs(&baton)).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, [std::ffi::OsString::from(sha256(&weights()))], "nothing but the file itself is left");
}
