//! `strftime_now`: the date as templates print it. A clock is handed in, so that rendering stays reproducible.
//!
//! transformers asks `datetime.now().strftime(…)`: local time without a zone, in the C locale. `jiff` does the same with its
//! POSIX names; the few directives that differ are put right here.

use jiff::fmt::strtime::{BrokenDownTime, Config, PosixCustom};
use jiff::tz::TimeZone;
use jiff::{Timestamp, Zoned};

/// The longest format that is read.
const MAX_FORMAT: usize = 1024;
/// The longest date that is written.
const MAX_DATE: usize = 16 * MAX_FORMAT;

/// A moment in local time, or in UTC where the clock was handed in. Moments beyond the calendar's end become that.
pub(super) fn moment(unix_seconds: i64, zone: TimeZone) -> Zoned {
    let seconds = unix_seconds.clamp(Timestamp::MIN.as_second(), Timestamp::MAX.as_second());
    Timestamp::from_second(seconds).expect("the seconds are within the calendar").to_zoned(zone)
}

/// The moment in the given format. Unknown directives stay as they are.
pub(super) fn strftime(moment: &Zoned, format: &str) -> Result<String, String> {
    if format.len() > MAX_FORMAT {
        return Err(format!("a date format must not be longer than {MAX_FORMAT} bytes"));
    }
    let config = Config::new().custom(PosixCustom::new()).lenient(true);
    let mut text = String::new();
    BrokenDownTime::from(moment)
        .format_with_config(&config, as_in_python(format), &mut text)
        .map_err(|error| error.to_string())?;
    if text.len() > MAX_DATE {
        return Err("the date becomes too long".to_owned());
    }
    Ok(text)
}

/// Python's `datetime.now()` carries no zone, so that `%z` and `%Z` are empty, and counts six digits of microseconds. The C
/// library has no quarters and takes `E` and `O` before a directive, which mean nothing in its own locale.
fn as_in_python(format: &str) -> String {
    let mut out = String::new();
    let mut rest = format.chars().peekable();
    while let Some(character) = rest.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        while rest.next_if(|next| matches!(next, 'E' | 'O')).is_some() {}
        match rest.next() {
            Some('z' | 'Z') => {}
            Some('f') => out.push_str("000000"),
            Some('q') => out.push_str("%%q"),
            Some(directive) => out.extend(['%', directive]),
            None => out.push_str("%%"),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right() {
        let check = |seconds, format: &str, expect: &str| {
            assert_eq!(strftime(&moment(seconds, TimeZone::UTC), format).expect("short"), expect);
        };
        check(0, "%Y-%m-%d %A %j %H:%M:%S", "1970-01-01 Thursday 001 00:00:00");
        check(1_709_210_096, "%d %B %Y, %I:%M %p (%a)", "29 February 2024, 12:34 PM (Thu)");
        check(1_735_689_599, "%j %y %b %e", "366 24 Dec 31");
        check(1_767_225_600, "%-d.%-m.%F %T%% %q %J %Ey %", "1.1.2026-01-01 00:00:00% %q %J 26 %");
        check(951_782_400, "%F", "2000-02-29");
        check(-1, "%F %T", "1969-12-31 23:59:59");
        check(
            0,
            "%c|%x|%X|%r|%D|%R",
            "Thu Jan  1 00:00:00 1970|01/01/70|00:00:00|12:00:00 AM|01/01/70|00:00",
        );
        check(0, "%f%z%Z %%z %P %k %_m %^a %h", "000000 %z am  0  1 THU Jan");
        // Weeks at the turn of a year, as Python gives them.
        check(1_735_689_600, "%G-%V %U %W %u %w", "2025-01 00 00 3 3");
        check(1_609_459_200, "%G-%V %U %W %u %w", "2020-53 00 00 5 5");
        check(1_230_768_000, "%G-%V %U %W", "2009-01 00 00");
        check(1_704_067_200, "%G-%V %U %W", "2024-01 00 01");
        check(i64::MAX, "%Y", "9999");
        assert!(strftime(&moment(0, TimeZone::UTC), &"x".repeat(2000)).is_err());
    }

    #[test]
    fn local_time_knows_summer_and_winter() {
        let berlin = TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").expect("a rule");
        let check = |seconds, expect: &str| {
            assert_eq!(strftime(&moment(seconds, berlin.clone()), "%F %T %s").expect("short"), expect);
        };
        // 29 March 2026, 01:00 UTC.
        check(1_774_745_999, "2026-03-29 01:59:59 1774745999");
        check(1_774_746_000, "2026-03-29 03:00:00 1774746000");
    }
}
