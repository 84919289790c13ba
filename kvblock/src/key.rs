//! The inputs, other than tokens, that must be equal for prefixes to be shared: salt, adapter and media.
//!
//! Salt and adapter belong to the whole sequence. They enter the hash of its first block, and through the chain of
//! hashes all later ones. Media belong to positions: a block depends on the media whose placeholder tokens it holds, as
//! in vLLM. So a conversation that adds an image still finds the blocks before that image.
//!
//! ```text
//! tokens      | t0 t1 t2 t3 | t4 i  i  i  | i  i  t10 t11 | t12 j  j  t15 |     i, j: placeholders of two images
//! key           salt,         image i       image i         image j
//!               adapter       from 5 on     from 5 on       from 13 on
//! ```
//!
//! Each kind of field has its own tag in the hash and its own field in the comparison, so that an adapter cannot be
//! mistaken for a salt with the same text.

use std::ops::Range;
use std::sync::Arc;

use crate::prompt::{Media, Prompt};

/// The inputs, other than tokens, that a sequence's keys and values depend on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PrefixKey {
    /// [`Prompt::salt`].
    pub salt: Option<String>,
    /// [`Prompt::adapter`].
    pub adapter: Option<String>,
    /// [`Prompt::media`], in order of position.
    pub media: Vec<Media>,
}

impl PrefixKey {
    /// Returns the key of a prompt; `None` if it depends only on its tokens.
    pub(crate) fn new(prompt: &Prompt<'_>) -> Option<Arc<PrefixKey>> {
        let &Prompt { salt, adapter, media, .. } = prompt;
        if salt.is_none() && adapter.is_none() && media.is_empty() {
            return None;
        }
        let mut media = media.to_vec();
        media.sort_unstable_by(|a, b| (a.start, a.len, &a.digest).cmp(&(b.start, b.len, &b.digest)));
        Some(Arc::new(PrefixKey { salt: salt.map(str::to_owned), adapter: adapter.map(str::to_owned), media }))
    }
}

/// The part of a sequence's key that one of its blocks depends on directly.
#[derive(Clone, Copy)]
pub(crate) struct BlockKey<'a> {
    key: Option<&'a PrefixKey>,
    /// First position of the block.
    start: usize,
    /// Position behind the block.
    end: usize,
}

impl<'a> BlockKey<'a> {
    pub fn new(key: Option<&'a PrefixKey>, positions: Range<usize>) -> BlockKey<'a> {
        BlockKey { key, start: positions.start, end: positions.end }
    }

    /// Salt and adapter. Only the key of a first block has them.
    pub fn texts(self) -> [Option<&'a str>; 2] {
        match self.key.filter(|_| self.start == 0) {
            Some(key) => [key.salt.as_deref(), key.adapter.as_deref()],
            None => [None, None],
        }
    }

    /// For each input with placeholders in the block: its digest, the position of its first placeholder, and the end of
    /// its placeholders or of the block, whichever comes first.
    pub fn media(self) -> impl Iterator<Item = (&'a [u8], usize, usize)> {
        let all = self.key.map_or(&[][..], |key| &key.media);
        let before = &all[..all.partition_point(|media| media.start < self.end)];
        let clipped = move |media: &'a Media| {
            (&media.digest[..], media.start, media.start.saturating_add(media.len).min(self.end))
        };
        before.iter().map(clipped).filter(move |(_, start, end)| *end > self.start.max(*start))
    }

    /// Returns whether the block depends only on its tokens and the blocks before it.
    pub fn is_empty(self) -> bool {
        self.texts() == [None, None] && self.media().next().is_none()
    }
}

impl PartialEq for BlockKey<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.texts() == other.texts() && self.media().eq(other.media())
    }
}
