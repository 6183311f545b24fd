//! KV from process to process: a prefill worker keeps what it has computed, and a decode worker fetches it over TCP.

mod channel;
mod client;
mod server;
pub mod wire;

pub use client::{PeerOptions, PeerStore};
pub use server::{TransferOptions, TransferServer};
