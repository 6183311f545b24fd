//! The local time zone: how many seconds its clocks are ahead of UTC at a moment.
//!
//! Read from where the C library reads it: `TZ`, or `/etc/localtime`, in the format of `tzfile(5)`. The standard
//! library knows no time zones, and one number is no reason for a dependency. Whatever cannot be read is UTC.

use std::path::{Path, PathBuf};

/// Larger files are no zones.
const MAX_ZONE_BYTES: u64 = 1 << 20;

/// Seconds to add to UTC at `unix_seconds`.
pub(super) fn local_offset(unix_seconds: i64) -> i64 {
    let variable = std::env::var("TZ").ok();
    offset_of(variable.as_deref(), unix_seconds).unwrap_or(0)
}

fn offset_of(variable: Option<&str>, unix_seconds: i64) -> Option<i64> {
    let path = match variable.map(|name| name.strip_prefix(':').unwrap_or(name)) {
        None => PathBuf::from("/etc/localtime"),
        Some("") => return Some(0),
        Some(name) if name.starts_with('/') => PathBuf::from(name),
        Some(name) if name.split('/').any(|part| part == "..") => return Some(0),
        Some(name) => {
            let path = Path::new("/usr/share/zoneinfo").join(name);
            if !path.is_file() {
                return Rule::parse(name).map(|rule| rule.offset(unix_seconds));
            }
            path
        }
    };
    if std::fs::metadata(&path).ok()?.len() > MAX_ZONE_BYTES {
        return None;
    }
    offset_in_file(&std::fs::read(path).ok()?, unix_seconds)
}

/// The counts in a header of `tzfile(5)`.
struct Header {
    version: u8,
    /// is_ut, is_std, leap seconds, transitions, types, letters of the abbreviations.
    counts: [usize; 6],
}

impl Header {
    const BYTES: usize = 44;

    fn read(bytes: &[u8]) -> Option<Self> {
        if bytes.get(..4)? != b"TZif" {
            return None;
        }
        let mut counts = [0; 6];
        for (index, count) in counts.iter_mut().enumerate() {
            *count = read_integer(bytes, 20 + 4 * index, 4).and_then(|count| usize::try_from(count).ok())?;
        }
        Some(Self { version: *bytes.get(4)?, counts })
    }

    fn body_bytes(&self, time_bytes: usize) -> usize {
        let [is_ut, is_std, leaps, transitions, types, letters] = self.counts;
        transitions * (time_bytes + 1) + types * 6 + letters + leaps * (time_bytes + 4) + is_std + is_ut
    }
}

fn read_integer(bytes: &[u8], at: usize, width: usize) -> Option<i64> {
    let bytes = bytes.get(at..at.checked_add(width)?)?;
    let first = if bytes[0] & 0x80 != 0 { -1 } else { 0 };
    Some(bytes.iter().fold(first, |value, &byte| value << 8 | i64::from(byte)))
}

fn offset_in_file(bytes: &[u8], unix_seconds: i64) -> Option<i64> {
    let mut header = Header::read(bytes)?;
    let (mut body, mut width) = (Header::BYTES, 4);
    if header.version >= b'2' {
        // The first block, with 32 bits, is for old readers.
        let second = Header::BYTES.checked_add(header.body_bytes(4))?;
        header = Header::read(bytes.get(second..)?)?;
        (body, width) = (second + Header::BYTES, 8);
    }
    let [_, _, _, transitions, types, _] = header.counts;
    let after = (0..transitions)
        .take_while(|index| {
            read_integer(bytes, body + index * width, width).is_some_and(|t| t <= unix_seconds)
        })
        .count();
    if after == transitions && width == 8 {
        let footer = body.checked_add(header.body_bytes(8))?;
        let rule = bytes.get(footer..)?.strip_prefix(b"\n")?;
        let rule = std::str::from_utf8(rule).ok()?.trim_end_matches('\n');
        if let Some(rule) = Rule::parse(rule) {
            return Some(rule.offset(unix_seconds));
        }
    }
    let kinds = body + transitions * width;
    let kind = match after.checked_sub(1) {
        Some(index) => usize::from(*bytes.get(kinds + index)?),
        None => 0,
    };
    if kind >= types {
        return None;
    }
    read_integer(bytes, kinds + transitions + kind * 6, 4)
}

/// A rule such as `CET-1CEST,M3.5.0,M10.5.0/3`.
struct Rule {
    standard: i64,
    /// Offset, begin and end of summer time.
    summer: Option<(i64, Change, Change)>,
}

#[derive(Clone, Copy)]
enum Day {
    /// Month, week (5 is the last), weekday.
    Weekday(i64, i64, i64),
    /// From 1, without 29 February.
    Julian(i64),
    /// From 0.
    OfYear(i64),
}

#[derive(Clone, Copy)]
struct Change {
    day: Day,
    second: i64,
}

impl Rule {
    fn parse(text: &str) -> Option<Self> {
        let rest = skip_name(text)?;
        let (standard, rest) = take_time(rest)?;
        if rest.is_empty() {
            return Some(Self { standard: -standard, summer: None });
        }
        let rest = skip_name(rest)?;
        let (summer, rest) = match take_time(rest) {
            Some((offset, rest)) => (-offset, rest),
            None => (-standard + 3600, rest),
        };
        // Without dates: those of the United States, as the C library has it.
        let dates = if rest.is_empty() { ",M3.2.0,M11.1.0" } else { rest };
        let (begin, end) = dates.strip_prefix(',')?.split_once(',')?;
        Some(Self { standard: -standard, summer: Some((summer, Change::parse(begin)?, Change::parse(end)?)) })
    }

