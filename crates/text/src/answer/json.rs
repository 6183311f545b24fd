//! An incremental JSON checker: one object, strictly RFC 8259, character by character.
//!
//! It stores no text, only its state. `call` interprets the characters (which key, which value) by the marks that are
//! returned where values begin and end.

/// Deeper values than this are no arguments of a function.
const MAX_DEPTH: usize = 64;

/// What a character began or ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    Nothing,
    StringBegin,
    StringEnd {
        is_key: bool,
    },
    ObjectBegin,
    /// An object or a list has ended; `JsonScanner::depth` is what is open still.
    End,
}

/// The character cannot stand here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotJson;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    Minus,
    Zero,
    Digits,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Value,
    ValueOrEnd,
    Key,
    KeyOrEnd,
    Colon,
    CommaOrEnd,
    Text {
        is_key: bool,
    },
    Escape {
        is_key: bool,
    },
    Hex {
        is_key: bool,
        left: u8,
    },
    Number(Number),
    /// What is left of `true`, `false` or `null`.
    Literal(&'static str),
}

/// Reads one object.
#[derive(Debug)]
pub struct JsonScanner {
    state: State,
    /// Open containers; true for an object.
    open: Vec<bool>,
}

impl JsonScanner {
    pub fn new() -> Self {
        Self { state: State::Value, open: Vec::new() }
    }

    /// How many objects and lists are open. 0 after the last character.
    pub fn depth(&self) -> usize {
        self.open.len()
    }

    pub fn push(&mut self, c: char) -> Result<Mark, NotJson> {
        match self.state {
            State::Text { is_key } => return self.in_text(c, is_key),
            State::Escape { is_key } => {
                self.state = match c {
                    '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => State::Text { is_key },
                    'u' => State::Hex { is_key, left: 4 },
                    _ => return Err(NotJson),
                };
                return Ok(Mark::Nothing);
            }
            State::Hex { is_key, left } => {
                if !c.is_ascii_hexdigit() {
                    return Err(NotJson);
                }
                self.state =
                    if left == 1 { State::Text { is_key } } else { State::Hex { is_key, left: left - 1 } };
                return Ok(Mark::Nothing);
            }
            State::Literal(rest) => {
                let rest = rest.strip_prefix(c).ok_or(NotJson)?;
                self.state = if rest.is_empty() { State::CommaOrEnd } else { State::Literal(rest) };
                return Ok(Mark::Nothing);
            }
            State::Number(number) => {
                if let Some(next) = next_of_number(number, c) {
                    self.state = State::Number(next);
                    return Ok(Mark::Nothing);
                }
                if !matches!(
                    number,
                    Number::Zero | Number::Digits | Number::Fraction | Number::ExponentDigits
                ) {
                    return Err(NotJson);
                }
                self.state = State::CommaOrEnd;
            }
            _ => {}
        }
        if matches!(c, ' ' | '\n' | '\r' | '\t') {
            return Ok(Mark::Nothing);
        }
        self.structure(c)
    }

    fn in_text(&mut self, c: char, is_key: bool) -> Result<Mark, NotJson> {
        match c {
            '"' => {
                self.state = if is_key { State::Colon } else { State::CommaOrEnd };
                return Ok(Mark::StringEnd { is_key });
            }
            '\\' => self.state = State::Escape { is_key },
            c if c < ' ' => return Err(NotJson),
            _ => {}
        }
        Ok(Mark::Nothing)
    }

    /// Between values.
    fn structure(&mut self, c: char) -> Result<Mark, NotJson> {
        match (self.state, c) {
            (State::KeyOrEnd | State::ValueOrEnd | State::CommaOrEnd, '}' | ']') => return self.close(c),
            (State::Key | State::KeyOrEnd, '"') => {
                self.state = State::Text { is_key: true };
                return Ok(Mark::StringBegin);
            }
            (State::Colon, ':') => self.state = State::Value,
            (State::CommaOrEnd, ',') => {
                self.state = if self.open.last() == Some(&true) { State::Key } else { State::Value };
            }
            (State::Value | State::ValueOrEnd, _) => return self.value(c),
            _ => return Err(NotJson),
        }
        Ok(Mark::Nothing)
    }

