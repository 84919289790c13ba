//! Loading of linear layers and norms from the checkpoint to the device, and their size there.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use attention_kernels::{Dtype, KernelError, KernelSet, LinearArgs, LinearScratch, Rows};
use device::{Buffer, Device, Features};
use linear::{Arithmetic, ByteMatrix, Matrix, PartForm, Purpose, Uploader, WeightRows};

use crate::checkpoint::quantized::{self, Module};
use crate::decoder::{self, Activation, Decoder, Form, Mixer, NormKind, Part, Pick};
use crate::{LoadError, Weights};

/// `y = x·Wᵀ + bias`, one or several fused projections.
pub(super) struct Linear {
    pub weights: Matrix,
    pub bias: Option<Buffer>,
}

impl Linear {
    /// Applies the layer to the first `rows` rows of `x`. `output` is the type of `y`.
    pub fn run(
        &self,
        (kernels, device): (&KernelSet, &dyn Device),
        x: Rows<'_>,
        rows: usize,
        y: &mut Buffer,
        output: Dtype,
        scratch: Option<&mut LinearScratch>,
    ) -> Result<(), KernelError> {
        let (weights, bias) = (&self.weights, self.bias.as_ref());
        let args = LinearArgs { x, rows, weights, bias, y, output, activation: None, scratch };
        kernels.linear.linear(device, args)
    }

    /// [`Linear::run`] and the activation of its outputs, if the layer [takes one](Linear::takes_activation).
    pub fn run_activated(
        &self,
        (kernels, device): (&KernelSet, &dyn Device),
        x: Rows<'_>,
        rows: usize,
        y: &mut Buffer,
        output: Dtype,
        activation: Activation,
    ) -> Result<(), KernelError> {
        let (weights, bias, activation) = (&self.weights, self.bias.as_ref(), Some(activation));
        kernels.linear.linear(device, LinearArgs { x, rows, weights, bias, y, output, activation, scratch: None })
    }

    /// Whether its product computes the activation of its outputs.
    pub fn takes_activation(&self, kernels: &KernelSet) -> bool {
        let capabilities = &kernels.linear.capabilities;
        capabilities.activates && self.weights.host().is_ok_and(|weights| weights.takes_activation(capabilities.isa))
    }
}

/// A norm of groups of `width` elements of a row.
pub(super) struct Norm {
    /// Float32: `[width]`, which serve every group, or one for each element of a row.
    pub weight: Buffer,
    /// Float32, as many as weights.
    pub bias: Option<Buffer>,
    pub width: usize,
    pub eps: f32,
    /// Whether the mean is subtracted first.
    pub centre: bool,
}

/// The weights of a mixture of experts.
pub(super) struct LoadedExperts {
    /// The projections of each expert: gate and up, down. On a device that launches kernels, one pair whose matrices are stacked.
    pub networks: Vec<[Linear; 2]>,
    /// Float32 `[num_experts]`, for the choice alone.
    pub choice_bias: Option<Buffer>,
    /// Float32 `[num_experts]`, factors of the weights.
    pub expert_scale: Option<Buffer>,
}

/// Called with the bytes of the checkpoint that are loaded and with all of them, before they are read; an error ends the loading.
pub type Progress<'a> = &'a dyn Fn(u64, u64) -> Result<(), LoadError>;

/// What weights become.
#[derive(Clone, Copy)]
pub(super) struct Types {
    /// Type of biases.
    pub dtype: Dtype,
    /// How products with packed matrices round and sum.
    pub arithmetic: Arithmetic,
    /// Whether products take weights that are codes.
    pub takes_codes: bool,
}

impl Types {
    pub fn of(kernels: &KernelSet) -> Types {
        let (dtype, arithmetic) = (kernels.format.dtype, kernels.arithmetic);
        Types { dtype, arithmetic, takes_codes: kernels.linear.capabilities.takes_codes }
    }
}

/// A module, and which of its matrices if it has several.
type MatrixName = (String, Option<usize>);

/// Uploads weights of a checkpoint after checking their shapes.
pub(super) struct Loader<'a> {
    pub weights: &'a Weights,
    uploader: Uploader<'a>,
    types: Types,
    progress: Progress<'a>,
    done: u64,
    /// The last quantised module whose weights were unpacked, with the number of its matrix.
    unpacked: Option<(MatrixName, Vec<u8>)>,
}

