//! `baton bench startup`: this program as its own child, again and again.

use std::io::Write;

use anyhow::{Context, Result};
use baton_bench::StartupOptions;

use super::{bar, write_result};
use crate::bench_args::StartupArgs;
use crate::session;

/// Flags of this command that a server does not know, each with a value.
const OWN_FLAGS: [&str; 3] = ["--num-iters-cold", "--num-iters-warm", "--output-json"];
/// The same without a value.
const OWN_SWITCHES: [&str; 2] = ["--no-progress", "--disable-tqdm"];

pub fn run(args: &StartupArgs, out: &mut dyn Write) -> Result<()> {
    let found = session::locate(args.model.as_deref())?;
    let typed = std::env::args().skip(1).skip_while(|arg| arg != "startup").skip(1);
    let mut child_args = vec!["serve".to_owned(), "--port=0".to_owned(), "--log-level=error".to_owned()];
    child_args.extend(of_server(typed));
    // Kernels are kept by us, and by NVIDIA's compiler; models stay where they are.
    let cold_folder = std::env::temp_dir().join(format!("baton-startup-{}", std::process::id()));
    let cold_environment = vec![
        ("BATON_HOME", baton_hub::home::home()?),
        ("XDG_CACHE_HOME", cold_folder.clone()),
        ("CUDA_CACHE_PATH", cold_folder.join("nvidia")),
    ];
    let options = StartupOptions {
        program: std::env::current_exe().context("this program's own file is not known")?,
        args: child_args,
        files: vec![found.path.clone()],
        cold_folder,
        cold_environment,
        num_iters_cold: args.num_iters_cold,
        num_iters_warm: args.num_iters_warm,
    };
    let result = baton_bench::startup(&options, &bar(&args.output, 1))?;
    write!(out, "{}", result.summary())?;
    let mut json = result.to_json();
    json.insert("model_id".to_owned(), found.name.into());
    write_result(&args.output, &json)
}

/// What was typed, without what is only for this command: the rest is for the server.
fn of_server(typed: impl Iterator<Item = String>) -> Vec<String> {
    let mut kept = Vec::new();
    let mut typed = typed.peekable();
    while let Some(arg) = typed.next() {
        let name = arg.split('=').next().unwrap_or_default();
        if OWN_SWITCHES.contains(&name) {
            continue;
        }
        if OWN_FLAGS.contains(&name) {
            if !arg.contains('=') {
                typed.next();
            }
            continue;
        }
        kept.push(arg);
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_gets_what_is_its_own() {
        let typed = "m.gguf --num-iters-cold 2 --threads 2 --output-json=x.json --no-progress --device=cpu";
        let kept = of_server(typed.split(' ').map(str::to_owned));
        assert_eq!(kept, ["m.gguf", "--threads", "2", "--device=cpu"]);
    }
}
