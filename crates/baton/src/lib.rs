//! Large language models in your program.
//!
//! ```no_run
//! use baton::{Llm, Message};
//!
//! let llm = Llm::open("smollm2")?;
//! println!("{}", llm.chat(&[Message::user("Name three rivers in Europe.")])?.text);
//! # Ok::<(), baton::Error>(())
//! ```
//!
//! [`Llm::open`] takes a `.gguf` file, a directory with safetensors, a name of the catalogue or a repository of a hub
//! (`owner/name[:quant]`), which is fetched on first use. The engine runs on a thread of its own: an [`Llm`] may be shared
//! by any number of threads, and their requests are batched. [`Llm::generate`] continues prompts, [`Llm::chat`] answers
//! conversations, [`Llm::stream`] and [`Llm::chat_stream`] give text as it comes (an [`Iterator`], and a
//! [`futures_core::Stream`] for async code), [`Llm::embed`] gives vectors. [`Params`] says how to sample and which shape the
//! output must have.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod draft;
mod error;
mod llm;
mod open;
mod params;
mod sampling;
mod stores;
mod stream;
mod text_model;

pub use baton_cluster::{
    Kv, KvStore, MemoryStore, PeerOptions, RedisOptions, RedisUrl, TransferOptions, TransferServer,
};
pub use baton_core::{FinishReason, SamplingParams, StructuredOutput, TokenId};
pub use baton_engine::EngineConfig;
pub use baton_engine::{BlockStore, KvIdentity, StorePolicy};
pub use error::Error;
pub use llm::{Answer, Llm};
pub use open::{
    AnyOpened, Device, OpenOptions, Opened, OpenedEncoder, Watch, gpu_steps, open, open_any, open_backend,
};
pub use params::Params;
pub use sampling::{GenerationConfig, SamplingDefaults};
pub use stores::StoreOptions;
pub use stream::Stream;
pub use text_model::{Message, TextModel};
