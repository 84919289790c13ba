//! The property of any bytes as a checkpoint of quantised safetensors, checked by the ordinary tests and by libFuzzer
//! (`fuzz/`).
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;

use models::decoder::{Linear, Part, Role};
use models::{LoadError, ModelFiles, Weights, load_matrix};

/// Outputs and inputs that the module may have.
const SHAPES: [[usize; 2]; 6] = [[64, 128], [32, 96], [40, 160], [24, 64], [12, 128], [24, 160]];

/// Opening the checkpoint in these bytes and packing its module `m` does not panic; an error is one line. The first two bytes are
/// the length of `config.json`, the rest is the file of tensors. Returns whether it is accepted.
pub fn read(folder: &Path, bytes: &[u8]) -> bool {
    let (length, rest) = bytes.split_at_checked(2).unwrap_or((&[0, 0], bytes));
    let length = usize::from(u16::from_le_bytes([length[0], length[1]])).min(rest.len());
    fs::write(folder.join("config.json"), &rest[..length]).unwrap();
    fs::write(folder.join("model.safetensors"), &rest[length..]).unwrap();
    let load = |[n, k]: [usize; 2]| {
        let weights = Weights::open(&ModelFiles::open(folder)?)?;
        load_matrix(
            &Linear::new(k, Role::Column, [Part::new("m", n)]),
            &weights,
            &*device::open("cpu", Some(1))?,
            device::Dtype::F32,
        )
    };
    let is_accepted = |shape| {
        let result: Result<_, LoadError> = load(shape);
        let message = result.as_ref().err().map(|error| error.to_string());
        assert!(message.is_none_or(|it| !it.contains('\n') && !it.is_empty() && it.len() < 20_000));
        result.is_ok()
    };
    SHAPES.map(is_accepted).contains(&true)
}
