//! The id and the trace context of a call.

use super::*;

#[test]
fn only_a_valid_trace_parent_is_accepted() {
    let (trace, parent) = ("0123456789abcdef0123456789abcdef", "0123456789abcdef");
    assert!(is_trace_parent(&format!("00-{trace}-{parent}-01")));
    let zero = "0".repeat(32);
    for bad in [
        String::new(),
        format!("01-{trace}-{parent}-01"),
        format!("00-{zero}-{parent}-01"),
        format!("00-{trace}-{parent}"),
    ] {
        assert!(!is_trace_parent(&bad), "{bad}");
    }
}
