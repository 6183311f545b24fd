//! Lists of numbers as text: commas, semicolons, tabs or blanks between them, `#` before comments, perhaps a header line.

use super::EdgeColumns;
use super::npy::{Array, Numbers};

/// Of a message: a line may be a whole file.
const MAX_SHOWN: usize = 60;

fn text(bytes: &[u8]) -> Result<&str, String> {
    std::str::from_utf8(bytes).map_err(|error| format!("is no text from byte {} on", error.valid_up_to()))
}

fn is_separator(letter: char) -> bool {
    matches!(letter, ',' | ';' | '\t' | ' ')
}

/// Lines with numbers, counted from 1, cut into fields.
fn lines(text: &str) -> impl Iterator<Item = (usize, impl Iterator<Item = &str>)> {
    let lines = text.lines().enumerate().map(|(number, line)| (number + 1, line.trim()));
    let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with(['#', '%']));
    lines.map(|(number, line)| (number, line.split(is_separator).filter(|field| !field.is_empty())))
}

fn shown(field: &str) -> String {
    let short: String = field.chars().take(MAX_SHOWN).collect();
    if short.len() < field.len() { format!("{short:?}…") } else { format!("{short:?}") }
}

fn parse_int(field: &str, line: usize) -> Result<i64, String> {
    let whole = || field.parse::<f64>().ok().filter(|value| value.fract() == 0.0 && value.abs() < 9e15);
    let value = field.parse().ok().or_else(|| whole().map(|value| value as i64));
    value.ok_or_else(|| format!("line {line}: {} is not the number of a node", shown(field)))
}

/// Whether a field may be a column's name.
fn is_name(field: &str) -> bool {
    field.parse::<f64>().is_err()
}

/// Two columns; further ones (weights, times) are not used.
pub fn edges(bytes: &[u8]) -> Result<EdgeColumns, String> {
    let mut columns = EdgeColumns::default();
    let mut is_first = true;
    for (number, mut fields) in lines(text(bytes)?) {
        let (Some(source), Some(target)) = (fields.next(), fields.next()) else {
            return Err(format!("line {number}: an edge is two numbers, source and target"));
        };
        let is_header = std::mem::take(&mut is_first) && is_name(source) && is_name(target);
        if is_header {
            continue;
        }
        columns.sources.push(parse_int(source, number)?);
        columns.targets.push(parse_int(target, number)?);
    }
    Ok(columns)
}

/// The first column.
pub fn column(bytes: &[u8]) -> Result<Array, String> {
    let mut values = Vec::new();
    let mut is_first = true;
    for (number, mut fields) in lines(text(bytes)?) {
        let field = fields.next().unwrap_or_default();
        if std::mem::take(&mut is_first) && is_name(field) {
            continue;
        }
        values.push(parse_int(field, number)?);
    }
    Ok(Array { shape: vec![values.len()], numbers: Numbers::Ints(values) })
}

/// A row of floats on each line.
pub fn matrix(bytes: &[u8]) -> Result<Array, String> {
    let (mut values, mut rows, mut cols) = (Vec::new(), 0, None);
    for (number, fields) in lines(text(bytes)?) {
        let first = values.len();
        let fields: Vec<&str> = fields.collect();
        // NaN is a number, but no header is only of those.
        if rows == 0 && fields.iter().all(|field| is_name(field)) {
            continue;
        }
        for field in fields {
            let value: f32 =
                field.parse().map_err(|_| format!("line {number}: {} is not a number", shown(field)))?;
            values.push(value);
        }
        rows += 1;
        let (got, expected) = (values.len() - first, *cols.get_or_insert(values.len() - first));
        if got != expected {
            return Err(format!("line {number} has {got} numbers, those before have {expected}"));
        }
    }
    Ok(Array { shape: vec![rows, cols.unwrap_or(0)], numbers: Numbers::Floats(values) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edges_are_read_in_every_dress() {
        let expected = EdgeColumns { sources: vec![0, 3], targets: vec![1, 2] };
        for text in [
            "0,1\n3,2\n",
            "source,target,weight\n0,1,0.5\n3,2,1",
            "# SNAP\n0\t1\n\n3\t2\n",
            "0 1\r\n3 2\r\n",
            "src;dst\n0.0;1.0\n3;2",
        ] {
            assert_eq!(edges(text.as_bytes()), Ok(expected.clone()), "{text:?}");
        }
    }

    #[test]
    fn the_line_of_an_error_is_named() {
        for (text, says) in [
            ("0,1\n2", "line 2: an edge is two numbers"),
            ("0,1\na,b", "line 2: \"a\" is not the number of a node"),
            ("0,1\n1.5,2", "line 2: \"1.5\""),
            ("0,1\n1,99999999999999999999", "line 2"),
        ] {
            let error = edges(text.as_bytes()).expect_err(text);
            assert!(error.contains(says), "{error}");
        }
        assert!(edges(b"0,1\n\xff,2").expect_err("no text").contains("from byte 4 on"));
        assert!(matrix(b"1,2\n3\n").expect_err("ragged").contains("line 2 has 1 numbers"));
        assert_eq!(matrix(b"a,b\n1,2\n3,4.5\n").expect("reads").shape, [2, 2]);
        assert_eq!(column(b"node\n4\n5\n").expect("reads").numbers, Numbers::Ints(vec![4, 5]));
    }
}
