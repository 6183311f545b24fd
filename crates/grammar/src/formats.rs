//! `format` as a regular expression.
//!
//! The specification leaves it open whether formats are checked. Here they are enforced, so that every validator
//! agrees: where validators differ or a format has rare forms, the expression matches the common ones only (no leap
//! seconds, no year 0, no quoted mailbox, no IPvFuture). Of internationalised formats only the ASCII part is allowed.

use std::sync::OnceLock;

const DATE: &str = "(?:[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])\
    |(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))\
    |(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)-02-29)";
const TIME: &str = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,6})?\
    (?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
const DURATION: &str = "P(?:N{W}|(?:N{Y}(?:N{M}(?:N{D})?)?|N{M}(?:N{D})?|N{D})(?:TN{TIME})?|TN{TIME})";
const DURATION_TIME: &str = "(?:N{H}(?:N{M}(?:N{S})?)?|N{M}(?:N{S})?|N{S})";
const LABEL: &str = "[a-zA-Z0-9]{1,20}(?:-[a-zA-Z0-9]{1,20}){0,2}";
const MAILBOX: &str = "[a-zA-Z0-9_+-]{1,20}(?:\\.[a-zA-Z0-9_+-]{1,20}){0,2}";
const IPV4: &str = "(?:(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])\\.){3}\
    (?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])";
const UUID: &str = "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}";
/// A character of a path segment; the second lacks the colon, which would make a scheme of what stands before it.
const SEGMENT: &str = "(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})";
const FIRST_SEGMENT: &str = "(?:[a-zA-Z0-9._~!$&'()*+,;=@-]|%[0-9a-fA-F]{2})";
const JSON_POINTER: &str = "(?:/(?:[^~/]|~[01])*)*";

/// The expression of a format's whole text. `None` for names that the specification does not have: those are notes.
pub(crate) fn expression(format: &str) -> Option<&'static str> {
    static TABLE: OnceLock<Vec<(&str, String)>> = OnceLock::new();
    let table = TABLE.get_or_init(table);
    table.iter().find(|(name, _)| *name == format).map(|(_, expression)| expression.as_str())
}

fn table() -> Vec<(&'static str, String)> {
    let hostname = format!("{LABEL}(?:\\.{LABEL}){{0,3}}");
    let email = format!("{MAILBOX}@{LABEL}(?:\\.{LABEL}){{1,3}}");
    let tail = format!("(?:\\?(?:{SEGMENT}|[/?])*)?(?:#(?:{SEGMENT}|[/?])*)?");
    let uri = format!(
        "[a-zA-Z][a-zA-Z0-9+.-]{{0,15}}:(?://{hostname}(?::[1-9][0-9]{{0,3}})?(?:/{SEGMENT}*)*\
        |/?{SEGMENT}+(?:/{SEGMENT}*)*){tail}"
    );
    let reference = format!("(?:{uri}|/?{FIRST_SEGMENT}+(?:/{SEGMENT}*)*{tail})");
    let time = DURATION_TIME.replace("N{", "[0-9]{1,6}{");
    let duration = DURATION.replace("N{TIME}", &time).replace("N{", "[0-9]{1,6}{");
    let duration = ["W", "Y", "M", "D", "H", "S"]
        .iter()
        .fold(duration, |text, unit| text.replace(&format!("{{{unit}}}"), unit));
    vec![
        ("date", DATE.to_owned()),
        ("time", TIME.to_owned()),
        ("date-time", format!("{DATE}T{TIME}")),
        ("duration", duration),
        ("email", email.clone()),
        ("idn-email", email),
        ("hostname", hostname.clone()),
        ("idn-hostname", hostname),
        ("ipv4", IPV4.to_owned()),
        ("ipv6", ipv6()),
        ("uuid", UUID.to_owned()),
        ("uri", uri.clone()),
        ("iri", uri),
        ("uri-reference", reference.clone()),
        ("iri-reference", reference.clone()),
        ("uri-template", reference),
        ("json-pointer", JSON_POINTER.to_owned()),
        ("relative-json-pointer", format!("(?:0|[1-9][0-9]{{0,8}})(?:#|{JSON_POINTER})")),
        ("regex", "[a-zA-Z0-9 _]*".to_owned()),
    ]
}

/// Eight groups, or fewer around one `::`.
fn ipv6() -> String {
    let group = "[0-9a-fA-F]{1,4}";
    let mut forms = vec![format!("(?:{group}:){{7}}{group}"), format!("(?:{group}:){{1,7}}:")];
    for before in 1..=6 {
        forms.push(format!("(?:{group}:){{{before}}}(?::{group}){{1,{}}}", 7 - before));
    }
    forms.push(format!(":(?:(?::{group}){{1,7}}|:)"));
    format!("(?:{})", forms.join("|"))
}
