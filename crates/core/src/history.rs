//! How often tokens occur in a sequence, for penalties.

use serde::{Deserialize, Serialize};

use crate::TokenId;

/// How often a token occurred in a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenCount {
    pub token_id: TokenId,
    pub in_prompt: bool,
    pub num_output: u32,
}
