//! Folders of Sentence Transformers: `modules.json`, `1_Pooling/config.json` and the modules behind it.

use crate::common::{Copy, Opened, message};
use models::{Dimensions, LoadError, ModelConfig, Pooler, Pooling, ScoreFunction, Task, Weights};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

fn load(copy: &Copy) -> Result<Pooler, LoadError> {
    let files = copy.files();
    let config = ModelConfig::load(&files)?;
    Pooler::load(&files, &config, &Weights::open(&files)?, None)
}

fn pool() -> simd::Pool {
    simd::Pool::new(Some(2)).unwrap()
}

#[test]
fn the_checkpoint_decides_and_the_last_token_is_the_default() {
    assert_eq!(load(&Copy::of("llama")).unwrap().pooling, Some(Pooling::Last));
    let of = |text: &str| load(&Copy::of("llama").write("1_Pooling/config.json", text));
    for (text, expected) in [
        (r#"{"word_embedding_dimension": 8, "pooling_mode_lasttoken": true}"#, Some(Pooling::Last)),
        (r#"{"pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true}"#, Some(Pooling::Mean)),
        (r#"{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}"#, Some(Pooling::Cls)),
        (r#"{"pooling_mode_max_tokens": true}"#, Some(Pooling::Max)),
        (r#"{"pooling_mode": "weightedmean"}"#, Some(Pooling::WeightedMean)),
        (r#"{"pooling_mode": ["mean_sqrt_len_tokens"]}"#, Some(Pooling::MeanSqrtLen)),
        (r#"{"pooling_mode_lasttoken": true, "pooling_mode_mean_tokens": true}"#, None),
        (r#"{"pooling_mode": "attention"}"#, None),
    ] {
        assert_eq!(of(text).unwrap().pooling, expected, "{text}");
    }
    assert!(of("{").is_err());
}

/// A folder with a dense layer of two outputs, `[1, 1, …]` and `[2, 0, 0, …]` with the biases 1 and −1.
fn with_dense(activation: &str) -> Copy {
    let width = load(&Copy::of("llama")).unwrap().width;
    let modules = json!([
        {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.base.modules.dense.Dense"},
    ]);
    let settings = json!({"in_features": width, "out_features": 2, "bias": true, "activation_function": activation});
    let weight: Vec<u8> = (0..2 * width)
        .map(|at| {
            if at < width {
                1.0_f32
            } else if at == width {
                2.0
            } else {
                0.0
            }
        })
        .flat_map(f32::to_le_bytes)
        .collect();
    let bias: Vec<u8> = [1.0_f32, -1.0].into_iter().flat_map(f32::to_le_bytes).collect();
    let views = [
        ("linear.weight", TensorView::new(Dtype::F32, vec![2, width], &weight).unwrap()),
        ("linear.bias", TensorView::new(Dtype::F32, vec![2], &bias).unwrap()),
    ];
    Copy::of("llama")
        .write("modules.json", modules.to_string())
        .write("1_Pooling/config.json", r#"{"pooling_mode_mean_tokens": true}"#)
        .write("2_Dense/config.json", settings.to_string())
        .write("2_Dense/model.safetensors", safetensors::serialize(views, None).unwrap())
}

#[test]
fn dense_modules_are_computed_and_their_results_are_not_normalised() {
    for (name, of) in [
        ("torch.nn.modules.linear.Identity", (|x| x) as fn(f64) -> f64),
        ("torch.nn.modules.activation.Tanh", f64::tanh),
        ("torch.nn.modules.activation.ReLU", |x| x.max(0.0)),
        ("torch.nn.modules.activation.Sigmoid", |x| 1.0 / (1.0 + (-x).exp())),
        ("torch.nn.modules.activation.SiLU", |x| x / (1.0 + (-x).exp())),
    ] {
        let pooler = load(&with_dense(name)).unwrap();
        assert_eq!((pooler.pooling, pooler.width), (Some(Pooling::Mean), 2));
        assert_eq!(pooler.task, Task::Embed { normalised: false });
        let width = load(&Copy::of("llama")).unwrap().width;
        let vector: Vec<f64> = (0..width).map(|i| (i as f64 * 0.7).sin() / 8.0).collect();
        let want = [of(vector.iter().sum::<f64>() + 1.0), of(2.0 * vector[0] - 1.0)];
        let found = pooler.apply(vector, &pool());
        assert!(found.iter().zip(want).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-6), "{name}: {found:?}, {want:?}");
    }
    // GELU has the error function.
    let pooler = load(&with_dense("torch.nn.modules.activation.GELU")).unwrap();
    let mut one = vec![0.0; load(&Copy::of("llama")).unwrap().width];
    one[0] = 1.0;
    let found = pooler.apply(one, &pool());
    assert!((f64::from(found[0]) - 1.954_499_736).abs() < 1e-6 && (f64::from(found[1]) - 0.841_344_746).abs() < 1e-6);
}

#[test]
fn embeddings_are_cut_to_the_lengths_that_the_checkpoint_lists_and_have_length_1_again() {
    let edit = |key: &str, value: Value| Copy::of("llama").edit("config.json", |config| config[key] = value.clone());
    let own = load(&Copy::of("llama")).unwrap();
    assert!(own.dimensions == Dimensions::Own && own.takes(own.width) && !own.takes(own.width - 1));
    let listed = load(&edit("matryoshka_dimensions", json!([4, 8]))).unwrap();
    assert!(listed.takes(4) && listed.takes(8) && !listed.takes(5));
    let any = load(&edit("is_matryoshka", json!(true))).unwrap();
    assert!(any.takes(1) && any.takes(any.width) && !any.takes(any.width + 1) && !any.takes(0));
    assert_eq!(any.cut(vec![0.6, 0.0, 0.8], 1), [1.0]);
    assert_eq!(any.cut(vec![0.6, 0.8, 0.0], 2), [0.6, 0.8]);
    assert_eq!(any.cut(vec![3.0], 5), [3.0]);
}

#[test]
fn mistakes_in_folders_name_the_file_and_the_key() {
    let modules = |kind: &str, path: &str| {
        let list = json!([{"path": path, "type": kind}]);
        Copy::of("llama").write("modules.json", list.to_string())
    };
    let dense = |key: &str, value: Value| {
        with_dense("Identity").edit("2_Dense/config.json", |settings| settings[key] = value.clone())
    };
    let config = |key: &str, value: Value| Copy::of("llama").edit("config.json", |file| file[key] = value.clone());
    let many = Value::Array(vec![json!({"path": "", "type": "Transformer"}); 65]);
    for (copy, parts) in [
        (
            modules("sentence_transformers.models.CLIPModel", "x"),
            &["modules.json: `0.type`", "CLIPModel", "Pooling"][..],
        ),
        (modules("Dense", "../outside"), &["modules.json: `0.path`", "../outside", "folder"]),
        (modules("Dense", "/etc"), &["modules.json: `0.path`"]),
        (modules("Dense", "2_Dense"), &["2_Dense/config.json: not found"]),
        (Copy::of("llama").write("modules.json", many.to_string()), &["`length` is 65", "at most 64"]),
        (dense("in_features", json!(7)), &["2_Dense/model.safetensors", "linear.weight"]),
        (dense("out_features", json!(0)), &["2_Dense/config.json: `out_features` is 0"]),
        (dense("activation_function", json!("torch.Softplus")), &["`activation_function`", "Tanh"]),
        (config("matryoshka_dimensions", json!([0])), &["config.json: `matryoshka_dimensions`"]),
        (config("is_causal", json!("no")), &["config.json: `is_causal`"]),
    ] {
        message(load(&copy), parts);
    }
}

#[test]
fn labels_and_scores_are_those_of_the_configuration() {
    let classes = |keys: Value| {
        let copy = Copy::of("llama").edit("config.json", |config| {
            config["architectures"] = json!(["LlamaForSequenceClassification"]);
            config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        });
        ModelConfig::load(&copy.files()).map(|config| {
            assert!(config.is_headless && config.decoder.head.linear.is_none());
            let classifier = config.decoder.head.classifier.unwrap();
            assert_eq!(classifier.layers[0].name, "score");
            assert_eq!((classifier.pooling, classifier.layers[0].outputs), (Pooling::Last, classifier.labels.len()));
            (classifier.labels.join(" "), classifier.scores)
        })
    };
    let of = |keys: Value| classes(keys).unwrap();
    assert_eq!(of(json!({})), ("LABEL_0 LABEL_1".to_string(), ScoreFunction::Softmax));
    assert_eq!(of(json!({"num_labels": 1})), ("LABEL_0".to_string(), ScoreFunction::Sigmoid));
    assert_eq!(of(json!({"id2label": {"1": "no", "0": "yes", "2": "so"}})).0, "yes no so");
    let problem = |kind: &str| of(json!({"num_labels": 1, "problem_type": kind})).1;
    assert_eq!(problem("regression"), ScoreFunction::Identity);
    assert_eq!(problem("single_label_classification"), ScoreFunction::Sigmoid);
    assert_eq!(of(json!({"problem_type": "multi_label_classification"})).1, ScoreFunction::Sigmoid);
    let older = json!({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"});
    assert_eq!(of(older).1, ScoreFunction::Identity);
    let newer = json!({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}});
    assert_eq!(of(newer).1, ScoreFunction::Sigmoid);
    for (keys, parts) in [
        (json!({"problem_type": "ranking"}), ["`problem_type` is \"ranking\"", "regression"]),
        (json!({"id2label": {"0": "a", "2": "b"}}), ["`id2label`", "names of labels"]),
        (json!({"num_labels": 0}), ["`num_labels` is 0", "1 to"]),
    ] {
        message(classes(keys), &parts);
    }
}
