//! The serialized form of a step's requests, in which requests with the same sampling parameters share them.
//!
//! All prompts of a call have the same lists, such as `bad_words`, which can be a thousand times as long as a prompt.

use std::sync::Arc;

use sampling::SamplingParams;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::NewRequest;

pub(super) fn serialize<S: Serializer>(requests: &[Arc<NewRequest>], serializer: S) -> Result<S::Ok, S::Error> {
    let mut distinct: Vec<&SamplingParams> = Vec::new();
    let mut indices = Vec::with_capacity(requests.len());
    for request in requests {
        let known = distinct.iter().position(|known| known.is_clone_of(&request.sampling));
        indices.push(known.unwrap_or(distinct.len()));
        if known.is_none() {
            distinct.push(&request.sampling);
        }
    }
    (distinct, indices, requests).serialize(serializer)
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Arc<NewRequest>>, D::Error> {
    let (distinct, indices, requests) =
        <(Vec<SamplingParams>, Vec<usize>, Vec<NewRequest>)>::deserialize(deserializer)?;
    if indices.len() != requests.len() {
        return Err(Error::invalid_length(indices.len(), &"an index for each request"));
    }
    let join = |(request, index): (NewRequest, usize)| {
        let sampling = distinct.get(index).cloned();
        let sampling = sampling.ok_or_else(|| Error::invalid_length(index, &"an index of sampling parameters"))?;
        Ok(Arc::new(NewRequest { sampling, ..request }))
    };
    requests.into_iter().zip(indices).map(join).collect()
}
