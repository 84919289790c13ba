//! Checkpoints of random tensors, for declarations that have no reference case.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use serde_json::{Map, Value, json};

/// Shape and numbers of tensors by name.
pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// A number of [−1, 1) by SplitMix64.
fn random(state: &mut u64) -> f32 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((mixed ^ (mixed >> 31)) >> 40) as f32 / (1u32 << 23) as f32 - 1.0
}

/// Random tensors of these shapes, each name once: near 1 if they are vectors, else such that a product keeps the size of its inputs.
pub fn random_tensors(shapes: impl IntoIterator<Item = (String, Vec<usize>)>, seed: u64) -> Tensors {
    let mut state = seed;
    let mut make = |(name, shape): (String, Vec<usize>)| {
        let (centre, spread) = match shape[..] {
            [_] => (1.0, 0.3),
            _ => (0.0, 1.7 / (shape.last().copied().unwrap_or(1) as f32).sqrt()),
        };
        let count = shape.iter().product();
        let numbers = (0..count).map(|_| centre + spread * random(&mut state)).collect();
        (name, (shape, numbers))
    };
    shapes.into_iter().collect::<BTreeMap<_, _>>().into_iter().map(&mut make).collect()
}

/// Writes `config.json` and `model.safetensors`, in float32, and these tensors of integers.
///
/// # Errors
/// The folder cannot be written.
pub fn write_checkpoint(
    folder: &Path,
    config: &Value,
    tensors: &Tensors,
    integers: &[(&str, Vec<i64>)],
) -> io::Result<()> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    let mut push = |name: &str, dtype: &str, shape: &[usize], bytes: &mut dyn Iterator<Item = u8>| {
        let start = data.len();
        data.extend(bytes);
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]});
        header.insert(name.to_string(), entry);
    };
    for (name, (shape, numbers)) in tensors {
        push(name, "F32", shape, &mut numbers.iter().flat_map(|number| number.to_le_bytes()));
    }
    for (name, numbers) in integers {
        push(name, "I64", &[numbers.len()], &mut numbers.iter().flat_map(|number| number.to_le_bytes()));
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    file.extend(data);
    std::fs::write(folder.join("config.json"), config.to_string())?;
    std::fs::write(folder.join("model.safetensors"), file)
}
