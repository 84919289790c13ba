//! `strftime` for templates that print the date, in UTC and the C locale.

use std::time::SystemTime;

use chrono::format::{Item, Numeric, StrftimeItems};
use chrono::{DateTime, Utc};
use minijinja::{Error, ErrorKind};

/// Greatest length of a format in bytes.
const LONGEST: usize = 1000;

/// Formats `time`; `%-d` and so on omit the padding. Fails on a directive that C does not have, and on a format longer than
/// [`LONGEST`].
pub(super) fn strftime(time: SystemTime, format: &str) -> Result<String, Error> {
    if format.len() > LONGEST {
        let problem = format!("strftime_now: found a format of {} bytes, expected at most {LONGEST}", format.len());
        return Err(Error::new(ErrorKind::InvalidOperation, problem));
    }
    // `%f` is microseconds in Python and nanoseconds in chrono.
    let is_unknown = |item: &Item<'_>| matches!(item, Item::Error | Item::Numeric(Numeric::Nanosecond, _));
    let items: Vec<Item<'_>> = StrftimeItems::new(format).collect();
    if items.iter().any(is_unknown) {
        let problem = format!("strftime_now: unknown directive in {format:?}");
        return Err(Error::new(ErrorKind::InvalidOperation, problem));
    }
    Ok(DateTime::<Utc>::from(time).format_with_items(items.iter()).to_string())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    #[test]
    fn dates_are_formatted_as_in_python_and_unknown_directives_are_errors() {
        let at = |seconds: u64, format: &str| strftime(UNIX_EPOCH + Duration::from_secs(seconds), format).unwrap();
        assert_eq!(at(0, "%A %d %B %Y, day %j, %T"), "Thursday 01 January 1970, day 001, 00:00:00");
        assert_eq!(at(951_782_400, "%a %F %Z %z"), "Tue 2000-02-29 UTC +0000");
        assert_eq!(at(1_709_251_199, "%d %b %Y %H:%M:%S"), "29 Feb 2024 23:59:59");
        assert_eq!(at(1_785_067_200, "%-d %-m %y %I %p %e 100%%"), "26 7 26 12 PM 26 100%");
        for unknown in ["%Q", "%", "%f", "day %"] {
            assert!(strftime(UNIX_EPOCH, unknown).is_err(), "{unknown}");
        }
    }
}
