//! KV in one's own hands: `inference(tokens, previous KV) -> new KV`, and a store that keeps it by tokens.
//!
//! Run it with a model, or without for the default one: `cargo run --release -p baton --example kv_store`

use std::sync::Arc;
use std::time::Duration;

use baton::{BlockStore, Kv, KvStore, MemoryStore, OpenOptions, SamplingParams, TokenId};
use baton_engine::Engine;

struct Model {
    engine: Engine,
    /// What the engine takes KV from and gives it to.
    exchange: KvStore,
}

impl Model {
    /// Computes what is not in `previous`, and gives the KV of all full blocks, the next token, and how many tokens were taken
    /// over.
    fn inference(&mut self, tokens: &[TokenId], previous: &Kv) -> Result<(Kv, TokenId, u32), baton::Error> {
        self.exchange.store(tokens, previous);
        let params = SamplingParams { max_tokens: Some(1), temperature: 0.0, ..SamplingParams::default() };
        let answers = self.engine.generate(vec![tokens.to_vec()], &params)?;
        self.engine.flush_stores(Duration::from_secs(10));
        let kv = self.exchange.retrieve(tokens);
        // Nothing stays behind: what is taken over next time comes from the caller.
        self.exchange.remove(tokens);
        self.engine.reset_prefix_cache();
        Ok((kv, answers[0].outputs[0].token_ids[0], answers[0].num_cached_tokens))
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut options = OpenOptions::default();
    options.stores.memory = Some(Arc::new(MemoryStore::default()));
    let memory = options.stores.memory.clone().expect("just set");
    let model = std::env::args().nth(1);
    let opened = baton::open(model.as_deref(), &options, &mut baton_hub::Quiet)?;
    let (mut engine, text) = (opened.engine, opened.text);
    let identity = engine.kv_identity()?;
    let block_size = engine.memory_plan().block_size;
    let exchange = KvStore::new(Arc::clone(&memory) as Arc<dyn BlockStore>, &identity, block_size);
    let mut model = Model { engine, exchange };

    let story =
        "The baton is passed from one runner to the next, and nobody runs the same way twice. ".repeat(12);
    let prompt = text.encode(&story)?;
    let (kv, token, cached) = model.inference(&prompt, &Kv::default())?;
    println!("computed {} tokens, {cached} of them taken over; next token {token}", prompt.len());

    // Any store will do: this one is in memory, others are on disk or in Redis.
    let library = KvStore::new(Arc::new(MemoryStore::default()), &identity, block_size);
    library.store(&prompt, &kv);
    let longer = [prompt, text.encode("So who is next?")?].concat();
    let found = library.retrieve(&longer);
    let (_, with_kv, cached) = model.inference(&longer, &found)?;
    let (_, without, _) = model.inference(&longer, &Kv::default())?;
    println!("retrieved {} tokens, {cached} of {} taken over", found.num_tokens, longer.len());
    println!("same token as computed anew: {}", with_kv == without);
    Ok(())
}
