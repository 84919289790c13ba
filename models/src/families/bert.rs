//! BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT and MPNet: encoders with learned positions, layer norms after each sum, and a plain
//! feed-forward network.
//!
//! RoBERTa and MPNet count positions from behind that of the padding token. MPNet adds a bias by distance to the scores of attention, the
//! same in all layers. A classifier reads the first token's state, through a layer whose name and activation differ.

use super::sizes::{self, MAX_POSITIONS, MAX_VOCAB};
use super::{
    Activation, Common, Decoder, Dense, DenseActivation, Family, Fields, LoadError, Mixer, Packing, Pooling, Role,
    Spec, labels,
};
use crate::decoder::{Distances, Linear, Part};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        architectures: &["BertModel", "BertForMaskedLM", "BertForSequenceClassification"],
        model_types: &["bert"],
        positions: (&["max_position_embeddings"], Some(512)),
        declare: |fields, max_positions| declare(fields, max_positions, &BERT),
        classify: |fields, hidden, count| {
            // GGUF files of DistilBERT have its classifier under BERT's names.
            let activation = labels::activation(fields, DenseActivation::Tanh)?;
            Ok(layers(hidden, count, ["bert.pooler.dense", "classifier"], activation))
        },
        pool_classes: |_| Ok(Pooling::Cls),
        encoder: true,
        reference: &["bert-embed"],
        largest: "google-bert/bert-large-uncased",
        ..Family::BASE
    },
    Family {
        architectures: &[
            "RobertaModel",
            "RobertaForMaskedLM",
            "RobertaForSequenceClassification",
            "XLMRobertaModel",
            "XLMRobertaForMaskedLM",
            "XLMRobertaForSequenceClassification",
            "CamembertModel",
            "CamembertForMaskedLM",
            "CamembertForSequenceClassification",
        ],
        model_types: &["roberta", "xlm-roberta", "camembert"],
        positions: (&["max_position_embeddings"], Some(512)),
        declare: |fields, max_positions| declare(fields, max_positions, &ROBERTA),
        classify: two_layers,
        pool_classes: |_| Ok(Pooling::Cls),
        encoder: true,
        reference: &["xlm-roberta-rerank"],
        largest: "FacebookAI/xlm-roberta-large",
        ..Family::BASE
    },
    Family {
        architectures: &["DistilBertModel", "DistilBertForMaskedLM", "DistilBertForSequenceClassification"],
        model_types: &["distilbert"],
        positions: (&["max_position_embeddings"], Some(512)),
        declare: |fields, max_positions| declare(fields, max_positions, &DISTILBERT),
        classify: |_, hidden, labels| {
            Ok(layers(hidden, labels, ["pre_classifier", "classifier"], DenseActivation::Relu))
        },
        pool_classes: |_| Ok(Pooling::Cls),
        encoder: true,
        largest: "distilbert/distilbert-base-multilingual-cased",
        ..Family::BASE
    },
    Family {
        architectures: &["MPNetModel", "MPNetForMaskedLM", "MPNetForSequenceClassification"],
        model_types: &["mpnet"],
        positions: (&["max_position_embeddings"], Some(512)),
        declare: |fields, max_positions| declare(fields, max_positions, &MPNET),
        classify: two_layers,
        pool_classes: |_| Ok(Pooling::Cls),
        encoder: true,
        largest: "microsoft/mpnet-base",
        ..Family::BASE
    },
];

