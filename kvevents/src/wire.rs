//! Batches of events as bytes: the payload of a message.
//!
//! ```text
//! payload      [timestamp, [event, …], data_parallel_rank]
//! map event    {"type": "BlockStored", "block_hashes": […], "parent_block_hash": …, "token_ids": […], "block_size": …,
//!               "lora_id": nil, "medium": …, "lora_name": …, "extra_keys"?: …, "group_idx"?: …, …}
//! array event  ["BlockStored", block_hashes, parent_block_hash, token_ids, block_size, nil, medium, lora_name, extra_keys?, …]
//! ```
//!
//! Fields with `?` are left out if they say nothing. In an array, only fields at its end can be.

use crate::change::{BlockHash, Change, Layout, SpecKind};
use crate::config::Format;
use crate::msgpack::{array, float, map, nil, text, uint};

/// A field of an event: its name in a map, and its value.
type Field<'a> = (&'static str, Value<'a>);

enum Value<'a> {
    Nil,
    Uint(u64),
    Text(&'a str),
    Hashes(&'a [BlockHash]),
    Tokens(&'a [u32]),
    /// One entry per block: the adapter, and in the first block of a sequence the cache salt.
    ExtraKeys {
        blocks: usize,
        lora_name: Option<&'a str>,
        first_salt: Option<&'a str>,
    },
}

/// Encodes a batch.
pub fn encode(timestamp: f64, events: &[Change], layout: Layout, format: Format) -> Vec<u8> {
    let mut to = Vec::with_capacity(64);
    array(&mut to, 3);
    float(&mut to, timestamp);
    array(&mut to, events.len());
    for event in events {
        let (name, fields) = fields(event, layout);
        match format {
            Format::Map => {
                let present = || fields.iter().filter(|(_, value)| value.is_some());
                map(&mut to, 1 + present().count());
                text(&mut to, "type");
                text(&mut to, name);
                for (key, value) in present() {
                    text(&mut to, key);
                    value.as_ref().unwrap_or(&Value::Nil).encode(&mut to);
                }
            }
            Format::Array => {
                let len = fields.iter().rposition(|(_, value)| value.is_some()).map_or(0, |last| last + 1);
                array(&mut to, 1 + len);
                text(&mut to, name);
                fields[..len].iter().for_each(|(_, value)| value.as_ref().unwrap_or(&Value::Nil).encode(&mut to));
            }
        }
    }
    // AIBrix takes only a whole number here.
    uint(&mut to, 0);
    to
}

/// The type of an event and its fields, in their order in an array. `None` is a field that says nothing.
fn fields(event: &Change, layout: Layout) -> (&'static str, Vec<(&'static str, Option<Value<'_>>)>) {
    let always = |(name, value): Field<'static>| (name, Some(value));
    let (group, kind, window) = match layout.group {
        None => (None, None, None),
        Some(SpecKind::Full { group }) => (Some(group), Some("full_attention"), None),
        Some(SpecKind::Sliding { group, window }) => (Some(group), Some("sliding_window"), Some(window)),
    };
    let number = |value: Option<usize>| value.map(|value| Value::Uint(value as u64));
    match event {
        Change::Stored { medium, parent, hashes, token_ids, lora_name, cache_salt } => {
            let lora_name = lora_name.as_deref();
            let first_salt = cache_salt.as_deref().filter(|_| parent.is_none());
            let extra = (lora_name.is_some() || first_salt.is_some()).then_some(Value::ExtraKeys {
                blocks: hashes.len(),
                lora_name,
                first_salt,
            });
            let fields = vec![
                ("block_hashes", Some(Value::Hashes(hashes))),
                ("parent_block_hash", Some(parent.map_or(Value::Nil, |parent| Value::Uint(parent.get())))),
                ("token_ids", Some(Value::Tokens(token_ids))),
                always(("block_size", Value::Uint(layout.block_size as u64))),
                always(("lora_id", Value::Nil)),
                always(("medium", Value::Text(medium.name()))),
                ("lora_name", Some(lora_name.map_or(Value::Nil, Value::Text))),
                ("extra_keys", extra),
                ("group_idx", number(group)),
                ("kv_cache_spec_kind", kind.map(Value::Text)),
                ("kv_cache_spec_sliding_window", number(window)),
            ];
            ("BlockStored", fields)
        }
        Change::Removed { medium, hash } => {
            let fields = vec![
                ("block_hashes", Some(Value::Hashes(std::slice::from_ref(hash)))),
                always(("medium", Value::Text(medium.name()))),
                ("group_idx", number(group)),
            ];
            ("BlockRemoved", fields)
        }
        Change::Cleared => ("AllBlocksCleared", Vec::new()),
    }
}

impl Value<'_> {
    fn encode(&self, to: &mut Vec<u8>) {
        match *self {
            Value::Nil => nil(to),
            Value::Uint(value) => uint(to, value),
            Value::Text(value) => text(to, value),
            Value::Hashes(hashes) => {
                array(to, hashes.len());
                hashes.iter().for_each(|hash| uint(to, hash.get()));
            }
            Value::Tokens(tokens) => {
                array(to, tokens.len());
                tokens.iter().for_each(|token| uint(to, u64::from(*token)));
            }
            Value::ExtraKeys { blocks, lora_name, first_salt } => {
                array(to, blocks);
                for block in 0..blocks {
                    let salt = first_salt.filter(|_| block == 0);
                    let keys: Vec<&str> = lora_name.into_iter().chain(salt).collect();
                    if keys.is_empty() {
                        nil(to);
                        continue;
                    }
                    array(to, keys.len());
                    keys.iter().for_each(|key| text(to, key));
                }
            }
        }
    }
}
