//! Reasoning in front of the answer.

use std::str::FromStr;

use crate::channels::Channels;
use crate::grammar::lark::{excluding, quote, regex};
use crate::marker::{HARMONY, MAX_HELD, Marker};
use crate::thought::Thought;
use crate::tools::special_token;
use crate::{ChatTemplate, Grammar, Tokenizer};

/// How a model marks its reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// Reasoning is part of the text.
    Off,
    /// Between `<think>` and `</think>`, if the text or the end of the prompt has the opening tag.
    Qwen3,
    /// In front of `</think>`, even without the opening tag.
    DeepseekR1,
    /// Between `[THINK]` and `[/THINK]`.
    Mistral,
    /// Between `<|channel>thought` and `<channel|>`.
    Gemma4,
    /// In the channel `analysis` of the harmony format.
    GptOss,
    /// Between `<seed:think>` and `</seed:think>`.
    SeedOss,
    /// Between `<|START_THINKING|>` and `<|END_THINKING|>`. The answer is between markers too, which are dropped.
    CohereCommand3,
}

/// Text after the opening marker of [`ReasoningFormat::Gemma4`].
const LABEL: &str = "thought\n";

/// The declaration of a format.
struct Declaration {
    format: ReasoningFormat,
    /// vLLM's names of the parser, the preferred one first.
    names: &'static [&'static str],
    /// Text that a chat template of such a model contains; `None` if templates do not tell.
    template: Option<&'static str>,
    /// Marks the beginning.
    open: &'static str,
    /// Marks the end.
    close: &'static str,
    /// Markers around the answer, which are no part of it.
    around: &'static [&'static str],
}

/// Every format. Where templates are ambiguous, the first that matches is chosen.
const FORMATS: [Declaration; 8] = [
    Declaration {
        format: ReasoningFormat::SeedOss,
        names: &["seed_oss"],
        template: Some("<seed:think>"),
        open: "<seed:think>",
        close: "</seed:think>",
        around: &[],
    },
    Declaration {
        format: ReasoningFormat::CohereCommand3,
        names: &["cohere_command3"],
        template: Some("<|START_THINKING|>"),
        open: "<|START_THINKING|>",
        close: "<|END_THINKING|>",
        around: &["<|START_RESPONSE|>", "<|END_RESPONSE|>"],
    },
    Declaration {
        format: ReasoningFormat::GptOss,
        names: &["openai_gptoss"],
        template: Some("<|channel|>"),
        open: "<|channel|>",
        close: "<|end|>",
        around: &[],
    },
    Declaration {
        format: ReasoningFormat::Gemma4,
        names: &["gemma4"],
        template: Some("<|channel>"),
        open: "<|channel>thought\n",
        close: "<channel|>",
        around: &[],
    },
    Declaration {
        format: ReasoningFormat::Mistral,
        names: &["mistral"],
        template: Some("[THINK]"),
        open: "[THINK]",
        close: "[/THINK]",
        around: &[],
    },
    Declaration {
        format: ReasoningFormat::Qwen3,
        names: &["qwen3", "glm45", "deepseek_v3", "deepseek_v32", "kimi_k2", "minimax_m2", "olmo3"],
        template: Some("</think>"),
        open: "<think>",
        close: "</think>",
        around: &[],
    },
    Declaration {
        format: ReasoningFormat::DeepseekR1,
        names: &["deepseek_r1"],
        template: None,
        open: "<think>",
        close: "</think>",
        around: &[],
    },
    Declaration { format: ReasoningFormat::Off, names: &["none"], template: None, open: "", close: "", around: &[] },
];

impl ReasoningFormat {
    /// All formats, in the order in which templates are compared with them.
    pub fn all() -> impl Iterator<Item = ReasoningFormat> {
        FORMATS.iter().map(|one| one.format)
    }

    /// The format that a chat template mentions, and the text that tells it.
    pub fn of(template: &ChatTemplate) -> Option<(ReasoningFormat, &'static str)> {
        let told = |one: &Declaration| Some((one.format, one.template.filter(|text| template.mentions(text))?));
        FORMATS.iter().find_map(told)
    }

