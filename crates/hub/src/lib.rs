//! Models by name: what is known of them ([`catalogue`]), where they are kept ([`home`]), and how they get there.
//!
//! A name is one of the catalogue, or a repository of a hub with Hugging Face's API (`owner/name[:quant]`). What is
//! fetched is verified by the checksum that the catalogue or the hub states, and kept in the layout of
//! `huggingface_hub`, so that models fetched by other tools are found and theirs find ours. Nothing here opens a model.
#![forbid(unsafe_code)]

pub mod catalogue;
mod client;
mod download;
mod error;
pub mod home;
mod pick;
mod repo;
mod resolve;
mod store;
mod wheel;

pub use client::{Client, Endpoint, RemoteFile, Snapshot};
pub use error::{ErrorKind, HubError};
pub use pick::{Picked, pick};
pub use repo::RepoName;
pub use resolve::{Located, Origin, find, locate, pull, pull_from};
pub use store::{HubCache, StoredModel};
pub use wheel::{cached as cached_entry, is_genuine};

/// Told how far a transfer is. Every method may be called from one thread only.
pub trait Progress {
    /// Something that is not counted in bytes begins; `None` says that it has ended.
    fn doing(&mut self, what: Option<&str>);
    /// A transfer of `total` bytes begins.
    fn begin(&mut self, what: &str, total: u64);
    fn at(&mut self, bytes: u64);
    fn end(&mut self);
}

/// For those who do not want to know.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quiet;

impl Progress for Quiet {
    fn doing(&mut self, _: Option<&str>) {}
    fn begin(&mut self, _: &str, _: u64) {}
    fn at(&mut self, _: u64) {}
    fn end(&mut self) {}
}

/// Bytes in hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        write!(text, "{byte:02x}").expect("a string takes everything");
    }
    text
}
