//! What besides its tokens a prefix must agree in to be shared.
//!
//! The key belongs to the whole sequence and enters the hash at its first block only; all others follow by the chain.
//! Each kind of field has a tag of its own in the hash and a field of its own in the comparison, so an adapter
//! can not pass for a salt of the same spelling.

use std::sync::Arc;

use crate::Prompt;

/// What a sequence's keys and values depend on besides its tokens. The default is: nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExtraKeys<'a> {
    /// Name or id of the adapter (LoRA) that computes the sequence.
    pub adapter: Option<&'a str>,
    /// One digest per image, sound or other input that stands for placeholder tokens, in order.
    pub media: &'a [&'a [u8]],
}

/// The owned form of a salt and [`ExtraKeys`], as block events carry it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PrefixKey {
    /// [`Prompt::salt`].
    pub salt: Option<String>,
    /// [`ExtraKeys::adapter`].
    pub adapter: Option<String>,
    /// [`ExtraKeys::media`].
    pub media: Vec<Vec<u8>>,
}

impl PrefixKey {
    /// The key of a prompt; `None` if it depends on its tokens alone.
    pub(crate) fn new(prompt: &Prompt<'_>, extra: ExtraKeys<'_>) -> Option<Arc<PrefixKey>> {
        if prompt.salt.is_none() && extra == ExtraKeys::default() {
            return None;
        }
        Some(Arc::new(PrefixKey {
            salt: prompt.salt.map(str::to_owned),
            adapter: extra.adapter.map(str::to_owned),
            media: extra.media.iter().map(|digest| digest.to_vec()).collect(),
        }))
    }
}