    fn declaration(self) -> &'static Declaration {
        FORMATS.iter().find(|one| one.format == self).unwrap_or(&FORMATS[0])
    }

    /// vLLM's names of the parser, the preferred one first.
    pub fn names(self) -> &'static [&'static str] {
        self.declaration().names
    }

    /// The markers around reasoning; empty without reasoning.
    pub fn markers(self) -> (&'static str, &'static str) {
        (self.declaration().open, self.declaration().close)
    }

    /// Whether the answer to a prompt begins within the reasoning; `None` if it may open the reasoning itself. A prompt that ends
    /// with the closing marker has no reasoning.
    fn begins_within(self, prompt: &str) -> Option<bool> {
        let (open, close) = self.markers();
        let prompt = prompt.trim_end();
        match prompt.ends_with(open.trim_end()) {
            true => Some(true),
            false if prompt.ends_with(close) => Some(false),
            false => (self == ReasoningFormat::DeepseekR1).then_some(true),
        }
    }

    /// Creates a parser for the text after a prompt; `None` if reasoning is not parsed.
    pub fn parser(self, prompt: &str) -> Option<ReasoningParser> {
        let state = match self {
            ReasoningFormat::Off => return None,
            ReasoningFormat::GptOss => State::Channels(Channels::new(prompt)),
            _ => match self.begins_within(prompt) {
                Some(true) => State::thinking(self.markers().1),
                Some(false) => State::Answer,
                None => State::Start(String::new()),
            },
        };
        let around = self.declaration().around;
        let markers = self.markers();
        Some(ReasoningParser { state, markers, around, held: String::new(), position: 0, end: 0 })
    }

    /// The text that opens the reasoning, where it is text: no special token.
    pub fn opening_text(self, tokenizer: &Tokenizer) -> Option<&'static str> {
        let open = self.markers().0;
        let is_text = special_token(tokenizer, open.trim_end_matches(LABEL)).is_none();
        (is_text && self != ReasoningFormat::GptOss).then_some(open).filter(|open| !open.is_empty())
    }

    /// Whether a marker of the format is a special token of the vocabulary. Special tokens must then be kept in the text.
    pub fn has_special_marker(self, tokenizer: &Tokenizer) -> bool {
        let (open, close) = self.markers();
        let around = self.declaration().around.iter().copied();
        let mut markers = [open, open.trim_end_matches(LABEL), close].into_iter().chain(around);
        markers.any(|text| special_token(tokenizer, text).is_some())
    }

    /// Returns a grammar that binds after the reasoning: the answer to `prompt` may have reasoning, and `then` applies to the text
    /// after it. `is_call` says that `then` writes tool calls with their markers.
    ///
    /// Where the answer opens the reasoning itself, a grammar that allows the opening marker applies from the first token.
    pub fn grammar(self, prompt: &str, then: Grammar, is_call: bool, tokenizer: &Tokenizer) -> Grammar {
        let text = |text: &str| match special_token(tokenizer, text) {
            Some(id) => format!("<[{id}]>"),
            None => quote(text),
        };
        let after = |before: String, open: Option<&str>, then: Grammar| match then {
            // One grammar, because calls and reasoning may begin alike.
            Grammar::Lark(calls) if is_call => {
                let calls = calls.strip_prefix("start:").unwrap_or(&calls);
                Grammar::Lark(format!("start: before answer\n{before}answer:{calls}"))
            }
            then => Grammar::AfterReasoning { before, open: open.map(str::to_string), then: Box::new(then) },
        };
        let (open, close) = self.markers();
        // Text up to the marker at its end, and the marker.
        let rest = || {
            // The parser reads text, so a marker that is a special token must not be spelled with others either.
            let is_special = special_token(tokenizer, close).is_some();
            let markers: &[&str] = if self == ReasoningFormat::GptOss { &HARMONY } else { &[close] };
            let others = markers.iter().copied().filter(|marker| is_special || *marker != close);
            let rest = format!("REST: /(?s:.*)/{}\n", excluding(&[], others));
            match is_special {
                true => format!("rest: REST? {}\n{rest}", text(close)),
                false => format!("rest[suffix={}]: REST\n{rest}", text(close)),
            }
        };
        let blank = "BLANK: /[ \\t\\r\\n]{1,8}/\n";
        if self == ReasoningFormat::GptOss {
            let (channel, message, start) = (text("<|channel|>"), text("<|message|>"), text("<|start|>"));
            let head = if is_call { String::new() } else { format!(" {channel} \"final\" {message}") };
            // A message in the other channel is a part of the answer.
            let channels = if is_call { "(\"analysis\" | \"commentary\")" } else { "\"analysis\"" };
            let other = format!("{channel} {channels} {message} rest {start} \"assistant\"");
            let before = format!("before: ({other})*{head}\n{}", rest());
            return after(before, Some(open), then);
        }
        let (before, opened) = match (self, self.begins_within(prompt)) {
            (ReasoningFormat::Off, _) | (_, Some(false)) => return then,
            (_, Some(true)) => (format!("before: rest BLANK?\n{blank}{}", rest()), None),
            (_, None) => {
                let marker = open.trim_end_matches(LABEL);
                let opening = match special_token(tokenizer, marker) {
                    Some(id) if marker == open => format!("BLANK? <[{id}]>"),
                    Some(id) => format!("BLANK? <[{id}]> {}", text(LABEL)),
                    None => "OPEN".to_string(),
                };
                // One terminal: a longer piece of free text would win over the first of two.
                let terminal = format!("OPEN: /[ \\t\\r\\n]{{0,8}}{}/\n", regex(open));
                (format!("before: ({opening} rest BLANK?)?\n{terminal}{blank}{}", rest()), Some(marker))
            }
        };
        after(before, opened, then)
    }
}

