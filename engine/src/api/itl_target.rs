//! The target for the time between two tokens of a sequence.

use std::fmt;
use std::str::FromStr;

use crate::error::{EngineError, bad};

/// The time between two tokens of a sequence that the engine aims at while prompts are computed beside it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ItlTarget {
    /// 2.2 times the time of a step in which all sequences decode.
    Auto,
    /// This number of milliseconds, from 1 to 60000.
    Millis(f64),
}

const EXPECTED: &str = "a number of milliseconds from 1 to 60000";

/// Formats the target in words, for the log.
impl fmt::Display for ItlTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ItlTarget::Auto => write!(f, "2.2 times the time of a step in which all sequences decode"),
            ItlTarget::Millis(millis) => write!(f, "{millis} ms"),
        }
    }
}

/// A number of milliseconds.
impl FromStr for ItlTarget {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<ItlTarget, &'static str> {
        text.parse().map(ItlTarget::Millis).ok().filter(|target| target.is_possible()).ok_or(EXPECTED)
    }
}

impl ItlTarget {
    fn is_possible(self) -> bool {
        match self {
            ItlTarget::Auto => true,
            ItlTarget::Millis(millis) => (1.0..=60_000.0).contains(&millis),
        }
    }

    /// Checks that the target is possible, and that prompts can be cut for it.
    pub(crate) fn check(self, enable_chunked_prefill: bool) -> Result<(), EngineError> {
        let (flag, found) = match self {
            ItlTarget::Auto => ("--max-num-batched-tokens", "auto".to_string()),
            ItlTarget::Millis(millis) => ("--itl-target-ms", format!("{millis:?}")),
        };
        if !self.is_possible() {
            return Err(bad(flag, found, EXPECTED));
        }
        if !enable_chunked_prefill {
            let expected =
                "chunked prefill too, because a target cuts prompts into chunks; remove one of the two flags";
            return Err(bad(flag, found, expected));
        }
        Ok(())
    }
}
