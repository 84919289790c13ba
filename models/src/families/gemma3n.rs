//! Gemma 3n (text): several residual streams that each layer mixes, a narrow network beside attention, inputs of each layer per token,
//! sparse gates in the first layers, and last layers that read the keys and values of others.

use super::sizes::{self, MAX_WIDTH};
use super::{
    Activation, Branch, Common, Decoder, Family, Fields, Layer, Linear, LoadError, Mixer, Norm, Part, Role,
    RopeDefaults, Spec, Windows, gemma, gemma4,
};
use crate::decoder::{Laurel, MAX_STREAMS, Mixing, Streams};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"],
    model_types: &["gemma3n_text", "gemma3n"],
    positions: (&["max_position_embeddings"], Some(32_768)),
    declare,
    reference: &["gemma3n"],
    largest: "google/gemma-3n-E4B-it (8B)",
    ..Family::BASE
}];

const WIDTHS: &str = "intermediate_size";
const SPARSITY: &str = "activation_sparsity_pattern";
/// The same as numbers below which a normal distribution has these shares, in GGUF files; `null` for none.
const LIMITS: &str = "activation_sparsity_scale";

const SPEC: Spec = Spec {
    // It may differ between layers.
    intermediate_size: "",
    sizes: &[
        ("", 1),
        ("head_dim", 256),
        ("vocab_size", 262_400),
        ("hidden_size", 2048),
        ("num_hidden_layers", 35),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 2),
        ("sliding_window", 512),
    ],
    activation: (&["hidden_activation"], Activation::GeluTanh),
    tied: true,
    rope: Some(RopeDefaults::theta(1_000_000.0)),
    ..Spec::LLAMA
};

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, SPEC)?;
    let (layers, hidden) = (common.num_layers, common.hidden_size);
    let streams = streams(fields)?;
    let bias = fields.boolean("attention_bias")?.unwrap_or(false);
    let rank = sizes::optional(fields, "laurel_rank", MAX_WIDTH)?.unwrap_or(64);
    let width = sizes::optional(fields, "hidden_size_per_layer_input", MAX_WIDTH)?.unwrap_or(256);
    let widths = of_layers(fields, WIDTHS, layers, 16_384, |value| {
        value.as_u64().filter(|width| (1..=MAX_WIDTH).contains(width)).map(|width| width as usize)
    })?;
    let sparse = if layers > 10 { 10 } else { 0 };
    let default = (0..layers).map(|layer| if layer < sparse { 0.95 } else { 0.0 }).collect();
    let shares = |value: &serde_json::Value| value.as_f64().filter(|share| (0.0..1.0).contains(share));
    let sparsity: Vec<f64> = match fields.get(SPARSITY) {
        None => default,
        Some(_) => of_layers(fields, SPARSITY, layers, 0.0, shares)?,
    };
    let limits = sparsity.into_iter().map(|share| (share > 0.0).then(|| quantile(share) as f32)).collect();
    let limits: Vec<Option<f32>> = match fields.get(LIMITS) {
        None => limits,
        Some(_) => of_layers(fields, LIMITS, layers, None, |value| match value.as_f64() {
            None => value.is_null().then_some(None),
            Some(limit) => Some(Some(limit as f32)).filter(|_| limit.abs() < f64::from(f32::MAX)),
        })?,
    };
    let default = if fields.is_absent("num_kv_shared_layers") { 15 } else { 0 };
    let shared = fields.integer("num_kv_shared_layers", 0..=layers as u64 - 1)?.unwrap_or(default) as usize;
    let windows = common.windows(fields, Windows::AllButEach(5))?;
    let donors = gemma4::donors(fields, &windows, layers.saturating_sub(shared))?;
    let [global, local] = gemma::ropes(fields, max_positions, &common)?;
    let mut decoder = common.decoder(|layer| {
        let at = |name: &str| common.at(layer, name);
        let norm = |name: &str| common.norm(at(name));
        let after = |name: &str, branch: Branch| Branch { norm_after: Some(norm(name)), ..branch };
        let matrix =
            |name: &str, [rows, inputs]: [usize; 2], role| Linear::new(inputs, role, [Part::new(at(name), rows)]);
        let values = ("v_proj", bias);
        let mut attention = gemma4::attention(&common, layer, values, windows[layer], donors[layer]);
        attention.rope = if windows[layer].is_some() { local.clone() } else { global.clone() };
        let laurel = Laurel {
            left: matrix("laurel.linear_left", [rank, hidden], Role::Column),
            right: matrix("laurel.linear_right", [hidden, rank], Role::Row),
            norm: norm("laurel.post_laurel_norm"),
        };
        let names = ["gate_proj", "up_proj", "down_proj"];
        let mut mlp = common.gated(at("mlp"), names, widths[layer]);
        mlp.sparsity = limits[layer];
        let inputs = Mixer::PerLayer(gemma4::per_layer(&common, layer, width));
        let attention = Branch {
            stream_scale: std::f32::consts::FRAC_1_SQRT_2,
            ..after("post_attention_layernorm", Branch::new(norm("input_layernorm"), attention.into()))
        };
        let mlp = Branch::new(norm("pre_feedforward_layernorm"), mlp.into());
        let branches = vec![
            Branch::new(norm("input_layernorm"), Mixer::Laurel(laurel)),
            attention,
            after("post_feedforward_layernorm", mlp),
            Branch { norm: None, ..after("post_per_layer_input_norm", Branch::new(norm(""), inputs)) },
        ];
        let router = matrix("altup.modality_router", [streams, hidden], Role::Replicated);
        let mixing = Mixing {
            norm: Norm { factor: 1.0 / hidden as f32, ..norm("altup.router_norm") },
            router: Linear { adapters: false, ..router },
            predictions: at("altup.prediction_coefs.weight"),
            corrections: at("altup.correction_coefs.weight"),
            output_scale: at("altup.correct_output_scale"),
        };
        Layer { parallel: 2, mixing: Some(mixing), ..Layer::new(branches) }
    });
    let root = common.spec.root;
    let projections = |name: &str| -> Vec<Part> {
        (0..streams - 1).map(|stream| Part::new(format!("{root}.{name}.{stream}"), hidden)).collect()
    };
    let matrix = |parts: Vec<Part>| Linear { adapters: false, ..Linear::new(hidden, Role::Replicated, parts) };
    decoder.streams = Some(Streams {
        project: matrix(projections("altup_projections")),
        merge: projections("altup_unembed_projections").into_iter().map(|part| matrix(vec![part])).collect(),
    });
    decoder.embedding.scale = (hidden as f32).sqrt();
    decoder.embedding.per_layer = Some(gemma4::per_layer_inputs(&common, width, gemma4::per_layer_vocab(fields)?.1));
    decoder.head.soft_cap = gemma::soft_cap(fields, "final_logit_softcapping", Some(30.0))?;
    Ok(decoder)
}

