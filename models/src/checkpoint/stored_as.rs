//! The name of the form in which a checkpoint stores its weights, as tools print it.

use std::collections::BTreeMap;

use super::files::ModelFiles;
use super::weights::Weights;

/// Names of the numbers in `general.file_type` of GGUF files, by llama.cpp.
#[rustfmt::skip]
const FILE_TYPES: [(u64, &str); 34] = [
    (0, "F32"), (1, "F16"), (2, "Q4_0"), (3, "Q4_1"), (7, "Q8_0"), (8, "Q5_0"), (9, "Q5_1"), (10, "Q2_K"), (11, "Q3_K_S"),
    (12, "Q3_K_M"), (13, "Q3_K_L"), (14, "Q4_K_S"), (15, "Q4_K_M"), (16, "Q5_K_S"), (17, "Q5_K_M"), (18, "Q6_K"),
    (19, "IQ2_XXS"), (20, "IQ2_XS"), (21, "Q2_K_S"), (22, "IQ3_XS"), (23, "IQ3_XXS"), (24, "IQ1_S"), (25, "IQ4_NL"),
    (26, "IQ3_S"), (27, "IQ3_M"), (28, "IQ2_S"), (29, "IQ2_M"), (30, "IQ4_XS"), (31, "IQ1_M"), (32, "BF16"), (36, "TQ1_0"),
    (37, "TQ2_0"), (38, "MXFP4"), (39, "NVFP4"),
];

/// The form of most weights of a checkpoint: what a GGUF file says of itself (`Q4_K_M`), the method of a quantised folder (`GPTQ-Int4`),
/// or else the type that most elements have (`BF16`).
pub fn stored_as(files: &ModelFiles, weights: &Weights) -> String {
    if let ModelFiles::Gguf { model, .. } = files
        && let Some((_, name)) = model.file_type().and_then(|id| FILE_TYPES.iter().find(|(known, _)| *known == id))
    {
        return (*name).to_string();
    }
    if let Some(name) = weights.quantization().and_then(|config| config.name()) {
        return name;
    }
    let mut elements: BTreeMap<String, usize> = BTreeMap::new();
    for tensor in weights.names().filter_map(|name| weights.raw_exactly(name)) {
        *elements.entry(tensor.stored_as()).or_default() += tensor.shape.iter().product::<usize>();
    }
    elements.into_iter().max_by_key(|(_, count)| *count).map_or_else(String::new, |(name, _)| name)
}