/// Parses vLLM's name of the parser.
impl FromStr for ReasoningFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<ReasoningFormat, String> {
        FORMATS.iter().find(|one| one.names.contains(&name)).map(|one| one.format).ok_or_else(|| {
            let names: Vec<&str> = FORMATS.iter().flat_map(|one| one.names).copied().collect();
            format!("expected one of {}", names.join(", "))
        })
    }
}

#[derive(Clone, Debug, PartialEq)]
enum State {
    /// The text is a list of messages.
    Channels(Channels),
    /// Only white space or the beginning of the opening marker has been read.
    Start(String),
    /// Within the reasoning. White space at its beginning is dropped.
    Thinking { close: Marker, has_text: bool },
    /// After the reasoning. White space in front of the answer is dropped.
    Between,
    /// Within the answer, until the end.
    Answer,
}

/// Separates the reasoning of one sequence from its answer, in a text that arrives in pieces.
///
/// Reasoning is recognised only in front of the answer: a later tag is text. White space around the reasoning is dropped. The
/// result does not depend on how the text is split into pieces.
///
/// ```
/// use text::ReasoningParser;
///
/// let mut parser = ReasoningParser::new(false);
/// let first = parser.push("<think>2 + 2");
/// let second = parser.push(" = 4.</think>\n\nFour.");
/// assert_eq!(first.reasoning + &second.reasoning, "2 + 2 = 4.");
/// assert_eq!(second.content, "Four.");
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ReasoningParser {
    state: State,
    markers: (&'static str, &'static str),
    /// Markers around the answer.
    around: &'static [&'static str],
    /// Text of the answer that may be one of them.
    held: String,
    /// Number of characters that have been read.
    position: usize,
    /// Number of characters up to the end of the reasoning so far.
    end: usize,
}

impl ReasoningParser {
    /// Creates a parser for reasoning between `<think>` and `</think>`. `thinking` says that the text begins within it.
    pub fn new(thinking: bool) -> ReasoningParser {
        let markers = ReasoningFormat::Qwen3.markers();
        ReasoningParser {
            state: if thinking { State::thinking(markers.1) } else { State::Start(String::new()) },
            markers,
            around: &[],
            held: String::new(),
            position: 0,
            end: 0,
        }
    }

    /// Number of characters, of those that have been read, of which it is known whether they are reasoning.
    pub fn num_decided_chars(&self) -> usize {
        let undecided = match &self.state {
            State::Channels(channels) => channels.num_undecided_chars(),
            State::Start(held) => held.chars().count(),
            State::Thinking { .. } | State::Between | State::Answer => 0,
        };
        self.position.saturating_sub(undecided)
    }

