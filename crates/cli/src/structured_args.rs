//! The flags that give an output its shape.

use anyhow::{Context, Result};
use baton_core::StructuredOutput;
use baton_grammar::closed_schema;
use clap::Args;

#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Structured output")]
#[group(id = "structured", multiple = false)]
pub struct StructuredArgs {
    /// The output is JSON that is valid for this schema; @FILE reads it from a file
    #[arg(long, value_name = "SCHEMA|@FILE")]
    pub json_schema: Option<String>,
    /// The whole output matches this regular expression, for example '[0-9]{4}-[0-9]{2}'
    #[arg(long, value_name = "REGEX", allow_hyphen_values = true)]
    pub regex: Option<String>,
    /// The output is one of these texts (repeatable)
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub choice: Vec<String>,
}

impl StructuredArgs {
    /// What the flags ask for, if anything.
    pub fn wish(&self) -> Result<Option<StructuredOutput>> {
        if let Some(text) = &self.json_schema {
            let schema = match text.strip_prefix('@') {
                None => text.clone(),
                Some(path) => std::fs::read_to_string(path)
                    .with_context(|| format!("--json-schema: cannot read {path}"))?,
            };
            // As the server does: an object has the keys that its schema lists.
            return Ok(Some(StructuredOutput::Json(closed_schema(&schema))));
        }
        let choice = (!self.choice.is_empty()).then(|| StructuredOutput::Choice(self.choice.clone()));
        Ok(self.regex.clone().map(StructuredOutput::Regex).or(choice))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schema_may_be_a_file() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), "{}").expect("written");
        let args = |text: String| StructuredArgs { json_schema: Some(text), ..StructuredArgs::default() };
        let from_file = args(format!("@{}", file.path().display())).wish().expect("read");
        assert_eq!(from_file, Some(StructuredOutput::Json("{}".to_owned())));
        assert_eq!(args("{}".to_owned()).wish().expect("taken"), from_file);
        let missing = args("@/no/such/file".to_owned()).wish().expect_err("must be refused").to_string();
        assert!(missing.contains("--json-schema: cannot read /no/such/file"), "{missing}");
        assert_eq!(StructuredArgs::default().wish().expect("nothing"), None);
    }
}