/// The number of residual streams.
fn streams(fields: &Fields<'_>) -> Result<usize, LoadError> {
    let count = fields.integer("altup_num_inputs", 2..=MAX_STREAMS as u64)?.unwrap_or(4) as usize;
    if fields.integer("altup_active_idx", 0..=MAX_STREAMS as u64)?.unwrap_or(0) != 0 {
        return Err(fields.wrong("altup_active_idx", "0: branches read the first stream"));
    }
    if fields.boolean("altup_correct_scale")? == Some(false) {
        return Err(fields.wrong("altup_correct_scale", "true"));
    }
    // Only training uses these keys.
    for key in ["altup_coef_clip", "altup_lr_multiplier"] {
        fields.get(key);
    }
    Ok(count)
}

/// A value for each layer: one for all of them, or a list.
fn of_layers<T: Copy>(
    fields: &Fields<'_>,
    key: &str,
    layers: usize,
    default: T,
    parse: impl Fn(&serde_json::Value) -> Option<T>,
) -> Result<Vec<T>, LoadError> {
    let expected = format!("a number in its range, or a list of {layers}");
    let stated = fields.read(key, &expected, |value| match value.as_array() {
        None => parse(value).map(|value| vec![value; layers]),
        Some(list) => list.iter().map(&parse).collect::<Option<Vec<T>>>().filter(|list| list.len() == layers),
    })?;
    Ok(stated.unwrap_or_else(|| vec![default; layers]))
}

/// The number below which this share of a standard normal distribution lies, by bisection.
fn quantile(share: f64) -> f64 {
    // The integral of the density from 0 to x (Abramowitz and Stegun, 26.2.11).
    let integral = |x: f64| {
        let (mut term, mut sum) = (x, x);
        for n in 1..200 {
            term *= x * x / f64::from(2 * n + 1);
            sum += term;
        }
        sum * (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt()
    };
    let (mut low, mut high) = (-8.0, 8.0);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        *(if integral(middle) + 0.5 < share { &mut low } else { &mut high }) = middle;
    }
    (low + high) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_tables() {
        for (share, x) in [(0.5, 0.0), (0.9, 1.281_551_565_545), (0.95, 1.644_853_626_951), (0.025, -1.959_963_984_540)]
        {
            assert!((quantile(share) - x).abs() < 1e-9, "{share}");
        }
    }
}
