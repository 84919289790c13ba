//! What is wrong with a checkpoint is said in one line that names the file, what was found and what was expected.

use std::collections::BTreeMap;
use std::path::Path;

use crate::common::{CASES, Copy, Opened, files, folder, message};
use crate::texts::TextFiles;
use models::decoder::{Activation, Decoder, Mixer};
use models::{GenerationDefaults, LoadError, ModelConfig, ModelFiles, Weights};
use serde_json::{Value, json};
use text::{ChatTemplate, Tokenizer};

const CONFIG: &str = "config.json";

fn config_with(case: &str, keys: Value) -> Result<ModelConfig, LoadError> {
    ModelConfig::load(&Copy::of(case).set(CONFIG, keys).files())
}

#[test]
fn a_path_that_is_not_a_folder_is_described_in_the_error() {
    let open = |path: &str| ModelFiles::open(Path::new(path));
    message(open("./no/such/folder"), &["./no/such/folder", "no such folder", "Hugging Face layout"]);
    message(open("nowhere"), &["nowhere: no such folder"]);
    message(open("/no/such"), &["/no/such: no such folder"]);
    let hub = message(open("some-org/Some_Model-7B.v2"), &["some-org/Some_Model-7B.v2", "hub id", "pass its folder"]);
    assert!(hub.contains("download some-org/Some_Model-7B.v2 first"), "{hub}");
    for not_hub in ["a/b/c", "../model", "~/model", "a/", "/a", "a b/c"] {
        let said = message(open(not_hub), &[not_hub]);
        assert!(!said.contains("hub id"), "{said}");
    }
    message(open("two\nlines/model"), &["two lines/model"]);
    let file = folder("llama").join(CONFIG);
    message(ModelFiles::open(&file), &["config.json", "found a file", "folder that holds"]);
}

#[test]
fn a_folder_without_a_file_names_that_file() {
    let missing = |file: &str| Copy::of("llama").remove(file);
    message(ModelConfig::load(&missing(CONFIG).files()), &[CONFIG, "not found"]);
    message(Weights::open(&missing("model.safetensors").files()), &["model.safetensors", "not found"]);
}

#[test]
fn broken_json_names_the_file_and_the_place() {
    for broken in ["", "{", "[1, 2]", "\"text\"", "{\"a\": }", "\u{0}", "{\n\"a\": tru\n}"] {
        let copy = |file: &str| Copy::of("llama").write(file, broken);
        message(ModelConfig::load(&copy(CONFIG).files()), &[CONFIG, "JSON", "line"]);
        let config = ModelConfig::load(&files("llama")).unwrap();
        let defaults = GenerationDefaults::load(&copy("generation_config.json").files(), &config.eos_token_ids);
        message(defaults, &["generation_config.json", "JSON", "line"]);
    }
    let copy = Copy::of("llama").write(CONFIG, b"{\"a\": \"\xFF\"}");
    message(ModelConfig::load(&copy.files()), &[CONFIG, "JSON"]);
}

#[test]
fn an_unsupported_architecture_is_an_error_that_lists_the_supported_ones() {
    let supported = "LlamaForCausalLM, MistralForCausalLM, ";
    for (name, nearest) in [
        ("Gemma5ForCausalLM", "Gemma"),
        ("GPT2HeadModel", "GPT2LMHeadModel"),
        ("MixtralForTokenClassification", "MixtralForCausalLM"),
        ("LlamaModels", "LlamaForCausalLM"),
        ("two\nlines", "nearest name"),
    ] {
        let shown = name.replace('\n', " ");
        let said = config_with("llama", json!({"architectures": [name], "warp_factor": 9, "attn_dropout": 0.5}));
        let said = message(said, &[CONFIG, &shown, supported, nearest]);
        assert!(!said.contains("attn_dropout") && !said.contains("rms_norm_eps"), "{said}");
    }
    // The context length is not read by the declaration.
    let said = config_with("llama", json!({"architectures": ["LlamaModels"], "query_pre_attn_scalar": 8}));
    let said = message(said, &["; the nearest name is LlamaForCausalLM, which does not read query_pre_attn_scalar"]);
    assert!(!said.contains("max_position_embeddings"), "{said}");
    // A declaration that fails has not read all its keys, so nothing is said of them.
    let cut = json!({"architectures": ["DeepseekVV3ForCausalLM"], "n_routed_experts": 8, "kv_lora_rank": 32, "index_topk": 9});
    let said = message(config_with("llama", cut), &["; the nearest name is DeepseekV3ForCausalLM"]);
    assert!(!said.contains("does not read"), "{said}");
    let long = "x".repeat(100_000);
    assert!(message(config_with("llama", json!({"architectures": [long]})), &[supported]).len() < 3000);
    let by_type = json!({"architectures": null, "model_type": "gpt3"});
    message(config_with("llama", by_type), &[CONFIG, "gpt3", supported, "GPT2LMHeadModel"]);
    let nothing = json!({"architectures": null, "model_type": null});
    message(config_with("llama", nothing), &[CONFIG, "no name", supported]);
    for wrong in [json!([]), json!("LlamaForCausalLM"), json!([1]), json!(["LlamaForCausalLM", "MistralForCausalLM"])] {
        message(config_with("llama", json!({ "architectures": wrong })), &[CONFIG, "`architectures`", "expected"]);
    }
}