    fn offset(&self, unix_seconds: i64) -> i64 {
        let Some((summer, begin, end)) = &self.summer else { return self.standard };
        let year = super::clock::year_of(unix_seconds + self.standard);
        let begin = begin.in_year(year) - self.standard;
        let end = end.in_year(year) - summer;
        let is_summer = if begin < end {
            (begin..end).contains(&unix_seconds)
        } else {
            // South of the equator summer goes over the turn of the year.
            !(end..begin).contains(&unix_seconds)
        };
        if is_summer { *summer } else { self.standard }
    }
}

fn skip_name(text: &str) -> Option<&str> {
    if let Some(quoted) = text.strip_prefix('<') {
        return quoted.split_once('>').map(|(_, rest)| rest);
    }
    let end = text.find(|character: char| !character.is_ascii_alphabetic()).unwrap_or(text.len());
    (end >= 3).then(|| &text[end..])
}

/// `[+-]hh[:mm[:ss]]` in seconds, and what follows.
fn take_time(text: &str) -> Option<(i64, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit() && !matches!(c, '+' | '-' | ':')).unwrap_or(text.len());
    let (time, rest) = text.split_at(end);
    let (sign, digits) = match time.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, time.strip_prefix('+').unwrap_or(time)),
    };
    let mut seconds = 0;
    let mut unit = 3600;
    for part in digits.split(':') {
        seconds += part.parse::<u16>().ok().map(i64::from)? * unit;
        unit /= 60;
    }
    Some((sign * seconds, rest))
}

impl Change {
    fn parse(text: &str) -> Option<Self> {
        let (day, time) = text.split_once('/').unwrap_or((text, "2"));
        let number = |text: &str| text.parse::<u16>().ok().map(i64::from);
        let day = if let Some(date) = day.strip_prefix('M') {
            let mut parts = date.split('.').map(number);
            let (month, week, weekday) = (parts.next()??, parts.next()??, parts.next()??);
            if !(1..=12).contains(&month) || !(1..=5).contains(&week) || weekday > 6 {
                return None;
            }
            Day::Weekday(month, week, weekday)
        } else if let Some(day) = day.strip_prefix('J') {
            Day::Julian(number(day)?)
        } else {
            Day::OfYear(number(day)?)
        };
        Some(Self { day, second: take_time(time)?.0 })
    }

    /// Local seconds since 1970.
    fn in_year(self, year: i64) -> i64 {
        use super::clock::{days_before_month, days_to_year, is_leap};
        let first = days_to_year(year);
        let day = match self.day {
            Day::OfYear(day) => first + day,
            Day::Julian(day) => first + day - 1 + i64::from(is_leap(year) && day >= 60),
            Day::Weekday(month, week, weekday) => {
                let month_begin = first + days_before_month(year, month);
                let month_end = if month == 12 {
                    days_to_year(year + 1)
                } else {
                    first + days_before_month(year, month + 1)
                };
                // 1 January 1970 was a Thursday.
                let to_weekday = (weekday - (month_begin + 4)).rem_euclid(7);
                let day = month_begin + to_weekday + (week - 1) * 7;
                if day >= month_end { day - 7 } else { day }
            }
        };
        day * 86_400 + self.second
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_know_summer_and_winter() {
        let check = |rule: &str, moment: i64, hours: f64| {
            assert_eq!(
                Rule::parse(rule).expect("a rule").offset(moment) as f64 / 3600.0,
                hours,
                "{rule} {moment}"
            );
        };
        // 29 March 2026, 01:00 UTC and 25 October 2026, 01:00 UTC.
        let berlin = "CET-1CEST,M3.5.0,M10.5.0/3";
        check(berlin, 1_774_745_999, 1.0);
        check(berlin, 1_774_746_000, 2.0);
        check(berlin, 1_792_889_999, 2.0);
        check(berlin, 1_792_890_000, 1.0);
        // 8 March 2026, 07:00 UTC.
        check("EST5EDT,M3.2.0,M11.1.0", 1_772_953_199, -5.0);
        check("EST5EDT", 1_772_953_200, -4.0);
        check("<+0530>-5:30", 0, 5.5);
        check("NZST-12NZDT,M9.5.0,M4.1.0/3", 1_767_225_600, 13.0);
        check("NZST-12NZDT,M9.5.0,M4.1.0/3", 1_782_864_000, 12.0);
        assert!(Rule::parse("nonsense").is_none_or(|rule| rule.offset(0) == 0));
    }

    #[test]
    fn files_are_read_and_damage_is_survived() {
        // Version 2 without transitions: an empty old block, one type of +1 h, and the rule.
        let header = |counts: [u8; 6]| {
            let mut bytes = b"TZif2".to_vec();
            bytes.extend([0; 15]);
            for count in counts {
                bytes.extend([0, 0, 0, count]);
            }
            bytes
        };
        let mut file = header([0, 0, 0, 0, 1, 4]);
        file.extend([0; 10]);
        file.extend(header([0, 0, 0, 1, 2, 4]));
        file.extend(1_000_i64.to_be_bytes());
        file.push(1);
        for offset in [3600_i32, 7200] {
            file.extend(offset.to_be_bytes());
            file.extend([0, 0]);
        }
        file.extend(b"CET\0\nCET-1CEST,M3.5.0,M10.5.0/3\n");
        assert_eq!(offset_in_file(&file, 0), Some(3600));
        assert_eq!(offset_in_file(&file, 1_774_746_000), Some(7200));
        for length in 0..file.len() {
            let _ = offset_in_file(&file[..length], 0);
            let mut damaged = file.clone();
            damaged[length] = 0xFF;
            let _ = offset_in_file(&damaged, 2_000);
        }
        assert_eq!(offset_of(Some(""), 0), Some(0));
        assert_eq!(offset_of(Some("../../etc/passwd"), 0), Some(0));
    }
}
