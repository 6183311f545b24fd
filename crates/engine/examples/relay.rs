//! Relay attention on and off on the CPU, in one process and in turns:
//! `cargo run --release -p baton-engine --example relay MODEL [requests shared own output rounds threads]`.
//!
//! One request fills the prefix cache of both engines, then `requests` come at once that share `shared` tokens, have `own` tokens
//! of their own and get `output` each. Says the output tokens a second of each round and their medians, by the clock and by the time
//! that the first thread was on a core: with one thread the better measure on a busy machine. Fails where tokens differ.

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use baton_core::{SamplingParams, TokenId};
use baton_cpu::{CpuBackend, CpuOptions};
use baton_engine::{Engine, EngineConfig};
use baton_model::{LoadFormat, ModelFiles};

fn params(max_tokens: u32) -> SamplingParams {
    SamplingParams {
        max_tokens: Some(max_tokens),
        temperature: 0.0,
        ignore_eos: true,
        ..SamplingParams::default()
    }
}

/// Seconds that the first thread has been on a core, where the system tells.
fn core_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/schedstat").unwrap_or_default();
    let own = text.split_whitespace().next().and_then(|field| field.parse::<f64>().ok());
    own.unwrap_or(0.0) / 1e9
}

/// Tokens a second: by the clock, and by time on a core.
type Speeds = [Vec<f64>; 2];

fn median(speeds: &mut [f64]) -> f64 {
    speeds.sort_by(f64::total_cmp);
    speeds[speeds.len() / 2]
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let model = args.next().ok_or("name a model's file")?;
    let numbers = args.map(|arg| arg.parse()).collect::<Result<Vec<usize>, _>>()?;
    let number = |index: usize, default| numbers.get(index).copied().unwrap_or(default);
    let (requests, shared, own) = (number(0, 32), number(1, 4096), number(2, 64));
    let (output, rounds, threads) = (number(3, 128), number(4, 5), number(5, 2));
    let files = ModelFiles::open(Path::new(&model), LoadFormat::Auto)?;
    let engine = |enable_relay_attention| -> Result<Engine, Box<dyn Error>> {
        let max_model_len = Some(shared + own + output);
        let config = EngineConfig { enable_relay_attention, max_model_len, ..EngineConfig::default() };
        let options = CpuOptions { threads: Some(threads), ..CpuOptions::default() };
        Ok(Engine::new(&files, Box::new(CpuBackend::new(options)?), &config, &mut |_| {})?)
    };
    let mut engines = [engine(true)?, engine(false)?];
    let token = |number: usize| 100 + (number * 7919 % 40_000) as TokenId;
    let prefix: Vec<TokenId> = (0..shared).map(token).collect();
    if shared > 0 {
        for engine in &mut engines {
            engine.generate(vec![prefix.clone()], &params(1))?;
        }
    }
    let mut speeds = [Speeds::default(), Speeds::default()];
    for round in 0..rounds {
        let prompt = |request: usize| {
            let own = (0..own).map(|i| token(1_000_003 + i * 131 + request * 1009 + round * 17));
            prefix.iter().copied().chain(own).collect::<Vec<_>>()
        };
        let mut tokens = Vec::new();
        for (engine, speeds) in engines.iter_mut().zip(&mut speeds) {
            let (start, start_s) = (Instant::now(), core_seconds());
            let outputs = engine.generate((0..requests).map(prompt).collect(), &params(output as u32))?;
            let seconds = [start.elapsed().as_secs_f64(), core_seconds() - start_s];
            for (speeds, seconds) in speeds.iter_mut().zip(seconds) {
                speeds.push((requests * output) as f64 / seconds.max(1e-9));
            }
            tokens.push(outputs.into_iter().flat_map(|output| output.outputs).map(|seq| seq.token_ids));
        }
        let of = |number: usize, kind: usize| speeds[number][kind][round];
        println!(
            "round {round}: relay {:.1}, plain {:.1} tok/s by the clock; {:.1}, {:.1} by time on a core",
            of(0, 0),
            of(1, 0),
            of(0, 1),
            of(1, 1)
        );
        let plain = tokens.pop().ok_or("two runs")?;
        if !tokens.pop().ok_or("two runs")?.eq(plain) {
            return Err("relay attention has changed the tokens".into());
        }
    }
    for (kind, name) in ["by the clock", "by time on a core"].into_iter().enumerate() {
        let [relay, plain] = [0, 1].map(|number: usize| median(&mut speeds[number][kind]));
        println!("medians {name}: relay {relay:.1}, plain {plain:.1} tok/s: {:.2} x", relay / plain);
    }
    println!("{:?}", engines[0].stats().relay);
    Ok(())
}