#[test]
fn a_size_that_makes_no_sense_names_its_key_and_value() {
    let keys = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "head_dim",
    ];
    for key in keys {
        for value in
            [json!(0), json!(-1), json!(1.5), json!("64"), json!([64]), json!(true), json!(u64::MAX), json!(1e300)]
        {
            let parts = [CONFIG, &format!("`{key}` is {value}"), "expected an integer, 1 to "];
            message(config_with("llama", json!({ key: value })), &parts);
        }
        if !matches!(key, "num_key_value_heads" | "head_dim") {
            message(config_with("llama", json!({ key: null })), &[CONFIG, &format!("`{key}` is null"), "expected"]);
            let copy = Copy::of("llama").drop_key(CONFIG, key);
            message(ModelConfig::load(&copy.files()), &[CONFIG, &format!("`{key}` is missing"), "expected"]);
        }
    }
    message(
        config_with("llama", json!({"num_key_value_heads": 3})),
        &[CONFIG, "`num_key_value_heads` is 3", "divisor", "4"],
    );
    message(
        config_with("llama", json!({"num_key_value_heads": 8})),
        &[CONFIG, "`num_key_value_heads` is 8", "divisor"],
    );
    message(config_with("llama", json!({"head_dim": 33})), &[CONFIG, "`head_dim` is 33", "even"]);
    let odd = json!({"head_dim": null, "hidden_size": 60});
    message(config_with("llama", odd), &[CONFIG, "`hidden_size` is 60", "even", "15 of 15"]);
    let uneven = json!({"head_dim": null, "hidden_size": 66});
    message(config_with("llama", uneven), &[CONFIG, "`hidden_size` is 66", "multiple of `num_attention_heads`, 4"]);
}

#[test]
fn an_option_that_is_not_supported_is_refused_by_name() {
    let cases = [
        ("llama", json!({"hidden_act": "tanhshrink"}), "`hidden_act` is \"tanhshrink\"", "\"silu\""),
        (
            "llama",
            json!({"rope_scaling": {"rope_type": "spiral", "factor": 4}}),
            "`rope_scaling.rope_type` is \"spiral\"",
            "llama3",
        ),
        ("llama", json!({"rope_scaling": {"type": "dynamic"}}), "`rope_scaling.factor` is missing", "at least 1"),
        (
            "qwen2",
            json!({"rope_parameters": {"rope_type": "longrope"}}),
            "`rope_parameters.short_factor` is missing",
            "16 numbers",
        ),
        (
            "phi3-longrope",
            json!({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}),
            "`rope_scaling.short_factor` is [1.0]",
            "12 numbers",
        ),
        ("llama", json!({"partial_rotary_factor": 1.5}), "`partial_rotary_factor` is 1.5", "share of the head"),
        ("llama", json!({"partial_rotary_factor": 0.1}), "`partial_rotary_factor` is 0.1", "3 of 32"),
        ("bloom", json!({"apply_residual_connection_post_layernorm": true}), "post_layernorm` is true", "false"),
        ("mixtral", json!({"num_experts_per_tok": 5}), "`num_experts_per_tok` is 5", "at most `num_local_experts`, 4"),
        ("qwen3-moe", json!({"num_experts": 0}), "`num_experts` is 0", "1 to"),
        (
            "qwen3-moe",
            json!({"num_experts": 4096, "num_hidden_layers": 4096}),
            "`num_experts` is 4096",
            "experts in all",
        ),
        ("gemma2", json!({"sliding_window": 0}), "`sliding_window` is 0", "1 to"),
        ("smollm3", json!({"no_rope_layers": [1, 0]}), "`no_rope_layers` is [1,0]", "list of 4"),
        (
            "llama",
            json!({"quantization_config": {"quant_method": "hqq"}}),
            "`quantization_config.quant_method` is \"hqq\"",
            "gptq, awq",
        ),
        (
            "llama",
            json!({"quantization_config": {"bits": 4}}),
            "`quantization_config.quant_method` is missing",
            "compressed-tensors",
        ),
    ];
    for (case, keys, found, expected) in cases {
        message(config_with(case, keys), &[CONFIG, found, expected]);
    }
}

