//! Dates, for file names and for the timestamps of traces. UTC only.

use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;

/// Seconds from 1970-01-01 to the beginning of a day, if there is such a day.
pub fn seconds_of(year: i64, month: i64, day: i64) -> Option<i64> {
    let date = Date::new(year.try_into().ok()?, month.try_into().ok()?, day.try_into().ok()?).ok()?;
    date.to_zoned(TimeZone::UTC).ok().map(|moment| moment.timestamp().as_second())
}

/// `20261115-093000`, of now.
pub fn stamp() -> String {
    stamp_of(Timestamp::now())
}

fn stamp_of(moment: Timestamp) -> String {
    moment.strftime("%Y%m%d-%H%M%S").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_utc() {
        assert_eq!(seconds_of(1970, 1, 1), Some(0));
        assert_eq!(seconds_of(2000, 3, 1), Some(11_017 * 86_400));
        assert_eq!(seconds_of(2025, 2, 29), None);
        assert_eq!(stamp_of(Timestamp::from_second(1_794_735_000).expect("a moment")), "20261115-093000");
    }
}
