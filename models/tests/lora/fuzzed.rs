//! The property of any bytes as an adapter, checked by the ordinary tests and by libFuzzer (`fuzz/`).
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use linear::Arithmetic;
use models::lora::{Adapter, AdapterLimits};
use models::{Decoder, ModelConfig};

/// The demo model.
static DECODER: LazyLock<Decoder> = LazyLock::new(|| ModelConfig::load(&models::demo()).unwrap().decoder);

/// Reading the adapter in these bytes does not panic; an error is one line. The first two bytes are the length of the settings, the
/// rest is the file of tensors. Returns whether the adapter is accepted.
pub fn read(folder: &Path, bytes: &[u8]) -> bool {
    let (length, rest) = bytes.split_at_checked(2).unwrap_or((&[0, 0], bytes));
    let length = usize::from(u16::from_le_bytes([length[0], length[1]])).min(rest.len());
    fs::write(folder.join("adapter_config.json"), &rest[..length]).unwrap();
    fs::write(folder.join("adapter_model.safetensors"), &rest[length..]).unwrap();
    match Adapter::read(folder, &DECODER, &AdapterLimits { slots: 1, rank: 8 }, Arithmetic::Exact) {
        Ok(adapter) => adapter.rank() <= 8,
        Err(error) => {
            let message = error.to_string();
            assert!(!message.contains('\n') && !message.is_empty() && message.len() < 20_000, "{message}");
            false
        }
    }
}
