//! Compiles grammars to matchers: each on a thread of its own, within bounds, and cached for later requests.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use llguidance::ParserFactory;
use llguidance::api::TopLevelGrammar;
use llguidance::panic_utils::catch_unwind;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, oneshot};

use super::lark::quote;
use super::matcher::Matcher;
use super::schema::{self, Prepared};
use super::{Grammar, GrammarError, bounds, vocabulary};
use crate::Tokenizer;

/// Stack size of a compilation in bytes. [`bounds`] bounds the recursion, and untouched pages of a stack take no memory.
const STACK: usize = 128 << 20;

/// Greatest size in bytes of a definition that is compiled among the small ones.
const SMALL: usize = 16 << 10;

/// Greatest number of compilations that run at once: of small definitions and of others. Those whose callers have left count until
/// they end.
const MAX_CONCURRENT: [usize; 2] = [6, 2];

/// Greatest number of compiled grammars in the cache, and of bytes of their definitions. A byte compiles to at most about 2 KiB.
const MAX_CACHED: (usize, usize) = (64, 512 << 10);

/// Compiles grammars to matchers over the vocabulary of one tokenizer.
///
/// ```
/// use std::path::Path;
/// use std::sync::Arc;
/// use text::{Grammar, Grammars, Tokenizer};
///
/// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo");
/// let tokenizer = Tokenizer::load(Path::new(folder))?;
/// let grammars = Arc::new(Grammars::new(Arc::new(tokenizer), 1 << 20));
/// let mut matcher = grammars.compile_blocking(&Grammar::Regex("[0-9]+".into()))?;
/// assert!(!matcher.mask()?.may_end, "at least one digit is needed");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Grammars {
    tokenizer: Arc<Tokenizer>,
    factory: OnceLock<Result<(ParserFactory, usize), String>>,
    /// Matchers at the start of their grammars, the most recently used last.
    cache: Mutex<Vec<(Grammar, Matcher)>>,
    permits: [Arc<Semaphore>; 2],
    max_bytes: usize,
}

impl Grammars {
    /// Creates a compiler that refuses definitions of more than `max_bytes` bytes. The vocabulary is indexed with the first
    /// grammar.
    pub fn new(tokenizer: Arc<Tokenizer>, max_bytes: usize) -> Grammars {
        let (factory, cache) = (OnceLock::new(), Mutex::new(Vec::new()));
        let permits = MAX_CONCURRENT.map(|most| Arc::new(Semaphore::new(most)));
        Grammars { tokenizer, factory, cache, permits, max_bytes }
    }

    /// Compiles a grammar, or takes it from the cache. Does not block the caller's thread. A compilation usually takes a few
    /// milliseconds, and at most a few seconds. Large definitions do not wait for small ones, nor small for large. If the caller
    /// stops waiting, the compilation ends after its current stage.
    ///
    /// # Errors
    /// The grammar is invalid or takes too much work.
    pub async fn compile(self: &Arc<Self>, grammar: &Grammar) -> Result<Matcher, GrammarError> {
        bounds::check(grammar, self.max_bytes).map_err(GrammarError)?;
        if let Some(matcher) = self.find(grammar) {
            return Ok(matcher);
        }
        let permits = &self.permits[usize::from(grammar.num_bytes() > SMALL)];
        // The semaphore is never closed.
        let permit = permits.clone().acquire_owned().await.ok();
        let (reply, answer) = oneshot::channel();
        let (grammars, grammar) = (self.clone(), grammar.clone());
        let work = move || {
            let _permit = permit;
            let matcher = grammars.find_or_compile(grammar, &|| reply.is_closed());
            // The caller may have stopped waiting.
            let _ = reply.send(matcher);
        };
        spawn(work)?;
        compiled(answer.await.ok())
    }

    /// Like [`Grammars::compile`], for a caller without an async runtime.
    ///
    /// # Errors
    /// As [`Grammars::compile`].
    pub fn compile_blocking(self: &Arc<Self>, grammar: &Grammar) -> Result<Matcher, GrammarError> {
        bounds::check(grammar, self.max_bytes).map_err(GrammarError)?;
        let (grammars, grammar) = (self.clone(), grammar.clone());
        compiled(spawn(move || grammars.find_or_compile(grammar, &|| false))?.join().ok())
    }

