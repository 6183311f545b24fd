//! Translates llama.cpp's GBNF grammars (`root ::= …`) to the grammar engine's own language (Lark).
//!
//! The engine splits text into lexemes before it parses, greedily. GBNF has no lexemes. So every rule that is not recursive
//! becomes one terminal, which is one regular expression, and so does every run of such rules within a recursive one. What is
//! left between two lexemes of a recursive rule is split greedily.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

/// Nested parentheses; the parser goes down one level of its own stack for each.
const MAX_DEPTH: usize = 100;
const MAX_REPEAT: u32 = 10_000;

#[derive(Clone, Debug)]
enum Node {
    Literal(String),
    /// Ranges of characters, and whether all others are meant.
    Class(Vec<(char, char)>, bool),
    Rule(String),
    Sequence(Vec<Node>),
    Choice(Vec<Node>),
    Repeat(Box<Node>, u32, Option<u32>),
}

/// The grammar in Lark. The error says what is wrong and where.
pub(crate) fn to_lark(text: &str) -> Result<String, String> {
    let rules = Parser { rest: text, line: 1, depth: 0 }.rules()?;
    let names: HashMap<&str, &Node> = rules.iter().map(|(name, node)| (name.as_str(), node)).collect();
    if !names.contains_key("root") {
        return Err("it has no rule `root`".to_owned());
    }
    for (name, node) in &rules {
        if let Some(missing) = references(node).into_iter().find(|other| !names.contains_key(other)) {
            return Err(format!("the rule `{name}` uses `{missing}`, which is not defined"));
        }
    }
    let recursive = recursive_rules(&rules);
    let mut writer = Writer {
        numbers: rules.iter().enumerate().map(|(index, (name, _))| (name.as_str(), index)).collect(),
        recursive,
        terminals: String::new(),
        num_terminals: 0,
    };
    let mut out = String::new();
    for (name, node) in &rules {
        let number = writer.numbers[name.as_str()];
        if writer.recursive.contains(name.as_str()) {
            let body = writer.rule(node);
            writeln!(out, "rule_{number}: {body}").expect("writing to a string");
        } else {
            let body = writer.terminal(node);
            writeln!(out, "RULE_{number}: {body}").expect("writing to a string");
        }
    }
    let root = writer.reference("root");
    Ok(format!("start: {root}\n{out}{}", writer.terminals))
}

fn references(node: &Node) -> Vec<&str> {
    match node {
        Node::Rule(name) => vec![name],
        Node::Sequence(nodes) | Node::Choice(nodes) => nodes.iter().flat_map(references).collect(),
        Node::Repeat(node, ..) => references(node),
        Node::Literal(_) | Node::Class(..) => Vec::new(),
    }
}

/// The rules that contain themselves, and those that contain such rules.
fn recursive_rules(rules: &[(String, Node)]) -> HashSet<&str> {
    let mut plain: HashSet<&str> = HashSet::new();
    loop {
        let before = plain.len();
        for (name, node) in rules {
            if references(node).iter().all(|other| plain.contains(other)) {
                plain.insert(name);
            }
        }
        if plain.len() == before {
            break;
        }
    }
    rules.iter().map(|(name, _)| name.as_str()).filter(|name| !plain.contains(name)).collect()
}

struct Writer<'a> {
    numbers: HashMap<&'a str, usize>,
    recursive: HashSet<&'a str>,
    /// Runs within recursive rules.
    terminals: String,
    num_terminals: usize,
}

