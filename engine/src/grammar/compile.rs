//! From a grammar to the state at its start: compiled on a thread of its own, bounded, and kept for the next request.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use llguidance::ParserFactory;
use llguidance::api::TopLevelGrammar;
use llguidance::panic_utils::catch_unwind;
use models::Tokenizer;
use sampling::Constraint;
use serde_json::Value;
use tokio::sync::{Semaphore, oneshot};

use super::matcher::Matcher;
use super::{Grammar, StructuredOutput, vocabulary};
use crate::error::SubmitError;

/// Deepest nesting of brackets in a regular expression or a Lark grammar; JSON is bounded by its parser.
const MAX_NESTING: usize = 100;

/// Stack of a compilation: nesting is bounded, and this is memory only where it is touched.
const STACK: usize = 64 << 20;

/// Compilations at once.
const AT_ONCE: usize = 2;

/// Compiled grammars that are kept.
const KEPT: usize = 64;

/// Compiles grammars for one vocabulary.
pub struct Grammars {
    tokenizer: Arc<Tokenizer>,
    factory: OnceLock<Result<(ParserFactory, usize), String>>,
    /// At the start of each, the last used last.
    kept: Mutex<Vec<(Grammar, Matcher)>>,
    permits: Arc<Semaphore>,
    /// Greatest definition in bytes.
    max_bytes: usize,
}

impl Grammars {
    /// `max_bytes` bounds the definition of a grammar.
    pub fn new(tokenizer: Arc<Tokenizer>, max_bytes: usize) -> Grammars {
        let (factory, kept) = (OnceLock::new(), Mutex::new(Vec::new()));
        Grammars { tokenizer, factory, kept, permits: Arc::new(Semaphore::new(AT_ONCE)), max_bytes }
    }

    /// The state at the start of a grammar. Waits without blocking; what it waits for takes a second at the
    /// most (measured: an `allOf` of ten alternatives), nearly always a few milliseconds.
    ///
    /// # Errors
    /// A refusal that names the field.
    pub async fn compile(self: &Arc<Self>, wanted: &StructuredOutput) -> Result<Box<dyn Constraint>, SubmitError> {
        check(wanted, self.max_bytes)?;
        if let Some(matcher) = self.find(&wanted.grammar) {
            return Ok(Box::new(matcher));
        }
        let permit = self.permits.clone().acquire_owned().await.map_err(|_| SubmitError::Closed)?;
        let (reply, answer) = oneshot::channel();
        let (grammars, grammar) = (self.clone(), wanted.grammar.clone());
        let work = move || {
            let _permit = permit;
            // The client may have gone.
            let _ = reply.send(grammars.find_or_make(grammar));
        };
        spawn(work).map_err(|problem| refused(wanted, problem))?;
        let compiled = answer.await.unwrap_or_else(|_| Err("the grammar could not be compiled".into()));
        compiled.map(boxed).map_err(|problem| refused(wanted, problem))
    }

    /// Like [`Grammars::compile`], for a caller without an async runtime.
    pub fn compile_blocking(self: &Arc<Self>, wanted: &StructuredOutput) -> Result<Box<dyn Constraint>, SubmitError> {
        check(wanted, self.max_bytes)?;
        let (grammars, grammar) = (self.clone(), wanted.grammar.clone());
        let thread = spawn(move || grammars.find_or_make(grammar)).map_err(|problem| refused(wanted, problem))?;
        let compiled = thread.join().unwrap_or_else(|_| Err("the grammar could not be compiled".into()));
        compiled.map(boxed).map_err(|problem| refused(wanted, problem))
    }

    fn find_or_make(&self, grammar: Grammar) -> Result<Matcher, String> {
        if let Some(matcher) = self.find(&grammar) {
            return Ok(matcher);
        }
        let matcher = self.make(&grammar)?;
        let kept = &mut *self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == KEPT {
            kept.remove(0);
        }
        kept.push((grammar, matcher.deep_clone()));
        Ok(matcher)
    }

    fn find(&self, grammar: &Grammar) -> Option<Matcher> {
        let kept = &mut *self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let at = kept.iter().position(|(known, _)| known == grammar)?;
        kept[at..].rotate_left(1);
        kept.last().map(|(_, matcher)| matcher.deep_clone())
    }

