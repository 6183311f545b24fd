//! `strftime_now`: the date as templates print it. A clock is handed in, so that rendering stays reproducible.
//!
//! transformers asks `datetime.now().strftime(…)`: local time without a zone, in the C locale.

/// Seconds since 1970 as a calendar date.
#[derive(Debug, PartialEq, Eq)]
struct Date {
    year: i64,
    month: i64,
    day: i64,
    /// 0 is Sunday.
    weekday: i64,
    /// 1 is 1 January.
    day_of_year: i64,
    second_of_day: i64,
    unix_seconds: i64,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
/// The longest text one directive may give; also the longest format that is read.
const MAX_FORMAT: usize = 1024;

impl Date {
    fn from_unix(seconds: i64) -> Self {
        let days = seconds.div_euclid(86_400);
        // Years are counted from 1 March of year 0, so that the leap day is the last day of a year.
        let shifted = days + 719_468;
        let era = shifted.div_euclid(146_097);
        let day_of_era = shifted.rem_euclid(146_097);
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_shifted_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * day_of_shifted_year + 2) / 153;
        let day = day_of_shifted_year - (153 * shifted_month + 2) / 5 + 1;
        let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        Self {
            year,
            month,
            day,
            weekday: (days + 4).rem_euclid(7),
            day_of_year: days_before_month(year, month) + day,
            second_of_day: seconds.rem_euclid(86_400),
            unix_seconds: seconds,
        }
    }

    /// Week of the year, when weeks begin on `first` (0 is Sunday); days before the first one are in week 0.
    fn week_from(&self, first: i64) -> i64 {
        (self.day_of_year + 6 - (self.weekday - first).rem_euclid(7)) / 7
    }

    /// Year and week of ISO 8601: weeks begin on Monday, and the first one holds the year's first Thursday.
    fn iso_week(&self) -> (i64, i64) {
        let monday_based = (self.weekday + 6) % 7;
        let week = (self.day_of_year - 1 - monday_based + 10) / 7;
        let weeks_in = |year: i64| {
            let first = (days_to_year(year) + 4).rem_euclid(7);
            if first == 4 || first == 3 && is_leap(year) { 53 } else { 52 }
        };
        match week {
            0 => (self.year - 1, weeks_in(self.year - 1)),
            53 if weeks_in(self.year) == 52 => (self.year + 1, 1),
            week => (self.year, week),
        }
    }

    /// A field that is a number: its value, its width and what fills it.
    fn number(&self, directive: char) -> Option<(i64, usize, char)> {
        let (hour, minute, second) =
            (self.second_of_day / 3600, self.second_of_day / 60 % 60, self.second_of_day % 60);
        let twelve = (hour + 11) % 12 + 1;
        Some(match directive {
            'Y' => (self.year, 1, '0'),
            'C' => (self.year.div_euclid(100), 2, '0'),
            'y' => (self.year.rem_euclid(100), 2, '0'),
            'G' => (self.iso_week().0, 1, '0'),
            'g' => (self.iso_week().0.rem_euclid(100), 2, '0'),
            'V' => (self.iso_week().1, 2, '0'),
            'U' => (self.week_from(0), 2, '0'),
            'W' => (self.week_from(1), 2, '0'),
            'm' => (self.month, 2, '0'),
            'd' => (self.day, 2, '0'),
            'e' => (self.day, 2, ' '),
            'j' => (self.day_of_year, 3, '0'),
            'w' => (self.weekday, 1, '0'),
            'u' => ((self.weekday + 6) % 7 + 1, 1, '0'),
            'H' => (hour, 2, '0'),
            'k' => (hour, 2, ' '),
            'I' => (twelve, 2, '0'),
            'l' => (twelve, 2, ' '),
            'M' => (minute, 2, '0'),
            'S' => (second, 2, '0'),
            // Microseconds; the moment is a whole second.
            'f' => (0, 6, '0'),
            's' => (self.unix_seconds, 1, '0'),
            _ => return None,
        })
    }

    fn text(&self, directive: char) -> Option<String> {
        let month = MONTHS[(self.month - 1) as usize];
        let weekday = WEEKDAYS[self.weekday as usize];
        Some(match directive {
            'B' => month.to_owned(),
            'b' | 'h' => month[..3].to_owned(),
            'A' => weekday.to_owned(),
            'a' => weekday[..3].to_owned(),
            'p' | 'P' => {
                let half = if self.second_of_day < 43_200 { "AM" } else { "PM" };
                if directive == 'P' { half.to_lowercase() } else { half.to_owned() }
            }
            'c' => self.format("%a %b %e %H:%M:%S %Y"),
            'x' | 'D' => self.format("%m/%d/%y"),
            'X' | 'T' => self.format("%H:%M:%S"),
            'F' => self.format("%Y-%m-%d"),
            'R' => self.format("%H:%M"),
            'r' => self.format("%I:%M:%S %p"),
            // The moment carries no zone.
            'z' | 'Z' => String::new(),
            'n' => "\n".to_owned(),
            't' => "\t".to_owned(),
            '%' => "%".to_owned(),
            _ => return None,
        })
    }

