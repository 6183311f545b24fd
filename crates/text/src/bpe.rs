//! Byte-level BPE: repeatedly joins the pair of neighbours that was learnt first, until no learnt pair is left.
//!
//! Input is one piece of the pre-tokeniser; output is token ids. Symbols are ids from the start: one look-up of a
//! pair of ids tells the rank and the joined id, no strings are built. A piece of n bytes costs O(n log n). Most
//! pieces of common text are one token; whether merging really gives it is found out once for each and remembered.
//!
//! The `tokenizers` crate, which reads every tokenizer.json, is not used for GGUF vocabularies: with GPT-2's and the same ids it
//! encodes English prose at 6 MB/s where this one has 29 (one thread of an EPYC, debug profile), and takes 98 ms instead of
//! 17 to load, since it has to be handed a tokenizer.json.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU8, Ordering};

use baton_core::TokenId;

use crate::TextError;
use crate::bytes::ByteAlphabet;
use crate::vocab::{GgufVocab, TokenKind};

/// Multiplies and folds one 64-bit key. The keys are pairs of ids of the loaded vocabulary, never user input, so a
/// stronger hash would only cost time.
#[derive(Debug, Default)]
pub(crate) struct PairHasher(u64);

impl Hasher for PairHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        let product = (self.0 ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = product ^ (product >> 32);
    }
}

#[derive(Clone, Copy, Debug)]
struct Merge {
    rank: u32,
    joined: u32,
}

type MergeTable = HashMap<u64, Merge, BuildHasherDefault<PairHasher>>;

fn pair_key(left: u32, right: u32) -> u64 {
    (u64::from(left) << 32) | u64::from(right)
}

const NONE: u32 = u32::MAX;

/// A symbol of the piece being merged, in a doubly linked list by index.
#[derive(Clone, Copy, Debug)]
struct Symbol {
    /// `NONE` once it was joined to its left neighbour.
    id: u32,
    previous: u32,
    next: u32,
}

/// A pair that may be joined. The order of the fields is the order of the queue: lowest rank first, then leftmost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: u32,
    left: u32,
    left_id: u32,
    right_id: u32,
    joined: u32,
}

/// Buffers that one call of `encode` uses for all its pieces.
#[derive(Debug, Default)]
pub(crate) struct BpeScratch {
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Reverse<Candidate>>,
}

/// How a piece is cut into its first symbols.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FirstSymbols {
    /// One for each byte, written in GPT-2's alphabet.
    Bytes,
    /// One for each character; a character that is not a token becomes byte tokens (`<0x0A>`).
    Characters,
}

/// A BPE model over ids. Ids from `num_tokens` on are strings that occur in merges but are no tokens.
#[derive(Debug)]
pub(crate) struct Bpe {
    merges: MergeTable,
    first_symbols: FirstSymbols,
    /// Symbol of each single byte (`FirstSymbols::Bytes`).
    byte_symbols: [u32; 256],
    /// Symbol of each text that can begin a merge (`FirstSymbols::Characters`).
    character_symbols: HashMap<char, u32>,
    num_tokens: u32,
    /// Text of each symbol past the vocabulary, in the alphabet of the file.
    extra_texts: Vec<Box<str>>,
    /// Tokens for single bytes that could not be merged into a token.
    byte_tokens: [Option<TokenId>; 256],
    unknown: Option<TokenId>,
    /// Tokens by their bytes, control tokens left out: plain text never becomes one.
    whole_pieces: HashMap<Box<[u8]>, TokenId>,
    /// A whole piece that is a token is taken as it is, whatever merging would give.
    ignore_merges: bool,
    /// For each token, whether merging its bytes gives it back: `UNTRIED`, `MERGES` or `SPLITS`.
    whole_piece_state: Vec<AtomicU8>,
}

const UNTRIED: u8 = 0;
const MERGES: u8 = 1;
const SPLITS: u8 = 2;

