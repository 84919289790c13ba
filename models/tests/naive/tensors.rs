//! The tensors of a checkpoint, read from files or made from a seed as the oracle asks for them: a made checkpoint holds exactly the
//! tensors that the oracle names, in the shapes that it states.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use half::bf16;
use models::Weights;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::math::{Rows, rms, scaled_by, standardise};

struct Tensor {
    shape: Vec<usize>,
    values: Rc<Vec<f64>>,
}

pub struct Tensors {
    stored: Option<Weights>,
    known: RefCell<BTreeMap<String, Tensor>>,
    random: Cell<u64>,
    pub narrow: bool,
    /// The input rows of every linear layer in the order of computation, each with the layer's name, since [`Tensors::record`].
    recorded: RefCell<Option<Vec<(String, Rows)>>>,
}

impl Tensors {
    pub fn stored(weights: Weights) -> Tensors {
        let narrow = weights.names().next().is_some_and(|name| weights.get(name).unwrap().dtype == device::Dtype::Bf16);
        Tensors {
            stored: Some(weights),
            known: RefCell::default(),
            random: Cell::new(0),
            narrow,
            recorded: RefCell::default(),
        }
    }

    /// Tensors of random values, of bfloat16 if `narrow`.
    pub fn made(seed: u64, narrow: bool) -> Tensors {
        Tensors {
            stored: None,
            known: RefCell::default(),
            random: Cell::new(seed),
            narrow,
            recorded: RefCell::default(),
        }
    }

    pub fn record(&self) {
        *self.recorded.borrow_mut() = Some(Vec::new());
    }

    /// Records the inputs of a linear layer.
    pub fn enter(&self, x: &Rows, name: &str) {
        if let Some(recorded) = &mut *self.recorded.borrow_mut() {
            recorded.push((name.to_string(), x.clone()));
        }
    }

    pub fn recorded(&self) -> Vec<(String, Rows)> {
        self.recorded.take().unwrap_or_default()
    }