#[test]
fn settings_that_change_the_results_are_refused_and_others_are_named() {
    for (case, key, value) in [
        ("mistral-sliding", "is_causal", json!(false)),
        ("gpt-oss", "is_causal", json!(false)),
        ("deepseek-v2-lite", "is_causal", json!(false)),
        ("qwen3-next", "is_causal", json!(false)),
        ("bloom", "use_bidirectional_attention", json!(true)),
        ("gemma3-text", "use_bidirectional_attention", json!("all")),
    ] {
        message(config_with(case, json!({ key: value })), &[CONFIG, &format!("`{key}` is {value}"), "expected"]);
    }
    let unread = |case: &str, keys: Value| config_with(case, keys).unwrap().unread;
    let neutral = json!({"is_causal": true, "use_bidirectional_attention": "vision", "id2label": {"0": "a"}, "qk_layernorm": false});
    assert!(unread("qwen2", neutral).is_empty());
    assert_eq!(unread("qwen2", json!({"warp_factor": 9, "mlp_bias": true})), ["warp_factor", "mlp_bias"]);
    // Everything in the reference checkpoints is read or known to be harmless.
    let named: Vec<_> = CASES.iter().map(|case| (case, unread(case, json!({})))).collect();
    assert!(named.iter().all(|(_, keys)| keys.is_empty()), "{named:?}");
}

/// The activations of the feed-forward networks, in the names of transformers.
fn activations(decoder: &Decoder) -> Vec<&'static str> {
    let name = |activation: Activation| match activation {
        Activation::Silu | Activation::ClampedSwiglu { .. } => "silu",
        Activation::Gelu => "gelu",
        Activation::GeluTanh => "gelu_pytorch_tanh",
        Activation::Relu => "relu",
        Activation::Relu2 => "relu2",
        Activation::Xielu { .. } => "xielu",
    };
    let experts = decoder.experts().flat_map(|mixture| mixture.experts.iter().chain(&mixture.shared));
    let mlps = decoder.branches().filter_map(|branch| match &branch.mixer {
        Mixer::Mlp(mlp) => Some(mlp),
        _ => None,
    });
    let mut names: Vec<_> = mlps.chain(experts).map(|mlp| name(mlp.activation)).collect();
    names.dedup();
    names
}

#[test]
fn an_activation_is_computed_or_refused_or_named() {
    const KEYS: [&str; 4] = ["hidden_act", "hidden_activation", "activation", "activation_function"];
    for case in CASES {
        let own = activations(&config_with(case, json!({})).unwrap().decoder)[0];
        for key in KEYS {
            let with = |name: &str| {
                let mut keys = json!(BTreeMap::from(KEYS.map(|key| (key, Value::Null))));
                keys[key] = json!(name);
                config_with(case, keys)
            };
            // The last is not known.
            for name in ["silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "warp"] {
                match with(name) {
                    Ok(config) if activations(&config.decoder) == [name] => assert!(config.unread.is_empty(), "{case}"),
                    Ok(config) => assert_eq!(config.unread, [key], "{case}: {name}"),
                    Err(error) => assert!(name != own && error.to_string().contains(key), "{case}: {error}"),
                }
            }
        }
    }
    // The names may disagree.
    let both = json!({"hidden_act": "silu", "hidden_activation": "gelu"});
    assert_eq!(config_with("llama", both).unwrap().unread, ["hidden_activation"]);
}

