//! Where a chat's lines come from: a line editor with history at a terminal, plain lines from a pipe.
//!
//! A line that ends with a backslash goes on in the next one; `"""` opens a text of several lines that ends with `"""`.

use std::io::{BufRead, IsTerminal};
use std::path::PathBuf;

use anyhow::{Context, Result};
use rustyline::error::ReadlineError;
use rustyline::{Config, DefaultEditor};

use baton_hub::home;

const PROMPT: &str = "> ";
const CONTINUED: &str = "… ";
const FENCE: &str = "\"\"\"";
const HISTORY_LINES: usize = 1000;

#[derive(Debug, PartialEq)]
pub enum Line {
    Text(String),
    /// Ctrl-C at the prompt.
    Interrupted,
    End,
}

pub enum Input {
    Terminal { editor: Box<DefaultEditor>, history: Option<PathBuf> },
    Pipe,
}

impl Input {
    pub fn open() -> Result<Self> {
        if !std::io::stdin().is_terminal() {
            return Ok(Self::Pipe);
        }
        let config = Config::builder()
            .max_history_size(HISTORY_LINES)
            .context("cannot start the line editor")?
            .build();
        let mut editor = DefaultEditor::with_config(config).context("cannot start the line editor")?;
        // A history that cannot be read or written is no reason not to talk.
        let history = home::home().ok().filter(|home| home::create(home).is_ok());
        let history = history.map(|home| home.join("chat_history.txt"));
        if let Some(path) = &history {
            let _ = editor.load_history(path);
        }
        Ok(Self::Terminal { editor: Box::new(editor), history })
    }

    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal { .. })
    }

    /// The next thing the user says, however many lines it has.
    pub fn next(&mut self) -> Result<Line> {
        let line = join_lines(&mut |prompt| self.raw_line(prompt))?;
        if let (Self::Terminal { editor, history }, Line::Text(text)) = (self, &line)
            && !text.trim().is_empty()
        {
            let added = editor.add_history_entry(text.as_str()).unwrap_or(false);
            if let (true, Some(path)) = (added, history) {
                let _ = editor.append_history(path);
            }
        }
        Ok(line)
    }

    fn raw_line(&mut self, prompt: &str) -> Result<Line> {
        match self {
            Self::Terminal { editor, .. } => match editor.readline(prompt) {
                Ok(line) => Ok(Line::Text(line)),
                Err(ReadlineError::Interrupted) => Ok(Line::Interrupted),
                Err(ReadlineError::Eof) => Ok(Line::End),
                Err(error) => Err(error).context("cannot read from the terminal"),
            },
            Self::Pipe => {
                let mut line = String::new();
                match std::io::stdin().lock().read_line(&mut line).context("cannot read standard input")? {
                    0 => Ok(Line::End),
                    _ => Ok(Line::Text(line.trim_end_matches(['\n', '\r']).to_owned())),
                }
            }
        }
    }
}

/// Puts continued lines together. The end of the input ends an unfinished text as well.
fn join_lines(next: &mut dyn FnMut(&str) -> Result<Line>) -> Result<Line> {
    let first = match next(PROMPT)? {
        Line::Text(first) => first,
        other => return Ok(other),
    };
    if let Some(rest) = first.trim_start().strip_prefix(FENCE) {
        return join_fenced(rest, next);
    }
    let mut text = first;
    while let Some(kept) = text.strip_suffix('\\') {
        let kept = format!("{kept}\n");
        match next(CONTINUED)? {
            Line::Text(more) => text = kept + &more,
            Line::End => return Ok(Line::Text(kept)),
            Line::Interrupted => return Ok(Line::Interrupted),
        }
    }
    Ok(Line::Text(text))
}

fn join_fenced(first: &str, next: &mut dyn FnMut(&str) -> Result<Line>) -> Result<Line> {
    let mut lines: Vec<String> = Vec::new();
    let mut line = first.to_owned();
    loop {
        if let Some(last) = line.trim_end().strip_suffix(FENCE) {
            lines.push(last.to_owned());
            break;
        }
        lines.push(line);
        match next(CONTINUED)? {
            Line::Text(more) => line = more,
            Line::End => break,
            Line::Interrupted => return Ok(Line::Interrupted),
        }
    }
    Ok(Line::Text(lines.join("\n").trim_matches('\n').to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(lines: &[&str], expect: &[&str]) {
        let mut left = lines.iter();
        let mut next = |_: &str| Ok(left.next().map_or(Line::End, |line| Line::Text((*line).to_owned())));
        let mut found = Vec::new();
        while let Line::Text(text) = join_lines(&mut next).unwrap() {
            found.push(text);
        }
        assert_eq!(found, expect);
    }

    #[test]
    fn lines_are_joined() {
        check(&["one", "two"], &["one", "two"]);
        check(&["one\\", "two\\", "three", "four"], &["one\ntwo\nthree", "four"]);
        check(&["\"\"\"", "one", "", "two", "\"\"\"", "three"], &["one\n\ntwo", "three"]);
        check(&["\"\"\"one\"\"\"", "two"], &["one", "two"]);
        check(&["\"\"\"one", "two\"\"\""], &["one\ntwo"]);
        check(&["never\\"], &["never\n"]);
        check(&["\"\"\"never", "closed"], &["never\nclosed"]);
    }
}
