//! The clock of the process.
#![allow(clippy::unwrap_used)]

use super::*;

#[test]
fn time_is_that_of_the_start_and_what_has_passed() {
    let start = Start { clock: Duration::from_millis(1_700_000_000_900), passed: Duration::from_secs(50) };
    for (passed, expected) in
        [(49_000, 1_700_000_000), (50_000, 1_700_000_000), (50_099, 1_700_000_000), (50_100, 1_700_000_001)]
    {
        assert_eq!(start.at(Duration::from_millis(passed)), expected);
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    assert!(unix_seconds().abs_diff(now) <= 1);
}
