//! What is wrong with a body, in words of JSON: the reader's own speak of Rust.

/// The words of the reader, and those for people. Longer ones first where one begins another.
const WORDS: [(&str, &str); 22] = [
    ("invalid type: sequence", "invalid type: list"),
    ("invalid type: map", "invalid type: object"),
    ("invalid type: string", "invalid type: text"),
    ("invalid type: floating point", "invalid type: number"),
    ("expected a sequence", "expected a list"),
    ("expected a map", "expected an object"),
    ("expected a string", "expected a text"),
    ("expected unit", "expected null"),
    ("expected usize", "expected a whole number >= 0"),
    ("expected u128", "expected a whole number >= 0"),
    ("expected u64", "expected a whole number >= 0"),
    ("expected u32", "expected a whole number from 0 to 4294967295"),
    ("expected u16", "expected a whole number from 0 to 65535"),
    ("expected u8", "expected a whole number from 0 to 255"),
    ("expected i64", "expected a whole number"),
    ("expected i32", "expected a whole number"),
    ("expected i16", "expected a whole number"),
    ("expected i8", "expected a whole number"),
    ("expected f64", "expected a number"),
    ("expected f32", "expected a number"),
    ("unit variant", "a text"),
    ("newtype variant", "an object"),
];

/// The message without the names of types.
pub fn of_json(message: &str) -> String {
    let mut message = message.to_owned();
    for (theirs, ours) in WORDS {
        message = message.replace(theirs, ours);
    }
    for kind in [
        "expected struct variant ",
        "expected tuple struct ",
        "expected struct ",
        "expected internally tagged enum ",
        "expected enum ",
        "expected variant of enum ",
    ] {
        while let Some(at) = message.find(kind) {
            let name = &message[at + kind.len()..];
            let end = name.find(|c: char| !c.is_alphanumeric() && c != '_' && c != ':').unwrap_or(name.len());
            message.replace_range(at..at + kind.len() + end, "expected an object");
        }
    }
    message
}

/// Reading takes lists for objects, field by field. A body must be an object.
pub fn is_object(bytes: &[u8]) -> bool {
    bytes.iter().find(|byte| !byte.is_ascii_whitespace()).is_none_or(|&byte| byte == b'{')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_type_of_rust_is_named() {
        for (theirs, ours) in [
            (
                "invalid type: string \"x\", expected u32 at line 1",
                "invalid type: text \"x\", expected a whole number from 0 to 4294967295 at line 1",
            ),
            (
                "invalid type: integer `3`, expected struct StreamOptions",
                "invalid type: integer `3`, expected an object",
            ),
            ("invalid type: map, expected a sequence", "invalid type: object, expected a list"),
            ("invalid type: sequence, expected f32", "invalid type: list, expected a number"),
        ] {
            assert_eq!(of_json(theirs), ours);
        }
        assert!(is_object(b" \n{}") && is_object(b"") && !is_object(b"[1]") && !is_object(b"null"));
    }
}