impl Writer<'_> {
    fn reference(&self, name: &str) -> String {
        let prefix = if self.recursive.contains(name) { "rule" } else { "RULE" };
        format!("{prefix}_{}", self.numbers[name])
    }

    fn is_plain(&self, node: &Node) -> bool {
        references(node).iter().all(|name| !self.recursive.contains(name))
    }

    /// The right side of a terminal.
    fn terminal(&self, node: &Node) -> String {
        match node {
            Node::Literal(text) => quoted(text),
            Node::Class(ranges, negated) => class(ranges, *negated),
            Node::Rule(name) => self.reference(name),
            Node::Sequence(nodes) if nodes.is_empty() => "\"\"".to_owned(),
            Node::Sequence(nodes) => {
                let parts: Vec<String> = nodes.iter().map(|node| self.terminal(node)).collect();
                format!("({})", parts.join(" "))
            }
            Node::Choice(nodes) => {
                let parts: Vec<String> = nodes.iter().map(|node| self.terminal(node)).collect();
                format!("({})", parts.join(" | "))
            }
            Node::Repeat(node, min, max) => format!("({}){}", self.terminal(node), repetition(*min, *max)),
        }
    }

    /// The right side of a rule that contains itself.
    fn rule(&mut self, node: &Node) -> String {
        if self.is_plain(node) {
            return self.own_terminal(std::slice::from_ref(node));
        }
        match node {
            Node::Rule(name) => self.reference(name),
            Node::Choice(nodes) => {
                let parts: Vec<String> = nodes.iter().map(|node| self.rule(node)).collect();
                format!("({})", parts.join(" | "))
            }
            Node::Repeat(node, min, max) => format!("({}){}", self.rule(node), repetition(*min, *max)),
            Node::Sequence(nodes) => {
                let mut parts = Vec::new();
                let mut from = 0;
                for (index, node) in nodes.iter().enumerate() {
                    if self.is_plain(node) {
                        continue;
                    }
                    if from < index {
                        parts.push(self.own_terminal(&nodes[from..index]));
                    }
                    parts.push(self.rule(node));
                    from = index + 1;
                }
                if from < nodes.len() {
                    parts.push(self.own_terminal(&nodes[from..]));
                }
                format!("({})", parts.join(" "))
            }
            Node::Literal(_) | Node::Class(..) => unreachable!("these are plain"),
        }
    }

    /// A terminal for a run that contains no recursive rule. One that may be empty is written as one that may be left
    /// out, which lexers like better.
    fn own_terminal(&mut self, nodes: &[Node]) -> String {
        let body = self.terminal(&Node::Sequence(nodes.to_vec()));
        let name = format!("RUN_{}", self.num_terminals);
        self.num_terminals += 1;
        writeln!(self.terminals, "{name}: {body}").expect("writing to a string");
        name
    }
}

fn repetition(min: u32, max: Option<u32>) -> String {
    match (min, max) {
        (0, None) => "*".to_owned(),
        (1, None) => "+".to_owned(),
        (0, Some(1)) => "?".to_owned(),
        (min, None) => format!("{{{min},}}"),
        (min, Some(max)) => format!("{{{min},{max}}}"),
    }
}

fn quoted(text: &str) -> String {
    serde_json::to_string(text).expect("a string serialises")
}

/// Every character by its number, so that none means something.
fn class(ranges: &[(char, char)], negated: bool) -> String {
    let mut out = String::from(if negated { "/[^" } else { "/[" });
    for &(first, last) in ranges {
        write!(out, "\\x{{{:X}}}-\\x{{{:X}}}", u32::from(first), u32::from(last))
            .expect("writing to a string");
    }
    out + "]/"
}

struct Parser<'a> {
    rest: &'a str,
    line: usize,
    depth: usize,
}

