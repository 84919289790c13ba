//! The keys of the model's sequences, and the contents determined by a key and its tokens.

use std::sync::LazyLock;

use kvblock::{Media, Prompt};

/// What a sequence depends on besides its tokens.
pub struct Key {
    pub salt: Option<&'static str>,
    pub adapter: Option<&'static str>,
    pub media: Vec<Media>,
}

impl Key {
    /// Whether sequences under the key depend only on their tokens.
    pub fn is_empty(&self) -> bool {
        self.salt.is_none() && self.adapter.is_none() && self.media.is_empty()
    }
}

/// All keys. A sequence refers to one by index. Some are equal up to a later image.
pub static KEYS: LazyLock<Vec<Key>> = LazyLock::new(|| {
    let texts = |salt, adapter| Key { salt, adapter, media: Vec::new() };
    let images = |salt, media: &[(&str, usize, usize)]| {
        let image = |&(digest, start, len): &(&str, usize, usize)| Media { digest: digest.into(), start, len };
        Key { salt, adapter: None, media: media.iter().map(image).collect() }
    };
    vec![
        texts(None, None),
        texts(None, None),
        texts(Some("a"), None),
        texts(None, Some("a")),
        texts(Some("b"), Some("a")),
        images(None, &[("cat", 3, 6)]),
        images(None, &[("dog", 12, 9), ("cat", 3, 6)]),
        images(None, &[("cat", 3, 6), ("cat", 12, 9)]),
        images(None, &[("cat", 3, 8)]),
        images(None, &[("cat", 4, 5), ("cat", 20, 0)]),
        images(Some("a"), &[("cat", 3, 6)]),
    ]
});

/// A prompt of these tokens under a key.
pub fn prompt(key: usize, tokens: &[u32]) -> Prompt<'_> {
    let Key { salt, adapter, media } = &KEYS[key];
    Prompt { salt: *salt, adapter: *adapter, media, ..Prompt::new(tokens) }
}

/// Digests and first positions of the inputs with a placeholder at a position.
fn inputs(key: usize, position: usize) -> Vec<(&'static [u8], usize)> {
    let holds = |media: &&Media| (media.start..media.start + media.len).contains(&position);
    let mut inputs: Vec<_> = KEYS[key].media.iter().filter(holds).map(|m| (&m.digest[..], m.start)).collect();
    inputs.sort_unstable();
    inputs
}

/// Whether two keys are equivalent for the first `len` tokens.
pub fn agree(a: usize, b: usize, len: usize) -> bool {
    let texts = |key: usize| (KEYS[key].salt, KEYS[key].adapter);
    a == b || texts(a) == texts(b) && (0..len).all(|position| inputs(a, position) == inputs(b, position))
}

/// The contents of each token's slot: a hash of group, key and all tokens so far.
pub fn contents(group: usize, key: usize, tokens: &[u32]) -> Vec<u64> {
    let mut state = 0;
    let mut mix = |value: u64| {
        state = (state ^ (value + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
        state
    };
    mix(group as u64);
    for text in [KEYS[key].salt, KEYS[key].adapter] {
        mix(text.map_or(0, |text| u64::from(text.as_bytes()[0])));
    }
    let mut values = Vec::with_capacity(tokens.len());
    for (position, token) in tokens.iter().enumerate() {
        for (digest, start) in inputs(key, position) {
            mix(1000 + u64::from(digest[0]) + ((start as u64) << 8));
        }
        values.push(mix(u64::from(*token)));
    }
    values
}
