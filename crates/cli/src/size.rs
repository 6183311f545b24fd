//! Sizes in bytes as people write and read them: `2GiB`, `512M`, `1.5 GB`.

/// Reads a size. A bare number is bytes; K, M, G, T (with or without `iB`) are powers of 1024; KB, MB, GB, TB of 1000.
pub fn parse_size(text: &str) -> Result<u64, String> {
    parse_with_unit(text, 1)
}

/// The same, but a bare number is GiB, as vLLM's `--swap-space` has it.
pub fn parse_size_gib(text: &str) -> Result<u64, String> {
    parse_with_unit(text, 1 << 30)
}

fn parse_with_unit(text: &str, bare_unit: u64) -> Result<u64, String> {
    let trimmed = text.trim();
    let split = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(split);
    let wrong = || format!("{text:?} is not a size: write for example 512MiB, 2GiB or 1.5G");
    let factor = match unit.trim().to_ascii_lowercase().as_str() {
        "" => bare_unit,
        "b" => 1,
        "k" | "ki" | "kib" => 1 << 10,
        "m" | "mi" | "mib" => 1 << 20,
        "g" | "gi" | "gib" => 1 << 30,
        "t" | "ti" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(wrong()),
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(factor).ok_or_else(|| format!("{text:?} is more than any machine has"));
    }
    let value: f64 = number.parse().map_err(|_| wrong())?;
    let bytes = value * factor as f64;
    if bytes < u64::MAX as f64 {
        Ok(bytes as u64)
    } else {
        Err(format!("{text:?} is more than any machine has"))
    }
}

/// Reads a count as vLLM does: `4k` is 4000, `4K` is 4096, `1.5k` is 1500.
pub fn parse_count(text: &str) -> Result<usize, String> {
    let wrong = || format!("{text:?} is not a number: write for example 4096, 4k (4000) or 32K (32768)");
    let (number, factor) = match text.trim().split_at_checked(text.trim().len().saturating_sub(1)) {
        Some((number, "k")) => (number, 1000.0),
        Some((number, "m")) => (number, 1e6),
        Some((number, "K")) => (number, 1024.0),
        Some((number, "M")) => (number, 1024.0 * 1024.0),
        _ => return text.trim().parse().map_err(|_| wrong()),
    };
    let is_plain = number.chars().all(|c| c.is_ascii_digit() || c == '.');
    let value = number.parse::<f64>().ok().filter(|_| is_plain).ok_or_else(wrong)? * factor;
    // A part of a token was not meant.
    if value.fract().abs() > 1e-6 || value > 1e15 { Err(wrong()) } else { Ok(value.round() as usize) }
}

/// For people: the largest binary unit that gives at least 1, with two decimals.
pub fn show(bytes: u64) -> String {
    let units = [("TiB", 1u64 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match units.iter().find(|(_, unit)| bytes >= *unit) {
        Some((name, unit)) => format!("{:.2} {name}", bytes as f64 / *unit as f64),
        None => format!("{bytes} B"),
    }
}

/// Digits in groups of three: `98,362,432`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        for (text, expect) in [
            ("0", 0),
            ("123", 123),
            ("2GiB", 2 << 30),
            ("2g", 2 << 30),
            ("512 MiB", 512 << 20),
            ("1.5K", 1536),
            ("80GB", 80_000_000_000),
            ("1TiB", 1 << 40),
        ] {
            assert_eq!(parse_size(text), Ok(expect), "{text}");
        }
        assert_eq!(parse_size_gib("4"), Ok(4 << 30));
        assert_eq!(parse_size_gib("512MiB"), Ok(512 << 20));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "GiB", "-1", "2XB", "1.2.3G", "99999999999999999999", "99999999999T", "nan", "inf"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown() {
        assert_eq!(show(1023), "1023 B");
        assert_eq!(show(98_362_432), "93.81 MiB");
        assert_eq!(show(3 << 40), "3.00 TiB");
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(98_362_432), "98,362,432");
    }
}