    fn value(&mut self, c: char) -> Result<Mark, NotJson> {
        if self.open.is_empty() && c != '{' {
            return Err(NotJson);
        }
        self.state = match c {
            '{' | '[' => {
                if self.open.len() == MAX_DEPTH {
                    return Err(NotJson);
                }
                self.open.push(c == '{');
                self.state = if c == '{' { State::KeyOrEnd } else { State::ValueOrEnd };
                return Ok(if c == '{' { Mark::ObjectBegin } else { Mark::Nothing });
            }
            '"' => {
                self.state = State::Text { is_key: false };
                return Ok(Mark::StringBegin);
            }
            't' => State::Literal("rue"),
            'f' => State::Literal("alse"),
            'n' => State::Literal("ull"),
            '-' => State::Number(Number::Minus),
            '0' => State::Number(Number::Zero),
            '1'..='9' => State::Number(Number::Digits),
            _ => return Err(NotJson),
        };
        Ok(Mark::Nothing)
    }

    fn close(&mut self, c: char) -> Result<Mark, NotJson> {
        if self.open.pop() != Some(c == '}') {
            return Err(NotJson);
        }
        self.state = State::CommaOrEnd;
        Ok(Mark::End)
    }
}

/// How a number goes on with this character; `None` where it does not.
fn next_of_number(number: Number, c: char) -> Option<Number> {
    use Number::{Digits, Exponent, ExponentDigits, ExponentSign, Fraction, Minus, Point, Zero};
    let next = match (number, c) {
        (Minus, '0') => Zero,
        (Minus, '1'..='9') | (Digits, '0'..='9') => Digits,
        (Zero | Digits, '.') => Point,
        (Point | Fraction, '0'..='9') => Fraction,
        (Zero | Digits | Fraction, 'e' | 'E') => Exponent,
        (Exponent, '+' | '-') => ExponentSign,
        (Exponent | ExponentSign | ExponentDigits, '0'..='9') => ExponentDigits,
        _ => return None,
    };
    Some(next)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// True where the text is exactly one object.
    fn is_object(text: &str) -> bool {
        let mut scanner = JsonScanner::new();
        let length = text.chars().count();
        for (index, c) in text.chars().enumerate() {
            let Ok(_) = scanner.push(c) else { return false };
            if scanner.depth() == 0 {
                return index + 1 == length && c == '}';
            }
        }
        false
    }

    #[test]
    fn it_takes_what_serde_takes() {
        let texts = [
            r"{}",
            r#"{"a":1}"#,
            r#"{"a": -0.5e+10, "b": [1, 2, [], {}], "c": null}"#,
            r#"{"\u00e9\n": "\"x\\"}"#,
            r#"{"a": true, "b": false}"#,
            r#"{"a": 0}"#,
            r#"{"a": "é😀"}"#,
            r"{,}",
            r#"{"a"}"#,
            r#"{"a":}"#,
            r#"{"a":01}"#,
            r#"{"a":1.}"#,
            r#"{"a":.5}"#,
            r#"{"a":+1}"#,
            r#"{"a":1e}"#,
            r#"{"a":tru}"#,
            r#"{"a":nul}"#,
            r#"{"a":[1,]}"#,
            r#"{"a":1,}"#,
            r#"{"a":[}"#,
            r#"{"a":{]}"#,
            r#"{"a" 1}"#,
            r"{a:1}",
            r"{'a':1}",
            "{\"a\":\"\n\"}",
            r#"{"a":"\x"}"#,
            r#"{"a":"\u12g4"}"#,
            r#"{"a":-}"#,
            r#"{"a":1 2}"#,
        ];
        for text in texts {
            let expect = serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(text).is_ok();
            assert_eq!(is_object(text), expect, "{text}");
        }
        assert!(!is_object("[1]"), "only objects");
        assert!(!is_object("1"));
    }

    #[test]
    fn depth_is_bounded() {
        let nested = |depth: usize| format!("{}{}", "{\"a\":".repeat(depth), "1");
        let closed = |depth: usize| format!("{}{}", nested(depth), "}".repeat(depth));
        assert!(is_object(&closed(MAX_DEPTH)));
        assert!(!is_object(&closed(MAX_DEPTH + 1)));
    }
}