#[test]
fn sizes_under_names_that_a_family_does_not_read_are_named_unless_it_computes_them() {
    let unread = |case: &str, key: &str, value: Value| config_with(case, json!({ key: value })).unwrap().unread;
    let none: [&str; 0] = [];
    for (case, key, same, other) in [
        ("gemma2", "sliding_window_size", json!(32), json!(31)),
        ("llama", "sliding_window_size", json!(null), json!(32)),
        ("gpt-oss", "experts_per_token", json!(2), json!(3)),
        ("llama", "max_window_layers", json!(28), json!(null)),
        ("gemma2", "max_window_layers", json!(null), json!(1)),
        ("gemma2", "sliding_window_size", json!(0), json!("32")),
    ] {
        assert_eq!(unread(case, key, same), none, "{case}: {key}");
        if !other.is_null() {
            assert_eq!(unread(case, key, other), [key], "{case}");
        }
    }
    // Where there is no mixture, there is no number of chosen experts.
    assert_eq!(unread("llama", "experts_per_token", json!(3)), none);
}

#[test]
fn the_scores_of_experts_are_those_of_the_family() {
    let v3 = |keys: Value| {
        let mut all = json!({"architectures": ["DeepseekV3ForCausalLM"], "topk_method": "noaux_tc", "scoring_func": "sigmoid",
            "n_group": 1, "topk_group": 1});
        all.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        config_with("deepseek-v2-lite", all)
    };
    v3(json!({})).unwrap();
    message(v3(json!({"scoring_func": "softmax"})), &["`scoring_func` is \"softmax\"", "sigmoid"]);
    message(v3(json!({"topk_method": "greedy"})), &["`topk_method` is \"greedy\"", "noaux_tc"]);
    message(config_with("deepseek-v2-lite", json!({"scoring_func": "sigmoid"})), &["`scoring_func` is", "softmax"]);
    // Without the keys, transformers has 8 groups, of which 4 are chosen from.
    let experts = |config: ModelConfig| {
        config
            .decoder
            .experts()
            .map(|experts| experts.routing.groups.map(|groups| (groups.count, groups.top)))
            .collect::<Vec<_>>()
    };
    let absent = v3(json!({"n_group": null, "topk_group": null, "n_routed_experts": 16})).unwrap();
    assert!(experts(absent).iter().all(|groups| *groups == Some((8, 4))));
}

#[test]
fn a_bare_decoder_is_the_family_without_an_output_layer() {
    for (case, class) in [("mistral-sliding", "MistralModel"), ("qwen2", "Qwen2Model"), ("gpt2", "GPT2Model")] {
        let whole = config_with(case, json!({"tie_word_embeddings": false})).unwrap();
        let bare = config_with(case, json!({"architectures": [class], "tie_word_embeddings": false})).unwrap();
        assert_eq!((bare.architecture, bare.is_headless, whole.is_headless), (whole.architecture, true, false));
        assert!(bare.decoder.is_tied() && bare.decoder.layers == whole.decoder.layers, "{class}");
    }
    let gemma = config_with("gemma3-text", json!({"architectures": ["Gemma3TextModel"]})).unwrap();
    assert_eq!((gemma.architecture, gemma.is_headless), ("Gemma3ForCausalLM", true));
    message(config_with("llama", json!({"architectures": ["LlammaModel"]})), &["LlammaModel", "not supported"]);
}

#[test]
fn a_decoder_whose_layers_see_both_sides_is_an_encoder() {
    for (case, keys, windows) in [
        ("qwen2", json!({"is_causal": false}), [None, None]),
        ("llama", json!({"use_bidirectional_attention": true}), [None, None]),
        ("gemma3-text", json!({"use_bidirectional_attention": true, "sliding_window": 17}), [Some(9), None]),
    ] {
        let config = config_with(case, keys).unwrap();
        assert!(
            config.is_headless && config.decoder.is_encoder() && config.decoder.attention().all(|it| it.both_sides)
        );
        let found: Vec<_> = config.decoder.attention().map(|attention| attention.window).collect();
        assert!(windows.iter().all(|window| found.contains(window)), "{case}: {found:?}");
    }
}

