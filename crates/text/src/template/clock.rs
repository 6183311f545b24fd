//! `strftime_now`: the date as templates print it. A clock is handed in, so that rendering stays reproducible.

/// Seconds since 1970 (UTC) as a calendar date.
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
        let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334][(month - 1) as usize];
        Self {
            year,
            month,
            day,
            weekday: (days + 4).rem_euclid(7),
            day_of_year: before + day + i64::from(leap && month > 2),
            second_of_day: seconds.rem_euclid(86_400),
        }
    }

    fn directive(&self, directive: char) -> Option<String> {
        let (hour, minute, second) =
            (self.second_of_day / 3600, self.second_of_day / 60 % 60, self.second_of_day % 60);
        let month = MONTHS[(self.month - 1) as usize];
        let weekday = WEEKDAYS[self.weekday as usize];
        Some(match directive {
            'Y' => self.year.to_string(),
            'y' => format!("{:02}", self.year.rem_euclid(100)),
            'm' => format!("{:02}", self.month),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'j' => format!("{:03}", self.day_of_year),
            'B' => month.to_owned(),
            'b' | 'h' => month[..3].to_owned(),
            'A' => weekday.to_owned(),
            'a' => weekday[..3].to_owned(),
            'w' => self.weekday.to_string(),
            'H' => format!("{hour:02}"),
            'I' => format!("{:02}", (hour + 11) % 12 + 1),
            'M' => format!("{minute:02}"),
            'S' => format!("{second:02}"),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'F' => format!("{}-{:02}-{:02}", self.year, self.month, self.day),
            'T' => format!("{hour:02}:{minute:02}:{second:02}"),
            'Z' => "UTC".to_owned(),
            'z' => "+0000".to_owned(),
            '%' => "%".to_owned(),
            _ => return None,
        })
    }
}

/// The moment in the given format. Unknown directives stay as they are; `%-d` leaves out leading zeros.
pub(super) fn strftime(seconds: i64, format: &str) -> Result<String, String> {
    if format.len() > MAX_FORMAT {
        return Err(format!("a date format must not be longer than {MAX_FORMAT} bytes"));
    }
    // Years beyond four digits mean a broken clock; the limit also keeps the arithmetic in range.
    let date = Date::from_unix(seconds.clamp(-62_135_596_800, 253_402_300_799));
    let mut out = String::new();
    let mut characters = format.chars().peekable();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let unpadded = characters.next_if_eq(&'-').is_some();
        let Some(directive) = characters.next() else {
            out.push('%');
            break;
        };
        match date.directive(directive) {
            Some(text) if unpadded => {
                let trimmed = text.trim_start_matches(['0', ' ']);
                out.push_str(if trimmed.is_empty() { "0" } else { trimmed });
            }
            Some(text) => out.push_str(&text),
            None => out.extend(['%', directive]),
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right() {
        let check = |seconds, format: &str, expect: &str| {
            assert_eq!(strftime(seconds, format).expect("short"), expect);
        };
        check(0, "%Y-%m-%d %A %j %H:%M:%S", "1970-01-01 Thursday 001 00:00:00");
        check(1_709_210_096, "%d %B %Y, %I:%M %p (%a)", "29 February 2024, 12:34 PM (Thu)");
        check(1_735_689_599, "%j %y %b %e", "366 24 Dec 31");
        check(1_767_225_600, "%-d.%-m.%F %T%% %q", "1.1.2026-01-01 00:00:00% %q");
        check(951_782_400, "%F", "2000-02-29");
        check(-1, "%F %T", "1969-12-31 23:59:59");
        assert!(strftime(0, &"x".repeat(2000)).is_err());
    }
}
