//! `strftime` for templates that print the date, in UTC and the C locale.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Error, ErrorKind};

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
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

/// Formats `time`; `%-d` and so on omit the padding. Fails on an unknown directive.
pub(super) fn strftime(time: SystemTime, format: &str) -> Result<String, Error> {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, second_of_day) = (seconds / 86_400, seconds % 86_400);
    let (year, day_of_year, month, day) = civil_date(days);
    let weekday = DAYS[(days as usize + 4) % 7];
    let month_name = MONTHS[month as usize - 1];
    let (hour, minute, second) = (second_of_day / 3600, second_of_day / 60 % 60, second_of_day % 60);
    let hour12 = (hour + 11) % 12 + 1;

    let mut out = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let mut directive = characters.next();
        let padded = directive != Some('-');
        if !padded {
            directive = characters.next();
        }
        let number = |value: u64, width: usize| {
            if padded { format!("{value:0width$}") } else { value.to_string() }
        };
        out.push_str(&match directive {
            Some('Y') => number(year, 4),
            Some('y') => number(year % 100, 2),
            Some('m') => number(month, 2),
            Some('d') => number(day, 2),
            Some('e') if padded => format!("{day:2}"),
            Some('e') => day.to_string(),
            Some('j') => number(day_of_year, 3),
            Some('H') => number(hour, 2),
            Some('I') => number(hour12, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second, 2),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_string(),
            Some('A') => weekday.to_string(),
            Some('a') => weekday[..3].to_string(),
            Some('B') => month_name.to_string(),
            Some('b' | 'h') => month_name[..3].to_string(),
            Some('F') => format!("{year:04}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".to_string(),
            Some('z') => "+0000".to_string(),
            Some('%') => "%".to_string(),
            other => {
                let name = other.map(String::from).unwrap_or_default();
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("strftime_now: unknown directive %{name}"),
                ));
            }
        });
    }
    Ok(out)
}

/// Year, day of the year, month and day of the month, all but the year counted from 1, of a day counted from 1970-01-01.
fn civil_date(days: u64) -> (u64, u64, u64, u64) {
    let leap = |year: u64| u64::from(year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400)));
    let (mut year, mut day) = (1970, days);
    while day >= 365 + leap(year) {
        day -= 365 + leap(year);
        year += 1;
    }
    let day_of_year = day + 1;
    let mut month = 0;
    for length in [31, 28 + leap(year), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        month += 1;
        if day < length {
            break;
        }
        day -= length;
    }
    (year, day_of_year, month, day + 1)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(seconds: u64, format: &str) -> String {
        strftime(UNIX_EPOCH + Duration::from_secs(seconds), format).unwrap()
    }

    #[test]
    fn known_dates_are_formatted_correctly() {
        assert_eq!(at(0, "%A %d %B %Y, day %j, %T"), "Thursday 01 January 1970, day 001, 00:00:00");
        assert_eq!(at(951_782_400, "%a %F"), "Tue 2000-02-29");
        assert_eq!(at(1_709_251_199, "%d %b %Y %H:%M:%S"), "29 Feb 2024 23:59:59");
        assert_eq!(at(1_735_603_200, "%j"), "366");
        assert_eq!(at(4_107_542_400, "%F"), "2100-03-01");
        assert_eq!(at(1_785_067_200, "%-d %-m %y %I %p 100%%"), "26 7 26 12 PM 100%");
    }

    #[test]
    fn every_day_follows_the_day_before() {
        let date = |days| {
            let (year, day_of_year, month, day) = civil_date(days);
            assert!((1..=366).contains(&day_of_year) && day <= day_of_year, "{year}-{month}-{day}: {day_of_year}");
            (year, month, day)
        };
        let mut previous = date(0);
        for days in 1..200_000 {
            let date = date(days);
            let next_day = (previous.0, previous.1, previous.2 + 1);
            let next_month = (previous.0, previous.1 + 1, 1);
            let next_year = (previous.0 + 1, 1, 1);
            assert!([next_day, next_month, next_year].contains(&date), "{previous:?} then {date:?}");
            previous = date;
        }
        assert_eq!(previous, (2517, 7, 31));
    }

    #[test]
    fn an_unknown_directive_is_an_error() {
        assert!(strftime(UNIX_EPOCH, "%Q").is_err());
        assert!(strftime(UNIX_EPOCH, "%").is_err());
    }
}