/// The rows of a part of a linear layer.
enum Found<'a> {
    Numbers(Dtype, Cow<'a, [u8]>),
    Stored(Box<Module<'a>>),
}

impl Found<'_> {
    fn rows(&self) -> WeightRows<'_> {
        match self {
            Found::Numbers(dtype, data) => WeightRows::Numbers(*dtype, data),
            Found::Stored(module) => WeightRows::Stored(module.part()),
        }
    }
}

impl<'a> Loader<'a> {
    pub fn new(
        weights: &'a Weights,
        device: &'a dyn Device,
        types: Types,
        progress: Progress<'a>,
    ) -> Result<Loader<'a>, LoadError> {
        let uploader = Uploader::new(device)?.with_arithmetic(types.arithmetic);
        Ok(Loader { weights, uploader, types, progress, done: 0, unpacked: None })
    }

    /// All linear layers without those of experts and heads, in the order of [`Decoder::linears`], in their declared forms. Those that
    /// `target` declares equally are its.
    pub fn linears(
        &mut self,
        decoder: &Decoder,
        target: Option<(&Decoder, &[Arc<Linear>])>,
    ) -> Result<Vec<Arc<Linear>>, LoadError> {
        let load = |linear| {
            let place = target.and_then(|(target, loaded)| Some(&loaded[shared(decoder, linear, target)?]));
            match place {
                Some(loaded) => Ok(Arc::clone(loaded)),
                None => Ok(Arc::new(self.stacked(&[linear], decoder.purpose(linear))?)),
            }
        };
        decoder.linears().map(load).collect()
    }

    /// Linear layers of the same inputs and form as one, their rows stacked.
    fn stacked(&mut self, linears: &[&decoder::Linear], purpose: Purpose) -> Result<Linear, LoadError> {
        let Some(first) = linears.first() else {
            return Err(LoadError::Device("no linear layers to load".to_string()));
        };
        let mut rows = Vec::new();
        let mut read = 0;
        let mut biases = Vec::new();
        for linear in linears {
            for part in linear.parts.iter().map(|part| self.weights.stored_part(part)) {
                let found = self.rows(&part, linear.inputs)?;
                read += match &found {
                    Found::Numbers(_, data) => data.len() as u64,
                    Found::Stored(module) => module.bytes,
                };
                rows.push(found);
                if linear.bias {
                    let bias = self.weights.expect(&part.bias(), &part.pick.bias_shape())?;
                    let pick = Pick { transposed: false, inputs: None, ..part.pick };
                    biases.push((bias.dtype, picked(pick, part.rows, 1, bias.dtype, bias.elements())));
                }
            }
        }
        self.progress(read)?;
        let shape = [linears.iter().map(|linear| linear.rows()).sum(), first.inputs];
        let parts: Vec<_> = rows.iter().map(Found::rows).collect();
        let purpose = if self.types.takes_codes { purpose } else { Purpose::Numbers };
        let weights = self.uploader.matrix(first.form.quantization(), self.types.dtype, shape, &parts, purpose)?;
        // Do not keep the checkpoint's pages in memory in addition to the packed copy.
        for found in &rows {
            match found {
                Found::Numbers(_, Cow::Borrowed(data)) => self.weights.release(data),
                Found::Numbers(_, Cow::Owned(_)) => {}
                Found::Stored(module) => self.weights.release(module.codes),
            }
        }
        let biases: Vec<_> = biases.iter().map(|(dtype, data)| (*dtype, &data[..])).collect();
        let bias = if first.bias { Some(self.uploader.numbers(self.types.dtype, &biases)?) } else { None };
        Ok(Linear { weights, bias })
    }

    /// The rows of a part in the form in which the checkpoint stores them, or as numbers.
    fn rows(&mut self, part: &Part, inputs: usize) -> Result<Found<'a>, LoadError> {
        let Some(module) = quantized::find(self.weights, part, inputs)? else {
            let weight = self.weights.expect(&part.weight(), &part.pick.shape(inputs))?;
            let numbers = picked(part.pick, part.rows, inputs, weight.dtype, weight.elements());
            if part.pick.inputs.is_some() {
                // They are a copy.
                self.weights.release(weight.data);
            }
            return Ok(Found::Numbers(weight.dtype, numbers));
        };
        if module.in_rows {
            return Ok(Found::Stored(Box::new(module)));
        }
        // The heads of latent attention are cut out of one module, one after the other.
        let name = (part.name.clone(), part.pick.matrix.map(|(index, _)| index));
        let numbers = match self.unpacked.take() {
            Some((last, numbers)) if last == name => numbers,
            _ => module.numbers(),
        };
        let cut = picked(module.pick, part.rows, inputs, Dtype::F32, Cow::Borrowed(&numbers)).into_owned();
        self.unpacked = Some((name, numbers));
        Ok(Found::Numbers(Dtype::F32, Cow::Owned(cut)))
    }

    /// The products of heads, each alone or stacked, with heads, outputs and inputs.
    pub fn heads(&mut self, linears: &[decoder::Linear], stacks: bool) -> Result<(Vec<Linear>, [usize; 3]), LoadError> {
        let shape = [
            linears.len(),
            linears.first().map_or(0, |first| first.rows()),
            linears.first().map_or(0, |first| first.inputs),
        ];
        let loaded = match stacks {
            true => vec![self.stacked(&linears.iter().collect::<Vec<_>>(), Purpose::Numbers)?],
            false => linears.iter().map(|head| self.stacked(&[head], Purpose::Numbers)).collect::<Result<_, _>>()?,
        };
        Ok((loaded, shape))
    }

    /// The networks of a mixture of experts, each alone or stacked.
    pub fn experts(&mut self, experts: &decoder::Experts, stacks: bool) -> Result<LoadedExperts, LoadError> {
        let networks = match stacks {
            true => {
                let [gate_up, down] = experts.stacks();
                vec![[self.stacked(&gate_up, stack_of(&gate_up))?, self.stacked(&down, stack_of(&down))?]]
            }
            false => {
                let mut load = |mlp: &decoder::Mlp| {
                    let mut one = |linear| self.stacked(&[linear], Purpose::Product);
                    Ok([one(&mlp.gate_up)?, one(&mlp.down)?])
                };
                experts.experts.iter().map(&mut load).collect::<Result<_, LoadError>>()?
            }
        };
        let decoder::Routing { choice_bias, expert_scale, .. } = &experts.routing;
        let count = [experts.experts.len()];
        let choice_bias = choice_bias.as_ref().map(|(name, shape)| self.vector(name, shape)).transpose()?;
        let expert_scale = expert_scale.as_ref().map(|name| self.vector(name, &count)).transpose()?;
        Ok(LoadedExperts { networks, choice_bias, expert_scale })
    }

    /// A norm; its weights are float32.
    pub fn norm(&mut self, norm: &decoder::Norm) -> Result<Norm, LoadError> {
        let mut weight = Vec::new();
        for name in &norm.weight {
            weight.extend(self.weights.expect(name, &norm.shape)?.to_f32());
        }
        if norm.weight.is_empty() {
            weight.resize(norm.width, 1.0);
        } else if norm.plus_one {
            weight.iter_mut().for_each(|weight| *weight += 1.0);
        }
        if norm.factor != 1.0 {
            weight.iter_mut().for_each(|weight| *weight *= norm.factor);
        }
        let part = norm.part.map_or(0..weight.len(), |(first, count)| first..first + count);
        let bias = norm.bias.as_ref().map(|name| {
            let bias = self.weights.expect(name, &norm.shape)?.to_f32();
            self.numbers(&bias[part.clone()])
        });
        let bias = bias.transpose()?;
        let (width, eps, centre) = (norm.width, norm.eps, norm.kind == NormKind::Layer);
        Ok(Norm { weight: self.numbers(&weight[part])?, bias, width, eps, centre })
    }

    /// A tensor of one number.
    pub fn scalar(&self, name: &str) -> Result<f32, LoadError> {
        Ok(self.weights.expect(name, &[1])?.to_f32().first().copied().unwrap_or(1.0))
    }

    /// A tensor in float32.
    pub fn vector(&mut self, name: &str, shape: &[usize]) -> Result<Buffer, LoadError> {
        let values = self.weights.expect(name, shape)?.to_f32();
        self.numbers(&values)
    }

    /// Numbers in float32.
    pub fn numbers(&mut self, values: &[f32]) -> Result<Buffer, LoadError> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Ok(self.uploader.numbers(Dtype::F32, &[(Dtype::F32, &bytes)])?)
    }

    /// Reports this many more bytes of the checkpoint.
    fn progress(&mut self, read: u64) -> Result<(), LoadError> {
        self.done += read;
        (self.progress)(self.done, self.weights.total_bytes())
    }
}

