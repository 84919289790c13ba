//! Encoders. BERT's architecture is that of RoBERTa too: files have its table of positions from the first token's on.

use serde_json::{Map, Value as Json, json};

use super::classic::{GPT2_ABSENT, GPT2_KEYS};
use super::{Architecture, BASE, BIASES, LAYER_EPS, WINDOWED};
use crate::checkpoint::error::LoadError;
use crate::checkpoint::gguf::metadata::Metadata;

const LABELS: &str = "classifier.output_labels";
/// Greatest number of labels.
const MAX_LABELS: usize = 1 << 16;

/// The last layer of a classifier, the one before it, and its norm.
const CLASSES: &str = "cls.output.weight";
const HEAD: &str = "cls.weight";
const HEAD_NORM: &str = "cls.norm.weight";

pub(super) const ARCHITECTURES: &[Architecture] = &[
    Architecture {
        name: "bert",
        class: "BertModel",
        keys: &[("layer_norm_eps", LAYER_EPS)],
        modules: &[
            ("attn_q", "attention.self.query"),
            ("attn_k", "attention.self.key"),
            ("attn_v", "attention.self.value"),
            ("attn_output", "attention.output.dense"),
            ("attn_output_norm", "attention.output.LayerNorm"),
            ("ffn_up", "intermediate.dense"),
            ("ffn_down", "output.dense"),
            ("layer_output_norm", "output.LayerNorm"),
        ],
        outer: &[
            ("token_embd", "bert.embeddings.word_embeddings"),
            ("position_embd", "bert.embeddings.position_embeddings"),
            ("token_types", "bert.embeddings.token_type_embeddings"),
            ("token_embd_norm", "bert.embeddings.LayerNorm"),
            ("cls", "bert.pooler.dense"),
            ("cls.output", "classifier"),
        ],
        layers: "bert.encoder.layer",
        derive: bert,
        ..BASE
    },
    Architecture {
        name: "nomic-bert",
        class: "NomicBertModel",
        keys: &[("rotary_emb_base", "rope.freq_base")],
        shared_keys: GPT2_KEYS,
        absent: GPT2_ABSENT,
        flags: &[
            ("qkv_proj_bias", "attn_qkv.bias"),
            ("mlp_fc1_bias", "ffn_up.bias"),
            ("mlp_fc2_bias", "ffn_down.bias"),
        ],
        constants: &[("activation_function", "\"swiglu\"")],
        modules: &[
            ("attn_qkv", "attn.Wqkv"),
            ("attn_output", "attn.out_proj"),
            ("attn_output_norm", "norm1"),
            ("ffn_up", "mlp.fc11"),
            ("ffn_gate", "mlp.fc12"),
            ("ffn_down", "mlp.fc2"),
            ("layer_output_norm", "norm2"),
        ],
        outer: &[
            ("token_embd", "model.embeddings.word_embeddings"),
            ("token_types", "model.embeddings.token_type_embeddings"),
            ("token_embd_norm", "model.emb_ln"),
        ],
        layers: "model.encoder.layers",
        derive: encoder,
        ..BASE
    },
    Architecture {
        name: "modern-bert",
        class: "ModernBertModel",
        keys: &[
            ("norm_eps", LAYER_EPS),
            ("local_attention", "attention.sliding_window"),
            ("global_rope_theta", "rope.freq_base"),
            ("local_rope_theta", "rope.freq_base_swa"),
        ],
        absent: &["rms_norm_eps", "rope_theta"],
        flags: &[("attention_bias", "attn_qkv.bias"), ("mlp_bias", "ffn_up.bias"), ("norm_bias", "ffn_norm.bias")],
        modules: &[
            ("attn_norm", "attn_norm"),
            ("attn_qkv", "attn.Wqkv"),
            ("attn_output", "attn.Wo"),
            ("ffn_norm", "mlp_norm"),
            ("ffn_up", "mlp.Wi"),
            ("ffn_down", "mlp.Wo"),
        ],
        outer: &[
            ("token_embd", "model.embeddings.tok_embeddings"),
            ("token_embd_norm", "model.embeddings.norm"),
            ("output_norm", "model.final_norm"),
            ("cls", "head.dense"),
            ("cls.norm", "head.norm"),
            ("cls.output", "classifier"),
        ],
        derive: modern_bert,
        ..BASE
    },
    Architecture { name: "eurobert", class: "EuroBertModel", flags: BIASES, derive: encoder, ..BASE },
];