    fn make(&self, grammar: &Grammar) -> Result<Matcher, String> {
        let factory = self.factory.get_or_init(|| vocabulary::factory(vocabulary::words(&self.tokenizer)));
        let (factory, vocab_size) = factory.as_ref().map_err(Clone::clone)?;
        matcher(factory, *vocab_size, grammar)
    }
}

fn matcher(factory: &ParserFactory, vocab_size: usize, grammar: &Grammar) -> Result<Matcher, String> {
    let definition = definition(grammar)?;
    let parser = catch_unwind(std::panic::AssertUnwindSafe(|| factory.create_parser(definition)));
    let mut inner = llguidance::Matcher::new(parser);
    if let Some(problem) = inner.get_error() {
        return Err(one_line(problem));
    }
    // A grammar of nothing but the empty text is complete at once.
    inner.consume_tokens(&[]).map_err(one_line)?;
    // Some faults come to light only with the first mask.
    inner.deep_clone().compute_mask_or_eos().map_err(one_line)?;
    Ok(Matcher::new(inner, vocab_size))
}

fn boxed(matcher: Matcher) -> Box<dyn Constraint> {
    Box::new(matcher)
}

fn spawn<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<std::thread::JoinHandle<T>, String> {
    let builder = std::thread::Builder::new().name("quire-grammar".to_string()).stack_size(STACK);
    builder.spawn(work).map_err(|error| format!("no thread to compile the grammar on: {error}"))
}

fn refused(wanted: &StructuredOutput, problem: String) -> SubmitError {
    SubmitError::Invalid { param: wanted.param, message: format!("{}: {problem}", wanted.param) }
}

/// What is refused without compiling it.
fn check(wanted: &StructuredOutput, max_bytes: usize) -> Result<(), SubmitError> {
    let found = wanted.grammar.len();
    if found > max_bytes {
        let problem = format!("found a grammar of {found} bytes, expected at most {max_bytes} (--max-schema-bytes)");
        return Err(refused(wanted, problem));
    }
    let nesting = match &wanted.grammar {
        Grammar::Regex(text) | Grammar::Lark(text) => nesting(text),
        _ => 0,
    };
    if nesting > MAX_NESTING {
        let problem = format!("found brackets nested {nesting} deep, expected at most {MAX_NESTING}");
        return Err(refused(wanted, problem));
    }
    match &wanted.grammar {
        Grammar::Choice(choices) if choices.is_empty() || choices.iter().any(String::is_empty) => {
            Err(refused(wanted, "expected at least one choice, none of them empty".into()))
        }
        _ => Ok(()),
    }
}

/// Greatest number of brackets that are open at once, quoted ones included.
fn nesting(text: &str) -> usize {
    let (mut open, mut most) = (0usize, 0);
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => open += 1,
            b')' | b']' | b'}' => open = open.saturating_sub(1),
            _ => {}
        }
        most = most.max(open);
    }
    most
}

/// A grammar in llguidance's terms.
fn definition(grammar: &Grammar) -> Result<TopLevelGrammar, String> {
    let json = |text: &str| serde_json::from_str::<Value>(text).map_err(one_line);
    Ok(match grammar {
        Grammar::JsonObject => {
            TopLevelGrammar::from_json_schema(super::laid_out(serde_json::json!({"type": "object"})))
        }
        Grammar::JsonSchema(text) => {
            let schema = json(text)?;
            super::cost::check(&schema)?;
            TopLevelGrammar::from_json_schema(super::laid_out(schema))
        }
        Grammar::Regex(text) => TopLevelGrammar::from_regex(text),
        // A JSON string is a Lark string.
        Grammar::Choice(choices) => {
            let quoted: Vec<String> = choices.iter().map(|choice| Value::from(choice.as_str()).to_string()).collect();
            TopLevelGrammar::from_lark(format!("start: {}", quoted.join(" | ")))
        }
        Grammar::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
    })
}

/// The first line of an error that may bring its state and a stack along.
pub(super) fn one_line(error: impl std::fmt::Display) -> String {
    const LONGEST: usize = 300;
    let text = format!("{error:#}");
    let line = text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("the grammar can not be used");
    line.trim_start_matches("panic: ").chars().take(LONGEST).collect()
}