    fn find_or_compile(&self, grammar: Grammar, is_left: &dyn Fn() -> bool) -> Result<Matcher, String> {
        if let Some(matcher) = self.find(&grammar) {
            return Ok(matcher);
        }
        let factory = self.factory.get_or_init(|| vocabulary::factory(vocabulary::words(&self.tokenizer)));
        let (factory, vocab_size) = factory.as_ref().map_err(Clone::clone)?;
        let matcher = matcher(factory, *vocab_size, &grammar, is_left)?;
        if !matcher.unenforced().is_empty() {
            tracing::warn!(
                keywords = matcher.unenforced().join(", "),
                "a JSON schema is served without some of its keywords"
            );
        }
        let cache = &mut *self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.push((grammar, matcher.clone()));
        while cache.len() > MAX_CACHED.0
            || cache.iter().map(|(grammar, _)| grammar.num_bytes()).sum::<usize>() > MAX_CACHED.1
        {
            cache.remove(0);
        }
        Ok(matcher)
    }

    fn find(&self, grammar: &Grammar) -> Option<Matcher> {
        let cache = &mut *self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let at = cache.iter().position(|(known, _)| known == grammar)?;
        cache[at..].rotate_left(1);
        cache.last().map(|(_, matcher)| matcher.clone())
    }
}

fn matcher(
    factory: &ParserFactory,
    vocab_size: usize,
    grammar: &Grammar,
    is_left: &dyn Fn() -> bool,
) -> Result<Matcher, String> {
    if let Grammar::AfterReasoning { open: Some(open), then, .. } = grammar {
        let answer = matcher(factory, vocab_size, then, is_left)?;
        let env = factory.tok_env();
        let special = env.tok_trie().get_special_token(open);
        let tokens = special.map_or_else(|| env.tokenize_bytes(open.as_bytes()), |token| vec![token]);
        if answer.allows(&tokens) {
            return Ok(answer);
        }
    }
    // Only patterns that may match the same name are refused so. The compiler finds them, also in objects that it has merged.
    let mut compiled = Definition::new(grammar, None).and_then(|whole| matcher_of(factory, vocab_size, whole, is_left));
    for least in [2, 1] {
        if !matches!(&compiled, Err(problem) if problem.contains("patternProperty regexes")) {
            break;
        }
        let folded = Definition::new(grammar, Some(least))?;
        // Nothing is folded in a strict schema.
        if folded.unenforced.contains("patternProperties") {
            compiled = matcher_of(factory, vocab_size, folded, is_left);
        }
    }
    compiled
}

fn matcher_of(
    factory: &ParserFactory,
    vocab_size: usize,
    definition: Definition,
    is_left: &dyn Fn() -> bool,
) -> Result<Matcher, String> {
    let go_on = || if is_left() { Err("the client has left".to_string()) } else { Ok(()) };
    go_on()?;
    let parser = catch_unwind(std::panic::AssertUnwindSafe(|| factory.create_parser(definition.grammar)));
    let mut inner = llguidance::Matcher::new(parser);
    if let Some(problem) = inner.get_error() {
        return Err(super::one_line(problem));
    }
    go_on()?;
    let mut unenforced: BTreeSet<String> = definition.unenforced.into_iter().map(str::to_string).collect();
    unenforced.extend(keywords(&inner.grammar_warnings()));
    // A grammar of only the empty text becomes complete here.
    inner.consume_tokens(&[]).map_err(super::one_line)?;
    Matcher::new(inner, vocab_size, unenforced.into_iter().collect()).map_err(|error| error.0)
}

/// The result of a compilation; `None` if its thread panicked.
fn compiled(matcher: Option<Result<Matcher, String>>) -> Result<Matcher, GrammarError> {
    matcher.unwrap_or_else(|| Err("the grammar could not be compiled".to_string())).map_err(GrammarError)
}

