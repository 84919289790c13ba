//! The property of any bytes as a GGUF file, checked by the ordinary tests and by libFuzzer (`fuzz/`).
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use models::gguf::{Gguf, GgufModel, Value};
use models::{GenerationDefaults, ModelConfig, ModelFiles, Weights};
use text::{ChatTemplate, Tokenizer};

use crate::counter::allocated_bytes;
use crate::texts::TextFiles;

/// Most bytes that are allocated for a file, freed ones included: a constant part, which the expressions of a tokenizer take, and a part
/// per byte.
const MOST: (usize, usize) = (256 << 20, 256);

/// Opening and reading everything does not panic; an error is one line. Returns whether the file is accepted.
pub fn read(bytes: &[u8]) -> bool {
    let gguf = match Gguf::from_bytes("fuzzed.gguf", Arc::from(bytes)) {
        Ok(gguf) => gguf,
        Err(error) => {
            check_message(&error);
            return false;
        }
    };
    for key in gguf.keys() {
        walk(gguf.value(key).unwrap());
    }
    for tensor in gguf.tensors().values() {
        let values = tensor.kind.values(gguf.data(tensor));
        assert_eq!(values.len(), tensor.shape.iter().product::<usize>());
    }
    true
}

/// Loading everything but the weights does not panic and takes little memory; an error is one line. Returns whether there is a tokenizer.
pub fn load(bytes: &[u8]) -> bool {
    let before = allocated_bytes();
    let loaded = load_all(bytes);
    let taken = allocated_bytes() - before;
    assert!(taken <= MOST.0 + MOST.1 * bytes.len(), "{taken} bytes for a file of {}", bytes.len());
    loaded
}

fn load_all(bytes: &[u8]) -> bool {
    let model = Gguf::from_bytes("fuzzed.gguf", Arc::from(bytes)).and_then(GgufModel::new);
    let files = match model {
        Ok(model) => ModelFiles::Gguf { path: "fuzzed.gguf".into(), model: Arc::new(model) },
        Err(error) => {
            check_message(&error);
            return false;
        }
    };
    let results = [
        Weights::open(&files).map(|_| ()),
        ModelConfig::load(&files).map(|_| ()),
        GenerationDefaults::load(&files, &[]).map(|_| ()),
    ];
    results.iter().filter_map(|result| result.as_ref().err()).for_each(check_message);
    ChatTemplate::load(&TextFiles(&files)).as_ref().err().into_iter().for_each(check_message);
    let tokenizer = match Tokenizer::load(&TextFiles(&files)) {
        Ok(tokenizer) => tokenizer,
        Err(error) => {
            check_message(&error);
            return false;
        }
    };
    const TEXT: &str = "A text\n\nwith 1234 <|im_end|></s>  ▁é你🙂";
    for special in [false, true] {
        let ids = tokenizer.encode(TEXT, special).unwrap();
        assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()));
        tokenizer.decode(&ids, special).unwrap();
    }
    true
}

fn check_message(error: &impl ToString) {
    let message = error.to_string();
    assert!(message.starts_with("fuzzed.gguf") && !message.contains('\n') && message.len() < 2000, "{message}");
}

/// Visits a value, whose elements must all be there.
fn walk(value: Value<'_>) {
    let _ = (value.unsigned(), value.float(), value.text(), value.to_string());
    if let Some(array) = value.array() {
        assert_eq!(array.iter().map(walk).count(), array.len());
    }
}