/// What all encoders have.
fn encoder(metadata: &Metadata<'_>, map: &mut Map<String, Json>) -> Result<(), LoadError> {
    const CAUSAL: &str = "attention.causal";
    if metadata.truth(CAUSAL)? == Some(true) {
        return Err(metadata.wrong(CAUSAL, "false, for an encoder"));
    }
    // All texts have their head on the table of tokens, or none.
    map.insert("tie_word_embeddings".into(), json!(true));
    let rows = |tensor: &str| metadata.shape(tensor).and_then(|shape| shape.first().copied());
    let types = match metadata.shape("token_types.weight") {
        // A row without its dimension.
        Some([_]) => 1,
        _ => rows("token_types.weight").unwrap_or(0),
    };
    map.insert("type_vocab_size".into(), json!(types));
    Ok(())
}

fn bert(metadata: &Metadata<'_>, map: &mut Map<String, Json>) -> Result<(), LoadError> {
    encoder(metadata, map)?;
    if classifier(metadata, map, "BertForSequenceClassification", &[HEAD])? && map["type_vocab_size"] == 0 {
        // DistilBERT, whose classifier has this activation.
        map.insert("classifier_activation".into(), json!("relu"));
    }
    Ok(())
}

/// The class and the labels of a classifier, if the file has one, which also has these tensors. Returns whether it has.
fn classifier(
    metadata: &Metadata<'_>,
    map: &mut Map<String, Json>,
    class: &str,
    others: &[&str],
) -> Result<bool, LoadError> {
    let Some(labels) = metadata.shape(CLASSES).and_then(|shape| shape.first().copied()) else { return Ok(false) };
    if let Some(missing) = others.iter().find(|tensor| metadata.shape(tensor).is_none()) {
        return Err(LoadError::Gguf {
            file: metadata.gguf.file(0).to_string(),
            found: format!("{CLASSES} without {missing}"),
            expected: "both: the conversion has dropped a part of the classifier, so use another one".to_string(),
        });
    }
    map.insert("architectures".into(), json!([class]));
    let texts = |value: crate::checkpoint::gguf::Value<'_>| value.text().map(str::to_string);
    let named = metadata.value(LABELS).and_then(|value| value.array()).filter(|list| list.len() <= MAX_LABELS);
    let named = named.and_then(|list| list.iter().map(texts).collect::<Option<Vec<String>>>());
    if metadata.value(LABELS).is_some() && named.as_ref().is_none_or(|names| names.len() != labels) {
        return Err(metadata.wrong(LABELS, format!("names of {labels} labels")));
    }
    match named {
        Some(names) => {
            let names = names.into_iter().enumerate().map(|(id, name)| (id.to_string(), Json::from(name)));
            map.insert("id2label".into(), Json::Object(names.collect()))
        }
        None => map.insert("num_labels".into(), json!(labels)),
    };
    Ok(true)
}

fn modern_bert(metadata: &Metadata<'_>, map: &mut Map<String, Json>) -> Result<(), LoadError> {
    const ACTIVATION: &str = "hidden_activation";
    encoder(metadata, map)?;
    if classifier(metadata, map, "ModernBertForSequenceClassification", &[HEAD, HEAD_NORM])? {
        // Files do not say how it pools. No checkpoint was compared.
        map.insert("classifier_pooling".into(), json!("mean"));
        map.insert("classifier_bias".into(), json!(metadata.shape("cls.bias").is_some()));
    }
    if let Some(every) = metadata.value(WINDOWED).filter(|value| value.array().is_none()) {
        let every = every.unsigned().filter(|every| *every > 0);
        let every = every.ok_or_else(|| metadata.wrong(WINDOWED, "a number above 0, or a list"))?;
        map.insert("global_attn_every_n_layers".into(), json!(every));
    }
    match metadata.value(ACTIVATION).map(|value| value.text()) {
        None => {}
        Some(Some(name)) => _ = map.insert(ACTIVATION.into(), json!(name)),
        Some(None) => return Err(metadata.wrong(ACTIVATION, "the name of an activation")),
    }
    Ok(())
}
