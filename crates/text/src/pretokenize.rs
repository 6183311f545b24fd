//! The splitting rules of byte-level BPE: which spans of a text may become tokens at all.
//!
//! `tokenizer.ggml.pre` names one of them. A rule is a list of regular expressions; each splits the pieces that the
//! one before it left, and what lies between two matches is a piece of its own. The expressions are those of the
//! models' own tokenizer.json files, but for one thing: where those say `\s+(?!\S)|\s+` (white space, but for the last
//! one before a word), ours say `\s+` and [`Expression`] gives the last one back. Without look-ahead the expressions
//! run as automata, in linear time and several times faster. Groups of three digits counted from the right, which the
//! models' files write with look-ahead and in quadratic time, are counted in code ([`Step::Digits`]).

use fancy_regex::{Regex, RegexBuilder};

use crate::TextError;

/// GPT-2: contractions, words with their leading space, numbers, punctuation, white space.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";

/// The family of GPT-4: contractions in any case, a word takes one leading symbol, line breaks stick together.
/// `$numbers` is how many digits make one piece, `$word` what a word is made of, `$mark` what else counts as its
/// own letters, `$tail` what a run of symbols swallows.
macro_rules! gpt4_family {
    ($word:literal, $numbers:literal, $letters:literal, $tail:literal) => {
        concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?",
            $word,
            "|",
            $numbers,
            r"| ?[^\s",
            $letters,
            r"\p{N}]+",
            $tail,
            r"|\s*[\r\n]+|\s+"
        )
    };
}

const LLAMA3: &str = gpt4_family!(r"\p{L}+", r"\p{N}{1,3}", r"\p{L}", r"[\r\n]*");
const QWEN2: &str = gpt4_family!(r"\p{L}+", r"\p{N}", r"\p{L}", r"[\r\n]*");
const QWEN35: &str = gpt4_family!(r"[\p{L}\p{M}]+", r"\p{N}", r"\p{L}\p{M}", r"[\r\n]*");
const MINICPM5: &str = gpt4_family!(r"\p{L}+", r"\p{N}+", r"\p{L}", r"[\r\n]*");
const SEED_CODER: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+";
const BAILING: &str =
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+";
const UFAKZEKA: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";

/// GPT-4o: words are split where lower case turns to upper case.
macro_rules! cased_words {
    ($contraction:literal, $numbers:literal) => {
        concat!(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
            $contraction,
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
            $contraction,
            "|",
            $numbers,
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+"
        )
    };
}

const GPT4O: &str = cased_words!(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}");
const TEKKEN: &str = cased_words!("", r"\p{N}");
const YOUTU: &str = cased_words!(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}");

const YOUTU_SCRIPTS: &str = concat!(
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}",
    r"\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]+|[",
    r"\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
);
const CJK: &str = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+";
const DEEPSEEK_CJK: &str = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+";
/// The letters of alphabetic scripts with case, as DeepSeek-LLM lists them.
const DEEPSEEK_LETTERS: &str = concat!(
    r"\s?[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}",
    r"\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}",
    r"\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-",
    r"\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-",
    r"\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-",
    r"\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-",
    r"\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}",
    r"-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-",
    r"\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}",
    r"\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-",
    r"\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}",
    r"\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}",
    r"\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}",
    r"\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+",
);
const DEEPSEEK_SYMBOLS: &str =
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+";
const DEEPSEEK3: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+"
);
const BLOOM: &str = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+";
const FALCON_PUNCTUATION: &str = r"[\p{P}\$\+<=>\^~\|`]+";
const DEFAULT_PUNCTUATION: &str = r"[\p{P}\$\+<=>\^~\|]+";
const THREE_DIGITS: &str = "[0-9][0-9][0-9]";

const SPARK: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
    r"| ?[\p{P}\p{S}]+|[\r\n]|\s+"
);
/// Runs of white space are cut into powers of two, the last space before a word left to the word.
const JAIS2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
    r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)",
    r"|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
);
const EXAONE_MOE: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+"
);
const CHAMELEON: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";
/// GPT-4o's, with Chinese characters apart.
const KIMI_K2: &str = concat!(
    r"\p{Han}+",
    r"|[^\r\n\p{L}\p{N}]?[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]*[[\p{Ll}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]+[[\p{Ll}\p{Lm}\p{Lo}\p{M}]&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
);
const AFMOE_SCRIPTS: &str = concat!(
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}\x{FF65}-\x{FF9F}",
    r"\x{2F00}-\x{2FDF}\x{E40}-\x{E7F}\x{E80}-\x{EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}",
    r"\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+",
);
/// Stands for groups of three digits from the right, in place of an expression.
const DIGITS: &str = "digits in threes";
/// The same, where no letter follows the number.
const DIGITS_OF_NUMBERS: &str = "digits in threes of whole numbers";

