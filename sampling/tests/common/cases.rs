//! The reference cases: rows of logits, parameters, and the results of transformers.
//!
//! `reference/sampling.json` describes them, `reference/sampling.safetensors` holds `<key>.logits` and `<key>.probs`.

use safetensors::SafeTensors;
use sampling::{Context, SamplingParams};
use serde_json::Value;

pub struct Case {
    pub key: String,
    pub params: SamplingParams,
    pub prompt: Vec<u32>,
    pub output: Vec<u32>,
    pub stop_ids: Vec<u32>,
    pub logits: Vec<f32>,
    pub probabilities: Vec<f32>,
    pub expected: Value,
}

impl Case {
    pub fn context(&self) -> Context<'_> {
        Context {
            prompt: &self.prompt,
            output: &self.output,
            stop_ids: &self.stop_ids,
            allowed: None,
            seed: 1,
            sequence: 0,
        }
    }
}

pub fn ids(value: &Value) -> Vec<u32> {
    value.as_array().map_or(vec![], |ids| ids.iter().map(|id| id.as_u64().unwrap() as u32).collect())
}

/// Reads the parameters of a case. Unknown names are errors, so that no parameter is ignored.
fn params(value: &Value) -> SamplingParams {
    let mut params = SamplingParams::default();
    for (name, value) in value.as_object().unwrap() {
        let number = value.as_f64().unwrap_or(f64::NAN) as f32;
        match name.as_str() {
            "temperature" => params.temperature = number,
            "top_k" => params.top_k = value.as_u64().unwrap() as u32,
            "top_p" => params.top_p = number,
            "min_p" => params.min_p = number,
            "typical_p" => params.typical_p = Some(number),
            "repetition_penalty" => params.repetition_penalty = number,
            "frequency_penalty" => params.frequency_penalty = number,
            "presence_penalty" => params.presence_penalty = number,
            "min_tokens" => params.min_tokens = value.as_u64().unwrap() as usize,
            "eos_token_ids" => {}
            "allowed_token_ids" => params.allowed_token_ids = Some(ids(value).into()),
            "banned_token_ids" => params.bad_words = ids(value).into_iter().map(|id| vec![id]).collect(),
            "logit_bias" => {
                let entries = value.as_object().unwrap().iter();
                params.logit_bias =
                    entries.map(|(id, bias)| (id.parse().unwrap(), bias.as_f64().unwrap() as f32)).collect();
            }
            other => panic!("the reference uses `{other}`, which this test does not know"),
        }
    }
    params
}

pub fn cases() -> Vec<Case> {
    let folder = testkit::workspace::root().join("sampling/tests/reference");
    let [cases, tensors] =
        ["sampling.json", "sampling.safetensors"].map(|name| std::fs::read(folder.join(name)).unwrap());
    let tensors = SafeTensors::deserialize(&tensors).unwrap();
    let row = |name: String| -> Vec<f32> {
        let (bytes, _) = tensors.tensor(&name).unwrap().data().as_chunks();
        bytes.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
    };
    let list: Vec<Value> = serde_json::from_slice(&cases).unwrap();
    list.into_iter()
        .map(|expected| {
            let key = expected["key"].as_str().unwrap().to_owned();
            Case {
                params: params(&expected["params"]),
                prompt: ids(&expected["prompt_ids"]),
                output: ids(&expected["output_ids"]),
                stop_ids: ids(&expected["params"]["eos_token_ids"]),
                logits: row(format!("{key}.logits")),
                probabilities: row(format!("{key}.probs")),
                key,
                expected,
            }
        })
        .collect()
}