impl Parser<'_> {
    fn error<T>(&self, message: &str) -> Result<T, String> {
        Err(format!("line {}: {message}", self.line))
    }

    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    fn bump(&mut self) -> Option<char> {
        let character = self.peek()?;
        self.line += usize::from(character == '\n');
        self.rest = &self.rest[character.len_utf8()..];
        Some(character)
    }

    fn skip_space(&mut self) {
        while let Some(character) = self.peek() {
            if character == '#' {
                let end = self.rest.find('\n').unwrap_or(self.rest.len());
                self.rest = &self.rest[end..];
            } else if character.is_whitespace() {
                self.bump();
            } else {
                break;
            }
        }
    }

    fn name(&mut self) -> &str {
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        let end = self.rest.find(|c| !is_name(c)).unwrap_or(self.rest.len());
        let (name, rest) = self.rest.split_at(end);
        self.rest = rest;
        name
    }

    /// A rule begins here: a name and `::=`.
    fn at_rule(&self) -> bool {
        let mut ahead = Parser { rest: self.rest, line: 0, depth: 0 };
        if ahead.name().is_empty() {
            return false;
        }
        ahead.skip_space();
        ahead.rest.starts_with("::=")
    }

    fn rules(mut self) -> Result<Vec<(String, Node)>, String> {
        let mut rules: Vec<(String, Node)> = Vec::new();
        self.skip_space();
        while !self.rest.is_empty() {
            if !self.at_rule() {
                return self.error("expected a rule, `name ::= …`");
            }
            let name = self.name().to_owned();
            self.skip_space();
            self.rest = &self.rest["::=".len()..];
            let node = self.choice()?;
            if rules.iter().any(|(other, _)| *other == name) {
                return self.error(&format!("the rule `{name}` is defined twice"));
            }
            rules.push((name, node));
            self.skip_space();
        }
        Ok(rules)
    }

    fn choice(&mut self) -> Result<Node, String> {
        let mut choices = vec![self.sequence()?];
        while self.peek() == Some('|') {
            self.bump();
            choices.push(self.sequence()?);
        }
        Ok(if choices.len() == 1 { choices.remove(0) } else { Node::Choice(choices) })
    }

    fn sequence(&mut self) -> Result<Node, String> {
        let mut nodes = Vec::new();
        loop {
            self.skip_space();
            let node = match self.peek() {
                None | Some('|' | ')') => break,
                _ if self.at_rule() => break,
                Some('"') => self.literal()?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.bump();
                    Node::Class(vec![('\0', char::MAX)], false)
                }
                Some('(') => self.group()?,
                Some(character) if character.is_ascii_alphanumeric() || matches!(character, '-' | '_') => {
                    Node::Rule(self.name().to_owned())
                }
                Some(character) => return self.error(&format!("{character:?} is not understood")),
            };
            let node = self.repeated(node)?;
            nodes.push(node);
        }
        Ok(if nodes.len() == 1 { nodes.remove(0) } else { Node::Sequence(nodes) })
    }

    fn group(&mut self) -> Result<Node, String> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return self.error("parentheses are nested too deeply");
        }
        self.bump();
        let node = self.choice()?;
        if self.bump() != Some(')') {
            return self.error("a `)` is missing");
        }
        self.depth -= 1;
        Ok(node)
    }

    fn repeated(&mut self, mut node: Node) -> Result<Node, String> {
        let mut times = 0;
        loop {
            let (min, max) = match self.peek() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => self.counts()?,
                _ => return Ok(node),
            };
            times += 1;
            if times > MAX_DEPTH {
                return self.error("repetitions are nested too deeply");
            }
            self.bump();
            node = Node::Repeat(Box::new(node), min, max);
        }
    }

    /// `{n}`, `{n,}`, `{,m}` or `{n,m}`, up to the closing brace.
    fn counts(&mut self) -> Result<(u32, Option<u32>), String> {
        let Some(end) = self.rest.find('}') else { return self.error("a `}` is missing") };
        let inner = self.rest[1..end].to_owned();
        self.rest = &self.rest[end..];
        let number = |text: &str, default: Option<u32>| match text.trim() {
            "" => Ok(default),
            text => text.parse().ok().filter(|&number| number <= MAX_REPEAT).map(Some).ok_or(()),
        };
        let counts = match inner.split_once(',') {
            Some((min, max)) => number(min, Some(0)).and_then(|min| Ok((min, number(max, None)?))),
            None => number(&inner, None).map(|count| (count, count)),
        };
        match counts {
            Ok((Some(min), max)) if max.is_none_or(|max| min <= max) => Ok((min, max)),
            _ => self.error(&format!("the repetition {{{inner}}} is not understood")),
        }
    }

    fn literal(&mut self) -> Result<Node, String> {
        self.bump();
        let mut text = String::new();
        loop {
            match self.bump() {
                None | Some('\n') => return self.error("a `\"` is missing"),
                Some('"') => return Ok(Node::Literal(text)),
                Some('\\') => text.push(self.escape()?),
                Some(character) => text.push(character),
            }
        }
    }

    fn class(&mut self) -> Result<Node, String> {
        self.bump();
        let negated = self.peek() == Some('^');
        if negated {
            self.bump();
        }
        let mut ranges = Vec::new();
        loop {
            let first = match self.bump() {
                None => return self.error("a `]` is missing"),
                Some(']') if ranges.is_empty() && !negated => return self.error("the class is empty"),
                Some(']') => return Ok(Node::Class(ranges, negated)),
                Some('\\') => self.escape()?,
                Some(character) => character,
            };
            let mut last = first;
            if self.rest.starts_with('-') && !self.rest.starts_with("-]") {
                self.bump();
                last = match self.bump() {
                    Some('\\') => self.escape()?,
                    Some(character) => character,
                    None => return self.error("a `]` is missing"),
                };
            }
            if last < first {
                return self.error("a range in a class goes backwards");
            }
            ranges.push((first, last));
        }
    }

    fn escape(&mut self) -> Result<char, String> {
        let digits = match self.bump() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            Some(character) if !character.is_ascii_alphanumeric() => return Ok(character),
            _ => return self.error("an escape is not understood"),
        };
        let code = self.rest.get(..digits).and_then(|digits| u32::from_str_radix(digits, 16).ok());
        let Some(character) = code.and_then(char::from_u32) else {
            return self.error("an escape is no character");
        };
        self.rest = &self.rest[digits..];
        Ok(character)
    }
}