/// Gives every text an id: its token id, or a new one past the vocabulary.
struct SymbolTable<'a> {
    ids: &'a HashMap<Box<str>, TokenId>,
    extra: HashMap<Box<str>, u32>,
    extra_texts: Vec<Box<str>>,
    num_tokens: u32,
}

impl SymbolTable<'_> {
    fn symbol(&mut self, text: &str) -> u32 {
        if let Some(&id) = self.ids.get(text).or_else(|| self.extra.get(text)) {
            return id;
        }
        let id = self.num_tokens + self.extra_texts.len() as u32;
        self.extra.insert(text.into(), id);
        self.extra_texts.push(text.into());
        id
    }
}

impl Bpe {
    pub(crate) fn new(
        vocab: &GgufVocab,
        kinds: &[TokenKind],
        ids: &HashMap<Box<str>, TokenId>,
        first_symbols: FirstSymbols,
        ignore_merges: bool,
    ) -> Result<Self, TextError> {
        // Every merge adds at most three symbols, so this keeps all ids below `NONE`.
        if vocab.merges.len() > crate::vocab::MAX_VOCAB_SIZE {
            return Err(TextError::InvalidVocab(format!("it has {} merges", vocab.merges.len())));
        }
        let alphabet = ByteAlphabet::new();
        let num_tokens = vocab.tokens.len() as u32;
        let mut table = SymbolTable { ids, extra: HashMap::new(), extra_texts: Vec::new(), num_tokens };
        let byte_text = |byte: u8| match first_symbols {
            FirstSymbols::Bytes => alphabet.char_of(byte).to_string(),
            FirstSymbols::Characters => format!("<0x{byte:02X}>"),
        };
        let byte_tokens = std::array::from_fn(|byte| ids.get(byte_text(byte as u8).as_str()).copied());
        let byte_symbols = std::array::from_fn(|byte| table.symbol(&byte_text(byte as u8)));
        let merges = Self::merge_table(vocab, &mut table)?;
        let mut character_symbols = HashMap::new();
        if first_symbols == FirstSymbols::Characters {
            for (text, &id) in ids.iter().chain(&table.extra) {
                let mut characters = text.chars();
                if let (Some(character), None) = (characters.next(), characters.next()) {
                    character_symbols.insert(character, id);
                }
            }
        }
        let plain = ids.iter().filter(|(_, id)| !kinds[**id as usize].is_special());
        let whole_pieces = match first_symbols {
            FirstSymbols::Bytes => plain
                .filter_map(|(text, &id)| Some((alphabet.decode_exact(text)?.into_boxed_slice(), id)))
                .collect(),
            // Merges of line breaks cannot be written in the file, so a run of them is looked up whole.
            FirstSymbols::Characters => plain
                .filter(|(text, _)| text.bytes().all(|byte| byte == b'\n'))
                .map(|(text, &id)| (text.as_bytes().into(), id))
                .collect(),
        };
        Ok(Self {
            merges,
            first_symbols,
            byte_symbols,
            character_symbols,
            num_tokens,
            extra_texts: table.extra_texts,
            byte_tokens,
            // A byte-level vocabulary writes every text; one that lacks a byte leaves it out, as llama.cpp does. Files
            // name all sorts of tokens as the unknown one, which must never come out of plain text.
            unknown: vocab.unknown_token_id.filter(|&id| {
                first_symbols == FirstSymbols::Characters && kinds[id as usize] == TokenKind::Unknown
            }),
            whole_pieces,
            ignore_merges: ignore_merges || first_symbols == FirstSymbols::Characters,
            whole_piece_state: vocab.tokens.iter().map(|_| AtomicU8::new(UNTRIED)).collect(),
        })
    }

