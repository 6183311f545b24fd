//! One tool call, `{"name": …, "arguments": {…}}`, read character by character.
//!
//! The call is announced as soon as its name is known and its arguments begin, and its arguments are handed on as they
//! come. Until then the text is kept, because it may turn out to be no call; what is kept is bounded. The key of the
//! arguments is `arguments` or `parameters`. A call whose arguments come before its name is read to its end first.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::json::{JsonScanner, Mark};

/// Text that may or may not be a call.
const MAX_PENDING_BYTES: usize = 256 << 10;
const ARGUMENT_KEYS: [&str; 2] = ["arguments", "parameters"];

/// Which calls are taken for calls.
#[derive(Clone, Debug)]
pub enum Names {
    /// The text is marked as a call: any name is one, and arguments may be missing.
    Any,
    /// The text may as well be an answer in JSON: only these names make it a call.
    Known(Arc<[String]>),
}

/// What a character brought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    Nothing,
    /// The call has this name, and its arguments begin.
    Begin {
        name: String,
    },
    /// The character belongs to the arguments.
    Argument,
    /// The same, and the call ends with it.
    LastArgument,
    /// A call that was announced before has ended.
    End,
    /// A call that could be read only as a whole.
    Whole {
        name: String,
        arguments: String,
    },
    /// This is not a call; the character does not belong to it.
    NoCall,
}

#[derive(Debug)]
pub struct CallReader {
    scanner: JsonScanner,
    names: Names,
    /// All text before the announcement.
    pending: String,
    /// Where in `pending` the current string begins.
    string_start: usize,
    key: String,
    name: Option<String>,
    is_announced: bool,
    in_arguments: bool,
    /// There is no object around the arguments.
    only_arguments: bool,
}

impl CallReader {
    pub fn new(names: Names) -> Self {
        Self {
            scanner: JsonScanner::new(),
            names,
            pending: String::new(),
            string_start: 0,
            key: String::new(),
            name: None,
            is_announced: false,
            in_arguments: false,
            only_arguments: false,
        }
    }

    /// Reads the arguments of a call whose name was written before them.
    pub fn of_arguments() -> Self {
        Self { is_announced: true, only_arguments: true, ..Self::new(Names::Any) }
    }

    pub fn is_announced(&self) -> bool {
        self.is_announced
    }

    /// What was read and not announced.
    pub fn take_pending(&mut self) -> String {
        std::mem::take(&mut self.pending)
    }

    pub fn push(&mut self, c: char) -> Progress {
        let Ok(mark) = self.scanner.push(c) else { return Progress::NoCall };
        let depth = self.scanner.depth();
        if self.is_announced {
            return self.push_announced(mark, depth);
        }
        if self.pending.len() + c.len_utf8() > MAX_PENDING_BYTES {
            return Progress::NoCall;
        }
        self.pending.push(c);
        match mark {
            Mark::StringBegin => self.string_start = self.pending.len() - 1,
            Mark::StringEnd { is_key } if depth == 1 => {
                let text = serde_json::from_str(&self.pending[self.string_start..]);
                if is_key {
                    self.key = text.unwrap_or_default();
                } else if self.key == "name" {
                    let Some(name) = text.ok().filter(|name| self.is_taken(name)) else {
                        return self.refuse(c);
                    };
                    self.name = Some(name);
                }
            }
            Mark::ObjectBegin if depth == 2 && ARGUMENT_KEYS.contains(&&*self.key) => {
                if let Some(name) = self.name.take() {
                    (self.is_announced, self.in_arguments) = (true, true);
                    self.pending = String::new();
                    return Progress::Begin { name };
                }
            }
            Mark::End if depth == 0 => return self.whole(c),
            _ => {}
        }
        Progress::Nothing
    }

    fn push_announced(&mut self, mark: Mark, depth: usize) -> Progress {
        if self.only_arguments {
            return if depth == 0 { Progress::LastArgument } else { Progress::Argument };
        }
        if self.in_arguments {
            self.in_arguments = !(mark == Mark::End && depth == 1);
            return Progress::Argument;
        }
        if depth == 0 { Progress::End } else { Progress::Nothing }
    }

    fn is_taken(&self, name: &str) -> bool {
        match &self.names {
            Names::Any => !name.is_empty(),
            Names::Known(names) => names.iter().any(|known| known == name),
        }
    }

