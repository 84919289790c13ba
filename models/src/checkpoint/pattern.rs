//! Names and regular expressions that choose modules, with the meaning that PEFT and compressed-tensors give them.

use fancy_regex::{Regex, RegexBuilder};

/// Greatest length of an expression in bytes.
const LONGEST: usize = 16 << 10;

/// Greatest number of steps back of one match.
const MOST_STEPS: usize = 10_000;

/// What chooses modules by their names.
#[derive(Clone, Debug)]
pub(crate) enum Pattern {
    /// The name, or its last parts.
    Suffix(String),
    /// A regular expression for the whole name.
    Expression(Regex),
}

impl Pattern {
    /// The last parts of a name.
    pub fn suffix(text: &str) -> Pattern {
        Pattern::Suffix(text.to_string())
    }

    /// A regular expression that the whole name matches (`re.fullmatch`).
    pub fn whole(text: &str) -> Result<Pattern, String> {
        Pattern::expression(text, &format!(r"\A(?:{text})\z"))
    }

    /// A regular expression that the start of the name matches (`re.match`).
    pub fn start(text: &str) -> Result<Pattern, String> {
        Pattern::expression(text, &format!(r"\A(?:{text})"))
    }

    /// A regular expression that the last parts of the name match, as the keys of `rank_pattern` and `alpha_pattern` do.
    pub fn last_parts(text: &str) -> Result<Pattern, String> {
        // A name without special characters needs no expression.
        if text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-')) {
            return Ok(Pattern::suffix(text));
        }
        Pattern::expression(text, &format!(r"\A(?:.*\.)?(?:{text})\z"))
    }

    fn expression(text: &str, expression: &str) -> Result<Pattern, String> {
        if text.len() > LONGEST {
            return Err(format!("a regular expression of {} bytes", text.len()));
        }
        let built = RegexBuilder::new(expression).backtrack_limit(MOST_STEPS).build();
        built.map(Pattern::Expression).map_err(|error| format!("a regular expression that cannot be used ({error})"))
    }

    /// Whether a name matches. An error is what was found: an expression that takes too many steps.
    pub fn matches(&self, name: &str) -> Result<bool, String> {
        match self {
            Pattern::Suffix(suffix) => {
                Ok(name.strip_suffix(suffix.as_str()).is_some_and(|rest| rest.is_empty() || rest.ends_with('.')))
            }
            Pattern::Expression(expression) => expression.is_match(name).map_err(|_| {
                let expression: String = expression.as_str().chars().take(80).collect();
                format!("the expression {expression:?}, which takes more than {MOST_STEPS} steps for a name")
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expression_that_takes_too_many_steps_is_an_error_and_no_answer() {
        // The reference to a group needs a search with steps back.
        let slow = Pattern::start(r"(?:(a|aa)+)+\1c").unwrap();
        assert_eq!(slow.matches("aac"), Ok(true));
        let problem = slow.matches(&"a".repeat(80)).unwrap_err();
        assert!(problem.contains("more than 10000 steps") && problem.len() < 200, "{problem}");
    }
}