    fn merge_table(vocab: &GgufVocab, table: &mut SymbolTable<'_>) -> Result<MergeTable, TextError> {
        let mut merges =
            MergeTable::with_capacity_and_hasher(vocab.merges.len(), BuildHasherDefault::default());
        let mut joined_text = String::new();
        for (rank, merge) in vocab.merges.iter().enumerate() {
            // A token may itself begin with a space (gemma), hence the search from the second byte on.
            let split = merge.char_indices().skip(1).find(|&(_, character)| character == ' ');
            let Some((split, _)) = split else {
                return Err(TextError::InvalidVocab(format!(
                    "merge {rank} '{merge}' is not a pair of tokens"
                )));
            };
            let (left, right) = (&merge[..split], &merge[split + 1..]);
            joined_text.clear();
            joined_text.push_str(left);
            joined_text.push_str(right);
            let key = pair_key(table.symbol(left), table.symbol(right));
            let joined = table.symbol(&joined_text);
            merges.entry(key).or_insert(Merge { rank: rank as u32, joined });
        }
        Ok(merges)
    }

    /// Appends the tokens of one piece.
    pub(crate) fn encode_piece(&self, piece: &str, scratch: &mut BpeScratch, out: &mut Vec<TokenId>) {
        let whole = self.whole_pieces.get(piece.as_bytes()).copied();
        if let Some(id) = whole {
            let known = self.whole_piece_state[id as usize].load(Ordering::Relaxed);
            if self.ignore_merges || known == MERGES {
                out.push(id);
                return;
            }
        }
        self.first_symbols(piece, &mut scratch.symbols);
        self.merge(scratch);
        if let (Some(id), Some(first)) = (whole, scratch.symbols.first()) {
            let state = if first.next == NONE && first.id == id { MERGES } else { SPLITS };
            self.whole_piece_state[id as usize].store(state, Ordering::Relaxed);
        }
        let mut index = if scratch.symbols.is_empty() { NONE } else { 0 };
        while index != NONE {
            let symbol = scratch.symbols[index as usize];
            self.emit(symbol.id, out);
            index = symbol.next;
        }
    }

    fn first_symbols(&self, piece: &str, symbols: &mut Vec<Symbol>) {
        symbols.clear();
        let mut push = |id: u32| {
            let index = symbols.len() as u32;
            symbols.push(Symbol { id, previous: index.wrapping_sub(1), next: index + 1 });
        };
        match self.first_symbols {
            FirstSymbols::Bytes => piece.bytes().for_each(|byte| push(self.byte_symbols[byte as usize])),
            FirstSymbols::Characters => {
                for character in piece.chars() {
                    if let Some(&id) = self.character_symbols.get(&character) {
                        push(id);
                    } else {
                        let mut buffer = [0; 4];
                        for byte in character.encode_utf8(&mut buffer).bytes() {
                            push(self.byte_symbols[byte as usize]);
                        }
                    }
                }
            }
        }
        if let Some(last) = symbols.last_mut() {
            last.next = NONE;
        }
    }

    fn merge(&self, scratch: &mut BpeScratch) {
        let BpeScratch { symbols, queue } = scratch;
        queue.clear();
        let enqueue = |queue: &mut BinaryHeap<_>, symbols: &[Symbol], left: u32| {
            let symbol = symbols[left as usize];
            if symbol.next == NONE {
                return;
            }
            let (left_id, right_id) = (symbol.id, symbols[symbol.next as usize].id);
            if let Some(&Merge { rank, joined }) = self.merges.get(&pair_key(left_id, right_id)) {
                queue.push(Reverse(Candidate { rank, left, left_id, right_id, joined }));
            }
        };
        for left in 0..symbols.len() as u32 {
            enqueue(queue, symbols, left);
        }
        while let Some(Reverse(Candidate { left, left_id, right_id, joined, .. })) = queue.pop() {
            let symbol = symbols[left as usize];
            // An entry is stale when either side has been joined to something else since.
            if symbol.id != left_id || symbol.next == NONE || symbols[symbol.next as usize].id != right_id {
                continue;
            }
            let right = symbols[symbol.next as usize];
            symbols[symbol.next as usize].id = NONE;
            symbols[left as usize] = Symbol { id: joined, previous: symbol.previous, next: right.next };
            if right.next != NONE {
                symbols[right.next as usize].previous = left;
            }
            if symbol.previous != NONE {
                enqueue(queue, symbols, symbol.previous);
            }
            enqueue(queue, symbols, left);
        }
    }