    /// The last character was taken in and is given back.
    fn refuse(&mut self, c: char) -> Progress {
        self.pending.truncate(self.pending.len() - c.len_utf8());
        Progress::NoCall
    }

    fn whole(&mut self, c: char) -> Progress {
        let call = serde_json::from_str::<Map<String, Value>>(&self.pending).ok();
        match call.and_then(|call| self.understand(&call)) {
            Some((name, arguments)) => Progress::Whole { name, arguments },
            None => self.refuse(c),
        }
    }

    fn understand(&self, call: &Map<String, Value>) -> Option<(String, String)> {
        let name = call.get("name")?.as_str().filter(|name| self.is_taken(name))?;
        let arguments = match ARGUMENT_KEYS.iter().find_map(|key| call.get(*key)) {
            Some(arguments @ Value::Object(_)) => arguments.to_string(),
            // JSON in a string.
            Some(Value::String(text)) => {
                serde_json::from_str::<Map<String, Value>>(text).ok()?;
                text.clone()
            }
            None | Some(Value::Null) if matches!(self.names, Names::Any) => "{}".to_owned(),
            _ => return None,
        };
        Some((name.to_owned(), arguments))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Name and arguments of a text that is one call, and whether it was announced before its end.
    fn read(text: &str, names: &Names) -> Option<(String, String, bool)> {
        let mut reader = CallReader::new(names.clone());
        let mut call: Option<(String, String)> = None;
        for c in text.chars() {
            match reader.push(c) {
                Progress::Nothing => {}
                Progress::Begin { name } => call = Some((name, c.to_string())),
                Progress::Argument => call.as_mut().expect("announced").1.push(c),
                Progress::End => return call.map(|(name, arguments)| (name, arguments, true)),
                Progress::Whole { name, arguments } => return Some((name, arguments, false)),
                Progress::LastArgument => panic!("there is an object around them"),
                Progress::NoCall => return None,
            }
        }
        None
    }

    fn check(text: &str, expect: Option<(&str, &str, bool)>) {
        let expect = expect.map(|(name, arguments, early)| (name.to_owned(), arguments.to_owned(), early));
        assert_eq!(read(text, &Names::Any), expect, "{text}");
    }

    #[test]
    fn calls_are_read() {
        check(r#"{"name": "f", "arguments": {"a": [1, {}]}}"#, Some(("f", r#"{"a": [1, {}]}"#, true)));
        check(r#"{"name": "f", "parameters": {} , "id": "x"}"#, Some(("f", "{}", true)));
        check(r#"{"arguments": {"a": 1}, "name": "f"}"#, Some(("f", r#"{"a":1}"#, false)));
        check(r#"{"name": "f\u006f", "arguments": "{\"a\": 1}"}"#, Some(("fo", r#"{"a": 1}"#, false)));
        check(r#"{"name": "f"}"#, Some(("f", "{}", false)));
        check(
            r#"{"type": "function", "name": "f", "arguments": {"name": "g"}}"#,
            Some(("f", r#"{"name": "g"}"#, true)),
        );
    }

    #[test]
    fn what_is_no_call_is_refused() {
        check(r#"{"a": 1}"#, None);
        check(r#"{"name": 1, "arguments": {}}"#, None);
        check(r#"{"name": "f", "arguments": 1}"#, None);
        check(r#"{"name": "f", "arguments": "x"}"#, None);
        check(r#"{"name": "", "arguments": {}}"#, None);
        let known = Names::Known(Arc::from(["f".to_owned()]));
        assert!(read(r#"{"name": "g", "arguments": {}}"#, &known).is_none());
        assert!(read(r#"{"name": "f"}"#, &known).is_none());
        assert!(read(r#"{"name": "f", "arguments": {}}"#, &known).is_some());
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut reader = CallReader::new(Names::Any);
        let long = format!("{{\"arguments\": {{\"a\": \"{}", "x".repeat(2 * MAX_PENDING_BYTES));
        let refused = long.chars().position(|c| reader.push(c) == Progress::NoCall);
        assert!(refused.is_some_and(|at| at <= MAX_PENDING_BYTES));
        assert!(reader.take_pending().len() <= MAX_PENDING_BYTES);
    }
}