/// What a name of `tokenizer.ggml.pre` stands for.
#[derive(Clone, Copy, Debug)]
struct Rule {
    expressions: &'static [&'static str],
    /// A whole piece that is a token is taken as it is, even where merges would give something else.
    ignore_merges: bool,
    /// Whether BOS is added where the file does not say.
    add_bos: bool,
}

impl Rule {
    const fn plain(expressions: &'static [&'static str]) -> Self {
        Self { expressions, ignore_merges: false, add_bos: false }
    }

    const fn ignoring_merges(expressions: &'static [&'static str], add_bos: bool) -> Self {
        Self { expressions, ignore_merges: true, add_bos }
    }
}

fn rule(name: &str) -> Option<Rule> {
    Some(match name {
        "default" => Rule::plain(&[DEFAULT_PUNCTUATION, GPT2, r"\p{N}+", THREE_DIGITS]),
        "gpt-2" | "phi-2" | "jina-es" | "jina-de" | "jina-v2-es" | "jina-v2-de" | "gigachat" | "a.x-4.0"
        | "mellum" | "modern-bert" | "jina-v1-en" | "jina-v2-code" | "roberta-bpe" | "mpt" | "olmo"
        | "jais" | "trillion" | "granite-docling" | "exaone4" => Rule::plain(&[GPT2]),
        "starcoder" | "refact" | "command-r" | "smollm" | "codeshell" | "exaone" | "minerva-7b"
        | "mellum2" => Rule::plain(&[r"\p{N}", GPT2]),
        "falcon" => Rule::plain(&[FALCON_PUNCTUATION, GPT2, THREE_DIGITS]),
        "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2"
        | "jina-v5-nano" => Rule::ignoring_merges(&[LLAMA3], true),
        "dbrx" | "smaug-bpe" | "chatglm-bpe" => Rule::plain(&[LLAMA3]),
        "glm4" | "glm5" => Rule::ignoring_merges(&[LLAMA3], false),
        "minicpm5" => Rule::ignoring_merges(&[r"\p{N}{1,3}", MINICPM5], false),
        "qwen2" | "deepseek-r1-qwen" | "kormo" | "f2llmv2" | "stablelm2" | "megrez" | "hunyuan"
        | "solar-open" | "grok-2" => Rule::plain(&[QWEN2]),
        "qwen35" => Rule::plain(&[QWEN35]),
        "laguna" => Rule::plain(&[r"[^\n]+|[\n]+", QWEN2]),
        "seed-coder" => Rule::plain(&[SEED_CODER]),
        "bailingmoe" | "bailingmoe2" | "llada-moe" => Rule::plain(&[BAILING]),
        "ufakzeka" => Rule::plain(&[UFAKZEKA]),
        "gpt-4o" | "llama4" | "kanana2" | "talkie" | "minimax-m2" => Rule::plain(&[GPT4O]),
        "granite-embed-multi-97m" => Rule::ignoring_merges(&[GPT4O], false),
        "tekken" => Rule::ignoring_merges(&[TEKKEN], true),
        "youtu" => Rule::ignoring_merges(&[YOUTU_SCRIPTS, YOUTU], false),
        "deepseek-llm" => {
            Rule::plain(&["[\r\n]", DEEPSEEK_LETTERS, DEEPSEEK_SYMBOLS, r"\s+$", DEEPSEEK_CJK, r"\p{N}+"])
        }
        "deepseek-coder" => Rule::plain(&["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK, r"\p{N}"]),
        "deepseek-v3" | "hunyuan-dense" | "joyai-llm" | "hy_v4" => {
            Rule::plain(&[r"\p{N}{1,3}", CJK, DEEPSEEK3])
        }
        "spark2_5" => Rule::plain(&[r"\p{N}{1,3}", CJK, SPARK, r"\p{N}"]),
        "jais-2" => Rule::plain(&[JAIS2]),
        "exaone-moe" => Rule::plain(&[EXAONE_MOE]),
        "chameleon" => Rule {
            add_bos: true,
            ..Rule::plain(&[
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                CHAMELEON,
            ])
        },
        "tiny_aya" | "cohere2moe" => Rule::plain(&[DIGITS_OF_NUMBERS, GPT4O]),
        "superbpe" => Rule::plain(&[r"\p{N}+", DIGITS]),
        "kimi-k2" => Rule::plain(&[KIMI_K2]),
        "afmoe" => Rule::plain(&[DIGITS, AFMOE_SCRIPTS, DEEPSEEK3]),
        "poro-chat" | "bloom" | "gpt3-finnish" => Rule::plain(&[BLOOM]),
        "viking" => Rule::plain(&[BLOOM, r"\p{N}"]),
        _ => return None,
    })
}

/// One regular expression of a rule.
#[derive(Debug)]
struct Expression {
    regex: Regex,
    /// It ends in `|\s+`: a run of white space before something else gives back its last character.
    gives_back_space: bool,
    /// It has an alternative for line breaks, so a match that ends in one was not made by `\s+`.
    matches_line_breaks: bool,
}

impl Expression {
    fn compile(pattern: &str) -> Result<Self, TextError> {
        let regex = RegexBuilder::new(pattern)
            .build()
            .map_err(|error| TextError::Encode(format!("splitting rule: {error}")))?;
        Ok(Self {
            regex,
            gives_back_space: pattern.ends_with(r"|\s+"),
            matches_line_breaks: pattern.contains(r"\s*[\r\n]"),
        })
    }

    /// The next match at or after `position`, never an empty one.
    fn find(&self, text: &str, position: usize) -> Result<Option<(usize, usize)>, TextError> {
        let found =
            self.regex.find_from_pos(text, position).map_err(|error| TextError::Encode(error.to_string()))?;
        let Some(found) = found else { return Ok(None) };
        let (start, mut end) = (found.start(), found.end());
        if self.gives_back_space && end < text.len() {
            let mut from_end = text[start..end].chars().rev();
            let last = from_end.next().filter(|last| last.is_whitespace());
            let before = from_end.next();
            if let (Some(last), Some(before)) = (last, before)
                && before.is_whitespace()
                && !(self.matches_line_breaks && matches!(last, '\r' | '\n'))
            {
                end -= last.len_utf8();
            }
        }
        Ok((end > start).then_some((start, end)))
    }
}

/// One step of a rule.
#[derive(Debug)]
enum Step {
    Expression(Expression),
    /// Groups of three digits, counted from the right; the first one has what is left over.
    Digits {
        runs: Regex,
        /// Only where neither a letter nor an underscore follows.
        of_numbers: bool,
    },
}

impl Step {
    fn compile(pattern: &str) -> Result<Self, TextError> {
        if pattern != DIGITS && pattern != DIGITS_OF_NUMBERS {
            return Expression::compile(pattern).map(Self::Expression);
        }
        let runs =
            Regex::new(r"\d+").map_err(|error| TextError::Encode(format!("splitting rule: {error}")))?;
        Ok(Self::Digits { runs, of_numbers: pattern == DIGITS_OF_NUMBERS })
    }

    fn find(&self, text: &str, position: usize) -> Result<Option<(usize, usize)>, TextError> {
        let (runs, of_numbers) = match self {
            Self::Expression(expression) => return expression.find(text, position),
            Self::Digits { runs, of_numbers } => (runs, *of_numbers),
        };
        let mut position = position;
        loop {
            let found = runs.find_from_pos(text, position);
            let Some(run) = found.map_err(|error| TextError::Encode(error.to_string()))? else {
                return Ok(None);
            };
            let is_word = |next: char| next.is_alphanumeric() || next == '_';
            if of_numbers && text[run.end()..].starts_with(is_word) {
                position = run.end();
                continue;
            }
            let first = match run.as_str().chars().count() % 3 {
                0 => 3,
                rest => rest,
            };
            let length: usize = run.as_str().chars().take(first).map(char::len_utf8).sum();
            return Ok(Some((run.start(), run.start() + length)));
        }
    }
}

/// A splitting rule, compiled.
#[derive(Debug)]
pub(crate) struct PreTokenizer {
    expressions: Vec<Step>,
    pub(crate) ignore_merges: bool,
    pub(crate) add_bos: bool,
}

impl PreTokenizer {
    pub(crate) fn from_name(name: &str) -> Result<Self, TextError> {
        let rule = rule(name).ok_or_else(|| TextError::UnknownPreTokenizer(name.to_owned()))?;
        Self::compile(rule.expressions, rule.ignore_merges, rule.add_bos)
    }

    /// Gemma 4: no words at all, only runs of line breaks are kept apart.
    pub(crate) fn lines() -> Result<Self, TextError> {
        Self::compile(&[r"[^\n]+|[\n]+"], false, false)
    }

    /// What lies between white space.
    pub(crate) fn words() -> Result<Self, TextError> {
        Self::compile(&[r"\S+"], false, false)
    }

    fn compile(patterns: &[&str], ignore_merges: bool, add_bos: bool) -> Result<Self, TextError> {
        let expressions = patterns.iter().map(|pattern| Step::compile(pattern)).collect::<Result<_, _>>()?;
        Ok(Self { expressions, ignore_merges, add_bos })
    }

    /// Calls `visit` with every piece of `text`, in order; pieces are never empty and make up the text.
    pub(crate) fn split<'a>(&self, text: &'a str, mut visit: impl FnMut(&'a str)) -> Result<(), TextError> {
        self.split_from(0, text, &mut visit)
    }

    fn split_from<'a>(
        &self,
        step: usize,
        text: &'a str,
        visit: &mut dyn FnMut(&'a str),
    ) -> Result<(), TextError> {
        let Some(expression) = self.expressions.get(step) else {
            visit(text);
            return Ok(());
        };
        let mut done = 0;
        while let Some((start, end)) = expression.find(text, done)? {
            if start > done {
                self.split_from(step + 1, &text[done..start], visit)?;
            }
            self.split_from(step + 1, &text[start..end], visit)?;
            done = end;
        }
        if done < text.len() {
            self.split_from(step + 1, &text[done..], visit)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