    /// A symbol that is not a token falls back to its bytes; a byte that is not a token is left out, or where a
    /// SentencePiece-like vocabulary has a token for what is unknown, becomes that.
    fn emit(&self, id: u32, out: &mut Vec<TokenId>) {
        if id < self.num_tokens {
            out.push(id);
            return;
        }
        let text = &self.extra_texts[(id - self.num_tokens) as usize];
        let mut bytes = Vec::new();
        match self.first_symbols {
            FirstSymbols::Bytes => ByteAlphabet::new().decode_into(text, &mut bytes),
            FirstSymbols::Characters => match crate::bytes::byte_of_hex_token(text) {
                Some(byte) => bytes.push(byte),
                None => bytes.extend_from_slice(text.as_bytes()),
            },
        }
        for byte in bytes {
            out.extend(self.byte_tokens[byte as usize].or(self.unknown));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bpe(tokens: &[&str], merges: &[&str], ignore_merges: bool) -> (Bpe, GgufVocab) {
        let vocab = GgufVocab {
            tokens: tokens.iter().map(|t| (*t).to_owned()).collect(),
            merges: merges.iter().map(|m| (*m).to_owned()).collect(),
            ..GgufVocab::default()
        };
        let kinds = vocab.validate().expect("valid");
        let bpe =
            Bpe::new(&vocab, &kinds, &vocab.ids_by_text(), FirstSymbols::Bytes, ignore_merges).expect("bpe");
        (bpe, vocab)
    }

    fn check(model: &(Bpe, GgufVocab), piece: &str, expect: &[&str]) {
        // Twice: the second time what the first found out about whole pieces is used.
        for _ in 0..2 {
            let mut ids = Vec::new();
            model.0.encode_piece(piece, &mut BpeScratch::default(), &mut ids);
            let texts: Vec<&str> = ids.iter().map(|&id| model.1.tokens[id as usize].as_str()).collect();
            assert_eq!(texts, expect);
        }
    }

    #[test]
    fn a_token_that_merging_cannot_reach_is_not_taken_whole() {
        check(&bpe(&["a", "b", "ab"], &[], false), "ab", &["a", "b"]);
        check(&bpe(&["a", "b", "c", "bc", "abc"], &["b c"], false), "abc", &["a", "bc"]);
    }

    #[test]
    fn the_pair_learnt_first_is_joined_first() {
        let model = bpe(&["a", "b", "c", "bc", "ab", "abc"], &["b c", "a b", "a bc"], false);
        check(&model, "abc", &["abc"]);
        check(&model, "abab", &["ab", "ab"]);
        check(&model, "", &[]);
        let model = bpe(&["a", "aa", "aaaa"], &["a a", "aa aa"], false);
        check(&model, "aaaaaaa", &["aaaa", "aa", "a"]);
    }

    #[test]
    fn a_joined_text_that_is_no_token_becomes_bytes() {
        check(&bpe(&["a", "b"], &["a b"], false), "ab", &["a", "b"]);
        check(&bpe(&["a", "b"], &[], false), "axb", &["a", "b"]);
    }

    #[test]
    fn whole_pieces_win_where_merges_are_ignored() {
        let tokens = ["a", "b", "Ġ", "Ġab"];
        check(&bpe(&tokens, &[], true), " ab", &["Ġab"]);
        check(&bpe(&tokens, &[], false), " ab", &["Ġ", "a", "b"]);
    }

    #[test]
    fn a_merge_must_be_a_pair() {
        let vocab = GgufVocab { tokens: vec!["a".into()], merges: vec!["a".into()], ..GgufVocab::default() };
        let error = Bpe::new(&vocab, &[TokenKind::Normal], &vocab.ids_by_text(), FirstSymbols::Bytes, false)
            .expect_err("not a pair");
        assert!(error.to_string().contains("'a' is not a pair"), "{error}");
    }
}
