//! A model that is served: its names, its text side, its running engine and the metrics of both.

use std::io::Write;
use std::sync::Arc;

use baton_core::{SamplingParams, TokenId};
use baton_engine::{EncoderEngine, Engine, EngineHandle, MemoryPlan};
use baton_events::EventHub;
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
    /// Where that comes from, for people; empty where it is neutral.
    pub sampling_source: String,
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
    pub(crate) kv_events: Option<Arc<EventHub>>,
    pub(crate) trace: Option<Arc<Trace>>,
    pub(crate) memory: MemoryPlan,
    pub(crate) max_model_len: usize,
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    /// The bytes of the longest token: no prompt of that many bytes a token can fit.
    longest_token_bytes: usize,
    pub(crate) created: u64,
    pub(crate) facts: Facts,
    /// The model gives vectors or scores, and no tokens.
    pub(crate) encoder: Option<ServedEncoder>,
}

/// What requests must know of an encoder.
#[derive(Clone, Debug)]
pub(crate) struct ServedEncoder {
    /// As requests name it.
    pub pooling: String,
    pub normalize: bool,
    /// It scores pairs of texts instead of embedding one.
    pub scores_pairs: bool,
    /// Two separators stand between the texts of a pair.
    pub double_separator: bool,
}

/// What a model is, for those who ask.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    pub architecture: String,
    pub num_parameters: u64,
    pub dtype: String,
    /// `gguf` or `safetensors`.
    pub format: String,
    pub weight_bytes: u64,
    pub on_gpu: bool,
    pub max_num_seqs: usize,
}

impl Facts {
    fn of(engine: &Engine) -> Self {
        let (model, memory) = (engine.model_config(), engine.memory_plan());
        let (architecture, names) = (format!("{:?}", model.architecture), format!("{:?}", model.names));
        Self::new(&architecture, &names, model.dtype.to_string(), engine.num_parameters(), memory)
    }

    fn new(architecture: &str, names: &str, dtype: String, num_parameters: u64, memory: &MemoryPlan) -> Self {
        Self {
            architecture: architecture.to_lowercase(),
            num_parameters,
            dtype,
            format: if names == "Gguf" { "gguf" } else { "safetensors" }.to_owned(),
            weight_bytes: memory.weight_bytes,
            on_gpu: memory.device.contains("NVIDIA"),
            max_num_seqs: memory.max_num_seqs,
        }
    }
}

impl ServedModel {
    /// Starts the engine's loop. `names` must hold at least one name; `profile` gets a trace of every step.
    pub fn start(
        engine: Engine,
        text: ModelText,
        names: Vec<String>,
        profile: Option<Box<dyn Write + Send>>,
    ) -> Self {
        Self::start_with_events(engine, text, names, profile, None)
    }

    /// The same, with a history of KV events that others read.
    pub fn start_with_events(
        engine: Engine,
        text: ModelText,
        names: Vec<String>,
        profile: Option<Box<dyn Write + Send>>,
        kv_events: Option<Arc<EventHub>>,
    ) -> Self {
        assert!(!names.is_empty(), "a model is served under at least one name");
        let memory = engine.memory_plan().clone();
        let cache = CacheInfo {
            block_size: memory.block_size,
            num_gpu_blocks: memory.num_device_blocks,
            num_cpu_blocks: memory.num_host_blocks,
        };
        let max_model_len = memory.max_model_len;
        let (vocab_size, hidden_size) = (engine.model_config().vocab_size, engine.model_config().hidden_size);
        let metrics = Arc::new(Metrics::new(&names[0], max_model_len, cache));
        let trace = profile.map(|out| Arc::new(Trace::new(out)));
        let observer = EngineObserver::new(Arc::clone(&metrics), trace.clone(), kv_events.clone());
        let longest_token_bytes = longest_token(&text);
        let grammars = text.tokenizer.as_ref().map(|tokenizer| {
            let ends = Arc::clone(&text.eos_token_ids);
            Arc::new(GrammarCompiler::new(Arc::clone(tokenizer), vocab_size, ends))
        });
        Self {
            facts: Facts::of(&engine),
            grammars,
            engine: engine.spawn_observed(Box::new(observer)),
            names,
            text,
            metrics,
            kv_events,
            trace,
            memory,
            max_model_len,
            vocab_size,
            hidden_size,
            longest_token_bytes,
            created: crate::ids::unix_seconds(),
            encoder: None,
        }
    }

    /// The same for an encoder, which answers `/v1/embeddings`, `/v1/rerank` and `/score`.
    pub fn start_encoder(engine: EncoderEngine, text: ModelText, names: Vec<String>) -> Self {
        assert!(!names.is_empty(), "a model is served under at least one name");
        let (model, memory) = (engine.model_config(), engine.memory_plan().clone());
        let config = model.encoder.clone().unwrap_or_default();
        let (architecture, scheme) = (format!("{:?}", model.architecture), format!("{:?}", model.names));
        let dtype = model.dtype.to_string();
        let facts = Facts::new(&architecture, &scheme, dtype, engine.num_parameters(), &memory);
        let (vocab_size, hidden_size) = (model.vocab_size, model.hidden_size);
        // Requests are counted with one token to come, which an encoder does not give.
        let max_model_len = memory.max_model_len + 1;
        let cache = CacheInfo { block_size: 0, num_gpu_blocks: 0, num_cpu_blocks: 0 };
        let metrics = Arc::new(Metrics::new(&names[0], max_model_len, cache));
        let longest_token_bytes = longest_token(&text);
        let observer = EngineObserver::new(Arc::clone(&metrics), None, None);
        Self {
            kv_events: None,
            facts,
            grammars: None,
            engine: engine.spawn_observed(Box::new(observer)),
            names,
            text,
            metrics,
            trace: None,
            memory,
            max_model_len,
            vocab_size,
            hidden_size,
            longest_token_bytes,
            created: crate::ids::unix_seconds(),
            encoder: Some(ServedEncoder {
                pooling: format!("{:?}", config.pooling).to_lowercase(),
                normalize: config.normalize,
                scores_pairs: config.num_labels.is_some(),
                double_separator: config.double_separator,
            }),
        }
    }

    /// The engine's thread.
    pub fn engine(&self) -> &EngineHandle {
        &self.engine
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

/// The bytes of the longest token.
fn longest_token(text: &ModelText) -> usize {
    text.tokenizer.as_ref().map_or(0, |tokenizer| {
        let ids = 0..tokenizer.vocab_size() as TokenId;
        ids.map(|id| tokenizer.token_bytes(id).len()).max().unwrap_or(0)
    })
}
