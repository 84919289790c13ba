//! Names of activations in `config.json`.

use super::{Activation, Fields, LoadError};

/// The activation under the first of the keys that is present.
pub(super) fn activation(
    fields: &Fields<'_>,
    (keys, default): (&'static [&'static str], Activation),
) -> Result<Activation, LoadError> {
    let Some(key) = keys.iter().find(|key| fields.get(key).is_some()) else { return Ok(default) };
    fields.string(key)?.and_then(activation_of).ok_or_else(|| {
        let names: Vec<String> = ACTIVATIONS.iter().map(|(name, _)| format!("\"{name}\"")).collect();
        fields.wrong(key, format!("one of {}", names.join(", ")))
    })
}

/// The names of transformers for activations without parameters.
const ACTIVATIONS: [(&str, Activation); 9] = [
    ("silu", Activation::Silu),
    ("swish", Activation::Silu),
    ("gelu", Activation::Gelu),
    ("gelu_new", Activation::GeluTanh),
    ("gelu_fast", Activation::GeluTanh),
    ("gelu_pytorch_tanh", Activation::GeluTanh),
    ("relu", Activation::Relu),
    ("relu2", Activation::Relu2),
    ("relu_squared", Activation::Relu2),
];

/// The activation of this name.
pub(super) fn activation_of(name: &str) -> Option<Activation> {
    ACTIVATIONS.iter().find(|(known, _)| *known == name).map(|(_, activation)| *activation)
}
