//! LoRA adapters made of pseudorandom numbers, in PEFT's files.

use std::fs;
use std::path::Path;

/// A module of the base model: its name, inputs and outputs.
pub type Module = (String, usize, usize);

/// A matrix of an adapter.
pub struct Matrix {
    /// Name of the tensor.
    pub name: String,
    /// Rows and columns.
    pub shape: [usize; 2],
    /// Row-major numbers.
    pub values: Vec<f32>,
}

/// Returns the factors A and B of each module with `rank(name)` ranks. Their numbers depend on the seed and on their position.
pub fn factors(modules: &[Module], rank: impl Fn(&str) -> usize, seed: u64) -> Vec<Matrix> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    let mut matrices = Vec::new();
    for (name, inputs, outputs) in modules {
        let rank = rank(name);
        for (factor, shape) in [("lora_A", [rank, *inputs]), ("lora_B", [*outputs, rank])] {
            // Such that the product changes results visibly, whatever the rank.
            let size = (4.0 / (inputs * rank) as f32).sqrt().sqrt();
            let values = (0..shape[0] * shape[1]).map(|_| size * next()).collect();
            matrices.push(Matrix { name: format!("base_model.model.{name}.{factor}.weight"), shape, values });
        }
    }
    matrices
}

/// Writes `adapter_config.json` and `adapter_model.safetensors` in float32.
pub fn write(folder: &Path, config: &str, matrices: &[Matrix]) {
    fs::create_dir_all(folder).unwrap_or_else(|error| panic!("{error}"));
    let (mut header, mut data) = (Vec::new(), Vec::new());
    for Matrix { name, shape: [rows, columns], values } in matrices {
        let start = data.len();
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        let offsets = format!("[{start},{}]", data.len());
        header.push(format!(r#""{name}":{{"dtype":"F32","shape":[{rows},{columns}],"data_offsets":{offsets}}}"#));
    }
    let header = format!("{{{}}}", header.join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.into_bytes());
    file.extend(data);
    let written = fs::write(folder.join("adapter_model.safetensors"), file);
    let written = written.and_then(|()| fs::write(folder.join("adapter_config.json"), config));
    written.unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
}

/// Writes an adapter of one rank for all of these modules.
pub fn simple(folder: &Path, modules: &[Module], rank: usize, seed: u64) {
    let names: Vec<String> = modules.iter().map(|(name, ..)| format!("{name:?}")).collect();
    let config = format!(
        r#"{{"peft_type":"LORA","r":{rank},"lora_alpha":{},"bias":"none","target_modules":[{}]}}"#,
        2 * rank,
        names.join(",")
    );
    write(folder, &config, &factors(modules, |_| rank, seed));
}