    /// Number of characters, of those that have been read, up to the end of the reasoning and the marker behind it. Until the reasoning
    /// has begun, it is 0.
    pub fn num_reasoning_chars(&self) -> usize {
        self.end
    }

    /// Returns calls of functions as text, in a format whose calls are messages beside the reasoning.
    pub fn ignore_calls(&mut self) {
        if let State::Channels(channels) = &mut self.state {
            channels.ignore_calls();
        }
    }

    /// Reads the last character of `held`, which are the characters since the last decision. Returns whether they belong to the
    /// answer; `None` if that depends on what follows.
    pub(super) fn is_answer(&mut self, held: &str) -> Option<bool> {
        self.read_char(held.chars().next_back()?, &mut Thought::default());
        match &self.state {
            State::Channels(channels) => channels.is_answer(held),
            State::Start(_) => None,
            State::Thinking { .. } | State::Between => Some(false),
            State::Answer => Some(true),
        }
    }

    /// Whether everything that follows belongs to the answer.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.state, State::Answer)
    }

    /// Reads the next piece of text.
    pub fn push(&mut self, text: &str) -> Thought {
        let mut thought = Thought::default();
        for c in text.chars() {
            let was_within = self.is_within();
            self.read_char(c, &mut thought);
            self.position += 1;
            if was_within || self.is_within() {
                self.end = self.position;
            }
        }
        thought
    }

    /// Whether reasoning may still follow.
    pub(super) fn may_reason(&self) -> bool {
        !matches!(self.state, State::Between | State::Answer)
    }

    /// Whether the last character belongs to the reasoning.
    pub(super) fn is_within(&self) -> bool {
        match &self.state {
            State::Channels(channels) => channels.is_reasoning(),
            State::Thinking { .. } => true,
            State::Start(_) | State::Between | State::Answer => false,
        }
    }

    /// Ends the text, and returns what was held back.
    pub fn finish(&mut self) -> Thought {
        match std::mem::replace(&mut self.state, State::Answer) {
            State::Channels(mut channels) => {
                let mut thought = Thought::default();
                channels.finish(&mut thought);
                thought
            }
            State::Start(held) => Thought { content: held, ..Thought::default() },
            State::Thinking { mut close, has_text } => {
                let held = close.take();
                let reasoning = if has_text { held.trim_end() } else { held.trim() };
                Thought { reasoning: reasoning.to_string(), ..Thought::default() }
            }
            State::Between | State::Answer => Thought { content: std::mem::take(&mut self.held), ..Thought::default() },
        }
    }

    fn read_char(&mut self, c: char, thought: &mut Thought) {
        let (open, close) = self.markers;
        match &mut self.state {
            State::Channels(channels) => channels.push(c, thought),
            State::Start(held) => {
                held.push(c);
                let inner = held.trim_start();
                if inner == open {
                    self.state = State::thinking(close);
                } else if !open.starts_with(inner) || held.len() > MAX_HELD {
                    let text = std::mem::take(held);
                    self.state = State::Answer;
                    text.chars().for_each(|c| self.read_char(c, thought));
                }
            }
            State::Thinking { close, has_text } => {
                let mut text = String::new();
                let closed = close.push(c, &mut text);
                let shown = if *has_text { text.as_str() } else { text.trim_start() };
                *has_text |= !shown.is_empty();
                thought.reasoning.push_str(shown);
                if closed {
                    self.state = State::Between;
                }
            }
            State::Between if c.is_whitespace() => {}
            State::Between | State::Answer => {
                self.held.push(c);
                let around = self.around;
                if around.contains(&self.held.as_str()) {
                    self.held.clear();
                    return;
                }
                while !around.iter().any(|marker| marker.starts_with(&self.held)) {
                    self.state = State::Answer;
                    let first = self.held.remove(0);
                    thought.content.push(first);
                    if self.held.is_empty() {
                        break;
                    }
                }
            }
        }
    }
}

impl State {
    fn thinking(close: &'static str) -> State {
        State::Thinking { close: Marker::new(close), has_text: false }
    }
}