    /// A number of [−1, 1) by SplitMix64.
    fn random(&self) -> f64 {
        let state = self.random.get().wrapping_add(0x9E37_79B9_7F4A_7C15);
        self.random.set(state);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    /// A tensor; where it is made, its values are `centre ± spread`.
    pub fn get(&self, name: &str, shape: &[usize], centre: f64, spread: f64) -> Rc<Vec<f64>> {
        if let Some(known) = self.known.borrow().get(name) {
            assert_eq!(known.shape, shape, "{name}");
            return Rc::clone(&known.values);
        }
        let values: Vec<f64> = match &self.stored {
            Some(weights) => {
                let view = weights.get(name).unwrap_or_else(|| panic!("the checkpoint has no {name}"));
                assert_eq!(view.shape, shape, "{name}");
                view.to_f32().iter().map(|v| f64::from(*v)).collect()
            }
            None => {
                let value = || (centre + spread * self.random()) as f32;
                let round = |v: f32| if self.narrow { bf16::from_f32(v).to_f32() } else { v };
                (0..shape.iter().product()).map(|_| f64::from(round(value()))).collect()
            }
        };
        let values = Rc::new(values);
        let tensor = Tensor { shape: shape.to_vec(), values: Rc::clone(&values) };
        self.known.borrow_mut().insert(name.to_string(), tensor);
        values
    }

    /// The made tensors as a safetensors file. `change` gives the name on disk, and may alter a shape or leave a tensor out.
    pub fn to_bytes(&self, change: impl Fn(&str, &mut Vec<usize>) -> Option<String>) -> Vec<u8> {
        let known = self.known.borrow();
        let bytes = |tensor: &Tensor| -> Vec<u8> {
            let wide = tensor.values.iter().map(|v| *v as f32);
            match self.narrow {
                true => wide.flat_map(|v| bf16::from_f32(v).to_le_bytes()).collect(),
                false => wide.flat_map(f32::to_le_bytes).collect(),
            }
        };
        let dtype = if self.narrow { Dtype::BF16 } else { Dtype::F32 };
        let entry = |(name, tensor): (&String, &Tensor)| {
            let mut shape = tensor.shape.clone();
            change(name, &mut shape).map(|name| (name, shape, bytes(tensor)))
        };
        let all: Vec<_> = known.iter().filter_map(entry).collect();
        let views = all.iter().map(|(name, shape, data)| (name, TensorView::new(dtype, shape.clone(), data).unwrap()));
        safetensors::serialize(views, None).unwrap()
    }

    /// Names and shapes in the order of names.
    pub fn names(&self) -> Vec<(String, Vec<usize>)> {
        self.known.borrow().iter().map(|(name, tensor)| (name.clone(), tensor.shape.clone())).collect()
    }

    /// `prefix` if tensors have it: some published checkpoints lack it.
    pub fn prefix(&self, prefix: &'static str, tensor: &str) -> &'static str {
        match &self.stored {
            Some(weights) if weights.get(&format!("{prefix}{tensor}")).is_none() => "",
            _ => prefix,
        }
    }

    /// A weight near 1.
    pub fn scale(&self, name: &str, len: usize) -> Rc<Vec<f64>> {
        self.get(name, &[len], 1.0, 0.4)
    }

    pub fn vector(&self, name: &str, len: usize) -> Rc<Vec<f64>> {
        self.get(name, &[len], 0.0, 0.4)
    }

    /// A matrix `[outputs, inputs]`, or a stack of them, whose product has about the size of its input.
    pub fn matrix(&self, name: &str, shape: &[usize], inputs: usize) -> Rc<Vec<f64>> {
        self.get(name, shape, 0.0, (3.0 / inputs as f64).sqrt())
    }

    /// Rows of a table at these indices.
    pub fn embed(&self, name: &str, [rows, width]: [usize; 2], indices: impl Iterator<Item = usize>) -> Rows {
        let table = self.get(name, &[rows, width], 0.0, 0.8);
        indices.map(|i| table[i * width..][..width].to_vec()).collect()
    }

    /// x·Wᵀ of `name`.weight, plus `name`.bias.
    pub fn linear(&self, x: &Rows, name: &str, outputs: usize, bias: bool) -> Rows {
        self.enter(x, name);
        let inputs = x[0].len();
        let weight = self.matrix(&format!("{name}.weight"), &[outputs, inputs], inputs);
        let bias = bias.then(|| self.vector(&format!("{name}.bias"), outputs));
        product(x, &weight, bias.as_ref().map(|b| &b[..]))
    }

    /// The tied or separate output head.
    pub fn head(&self, x: &[f64], name: &str, vocab: usize, bias: bool) -> Vec<f64> {
        let x = vec![x.to_vec()];
        let table = self.get(&format!("{name}.weight"), &[vocab, x[0].len()], 0.0, 0.2);
        let bias = bias.then(|| self.vector(&format!("{name}.bias"), vocab));
        product(&x, &table, bias.as_ref().map(|b| &b[..])).remove(0)
    }

    pub fn rms(&self, x: &Rows, name: &str, eps: f64) -> Rows {
        rms(x, &self.scale(&format!("{name}.weight"), x[0].len()), eps)
    }

    /// RMS of each head of `dim`, with one weight for all.
    pub fn rms_heads(&self, x: &Rows, name: &str, dim: usize, eps: f64) -> Rows {
        rms(x, &self.scale(&format!("{name}.weight"), dim), eps)
    }

    /// RMS of slices of `dim`, times 1 + weight.
    pub fn rms_plus_one(&self, x: &Rows, name: &str, dim: usize, eps: f64) -> Rows {
        let weight = self.vector(&format!("{name}.weight"), dim);
        rms(x, &weight.iter().map(|w| 1.0 + w).collect::<Vec<_>>(), eps)
    }

    /// LayerNorm with weight, and bias if `bias`.
    pub fn layer_norm(&self, x: &Rows, name: &str, eps: f64, bias: bool) -> Rows {
        let dim = x[0].len();
        let mut out = scaled_by(&standardise(x, dim, eps), &self.scale(&format!("{name}.weight"), dim));
        if bias {
            let bias = self.vector(&format!("{name}.bias"), dim);
            out.iter_mut().for_each(|row| row.iter_mut().zip(bias.iter()).for_each(|(v, b)| *v += b));
        }
        out
    }
}

/// x·Wᵀ + b of a row-major `[outputs, inputs]`.
pub fn product(x: &Rows, weight: &[f64], bias: Option<&[f64]>) -> Rows {
    let inputs = x[0].len();
    let dot = |row: &[f64], w: &[f64]| row.iter().zip(w).map(|(a, b)| a * b).sum::<f64>();
    let one = |row: &Vec<f64>| {
        let outputs = weight.chunks_exact(inputs).enumerate();
        outputs.map(|(o, w)| dot(row, w) + bias.map_or(0.0, |b| b[o])).collect()
    };
    x.iter().map(one).collect()
}