fn spawn<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<std::thread::JoinHandle<T>, GrammarError> {
    let builder = std::thread::Builder::new().name("quire-grammar".to_string()).stack_size(STACK);
    builder.spawn(work).map_err(|error| GrammarError(format!("no thread to compile the grammar on: {error}")))
}

/// A grammar in llguidance's form, and the keywords of its schemas that it does not enforce.
struct Definition {
    grammar: TopLevelGrammar,
    unenforced: BTreeSet<&'static str>,
}

impl Definition {
    /// Translates a grammar. `fold` is for [`schema::prepare`].
    fn new(grammar: &Grammar, fold: Option<usize>) -> Result<Definition, String> {
        let json = |text: &str| serde_json::from_str::<Value>(text).map_err(super::one_line);
        let lark =
            |text: String| Ok(Definition { grammar: TopLevelGrammar::from_lark(text), unenforced: BTreeSet::new() });
        match grammar {
            Grammar::JsonObject => Definition::of_schema(json!({"type": "object"}), true, fold),
            Grammar::JsonSchema(text) => Definition::of_schema(json(text)?, false, fold),
            Grammar::StrictSchema(text) => Definition::of_schema(json(text)?, true, fold),
            Grammar::Regex(text) => {
                Ok(Definition { grammar: TopLevelGrammar::from_regex(text), unenforced: BTreeSet::new() })
            }
            // One terminal: its alternatives are no items of the parser.
            Grammar::Choice(choices) => {
                let quoted: Vec<String> = choices.iter().map(|choice| quote(choice)).collect();
                lark(format!("start: CHOICE\nCHOICE: {}", quoted.join(" | ")))
            }
            Grammar::Ebnf(text) => {
                let text = super::ebnf::to_lark(text)?;
                bounds::lark(&text)?;
                lark(text)
            }
            Grammar::Lark(text) => Definition::of_lark(text, fold),
            Grammar::AfterReasoning { before, then, .. } => {
                let mut whole = Definition::new(then, fold)?;
                if let Some(answer) = whole.grammar.grammars.first_mut() {
                    answer.name = Some("answer".to_string());
                }
                let outer = TopLevelGrammar::from_lark(format!("start: before @answer\n{before}"));
                whole.grammar.grammars.splice(0..0, outer.grammars);
                Ok(whole)
            }
        }
    }

    fn of_schema(schema: Value, is_strict: bool, fold: Option<usize>) -> Result<Definition, String> {
        let Prepared { schema, unenforced } = schema::prepare(schema::with_options(schema, is_strict), fold)?;
        bounds::schema(&schema)?;
        super::cost::check([&schema])?;
        Ok(Definition {
            grammar: TopLevelGrammar::from_json_schema(schema),
            unenforced: unenforced.into_iter().collect(),
        })
    }

    /// Prepares the schemas in a Lark grammar.
    fn of_lark(text: &str, fold: Option<usize>) -> Result<Definition, String> {
        let (mut whole, mut from, mut unenforced, mut all) = (String::new(), 0, BTreeSet::new(), Vec::new());
        for (at, schema) in bounds::schemas(text) {
            let prepared = schema::prepare(schema::with_default_options(schema), fold)?;
            bounds::schema(&prepared.schema)?;
            unenforced.extend(prepared.unenforced);
            whole.push_str(&text[from..at.start]);
            whole.push_str(&format!(" {}", prepared.schema));
            all.push(prepared.schema);
            from = at.end;
        }
        super::cost::check(&all)?;
        whole.push_str(&text[from..]);
        Ok(Definition { grammar: TopLevelGrammar::from_lark(whole), unenforced })
    }
}

/// Keywords that llguidance's warnings name.
fn keywords(warnings: &[String]) -> Vec<String> {
    let mut all = Vec::new();
    for warning in warnings {
        if warning.contains("oneOf") {
            all.push("oneOf".to_string());
        } else if warning.contains("min/maxProperties") {
            all.extend(["minProperties", "maxProperties"].map(str::to_string));
        } else if warning.contains("Unknown format") {
            all.push("format".to_string());
        } else if warning.contains("Unimplemented keys") {
            all.extend(warning.split('"').skip(1).step_by(2).map(str::to_string));
        }
    }
    all
}
