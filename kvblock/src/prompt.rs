//! What is to be opened: tokens, and what else their keys and values depend on.

use crate::ids::PrefixHash;

/// A sequence that needs slots. Start from [`Prompt::new`] and change what differs, so that new fields break nothing.
///
/// ```
/// # use kvblock::Prompt;
/// let salted = Prompt { salt: Some("tenant"), ..Prompt::new(&[1, 2, 3]) };
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// All known tokens.
    pub tokens: &'a [u32],
    /// Blocks are shared only between prompts of the same salt.
    pub salt: Option<&'a str>,
    /// Name or id of the adapter (LoRA) that computes the sequence. Blocks are shared only under the same one.
    pub adapter: Option<&'a str>,
    /// Images, sounds and other inputs that stand for some of the tokens. Blocks that hold their placeholders are shared
    /// only where these agree.
    pub media: &'a [Media],
    /// `false` computes every token; the blocks are stored for others nevertheless.
    pub read_cache: bool,
    /// The names of the prompt's prefixes, if they are at hand. They only guide a lookup: those of another prompt lead
    /// to a miss, never to a wrong hit.
    pub hashes: Option<&'a PromptHashes>,
}

impl<'a> Prompt<'a> {
    /// A prompt that depends on its tokens alone and reads the cache.
    pub fn new(tokens: &'a [u32]) -> Prompt<'a> {
        Prompt { tokens, salt: None, adapter: None, media: &[], read_cache: true, hashes: None }
    }
}

/// The names of a prompt's prefixes, computed once by [`BlockPool::hash_prompt`](crate::BlockPool::hash_prompt) for all lookups of a waiting request.
#[derive(Clone, Debug, Default)]
pub struct PromptHashes(pub(crate) Vec<PrefixHash>);

/// An image, a sound or another input that stands for placeholder tokens of a prompt.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Media {
    /// Identifies the contents: equal digests mean equal inputs.
    pub digest: Vec<u8>,
    /// Position of its first placeholder token.
    pub start: usize,
    /// Number of its placeholder tokens. Without any it has no influence.
    pub len: usize,
}
