//! A real model on the CPU with its tokenizer and grammars: schemas in, texts out.
#![allow(dead_code, reason = "each user takes its own part of this")]

use std::path::Path;
use std::sync::Arc;

use baton_core::{Constraint, FinishReason, Request, SamplingParams, StructuredOutput, TokenId};
use baton_cpu::{CpuBackend, CpuOptions};
use baton_engine::{Engine, EngineConfig, EngineHandle, OutputReceiver};
use baton_grammar::{GrammarCompiler, GrammarError};
use baton_model::{LoadFormat, ModelFiles, TokenizerSource};
use baton_text::{GgufVocab, Tokenizer};

pub struct RealModel {
    pub engine: EngineHandle,
    pub tokenizer: Arc<Tokenizer>,
    compiler: GrammarCompiler,
    eos_token_ids: Arc<[TokenId]>,
}

/// A text under way.
pub struct Pending {
    receiver: OutputReceiver,
}

impl RealModel {
    pub fn open(path: &Path, max_num_seqs: usize) -> Self {
        let files = ModelFiles::open(path, LoadFormat::Auto).expect("the model opens");
        let source = files.tokenizer_source().expect("a sound tokenizer").expect("a tokenizer");
        let tokenizer = match source {
            TokenizerSource::Gguf(fields) => Tokenizer::from_gguf(GgufVocab {
                model: fields.model,
                pre: fields.pre,
                tokens: fields.tokens,
                token_types: fields.token_types,
                scores: fields.scores,
                merges: fields.merges,
                bos_token_id: fields.bos_token_id,
                eos_token_id: fields.eos_token_id,
                eot_token_id: fields.eot_token_id,
                ..GgufVocab::default()
            }),
            TokenizerSource::HuggingFace { tokenizer_json, tokenizer_config_json } => {
                Tokenizer::from_hf(&tokenizer_json, tokenizer_config_json.as_deref())
            }
        };
        let tokenizer = Arc::new(tokenizer.expect("a usable tokenizer"));
        let backend = CpuBackend::new(CpuOptions::default()).expect("the CPU is always there");
        let config = EngineConfig { max_num_seqs, max_model_len: Some(2048), ..EngineConfig::default() };
        let engine = Engine::new(&files, Box::new(backend), &config, &mut |_| {}).expect("the model loads");
        let eos_token_ids: Arc<[TokenId]> = Arc::from(tokenizer.end_token_ids());
        let vocab_size = engine.model_config().vocab_size;
        let compiler = GrammarCompiler::new(Arc::clone(&tokenizer), vocab_size, Arc::clone(&eos_token_ids));
        Self { engine: engine.spawn(), tokenizer, compiler, eos_token_ids }
    }

    /// Hands a prompt to the engine, with the shape that its answer must have.
    pub fn submit(
        &self,
        prompt: &str,
        wish: StructuredOutput,
        params: SamplingParams,
    ) -> Result<Pending, GrammarError> {
        let constraint: Arc<dyn Constraint> = self.compiler.compile_apart(&wish)?;
        let prompt = self.tokenizer.encode(prompt, true).expect("a prompt");
        let params = SamplingParams { structured_outputs: Some(wish), ..params };
        let request = Request {
            constraint: Some(constraint),
            eos_token_ids: Arc::clone(&self.eos_token_ids),
            ..Request::new(self.engine.new_request_id(), prompt, params)
        };
        Ok(Pending { receiver: self.engine.submit(request).expect("the engine takes it") })
    }
}

impl Pending {
    /// The texts of all continuations, with how they ended.
    pub fn finish(mut self, tokenizer: &Tokenizer, n: usize) -> Vec<(String, FinishReason)> {
        let mut texts: Vec<(Vec<TokenId>, Option<FinishReason>)> = vec![(Vec::new(), None); n];
        while let Some(output) = self.receiver.recv() {
            for sequence in output.expect("the engine goes on").outputs {
                let (tokens, reason) = &mut texts[sequence.index as usize];
                let shown = sequence.token_ids.len() - usize::from(sequence.stop_token_id.is_some());
                tokens.extend_from_slice(&sequence.token_ids[..shown]);
                *reason = sequence.finish_reason;
            }
        }
        let text = |(tokens, reason): (Vec<TokenId>, Option<FinishReason>)| {
            (tokenizer.decode(&tokens, false).expect("decodes"), reason.expect("every sequence ends"))
        };
        texts.into_iter().map(text).collect()
    }
}