/// How the families differ.
struct Kind {
    spec: Spec,
    /// Projections to queries, keys and values, the output projection, and the norm behind it.
    attention: ([&'static str; 3], &'static str, &'static str),
    /// The feed-forward network, and the norm behind it.
    network: ([&'static str; 2], &'static str),
    /// Number of token types if the key is absent; `None`: the family has none.
    types: Option<usize>,
    /// The padding token if the key is absent, behind whose position the first lies; `None`: positions count from 0.
    padding: Option<u64>,
    /// Name of the biases by distance.
    distances: Option<&'static str>,
}

pub(super) const SPEC: Spec = Spec {
    sizes: &[
        ("vocab_size", 30_522),
        ("hidden_size", 768),
        ("intermediate_size", 3072),
        ("num_hidden_layers", 12),
        ("num_attention_heads", 12),
    ],
    eps: ("layer_norm_eps", 1e-12),
    activation: (&["hidden_act"], Activation::Gelu),
    tied: true,
    rope: None,
    root: "bert",
    tokens: "embeddings.word_embeddings",
    layers: "encoder.layer",
    ..Spec::LAYER_NORM
};

const BERT: Kind = Kind {
    spec: SPEC,
    attention: (["self.query", "self.key", "self.value"], "output.dense", "attention.output.LayerNorm"),
    network: (["intermediate.dense", "output.dense"], "output.LayerNorm"),
    types: Some(2),
    padding: None,
    distances: None,
};

const ROBERTA: Kind = Kind { spec: Spec { root: "roberta", ..SPEC }, padding: Some(1), ..BERT };

const DISTILBERT: Kind = Kind {
    spec: Spec {
        hidden_size: "dim",
        intermediate_size: "hidden_dim",
        num_layers: "n_layers",
        num_heads: "n_heads",
        sizes: &[("vocab_size", 30_522), ("dim", 768), ("hidden_dim", 3072), ("n_layers", 6), ("n_heads", 12)],
        eps: ("", 1e-12),
        activation: (&["activation"], Activation::Gelu),
        root: "distilbert",
        layers: "transformer.layer",
        ..SPEC
    },
    attention: (["q_lin", "k_lin", "v_lin"], "out_lin", "sa_layer_norm"),
    network: (["ffn.lin1", "ffn.lin2"], "output_layer_norm"),
    types: None,
    ..BERT
};

const MPNET: Kind = Kind {
    spec: Spec { root: "mpnet", ..SPEC },
    attention: (["attn.q", "attn.k", "attn.v"], "attn.o", "attention.LayerNorm"),
    types: None,
    padding: Some(1),
    distances: Some("encoder.relative_attention_bias"),
    ..BERT
};

/// Distance from which MPNet has one bias, which its code fixes.
const REACH: usize = 128;

fn declare(fields: &Fields<'_>, max_positions: usize, kind: &Kind) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, kind.spec)?;
    if fields.get("lora_adaptations").is_some() {
        let expected = "null: encoders with an adapter for each task, as jina-embeddings-v3, are not supported";
        return Err(fields.wrong("lora_adaptations", expected));
    }
    if fields.string("position_embedding_type")?.is_some_and(|found| found != "absolute") {
        return Err(fields.wrong("position_embedding_type", "\"absolute\""));
    }
    if fields.boolean("is_decoder")? == Some(true) {
        return Err(fields.wrong("is_decoder", "false: layers that see earlier tokens alone are not supported"));
    }
    let root = kind.spec.root;
    let distances = match kind.distances {
        Some(name) => {
            let buckets = sizes::optional(fields, "relative_attention_num_buckets", MAX_POSITIONS.min(1 << 16))?;
            let buckets = buckets.unwrap_or(32);
            if !buckets.is_multiple_of(4) || buckets / 4 >= REACH {
                return Err(fields.wrong("relative_attention_num_buckets", "a multiple of 4, less than 512"));
            }
            Some(Distances { table: format!("{root}.{name}.weight"), buckets, reach: REACH })
        }
        None => None,
    };
    let mut decoder = common.decoder(|layer| {
        let (qkv, output, attention_norm) = kind.attention;
        let (network, network_norm) = kind.network;
        let mut attention =
            common.attention_of(common.at(layer, "attention"), Packing::Separate(qkv), output).biased(true, true);
        attention.distances.clone_from(&distances);
        let mlp = common.plain(common.at(layer, ""), network).biased(true);
        common.layer_with(layer, [attention_norm, network_norm], attention, mlp)
    });
    let offset = match kind.padding {
        Some(default) => fields.integer("pad_token_id", 0..=MAX_VOCAB)?.unwrap_or(default) as usize + 1,
        None => 0,
    };
    if max_positions <= offset {
        let expected = format!("more than {offset}, the positions before the first token's");
        return Err(fields.wrong("max_position_embeddings", expected));
    }
    decoder.embedding.positions = Some(common.positions("embeddings.position_embeddings", max_positions, offset));
    encoder(fields, &common, decoder, kind.types, "embeddings.LayerNorm")
}

/// The decoder as an encoder with BERT's embedding: a table of token types, whose number is `types` if it is not stated, and a norm of this
/// name. Layers norm the stream behind each branch, so there is no norm at the end.
pub(super) fn encoder(
    fields: &Fields<'_>,
    common: &Common,
    mut decoder: Decoder,
    types: Option<usize>,
    norm: &str,
) -> Result<Decoder, LoadError> {
    let root = common.spec.root;
    let stated = |default: usize| {
        Ok::<_, LoadError>(fields.integer("type_vocab_size", 0..=MAX_VOCAB)?.map_or(default, |types| types as usize))
    };
    // GGUF files of DistilBERT have none under BERT's name.
    if let Some(types) = types.map(stated).transpose()?.filter(|types| *types > 0) {
        let table = Part::new(format!("{root}.embeddings.token_type_embeddings"), types);
        let table = Linear { adapters: false, ..Linear::new(common.hidden_size, Role::Replicated, [table]) };
        decoder.embedding.types = Some(table);
    }
    for branch in decoder.layers.iter_mut().flat_map(|layer| &mut layer.branches) {
        branch.stream_norm = branch.norm.take();
        if let Mixer::Attention(attention) = &mut branch.mixer {
            attention.both_sides = true;
        }
    }
    decoder.embedding.norm = Some(common.norm(format!("{root}.{norm}")));
    decoder.final_norm = None;
    Ok(decoder)
}

/// A layer of the model's width with an activation, and that of the labels.
pub(super) fn layers(hidden: usize, labels: usize, names: [&str; 2], activation: DenseActivation) -> Vec<Dense> {
    let [first, last] = names;
    let last = Dense::new(last, labels, hidden).activated(true, DenseActivation::Identity);
    vec![Dense::new(first, hidden, hidden).activated(true, activation), last]
}

fn two_layers(_: &Fields<'_>, hidden: usize, labels: usize) -> Result<Vec<Dense>, LoadError> {
    Ok(layers(hidden, labels, ["classifier.dense", "classifier.out_proj"], DenseActivation::Tanh))
}