    /// Unknown directives stay as they are. As in the C library a flag may go before a field (`-` no padding, `_`
    /// spaces, `0` zeros, `^` capitals, `#` other case), then a width, then `E` or `O`, which mean nothing here.
    fn format(&self, format: &str) -> String {
        let mut out = String::new();
        let mut rest = format;
        while let Some(at) = rest.find('%') {
            out.push_str(&rest[..at]);
            let field = &rest[at + 1..];
            let after_flags = field.trim_start_matches(['-', '_', '0', '^', '#']);
            let flags = &field[..field.len() - after_flags.len()];
            let after_width = after_flags.trim_start_matches(|character: char| character.is_ascii_digit());
            let width = after_flags[..after_flags.len() - after_width.len()].parse::<usize>().ok();
            let name = after_width.strip_prefix(['E', 'O']).unwrap_or(after_width);
            let written = name.chars().next().and_then(|directive| self.field(directive, flags, width));
            if let (Some(text), Some(directive)) = (written, name.chars().next()) {
                out.push_str(&text);
                rest = &name[directive.len_utf8()..];
            } else {
                out.push('%');
                rest = field;
            }
        }
        out + rest
    }

    fn field(&self, directive: char, flags: &str, width: Option<usize>) -> Option<String> {
        let width = width.map(|width| width.min(MAX_FORMAT));
        let pad = flags.chars().rfind(|flag| matches!(flag, '-' | '_' | '0'));
        let text = if let Some((value, usual, fill)) = self.number(directive) {
            let fill = match pad {
                Some('-') => return Some(value.to_string()),
                Some('_') => ' ',
                Some(_) => '0',
                None => fill,
            };
            let width = width.unwrap_or(usual);
            if fill == ' ' { format!("{value:width$}") } else { format!("{value:0width$}") }
        } else {
            let text = self.text(directive)?;
            let missing = width.unwrap_or(0).saturating_sub(text.len());
            (if pad == Some('0') { "0" } else { " " }).repeat(missing) + &text
        };
        let other_case = flags.contains('#');
        Some(match directive {
            'p' if other_case => text.to_lowercase(),
            'a' | 'A' | 'b' | 'B' | 'h' if other_case => text.to_uppercase(),
            _ if flags.contains('^') => text.to_uppercase(),
            _ => text,
        })
    }
}

pub(super) fn is_leap(year: i64) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

/// Days of the year before a month, which is counted from 1.
pub(super) fn days_before_month(year: i64, month: i64) -> i64 {
    let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334][(month - 1) as usize];
    before + i64::from(is_leap(year) && month > 2)
}

/// Days from 1 January 1970 to that of a year.
pub(super) fn days_to_year(year: i64) -> i64 {
    let past = year - 1;
    (year - 1970) * 365 + (past.div_euclid(4) - past.div_euclid(100) + past.div_euclid(400)) - 477
}

pub(super) fn year_of(seconds: i64) -> i64 {
    Date::from_unix(clamped(seconds)).year
}

/// Years beyond four digits mean a broken clock; the limit also keeps the arithmetic in range.
fn clamped(seconds: i64) -> i64 {
    seconds.clamp(-62_135_596_800, 253_402_300_799)
}

/// The moment, `offset` seconds ahead of UTC, in the given format.
pub(super) fn strftime(seconds: i64, offset: i64, format: &str) -> Result<String, String> {
    if format.len() > MAX_FORMAT {
        return Err(format!("a date format must not be longer than {MAX_FORMAT} bytes"));
    }
    let mut date = Date::from_unix(clamped(seconds.saturating_add(offset)));
    date.unix_seconds = clamped(seconds);
    let text = date.format(format);
    if text.len() > MAX_FORMAT * 16 {
        return Err("the date becomes too long".to_owned());
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right() {
        let check = |seconds, format: &str, expect: &str| {
            assert_eq!(strftime(seconds, 0, format).expect("short"), expect);
        };
        check(0, "%Y-%m-%d %A %j %H:%M:%S", "1970-01-01 Thursday 001 00:00:00");
        check(1_709_210_096, "%d %B %Y, %I:%M %p (%a)", "29 February 2024, 12:34 PM (Thu)");
        check(1_735_689_599, "%j %y %b %e", "366 24 Dec 31");
        check(1_767_225_600, "%-d.%-m.%F %T%% %q", "1.1.2026-01-01 00:00:00% %q");
        check(951_782_400, "%F", "2000-02-29");
        check(-1, "%F %T", "1969-12-31 23:59:59");
        // Weeks at the turn of a year, as Python gives them.
        check(1_735_689_600, "%G-%V %U %W %u %w", "2025-01 00 00 3 3");
        check(1_609_459_200, "%G-%V %U %W %u %w", "2020-53 00 00 5 5");
        check(1_230_768_000, "%G-%V %U %W", "2009-01 00 00");
        check(1_704_067_200, "%G-%V %U %W", "2024-01 00 01");
        assert_eq!(strftime(0, 5400, "%F %T %s").expect("short"), "1970-01-01 01:30:00 0");
        assert!(strftime(0, 0, &"x".repeat(2000)).is_err());
    }
}
