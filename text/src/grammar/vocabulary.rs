//! The tokenizer's vocabulary for llguidance: the bytes of every token, in a trie.

use std::sync::Arc;

use llguidance::ParserFactory;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use crate::Tokenizer;

/// Limits of one grammar. Beyond them, the grammar is refused or its sequence ends with an error. At llguidance's speed,
/// compilation takes some tens of milliseconds, and a mask at most about ten.
const ROW_ITEMS: usize = 20_000;
const LEXER_FUEL: u64 = 1_000_000;
const GRAMMAR_SIZE: usize = 250_000;
const LEXER_STATES: usize = 50_000;
const MASK_FUEL: u64 = 100_000;
const MASK_ITEMS: usize = 50_000;

/// Returns the bytes of every token for [`factory`]. Special tokens are not text: a grammar allows one only where it names it, as
/// `<[id]>` or by its text between angle brackets in Lark. Tokens without bytes match nothing.
pub(super) fn words(tokenizer: &Tokenizer) -> Vec<Vec<u8>> {
    let word = |id: u32| match tokenizer.is_special(id) {
        true => special(&tokenizer.id_to_token(id).unwrap_or_default()),
        false => tokenizer.token_bytes(id),
    };
    (0..tokenizer.vocab_size() as u32).map(word).collect()
}

/// Creates a factory of parsers over a vocabulary, and returns the id past its end that stands for the end of the text.
pub(super) fn factory(mut words: Vec<Vec<u8>>) -> Result<(ParserFactory, usize), String> {
    let size = words.len();
    words.push(special("<end>"));
    let info = TokRxInfo::new(words.len() as u32, size as u32);
    // Approximate, because the model may spell a text with any tokens.
    let env: TokEnv = Arc::new(ApproximateTokEnv::new(TokTrie::from(&info, &words)));
    let mut factory = ParserFactory::new_simple(&env).map_err(|error| error.to_string())?;
    factory.quiet();
    let limits = factory.limits_mut();
    limits.max_items_in_row = ROW_ITEMS;
    limits.initial_lexer_fuel = LEXER_FUEL;
    limits.max_grammar_size = GRAMMAR_SIZE;
    limits.max_lexer_states = LEXER_STATES;
    limits.step_lexer_fuel = MASK_FUEL;
    limits.step_max_items = MASK_ITEMS;
    limits.verbose_errors = false;
    Ok((factory, size))
}

/// Returns llguidance's spelling of a special token.
fn special(name: &str) -> Vec<u8> {
    [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat()
}
