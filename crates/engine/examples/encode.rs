//! Embeds texts that are given as token ids, and says how fast: the engine of encoders without a server around it.
//!
//! ```text
//! encode MODEL TEXTS.json OUT.json [--rounds N] [--threads N]
//! ```
//! TEXTS.json is a list of lists of token ids, OUT.json becomes a list of vectors.

use std::path::PathBuf;
use std::time::Instant;

use baton_core::TokenId;
use baton_cpu::{CpuBackend, CpuOptions};
use baton_engine::{EncoderEngine, EngineConfig};
use baton_model::{LoadFormat, ModelFiles};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut paths = Vec::new();
    let (mut rounds, mut threads) = (1, None);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--rounds" => rounds = words.next().ok_or("--rounds needs a number")?.parse()?,
            "--threads" => threads = Some(words.next().ok_or("--threads needs a number")?.parse()?),
            _ => paths.push(PathBuf::from(word)),
        }
    }
    let [model, texts, out] = paths.as_slice() else {
        return Err("encode MODEL TEXTS.json OUT.json [--rounds N] [--threads N]".into());
    };
    let texts: Vec<Vec<TokenId>> = serde_json::from_slice(&std::fs::read(texts)?)?;
    let files = ModelFiles::open(model, LoadFormat::Auto)?;
    let backend = Box::new(CpuBackend::new(CpuOptions { threads, ..CpuOptions::default() })?);
    let config = EngineConfig { max_num_batched_tokens: 1024, ..EngineConfig::default() };
    let mut engine = EncoderEngine::new(&files, backend, &config, &mut |_| {})?;
    let mut vectors = Vec::new();
    for _ in 0..rounds {
        let begin = Instant::now();
        vectors = engine.encode(&texts)?;
        println!("{:.1} texts/s", texts.len() as f64 / begin.elapsed().as_secs_f64());
    }
    std::fs::write(out, serde_json::to_vec(&vectors)?)?;
    Ok(())
}
