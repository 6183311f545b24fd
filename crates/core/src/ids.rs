//! Ids. Each is its own type, so that a block can never be mistaken for a sequence.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A token of the model's vocabulary.
pub type TokenId = u32;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

id! {
    /// One request as a client sent it. It may own several sequences.
    RequestId(u64)
}
id! {
    /// One token sequence with its own KV: a sampled continuation or a beam of a request.
    SeqId(u64)
}
id! {
    /// A physical block of the paged KV cache (device or host tier, by context).
    BlockId(u32)
}

impl BlockId {
    /// The block as an index into a table.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}
