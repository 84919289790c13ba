//! Prompts: tokens, and the other inputs that their keys and values depend on.

use crate::ids::PrefixHash;

/// A sequence to look up or open. Build it from [`Prompt::new`], so that new fields do not break your code.
///
/// ```
/// # use kvblock::Prompt;
/// let salted = Prompt { salt: Some("tenant"), ..Prompt::new(&[1, 2, 3]) };
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// The tokens of the sequence.
    pub tokens: &'a [u32],
    /// Blocks are shared only between prompts of the same salt.
    pub salt: Option<&'a str>,
    /// Name or id of the adapter (LoRA) that computes the sequence. Blocks are shared only under the same one.
    pub adapter: Option<&'a str>,
    /// Images, sounds and other inputs behind placeholder tokens. Blocks with such placeholders are shared only if the
    /// inputs are equal.
    pub media: &'a [Media],
    /// Whether to use cached blocks. `false` computes every token; the blocks enter the cache nevertheless.
    pub read_cache: bool,
    /// The hashes of the prompt's prefixes, if they are known. Hashes of another prompt lead to a miss, never to a
    /// wrong hit.
    pub hashes: Option<&'a PromptHashes>,
}

impl<'a> Prompt<'a> {
    /// Creates a prompt that depends only on its tokens and uses cached blocks.
    pub fn new(tokens: &'a [u32]) -> Prompt<'a> {
        Prompt { tokens, salt: None, adapter: None, media: &[], read_cache: true, hashes: None }
    }
}

/// The hashes of a prompt's prefixes, computed once by [`BlockPool::hash_prompt`](crate::BlockPool::hash_prompt) for
/// all lookups of a waiting request.
#[derive(Clone, Debug, Default)]
pub struct PromptHashes(pub(crate) Vec<PrefixHash>);

/// An image, a sound or another input behind placeholder tokens of a prompt.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Media {
    /// Identifies the input: equal digests mean equal inputs.
    pub digest: Vec<u8>,
    /// Position of its first placeholder token.
    pub start: usize,
    /// Number of its placeholder tokens. With 0 the input has no effect.
    pub len: usize,
}
