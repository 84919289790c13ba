//! GGUF files made by the tests.

use serde_json::Value;

/// A file with any contents, true or false.
#[derive(Clone)]
pub struct Made {
    pub version: u32,
    pub keys: Vec<(String, Vec<u8>)>,
    pub tensors: Vec<Info>,
    pub alignment: usize,
    pub data: Vec<u8>,
}

/// The info of a tensor as it is written.
#[derive(Clone)]
pub struct Info {
    pub name: String,
    pub dims: Vec<u64>,
    pub id: u32,
    pub offset: u64,
}

pub fn string(text: impl AsRef<[u8]>) -> Vec<u8> {
    let text = text.as_ref();
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

/// A value with its type.
pub fn u32_value(number: u32) -> Vec<u8> {
    [4_u32.to_le_bytes(), number.to_le_bytes()].concat()
}

pub fn i32_value(number: i32) -> Vec<u8> {
    [&5_u32.to_le_bytes()[..], &number.to_le_bytes()].concat()
}

pub fn u16_value(number: u16) -> Vec<u8> {
    [&2_u32.to_le_bytes()[..], &number.to_le_bytes()].concat()
}

pub fn f32_value(number: f32) -> Vec<u8> {
    [6_u32.to_le_bytes(), number.to_le_bytes()].concat()
}

pub fn text_value(text: &str) -> Vec<u8> {
    [&8_u32.to_le_bytes()[..], &string(text)].concat()
}

/// An array: the type and the number of its elements, then their bytes.
pub fn array_value(kind: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    [&9_u32.to_le_bytes()[..], &kind.to_le_bytes(), &count.to_le_bytes(), elements].concat()
}

/// The keys that most architectures have, without the architecture, from a configuration in Hugging Face layout.
pub fn usual_keys(json: &Value) -> impl Iterator<Item = (&'static str, Vec<u8>)> {
    let number = |key: &str| json[key].as_u64().map(|number| u32_value(number as u32));
    let real = |number: &Value| number.as_f64().map(|number| f32_value(number as f32));
    let all = [
        ("context_length", number("max_position_embeddings")),
        ("embedding_length", number("hidden_size")),
        ("block_count", number("num_hidden_layers")),
        ("feed_forward_length", number("intermediate_size")),
        ("attention.head_count", number("num_attention_heads")),
        ("attention.head_count_kv", number("num_key_value_heads")),
        ("attention.key_length", number("head_dim")),
        ("attention.value_length", number("head_dim")),
        ("attention.layer_norm_rms_epsilon", real(&json["norm_eps"]).or(real(&json["rms_norm_eps"]))),
        ("rope.freq_base", real(&json["rope_theta"]).or(real(&json["rope_parameters"]["rope_theta"]))),
    ];
    all.into_iter().filter_map(|(key, value)| Some((key, value?)))
}

impl Made {
    pub fn new() -> Made {
        Made { version: 3, keys: Vec::new(), tensors: Vec::new(), alignment: 32, data: Vec::new() }
    }

    pub fn key(mut self, name: &str, value: Vec<u8>) -> Made {
        self.keys.push((name.into(), value));
        self
    }

    /// Adds a tensor with its data, dimensions innermost first.
    pub fn tensor(mut self, name: &str, dims: &[u64], id: u32, data: &[u8]) -> Made {
        self.data.resize(self.data.len().next_multiple_of(self.alignment), 0);
        let offset = self.data.len() as u64;
        self.tensors.push(Info { name: name.into(), dims: dims.to_vec(), id, offset });
        self.data.extend_from_slice(data);
        self
    }

    /// A float32 tensor.
    pub fn floats(self, name: &str, dims: &[u64], values: &[f32]) -> Made {
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensor(name, dims, 0, &data)
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (name, value) in &self.keys {
            out.extend(string(name));
            out.extend(value);
        }
        for Info { name, dims, id, offset } in &self.tensors {
            out.extend(string(name));
            out.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(id.to_le_bytes());
            out.extend(offset.to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(&self.data);
        out
    }
}

/// A small file with every kind of value and two tensors.
pub fn small() -> Made {
    let strings: Vec<u8> = ["a", "", "ccc"].iter().flat_map(string).collect();
    let inner = &array_value(4, 2, &[1, 0, 0, 0, 2, 0, 0, 0])[4..];
    let nested = array_value(9, 2, &[inner, inner].concat());
    Made::new()
        .key("general.architecture", text_value("llama"))
        .key("general.alignment", u32_value(32))
        .key("llama.block_count", u32_value(7))
        .key("llama.rope.freq_base", f32_value(1e4))
        .key("signed", [&5_u32.to_le_bytes()[..], &(-3_i32).to_le_bytes()].concat())
        .key("truth", [&7_u32.to_le_bytes()[..], &[1]].concat())
        .key("tokens", array_value(8, 3, &strings))
        .key("nested", nested)
        .floats("one", &[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        .tensor("two", &[32, 2], 8, &[1; 68])
}