#[test]
fn a_value_of_the_wrong_kind_is_refused() {
    let llama3 = |changes: Value| {
        let mut scaling = json!({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4});
        scaling.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        json!({ "rope_scaling": scaling })
    };
    let cases = [
        ("llama", json!({"rms_norm_eps": 0}), "`rms_norm_eps` is 0"),
        ("llama", json!({"rms_norm_eps": "small"}), "`rms_norm_eps` is \"small\""),
        ("llama", json!({"rope_theta": -1}), "`rope_theta` is -1"),
        ("llama", json!({"rope_scaling": "linear"}), "`rope_scaling` is \"linear\""),
        ("llama", json!({"rope_scaling": {"rope_type": "linear"}}), "`rope_scaling.factor` is missing"),
        ("llama", json!({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}), "`rope_scaling.factor` is 0.5"),
        ("llama", llama3(json!({"low_freq_factor": null})), "`rope_scaling.low_freq_factor` is null"),
        ("llama", llama3(json!({"high_freq_factor": 1})), "`rope_scaling.high_freq_factor` is 1"),
        (
            "llama",
            llama3(json!({"original_max_position_embeddings": 0})),
            "`rope_scaling.original_max_position_embeddings` is 0",
        ),
        ("llama", json!({"attention_bias": "no"}), "`attention_bias` is \"no\""),
        ("llama", json!({"tie_word_embeddings": 1}), "`tie_word_embeddings` is 1"),
        ("llama", json!({"eos_token_id": -1}), "`eos_token_id` is -1"),
        ("llama", json!({"eos_token_id": [1, "x"]}), "`eos_token_id` is [1,\"x\"]"),
        ("mistral-sliding", json!({"sliding_window": 0}), "`sliding_window` is 0"),
        ("qwen2", json!({"use_sliding_window": "yes"}), "`use_sliding_window` is \"yes\""),
        ("qwen2", json!({"layer_types": ["full_attention"]}), "`layer_types` is [\"full_attention\"]"),
        ("qwen2", json!({"layer_types": ["linear_attention", "x", "y"]}), "`layer_types` is [\"linear_attention\""),
        ("qwen2", json!({"layer_types": vec!["sliding_attention"; 3]}), "`layer_types` is"),
    ];
    for (case, keys, found) in cases {
        message(config_with(case, keys), &[CONFIG, found, "; expected "]);
    }
    let long = message(config_with("llama", json!({"eos_token_id": "x".repeat(10_000)})), &[CONFIG, "`eos_token_id`"]);
    assert!(long.len() < 400, "{} bytes", long.len());
}

#[test]
fn embedded_files_read_like_a_folder_and_errors_name_them() {
    let read = |name| -> &'static [u8] { std::fs::read(folder("llama").join(name)).unwrap().leak() };
    let embedded = ["config.json", "model.safetensors"].map(|name| (name, read(name)));
    let files_in_memory = [&embedded[..], &[("tokenizer_config.json", b"{")]].concat().leak();
    let in_memory = ModelFiles::Embedded { name: "demo", files: files_in_memory };
    let folder = files("llama");
    assert_eq!((in_memory.name(), folder.name()), ("demo".to_string(), "llama".to_string()));
    assert_eq!(ModelConfig::load(&in_memory).unwrap(), ModelConfig::load(&folder).unwrap());
    let (embedded, mapped) = (Weights::open(&in_memory).unwrap(), Weights::open(&folder).unwrap());
    for name in mapped.names() {
        assert_eq!(embedded.get(name).unwrap().data, mapped.get(name).unwrap().data);
    }
    message(Tokenizer::load(&TextFiles(&in_memory)), &["demo/tokenizer.json", "not found"]);
    message(ChatTemplate::load(&TextFiles(&in_memory)), &["demo/tokenizer_config.json", "JSON"]);
}

#[test]
fn a_snapshot_in_the_cache_of_the_hub_has_the_name_of_its_repository() {
    let cache = tempfile::TempDir::new().unwrap();
    let repo = cache.path().join("models--some-org--a-model.v2");
    for (folder, name) in [("snapshots/0123abcd", "some-org/a-model.v2"), ("other/0123abcd", "0123abcd")] {
        std::fs::create_dir_all(repo.join(folder)).unwrap();
        assert_eq!(ModelFiles::open(&repo.join(folder)).unwrap().name(), name);
    }
}
