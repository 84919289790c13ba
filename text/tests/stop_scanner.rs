//! The search for stop strings in a text that comes in pieces.

use proptest::prelude::*;
use text::{Scanned, StopScanner};

fn scanner(stops: &[&str], include_stop: bool) -> StopScanner {
    let stops: Vec<String> = stops.iter().map(|&stop| stop.to_owned()).collect();
    StopScanner::new(&stops, include_stop)
}

/// All pieces and the end: the text given, and the stop string found.
fn scan(mut scanner: StopScanner, pieces: &[&str]) -> (String, Option<String>) {
    let mut text = String::new();
    for piece in pieces {
        let scanned = scanner.push(piece);
        text += &scanned.text;
        if scanned.stop.is_some() {
            return (text, scanned.stop);
        }
    }
    (text + &scanner.finish(), None)
}

fn found(text: &str, stop: &str) -> (String, Option<String>) {
    (text.to_owned(), Some(stop.to_owned()))
}

#[test]
fn a_stop_string_that_straddles_pieces_never_leaks() {
    let mut scanner = scanner(&["<end>"], false);
    for (piece, given) in [("a<", "a"), ("en", ""), ("<e", "<en"), ("nd", ""), (">b", "")] {
        assert_eq!(scanner.push(piece).text, given, "{piece}");
    }
    assert_eq!(scanner.push("more"), Scanned::default());
    assert_eq!(scanner.finish(), "");
}

#[test]
fn a_beginning_that_leads_nowhere_is_released() {
    let mut scanner = scanner(&["aab"], false);
    assert_eq!(scanner.push("aaaa").text, "aa");
    assert_eq!(scanner.push("c").text, "aac");
    assert_eq!(scanner.push("a").text, "");
    assert_eq!(scanner.finish(), "a");
}

#[test]
fn the_match_that_ends_first_wins_and_then_the_longest() {
    assert_eq!(scan(scanner(&["cd", "b", "abc"], false), &["xabcd"]), found("xa", "b"));
    assert_eq!(scan(scanner(&["c", "abc", "bc"], true), &["xabcd"]), found("xabc", "abc"));
}

#[test]
fn a_multibyte_stop_string_cuts_between_characters() {
    assert_eq!(scan(scanner(&["世界"], false), &["你好世", "世", "界!"]), found("你好世", "世界"));
    assert_eq!(scan(scanner(&["é\u{301}"], true), &["caf", "é", "\u{301}s"]), found("café\u{301}", "é\u{301}"));
}

#[test]
fn an_empty_stop_string_never_matches() {
    assert_eq!(scan(scanner(&[""], false), &["ab", "c"]), ("abc".into(), None));
}

/// Character by character over the whole text.
fn naive(text: &str, stops: &[String], include_stop: bool) -> (String, Option<String>) {
    let ends = text.char_indices().map(|(at, character)| at + character.len_utf8());
    for end in ends {
        let matches = stops.iter().filter(|stop| !stop.is_empty() && text[..end].ends_with(*stop));
        if let Some(stop) = matches.max_by_key(|stop| stop.len()) {
            let cut = if include_stop { end } else { end - stop.len() };
            return found(&text[..cut], stop);
        }
    }
    (text.to_owned(), None)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn every_split_gives_what_a_search_of_the_whole_gives(
        text in "[ab世é]{0,24}",
        stops in prop::collection::vec("[ab世é]{0,5}", 0..4),
        include_stop: bool,
        cuts in prop::collection::vec(0usize..80, 0..12),
    ) {
        let bounds: Vec<usize> = (0..=text.len()).filter(|&at| text.is_char_boundary(at)).collect();
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| bounds[cut % bounds.len()]).chain([0, text.len()]).collect();
        cuts.sort_unstable();
        let pieces: Vec<&str> = cuts.windows(2).map(|cut| &text[cut[0]..cut[1]]).collect();
        let found = scan(StopScanner::new(&stops, include_stop), &pieces);
        prop_assert_eq!(found, naive(&text, &stops, include_stop));
    }

    #[test]
    fn less_than_the_longest_stop_string_is_held_back(
        text in "[ab世é]{0,24}",
        stops in prop::collection::vec("[ab世é]{1,5}", 1..4),
    ) {
        let most = stops.iter().map(String::len).max().unwrap_or(1) - 1;
        let mut scanner = StopScanner::new(&stops, false);
        for character in text.chars() {
            scanner.push(character.encode_utf8(&mut [0; 4]));
            prop_assert!(scanner.clone().finish().len() <= most);
            let held = scanner.clone().finish();
            prop_assert!(stops.iter().any(|stop| stop.starts_with(&held)), "{held:?} is held for nothing");
        }
    }
}
