//! `baton ps`: what a running server has loaded, asked of the server itself.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::args::PsArgs;
use crate::errors::hinted;
use crate::size::grouped;
use crate::table::{Align, Table};

const PATIENCE: Duration = Duration::from_secs(10);

pub fn run(args: &PsArgs, out: &mut dyn Write) -> Result<()> {
    let url = args.address.base_url();
    let (models, load) = (get(args, &url, "/v1/models")?, get(args, &url, "/load")?);
    if args.json {
        let both = serde_json::json!({"url": url, "models": models["data"], "running": load["server_load"]});
        writeln!(out, "{}", serde_json::to_string_pretty(&both)?)?;
        return Ok(());
    }
    let mut table = Table::new(&[Align::Left, Align::Right, Align::Right, Align::Left]);
    table.row(["NAME", "CONTEXT", "REQUESTS", "SERVER"]);
    for model in models["data"].as_array().into_iter().flatten() {
        let name = model["id"].as_str().unwrap_or("–");
        let context = model["max_model_len"].as_u64().map_or_else(|| "–".to_owned(), grouped);
        table.row([name, &context, &load["server_load"].to_string(), &url]);
    }
    write!(out, "{table}")?;
    Ok(())
}

fn get(args: &PsArgs, url: &str, path: &str) -> Result<Value> {
    let config =
        ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).http_status_as_error(false).build();
    let mut request = ureq::Agent::new_with_config(config).get(format!("{url}{path}"));
    let key = std::env::var("BATON_API_KEY").ok().filter(|_| args.address.api_key.is_none());
    let key = key.and_then(|keys| {
        keys.split(',').next().map(|key| ("authorization".to_owned(), format!("Bearer {key}")))
    });
    for (name, value) in args.address.headers().into_iter().chain(key) {
        request = request.header(name, value);
    }
    let mut answer = request.call().map_err(|cause| {
        hinted(
            format!("no server answers on {url}: {cause}"),
            "`baton serve` starts one; --port or --base-url say where another is",
        )
    })?;
    let status = answer.status().as_u16();
    if status == 401 {
        return Err(hinted(format!("{url}: API key required"), "set BATON_API_KEY or give --api-key"));
    }
    let text = answer.body_mut().read_to_string().with_context(|| format!("cannot read {url}{path}"))?;
    serde_json::from_str(&text).ok().filter(|_| status == 200).ok_or_else(|| {
        hinted(format!("{url}{path} answered {status}, not as Baton does"), "is it another program's port?")
    })
}
