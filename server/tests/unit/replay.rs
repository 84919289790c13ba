//! The second run of a background response.
#![allow(clippy::unwrap_used)]

use engine::{Delta, FinishReason, TokenOutput};
use proptest::prelude::*;

use super::{Block, Differs, Replay};

/// Deltas of these sizes: tokens, and characters of one to four bytes.
fn deltas(sizes: &[(usize, usize)]) -> Vec<Delta> {
    let (mut id, mut at) = (0, 0);
    let delta = |&(tokens, chars): &(usize, usize)| {
        let token = |n: u32| TokenOutput { id: n, logprobs: None, text_offset: n as usize };
        let tokens: Vec<TokenOutput> = (id..id + tokens as u32).map(token).collect();
        let text = (at..at + chars).map(|n| ['a', 'é', '中', '🦀'][n % 4]).collect();
        (id, at) = (id + tokens.len() as u32, at + chars);
        Delta { text, tokens, ..Delta::default() }
    };
    sizes.iter().map(delta).collect()
}

fn cuts(deltas: &[Delta]) -> Vec<(u32, u32)> {
    deltas.iter().map(|delta| (delta.tokens.len() as u32, delta.text.len() as u32)).collect()
}

fn joined(deltas: &[Delta]) -> Delta {
    let mut whole = Delta::default();
    deltas.iter().for_each(|delta| whole.extend(delta.clone()));
    whole
}

proptest! {
    /// A second run in any other deltas is cut like the first, and loses and repeats nothing behind it.
    #[test]
    fn a_second_run_is_cut_like_the_first(
        sizes in prop::collection::vec((0..4_usize, 0..6_usize), 1..20),
        kept in 0..20_usize,
        joins in prop::collection::vec(1..5_usize, 20),
    ) {
        let first = deltas(&sizes);
        let kept = kept.min(first.len());
        let block = Block { cached_tokens: 3, cuts: cuts(&first[..kept]), events: Vec::new() };
        let block = Block::decode(&block.encode()).unwrap();
        let mut replay = Replay::new([block]);
        // Tokens come in groups of other sizes, and their text with them.
        let (mut second, mut rest) = (Vec::new(), &first[..]);
        for join in joins {
            let (now, later) = rest.split_at(join.min(rest.len()));
            second.push(joined(now));
            rest = later;
        }
        let mut last = second.pop().unwrap();
        last.extend(joined(rest));
        last.finish = Some(FinishReason::Length);
        second.push(last);
        let mut cut = Vec::new();
        for delta in second {
            cut.extend(replay.cut(delta).unwrap());
        }
        prop_assert!(cut.iter().enumerate().all(|(i, (_, is_kept))| *is_kept == (i < kept)));
        let cut: Vec<Delta> = cut.into_iter().map(|(delta, _)| delta).collect();
        prop_assert_eq!(&cut[..kept], &first[..kept]);
        let (whole, expected) = (joined(&cut), joined(&first));
        prop_assert_eq!((whole.text, whole.tokens, whole.finish), (expected.text, expected.tokens, Some(FinishReason::Length)));
        prop_assert!(replay.is_over());
        prop_assert_eq!(replay.cached_tokens(9), if kept > 0 { 3 } else { 9 });
    }
}

#[test]
fn a_second_run_that_gives_something_else_is_found() {
    let first = deltas(&[(2, 3), (1, 2)]);
    let block = || Block { cached_tokens: 0, cuts: cuts(&first), events: vec![("a".into(), "1".into())] };
    // It ends early, or its text is cut within a character.
    let mut replay = Replay::new([block()]);
    let short = Delta { finish: Some(FinishReason::Length), ..first[0].clone() };
    assert_eq!(replay.cut(short), Err(Differs));
    let mut replay = Replay::new([block()]);
    let other = Delta { text: "🦀🦀🦀".into(), ..joined(&first) };
    assert_eq!(replay.cut(other), Err(Differs));
    // Another event comes.
    assert_eq!(Replay::new([block()]).is_new("a", "2"), Err(Differs));
    assert_eq!(Replay::new([block()]).is_new("b", "1"), Err(Differs));
    let mut replay = Replay::new([block()]);
    assert_eq!((replay.is_new("a", "1"), replay.is_new("a", "1")), (Ok(false), Ok(true)));
}
