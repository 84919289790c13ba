//! Fields of the reasoning in front of an answer: how much there is, and whether it is returned.

use text::ReasoningFormat;

use super::fields::Fields;
use super::work::Work;
use crate::http::ApiError;

/// Values of `reasoning_effort`.
pub const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// Names of the limit of the reasoning: of vLLM, Qwen and llama-server. The first that is given counts.
const BUDGETS: [&str; 3] = ["thinking_token_budget", "thinking_budget", "reasoning_budget"];

/// The limit of the reasoning: the field that has it, and the number of tokens.
pub type Budget = (&'static str, usize);

/// Reads the limit of the reasoning.
pub fn budget(work: &Work, fields: &Fields<'_>) -> Result<Option<Budget>, ApiError> {
    let mut found = None;
    for name in BUDGETS {
        let other = format!("Another name of {}.", BUDGETS[0]);
        let description = if name == BUDGETS[0] {
            "Maximum number of tokens of the reasoning, after which its end is forced; -1, the default: no limit."
        } else {
            &other
        };
        let tokens = fields.integer(name, (-1, i64::MAX), description)?;
        found = found.or(tokens.map(|tokens| (name, usize::try_from(tokens).ok())));
    }
    let budget = found.and_then(|(name, tokens)| Some((name, tokens?)));
    budget.map_or(Ok(None), |budget| checked(work, budget).map(Some))
}

fn checked(work: &Work, budget: Budget) -> Result<Budget, ApiError> {
    if work.reasoning == ReasoningFormat::Off {
        let advice =
            "remove it, or start the server with --reasoning-parser: no end of the reasoning of this model is known";
        return Err(ApiError::unsupported(budget.0, advice));
    }
    Ok(budget)
}

/// The object `reasoning`, as in OpenAI's responses and in the chats of OpenRouter.
#[derive(Default)]
pub struct Reasoning<'f> {
    /// The reasoning effort.
    pub effort: Option<&'f str>,
    /// Do not return the reasoning.
    pub is_hidden: bool,
    max_tokens: Option<usize>,
}

impl<'f> Reasoning<'f> {
    /// Reads the object.
    pub fn read(fields: &'f Fields<'_>) -> Result<Reasoning<'f>, ApiError> {
        let description = "effort: reasoning effort. max_tokens: as thinking_token_budget. exclude: do not return the reasoning. \
                           enabled: false is an effort of none. summary is accepted but not used.";
        let Some(object) = fields.object("reasoning", description)? else { return Ok(Reasoning::default()) };
        let given = |name: &str| object.get(name).filter(|value| !value.is_null());
        let wrong = |name: &str, found, expected: &str| ApiError::wrong(format!("reasoning.{name}"), found, expected);
        let effort = match given("effort") {
            None => None,
            Some(found) => {
                let expected = || format!("one of {}", EFFORTS.join(", "));
                let known = found.as_str().filter(|name| EFFORTS.contains(name));
                Some(known.ok_or_else(|| wrong("effort", found, &expected()))?)
            }
        };
        let flag = |name: &str| match given(name) {
            None => Ok(None),
            Some(found) => found.as_bool().map(Some).ok_or_else(|| wrong(name, found, "true or false")),
        };
        let effort = if flag("enabled")? == Some(false) { Some("none") } else { effort };
        let max_tokens = match given("max_tokens") {
            None => None,
            Some(found) => {
                let tokens = found.as_u64().and_then(|tokens| usize::try_from(tokens).ok());
                Some(tokens.ok_or_else(|| wrong("max_tokens", found, "a number of tokens"))?)
            }
        };
        Ok(Reasoning { effort, is_hidden: flag("exclude")? == Some(true), max_tokens })
    }

    /// The limit of the reasoning, which precedes the other field.
    pub fn budget(&self, work: &Work, other: Option<Budget>) -> Result<Option<Budget>, ApiError> {
        let own = self.max_tokens.map(|tokens| checked(work, ("reasoning.max_tokens", tokens))).transpose()?;
        Ok(own.or(other))
    }

    /// Reads whether to return the reasoning, and whether stop strings count within it.
    pub fn is_shown(&self, fields: &Fields<'_>) -> Result<(bool, bool), ApiError> {
        let shows = fields.flag("include_reasoning", true, "Return the reasoning.")?;
        let description = "Search the stop strings in the reasoning too, and not only in the answer after it.";
        Ok((shows && !self.is_hidden, fields.flag("stop_in_reasoning", false, description)?))
    }
}
