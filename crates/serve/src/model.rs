//! A model that is served: its names, its text side, its running engine and the metrics of both.

use std::io::Write;
use std::sync::Arc;

use baton_core::{SamplingParams, TokenId};
use baton_engine::{Engine, EngineHandle};
use baton_grammar::GrammarCompiler;
use baton_text::{ChatTemplate, Tokenizer};

use crate::metrics::{CacheInfo, EngineObserver, Metrics};
use crate::trace::Trace;

/// What turns text into tokens and back, and what the model's makers recommend.
#[derive(Debug)]
pub struct ModelText {
    /// Absent where there are only weights; prompts must then be token ids and outputs have no text.
    pub tokenizer: Option<Arc<Tokenizer>>,
    pub chat_template: Option<ChatTemplate>,
    /// Every token that ends an answer.
    pub eos_token_ids: Arc<[TokenId]>,
    /// What a request that says nothing gets.
    pub default_sampling: SamplingParams,
}

#[derive(Debug)]
pub struct ServedModel {
    /// The first one is what answers say.
    pub(crate) names: Vec<String>,
    pub(crate) text: ModelText,
    /// Absent without a tokenizer.
    pub(crate) grammars: Option<Arc<GrammarCompiler>>,
    pub(crate) engine: EngineHandle,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) trace: Option<Arc<Trace>>,
    pub(crate) max_model_len: usize,
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    /// The bytes of the longest token: no prompt of that many bytes a token can fit.
    longest_token_bytes: usize,
    pub(crate) created: u64,
}

impl ServedModel {
    /// Starts the engine's loop. `names` must hold at least one name; `profile` gets a trace of every step.
    pub fn start(
        engine: Engine,
        text: ModelText,
        names: Vec<String>,
        profile: Option<Box<dyn Write + Send>>,
    ) -> Self {
        assert!(!names.is_empty(), "a model is served under at least one name");
        let memory = engine.memory_plan();
        let cache = CacheInfo {
            block_size: memory.block_size,
            num_gpu_blocks: memory.num_device_blocks,
            num_cpu_blocks: memory.num_host_blocks,
        };
        let max_model_len = memory.max_model_len;
        let (vocab_size, hidden_size) = (engine.model_config().vocab_size, engine.model_config().hidden_size);
        let metrics = Arc::new(Metrics::new(&names[0], max_model_len, cache));
        let trace = profile.map(|out| Arc::new(Trace::new(out)));
        let observer = EngineObserver::new(Arc::clone(&metrics), trace.clone());
        let longest_token_bytes = text.tokenizer.as_ref().map_or(0, |tokenizer| {
            let ids = 0..tokenizer.vocab_size() as TokenId;
            ids.map(|id| tokenizer.token_bytes(id).len()).max().unwrap_or(0)
        });
        let grammars = text.tokenizer.as_ref().map(|tokenizer| {
            let ends = Arc::clone(&text.eos_token_ids);
            Arc::new(GrammarCompiler::new(Arc::clone(tokenizer), vocab_size, ends))
        });
        Self {
            grammars,
            engine: engine.spawn_observed(Box::new(observer)),
            names,
            text,
            metrics,
            trace,
            max_model_len,
            vocab_size,
            hidden_size,
            longest_token_bytes,
            created: crate::ids::unix_seconds(),
        }
    }

    pub fn name(&self) -> &str {
        &self.names[0]
    }

    pub(crate) fn is_named(&self, name: &str) -> bool {
        self.names.iter().any(|own| own == name)
    }

    /// More bytes than this cannot be a prompt that fits, however it is cut into tokens.
    pub(crate) fn max_prompt_bytes(&self) -> usize {
        self.longest_token_bytes.saturating_mul(self.max_model_len)
    }

    /// What a token stands for, for people.
    pub(crate) fn token_text(&self, token: TokenId) -> String {
        let Some(tokenizer) = &self.text.tokenizer else { return String::new() };
        String::from_utf8_lossy(&tokenizer.token_bytes(token)).into_owned()
    }
}
