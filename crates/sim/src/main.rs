//! Replays seeds: `cargo run -p baton-sim -- --seed S --steps N [--seeds COUNT]`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

const USAGE: &str = "usage: baton-sim [--seed S] [--steps N] [--seeds COUNT]
Runs COUNT seeds from S on (default 0, 1 of them) for N steps each (default 10000) and prints what happened.";

fn arguments() -> Result<(u64, usize, u64), String> {
    let (mut seed, mut steps, mut seeds) = (0, 10_000, 1);
    let mut arguments = std::env::args().skip(1);
    while let Some(flag) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{flag} needs a value"))?;
        let number: u64 = value.parse().map_err(|error| format!("{flag} {value}: {error}"))?;
        match flag.as_str() {
            "--seed" => seed = number,
            "--steps" => steps = number as usize,
            "--seeds" => seeds = number,
            _ => return Err(format!("unknown flag {flag}")),
        }
    }
    Ok((seed, steps, seeds))
}

fn main() -> ExitCode {
    match arguments() {
        Ok((first, steps, seeds)) => {
            for seed in first..first.saturating_add(seeds) {
                println!("seed {seed}: {:#?}", baton_sim::simulate(seed, steps, true));
            }
            ExitCode::SUCCESS
        }
        Err(message) => {
            eprintln!("{message}\n{USAGE}");
            ExitCode::FAILURE
        }
    }
}
