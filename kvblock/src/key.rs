//! What besides its tokens a prefix must agree in to be shared.
//!
//! Salt and adapter belong to the whole sequence: they enter the hash of its first block, and all later blocks follow by
//! the chain. Media belong to positions: a block depends on those whose placeholder tokens it holds, as in vLLM. So a
//! conversation that adds an image still finds the blocks before that image.
//!
//! ```text
//! tokens      | t0 t1 t2 t3 | t4 i  i  i  | i  i  t10 t11 | t12 j  j  t15 |     i, j: placeholders of two images
//! key of it     salt,         image i       image i         image j
//!               adapter       from 5 on     from 5 on       from 13 on
//! ```
//!
//! Each kind of field has a tag of its own in the hash and a field of its own in the comparison, so an adapter
//! cannot pass for a salt of the same spelling.

use std::ops::Range;
use std::sync::Arc;

use crate::prompt::{Media, Prompt};

/// What a sequence's keys and values depend on besides its tokens, as block events carry it.
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
    /// The key of a prompt; `None` if it depends on its tokens alone.
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
    /// Positions of the block.
    start: usize,
    end: usize,
}

impl<'a> BlockKey<'a> {
    /// The part for the block that holds `positions`.
    pub fn new(key: Option<&'a PrefixKey>, positions: Range<usize>) -> BlockKey<'a> {
        BlockKey { key, start: positions.start, end: positions.end }
    }

    /// The part of a sequence without a key.
    #[cfg(test)]
    pub const fn none() -> BlockKey<'a> {
        BlockKey { key: None, start: 0, end: 0 }
    }

    /// Salt and adapter; only a first block has them.
    pub fn texts(self) -> [Option<&'a str>; 2] {
        match self.key.filter(|_| self.start == 0) {
            Some(key) => [key.salt.as_deref(), key.adapter.as_deref()],
            None => [None, None],
        }
    }

    /// Digest of each input with placeholders in the block, the position where these begin, and where they end or the
    /// block does.
    pub fn media(self) -> impl Iterator<Item = (&'a [u8], usize, usize)> {
        let all = self.key.map_or(&[][..], |key| &key.media);
        let before = &all[..all.partition_point(|media| media.start < self.end)];
        let clipped = move |media: &'a Media| {
            (&media.digest[..], media.start, media.start.saturating_add(media.len).min(self.end))
        };
        before.iter().map(clipped).filter(move |(_, start, end)| *end > self.start.max(*start))
    }

    /// Whether the block depends on its tokens and the blocks before it alone.
    pub fn is_empty(self) -> bool {
        self.texts() == [None, None] && self.media().next().is_none()
    }
}

impl PartialEq for BlockKey<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.texts() == other.texts() && self.media().eq(other.media())
    }
}