/// The place of a linear layer of a predictor among those of its target, if that declares it too, for the same purpose.
pub(super) fn shared(decoder: &Decoder, linear: &decoder::Linear, target: &Decoder) -> Option<usize> {
    let is_same = |other: &decoder::Linear| {
        let is_head_too = target.is_tied() && std::ptr::eq(other, &target.embedding.tokens);
        linear == other && (is_head_too || decoder.purpose(linear) == target.purpose(other))
    };
    target.linears().position(is_same)
}

/// What stacked matrices of experts are for.
pub(super) fn stack_of(linears: &[&decoder::Linear]) -> Purpose {
    linears.first().map_or(Purpose::Numbers, |first| Purpose::Stack(first.rows()))
}

/// Rows `[rows, inputs]` of a tensor: a piece of it, or a copy where they do not lie one behind the other.
fn picked(pick: Pick, rows: usize, inputs: usize, dtype: Dtype, elements: Cow<'_, [u8]>) -> Cow<'_, [u8]> {
    let size = dtype.bytes();
    let (first_input, all_inputs) = pick.inputs.unwrap_or((0, inputs));
    let matrix = pick.total * all_inputs * size;
    let start = pick.matrix.map_or(0, |(index, _)| index * matrix);
    let wanted = start..start + matrix;
    if !pick.transposed && pick.inputs.is_none() && pick.run >= rows {
        let row = inputs * size;
        let rows = wanted.start + pick.first * row..wanted.start + (pick.first + rows) * row;
        return match elements {
            Cow::Borrowed(data) => Cow::Borrowed(&data[rows]),
            Cow::Owned(data) if rows == (0..data.len()) => Cow::Owned(data),
            Cow::Owned(data) => Cow::Owned(data[rows].to_vec()),
        };
    }
    let data = &elements[wanted];
    let mut copy = Vec::with_capacity(rows * inputs * size);
    for row in (0..rows).map(|row| pick.row(row)) {
        if pick.transposed {
            for input in first_input..first_input + inputs {
                copy.extend_from_slice(&data[(input * pick.total + row) * size..][..size]);
            }
        } else {
            copy.extend_from_slice(&data[(row * all_inputs + first_input) * size..][..inputs * size]);
        }
    }
    Cow::Owned(copy)
}

/// Loads the matrix of a linear layer, without its bias, to a device that computes in `dtype`, for products.
///
/// # Errors
/// Those of [`Model::load`](super::Model::load).
pub fn load_matrix(
    linear: &decoder::Linear,
    weights: &Weights,
    device: &dyn Device,
    dtype: Dtype,
) -> Result<Matrix, LoadError> {
    let plain = decoder::Linear { bias: false, ..linear.clone() };
    let types = Types { dtype, arithmetic: Arithmetic::Exact, takes_codes: true };
    let mut loader = Loader::new(weights, device, types, &|_, _| Ok(()))?;
    Ok(loader.stacked(&[&plain], Purpose::Product)?.weights)
}

/// The same decoder with the form of each linear layer of which the checkpoint stores weights in fewer bits.
///
/// # Errors
/// A quantised module whose tensors are missing or contradict its scheme.
pub fn in_stored_forms(mut decoder: Decoder, weights: &Weights) -> Result<Decoder, LoadError> {
    for linear in decoder.linears_mut() {
        let mut modules = Vec::new();
        for part in linear.parts.iter().map(|part| weights.stored_part(part)) {
            modules.push(quantized::find(weights, &part, linear.inputs)?.filter(|module| module.in_rows));
        }
        if modules.iter().any(Option::is_some) {
            let takes_blocks = modules.iter().all(|module| module.as_ref().is_some_and(|module| module.takes_blocks()));
            let parts: Option<Vec<_>> = modules.iter().map(|module| module.as_ref().map(Module::part)).collect();
            let parts: Vec<_> = parts.into_iter().flatten().map(|part| (part.rows, PartForm::Stored(part))).collect();
            let rounding = ByteMatrix::rounding_of(Features::LAUNCHING, Purpose::Product, linear.inputs, &parts);
            let grains = || modules.iter().flatten().map(Module::grain);
            let fits = |most: usize| grains().all(|grain| grain > 0 && most.is_multiple_of(grain));
            let grain = grains().max().filter(|most| fits(*most)).unwrap_or(0);
            linear.form = Form::Stored { takes_blocks, rounds: rounding.is_some(), grain };
        }
    }
    Ok(decoder)
}

/// Type in which the checkpoint stores its embedding, for a model that computes in the checkpoint's type; `None` if it stores codes, or
/// the tensor is missing.
pub fn checkpoint_dtype(decoder: &Decoder, weights: &Weights) -> Option<Dtype> {
    let embedding = &decoder.embedding.tokens;
    let part = weights.stored_part(embedding.parts.first()?);
    match quantized::find(weights, &part, embedding.inputs) {
        Ok(Some(_)) => None,
        _ => weights.get(&part.weight()).map(|view| view.dtype),
    }
}

/// Checks that the checkpoint has every tensor that the model reads, in a usable type and shape, and no other tensor that might
/// change the results. Reads only the headers of the checkpoint.
///
/// # Errors
/// The first tensor that is missing, has an unexpected shape or type, or is not read.
pub fn check_weights(decoder: &Decoder, weights: &Weights) -> Result<(), LoadError> {
    let mut read = BTreeSet::new();
    for linear in decoder.all_linears() {
        for part in linear.parts.iter().map(|part| weights.stored_part(part)) {
            match quantized::find(weights, &part, linear.inputs)? {
                Some(module) => read.extend(module.tensors.into_iter().map(str::to_string)),
                None => {
                    read.insert(weights.expect(&part.weight(), &part.pick.shape(linear.inputs))?.name);
                }
            }
            if linear.bias {
                read.insert(weights.expect(&part.bias(), &part.pick.bias_shape())?.name);
            }
        }
    }
    for (name, shape) in decoder.other_tensors() {
        read.insert(weights.expect(&name, &shape)?.name);
    }
    let unused = weights.names().find(|name| !read.contains(*name) && !is_harmless(name, decoder));
    unused.map_or(Ok(()), |name| Err(weights.unused(name)))
}

/// Whether a tensor that the model does not read cannot change its results: buffers that are computed, scales of a cache, a head
/// that is tied, layers behind the last one (which predict further tokens), parts for other kinds of input.
fn is_harmless(name: &str, decoder: &Decoder) -> bool {
    const ENDS: [&str; 12] = [
        "act_fn.beta",
        "act_fn.eps",
        "rotary_emb.inv_freq",
        "rotary_emb.cos_cached",
        "rotary_emb.sin_cached",
        "attn.bias",
        "attn.masked_bias",
        "attention.bias",
        "attention.masked_bias",
        "k_scale",
        "v_scale",
        "kv_scale",
    ];
    const PARTS: [&str; 10] = [
        "mtp",
        "visual",
        "vision_tower",
        "vision_model",
        "multi_modal_projector",
        "mm_projector",
        "audio_tower",
        "embed_vision",
        "embed_audio",
        "image_newline",
    ];
    // Encoders have buffers and heads for tokens that are not read.
    const OF_ENCODERS: [&str; 8] = [
        "position_ids",
        "pooler",
        "cls",
        "lm_head",
        "vocab_transform",
        "vocab_layer_norm",
        "vocab_projector",
        "decoder",
    ];
    // Modules that a layer does not use if it reads the keys and values of another layer.
    const UNSHARED: [&str; 4] = ["k_proj", "v_proj", "k_norm", "v_norm"];
    let shares_and_ignores = |layer: &decoder::Layer| {
        let mut mixers = layer.branches.iter().map(|branch| &branch.mixer);
        let shares = mixers.any(|mixer| matches!(mixer, Mixer::Attention(attention) if attention.shares.is_some()));
        shares && name.split('.').any(|word| UNSHARED.contains(&word))
    };
    let words = name.split('.');
    let layer = name.split('.').find_map(|word| word.parse::<usize>().ok());
    let is_head = matches!(name.rsplit('.').nth(1), Some("lm_head" | "embed_out"));
    ENDS.iter().any(|end| name.ends_with(end))
        || words.clone().any(|word| PARTS.contains(&word))
        || decoder.is_encoder() && words.clone().any(|word| OF_ENCODERS.contains(&word))
        || decoder.is_encoder() && decoder.head.classifier.is_none() && name.starts_with("head.")
        || layer.is_some_and(|layer| decoder.layers.get(layer).is_none_or(shares_and_ignores))
        || is_head && decoder.is_tied()
}
