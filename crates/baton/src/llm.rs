//! A model that is ready, with its engine on a thread of its own.

use std::sync::Arc;

use baton_core::{Constraint, FinishReason, Request, SamplingParams, TokenId};
use baton_engine::{EngineConfig, EngineHandle, EngineStats};
use baton_hub::Quiet;

use crate::open::{OpenOptions, Opened, open};
use crate::stream::{RunningRequest, Stream};
use crate::{Error, Message, Params, SamplingDefaults, TextModel};

/// A language model that answers. Cheap to clone and to share between threads: requests of all of them are batched. The
/// engine's thread ends with the last clone.
#[derive(Clone, Debug)]
pub struct Llm {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    engine: EngineHandle,
    text: Arc<TextModel>,
    sampling: SamplingDefaults,
    vocab_size: usize,
    max_model_len: usize,
}

/// A whole continuation or answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// What the model wrote.
    pub text: String,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the prompt that were in the prefix cache.
    pub cached_tokens: usize,
    /// Tokens of the answer.
    pub completion_tokens: usize,
}

impl Llm {
    /// Opens a model: a `.gguf` file, a directory with safetensors, a name of the catalogue, or `owner/name[:quant]` of a
    /// hub. What is not here is fetched.
    pub fn open(model: &str) -> Result<Self, Error> {
        Self::open_with(model, &OpenOptions::default())
    }

    /// The same with a device, a length or a memory of one's choice.
    pub fn open_with(model: &str, options: &OpenOptions) -> Result<Self, Error> {
        let mut options = options.clone();
        if options.engine.seed == EngineConfig::default().seed {
            options.engine.seed = random_seed();
        }
        Ok(Self::from_opened(open(Some(model), &options, &mut Quiet)?))
    }

    /// Gives the engine of an opened model its thread.
    pub fn from_opened(opened: Opened) -> Self {
        let Opened { engine, text, sampling, .. } = opened;
        let (vocab_size, max_model_len) =
            (engine.model_config().vocab_size, engine.memory_plan().max_model_len);
        let (engine, text) = (engine.spawn(), Arc::new(text));
        Self { inner: Arc::new(Inner { engine, text, sampling, vocab_size, max_model_len }) }
    }

    /// What the model is called.
    pub fn name(&self) -> &str {
        &self.inner.text.name
    }

    /// The longest sequence, prompt and output together, in tokens.
    pub fn max_model_len(&self) -> usize {
        self.inner.max_model_len
    }

    /// How the model is sampled where [`Params`] do not say.
    pub fn sampling_defaults(&self) -> &SamplingDefaults {
        &self.inner.sampling
    }

    /// What the engine is doing: requests, blocks, cached tokens.
    pub fn stats(&self) -> Result<EngineStats, Error> {
        Ok(self.inner.engine.stats()?)
    }

    /// Continues all prompts together. The answers are in the order of the prompts, `n` for each.
    pub fn generate<P: AsRef<str>>(&self, prompts: &[P], params: &Params) -> Result<Vec<Answer>, Error> {
        let encoded: Vec<Vec<TokenId>> =
            prompts.iter().map(|prompt| self.inner.text.encode(prompt.as_ref())).collect::<Result<_, _>>()?;
        let streams: Vec<Stream> =
            encoded.into_iter().map(|prompt| self.start(prompt, params)).collect::<Result<_, _>>()?;
        let mut answers = Vec::with_capacity(streams.len());
        for stream in streams {
            answers.extend(stream.collect_all()?);
        }
        Ok(answers)
    }

    /// Answers a conversation.
    pub fn chat(&self, messages: &[Message]) -> Result<Answer, Error> {
        self.chat_with(messages, &Params::new())
    }

    /// The same with parameters.
    pub fn chat_with(&self, messages: &[Message], params: &Params) -> Result<Answer, Error> {
        let mut answers = self.chat_stream(messages, params)?.collect_all()?;
        Ok(answers.swap_remove(0))
    }

    /// Continues a prompt, a piece of text at a time.
    pub fn stream(&self, prompt: &str, params: &Params) -> Result<Stream, Error> {
        self.start(self.inner.text.encode(prompt)?, params)
    }

    /// Answers a conversation, a piece of text at a time.
    pub fn chat_stream(&self, messages: &[Message], params: &Params) -> Result<Stream, Error> {
        self.start(self.inner.text.encode_chat(messages)?, params)
    }

    /// The hidden state after each text, as a unit vector.
    pub fn embed<T: AsRef<str>>(&self, texts: &[T]) -> Result<Vec<Vec<f32>>, Error> {
        let params =
            Arc::new(SamplingParams { ignore_eos: true, pooling: true, ..SamplingParams::greedy(1) });
        let mut receivers = Vec::with_capacity(texts.len());
        for text in texts {
            let prompt = self.inner.text.encode(text.as_ref())?;
            receivers.push(self.inner.engine.submit(self.request(prompt, Arc::clone(&params), None))?);
        }
        let mut vectors = Vec::with_capacity(receivers.len());
        for mut receiver in receivers {
            let mut pooled = Vec::new();
            while let Some(output) = receiver.recv() {
                let output = output?;
                if !output.pooled.is_empty() {
                    pooled = output.pooled;
                }
            }
            let length = pooled.iter().map(|value| value * value).sum::<f32>().sqrt();
            if length > 0.0 {
                for value in &mut pooled {
                    *value /= length;
                }
            }
            vectors.push(pooled);
        }
        Ok(vectors)
    }

    fn request(
        &self,
        prompt_token_ids: Vec<TokenId>,
        params: Arc<SamplingParams>,
        constraint: Option<Arc<dyn Constraint>>,
    ) -> Request {
        let id = self.inner.engine.new_request_id();
        let request = Request::new(id, prompt_token_ids, SamplingParams::default());
        self.inner.text.with_end_tokens(Request { params, constraint, ..request })
    }

    fn start(&self, prompt: Vec<TokenId>, params: &Params) -> Result<Stream, Error> {
        let limit = self.inner.max_model_len;
        if prompt.is_empty() {
            return Err(Error::usage("the prompt is empty", "give at least one token"));
        }
        if prompt.len() >= limit {
            let message =
                format!("the {}-token prompt leaves no room for a reply (limit {limit})", prompt.len());
            return Err(Error::usage(message, "shorten the prompt, or raise max_model_len"));
        }
        let mut sampling = params.resolve(self.inner.sampling.over(SamplingParams::default()));
        let left = (limit - prompt.len()) as u32;
        if !params.asks_for_length() {
            sampling.max_tokens = sampling.max_tokens.map(|wanted| wanted.min(left));
        }
        sampling.validate(self.inner.vocab_size as u32)?;
        let shape = sampling.structured_outputs.as_ref();
        let constraint =
            shape.map(|shape| self.inner.text.compile(shape, self.inner.vocab_size)).transpose()?;
        let request = self.request(prompt, Arc::new(sampling), constraint);
        let streams = (0..request.params.n)
            .map(|_| self.inner.text.output_stream(&request, true))
            .collect::<Result<Vec<_>, _>>()?;
        let num_prompt_tokens = request.prompt_token_ids.len();
        let receiver = self.inner.engine.submit(request)?;
        let engine = self.inner.engine.clone();
        Ok(Stream::new(RunningRequest { engine, receiver, num_prompt_tokens }, streams))
    }
}

/// The standard library seeds its hash maps from the system; a hasher without input gives that seed away.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}
