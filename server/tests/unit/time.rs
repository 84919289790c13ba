//! Times in answers.

use super::*;

#[test]
fn times_are_those_of_the_calendar() {
    let at = |seconds: u64| time(UNIX_EPOCH + Duration::from_secs(seconds));
    // From `date -u -d @N`.
    for (seconds, expected) in [
        (0, "1970-01-01T00:00:00"),
        (951_782_399, "2000-02-28T23:59:59"),
        (951_782_400, "2000-02-29T00:00:00"),
        (951_868_800, "2000-03-01T00:00:00"),
        (1_709_164_800, "2024-02-29T00:00:00"),
        (1_798_761_599, "2026-12-31T23:59:59"),
        (4_107_542_400, "2100-03-01T00:00:00"),
    ] {
        assert_eq!(at(seconds), format!("{expected}.000000+00:00"));
    }
    assert_eq!(time(UNIX_EPOCH + Duration::from_micros(1_500_007)), "1970-01-01T00:00:01.500007+00:00");
}
