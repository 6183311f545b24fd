//! Whole runs through the engine: scheduler, paged cache and device, without a server. Greedy, no end token, random prompts.

use std::path::Path;
use std::time::Instant;

use baton_backend::Precision;
use baton_core::SamplingParams;
use baton_engine::{Engine, EngineConfig};
use baton_model::{LoadFormat, ModelFiles};

use crate::{backend, kv_dtype};

/// Requests of one size that arrive at once.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    pub num_requests: usize,
    /// Tokens that all prompts begin with.
    pub shared: usize,
    /// Further tokens of each prompt.
    pub input: usize,
    pub output: usize,
}

impl Work {
    /// `REQUESTSxINPUT/OUTPUT`, or `REQUESTSxSHARED+INPUT/OUTPUT`.
    pub fn parse(text: &str) -> Option<Self> {
        let (num_requests, rest) = text.split_once('x')?;
        let (prompt, output) = rest.split_once('/')?;
        let (shared, input) = prompt.split_once('+').unwrap_or(("0", prompt));
        Some(Self {
            num_requests: num_requests.parse().ok()?,
            shared: shared.parse().ok()?,
            input: input.parse().ok()?,
            output: output.parse().ok()?,
        })
    }

    fn prompts(&self, seed: u32) -> Vec<Vec<u32>> {
        let token = |place: u32| place.wrapping_mul(2_654_435_761) >> 17;
        let one = |request: usize| {
            let own = (seed << 24) + ((request as u32) << 12);
            let shared = (0..self.shared as u32).map(|at| token((seed << 24) + (1 << 23) + at));
            shared.chain((0..self.input as u32).map(|at| token(own + at))).collect()
        };
        (0..self.num_requests).map(one).collect()
    }
}

fn params(max_tokens: usize) -> SamplingParams {
    SamplingParams {
        max_tokens: Some(max_tokens as u32),
        temperature: 0.0,
        ignore_eos: true,
        ..SamplingParams::default()
    }
}

pub fn run(model: &Path, all: &[Work]) {
    let longest = all.iter().map(|work| work.shared + work.input + work.output).max().expect("some work");
    let config = EngineConfig {
        max_num_seqs: 256,
        max_num_batched_tokens: 8192,
        max_model_len: Some(longest + 16),
        kv_dtype: kv_dtype(),
        swap_space: 0,
        enable_prefix_caching: all.iter().any(|work| work.shared > 0),
        ..EngineConfig::default()
    };
    let start = Instant::now();
    let files = ModelFiles::open(model, LoadFormat::Dummy).expect("the model opens");
    let mut engine = Engine::new(&files, Box::new(backend(Precision::Fast)), &config, &mut |_| ())
        .expect("the engine starts");
    println!("ready in {:.2} s", start.elapsed().as_secs_f64());
    println!(
        "{:>8} {:>6} {:>6} {:>6} {:>9} {:>9} {:>14} {:>13} {:>7}",
        "requests", "shared", "in", "out", "seconds", "steps", "output tok/s", "total tok/s", "idle %"
    );
    for (number, work) in all.iter().enumerate() {
        let seed = 2 * number as u32;
        let warm = Work { shared: 0, input: 16, output: 6, ..*work };
        engine.generate(warm.prompts(seed + 1), &params(6)).expect("it warms up");
        let (steps, busy) = (engine.stats().num_steps, engine.stats().device_busy_s.unwrap_or(0.0));
        let start = Instant::now();
        engine.generate(work.prompts(seed), &params(work.output)).expect("it runs");
        let seconds = start.elapsed().as_secs_f64();
        let busy = engine.stats().device_busy_s.unwrap_or(0.0) - busy;
        let output = work.num_requests * work.output;
        let total = output + work.num_requests * (work.shared + work.input);
        println!(
            "{:>8} {:>6} {:>6} {:>6} {seconds:>9.3} {:>9} {:>14.1} {:>13.1} {:>7.1}",
            work.num_requests,
            work.shared,
            work.input,
            work.output,
            engine.stats().num_steps - steps,
            output as f64 / seconds,
            total as f64 / seconds,
            100.0 * (1.0 - busy / seconds)
        );
    }
}
