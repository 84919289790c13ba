//! Values of `config.json` and the rotations that it describes.

use serde_json::Value;

use super::math::{Heads, Rows};

#[derive(Clone, Copy)]
pub struct Config<'a>(pub &'a Value);

impl<'a> Config<'a> {
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    pub fn n_if(&self, key: &str) -> Option<usize> {
        self.get(key).map(|value| value.as_u64().unwrap() as usize)
    }

    pub fn n(&self, key: &str) -> usize {
        self.n_if(key).unwrap_or_else(|| panic!("no {key}"))
    }

    pub fn f_if(&self, key: &str) -> Option<f64> {
        self.get(key).map(|value| value.as_f64().unwrap())
    }

    pub fn f(&self, key: &str, default: f64) -> f64 {
        self.f_if(key).unwrap_or(default)
    }

    pub fn on(&self, key: &str, default: bool) -> bool {
        self.get(key).map_or(default, |value| value.as_bool().unwrap())
    }

    pub fn text(&self, key: &str) -> Option<&'a str> {
        self.get(key).map(|value| value.as_str().unwrap())
    }

    pub fn heads(&self) -> Heads {
        let q = self.n("num_attention_heads");
        let dim = self.n_if("head_dim").unwrap_or(self.n("hidden_size") / q);
        Heads { q, kv: self.n_if("num_key_value_heads").unwrap_or(q), dim }
    }

    /// Whether layer `i` slides by `layer_types`, else by a pattern whose last layer of each group is full.
    pub fn slides(&self, i: usize, pattern: Option<usize>) -> bool {
        match self.get("layer_types") {
            Some(types) => types[i] == "sliding_attention",
            None => pattern.is_some_and(|pattern| !(i + 1).is_multiple_of(pattern)),
        }
    }

    fn rope_dict(&self) -> Config<'a> {
        const NONE: &Value = &Value::Null;
        Config(self.get("rope_parameters").or(self.get("rope_scaling")).unwrap_or(NONE))
    }

    pub fn partial(&self, default: f64) -> f64 {
        self.f_if("partial_rotary_factor").or(self.rope_dict().f_if("partial_rotary_factor")).unwrap_or(default)
    }

    pub fn theta(&self, default: f64) -> f64 {
        self.rope_dict().f_if("rope_theta").or(self.f_if("rope_theta")).unwrap_or(default)
    }

    /// The scaled rope of `dims` dimensions that the configuration states, for sequences of up to `context` tokens.
    pub fn rope(&self, dims: usize, theta: f64, context: usize) -> Rope {
        self.rope_by(self.rope_dict(), dims, self.theta(theta), context)
    }

    /// The rope of a dictionary `dict` of scaling parameters.
    pub fn rope_by(&self, dict: Config, dims: usize, theta: f64, context: usize) -> Rope {
        let kind = dict.text("rope_type").or(dict.text("type")).unwrap_or("default");
        let greatest = || self.n("max_position_embeddings") as f64;
        let original = self.f_if("original_max_position_embeddings").or(dict.f_if("original_max_position_embeddings"));
        let original = || original.unwrap_or_else(greatest);
        let plain = Rope::new(dims, theta);
        let (pi, d) = (std::f64::consts::PI, dims as f64);
        match kind {
            "default" => plain,
            "linear" => plain.scaled(|_, f| f / dict.f_if("factor").unwrap(), 1.0),
            // The greatest length that is served sets the base; shorter sequences than the trained ones leave it.
            "dynamic" if dict.get("alpha").is_some() => {
                Rope::new(dims, theta * dict.f("alpha", 1.0).powf(d / (d - 2.0)))
            }
            "dynamic" => {
                let (s, n) = (dict.f_if("factor").unwrap(), (context as f64).max(greatest()));
                Rope::new(dims, theta * (s * n / greatest() - (s - 1.0)).powf(d / (d - 2.0)))
            }
            "llama3" => {
                let s = dict.f_if("factor").unwrap();
                let (low, high) = (dict.f_if("low_freq_factor").unwrap(), dict.f_if("high_freq_factor").unwrap());
                let scale = |_: usize, f: f64| {
                    let wave = 2.0 * pi / f;
                    let t = (original() / wave - low) / (high - low);
                    match () {
                        () if wave < original() / high => f,
                        () if wave > original() / low => f / s,
                        () => (1.0 - t) * f / s + t * f,
                    }
                };
                plain.scaled(scale, 1.0)
            }
            "yarn" => {
                let s = dict.f_if("factor").unwrap_or_else(|| greatest() / original());
                let turns = |r: f64| d * (original() / (2.0 * pi * r)).ln() / (2.0 * theta.ln());
                let (mut lo, mut hi) = (turns(dict.f("beta_fast", 32.0)), turns(dict.f("beta_slow", 1.0)));
                if dict.on("truncate", true) {
                    (lo, hi) = (lo.floor(), hi.ceil());
                }
                (lo, hi) = (lo.max(0.0), hi.min(d - 1.0));
                if lo == hi {
                    hi += 0.001;
                }
                let factor = dict.f_if("attention_factor").unwrap_or(
                    match (dict.f("mscale", 0.0), dict.f("mscale_all_dim", 0.0)) {
                        (m, all) if m != 0.0 && all != 0.0 => mscale(s, m) / mscale(s, all),
                        _ => mscale(s, 1.0),
                    },
                );
                let ramp = |i: usize| ((i as f64 - lo) / (hi - lo)).clamp(0.0, 1.0);
                plain.scaled(|i, f| f / s * ramp(i) + f * (1.0 - ramp(i)), factor)
            }
            "longrope" | "su" => {
                let key = if context as f64 > original() { "long_factor" } else { "short_factor" };
                let factors: Vec<f64> = serde_json::from_value(dict.get(key).unwrap().clone()).unwrap();
                let s = dict.f_if("factor").unwrap_or_else(|| greatest() / original());
                let stretch = if s <= 1.0 { 1.0 } else { (1.0 + s.ln() / original().ln()).sqrt() };
                plain.scaled(|i, f| f / factors[i], dict.f("attention_factor", stretch))
            }
            // Pairs are those of the whole head; pairs beyond the share have frequency 0.
            "proportional" => {
                let turning = (dict.f("partial_rotary_factor", 1.0) * d / 2.0) as usize;
                plain.scaled(|i, f| if i < turning { f / dict.f("factor", 1.0) } else { 0.0 }, 1.0)
            }
            _ => panic!("rope {kind}"),
        }
    }

    /// The softmax factor of DeepSeek's yarn.
    pub fn mscale_of_scores(&self) -> f64 {
        let dict = self.rope_dict();
        match (dict.f_if("factor"), dict.f("mscale_all_dim", 0.0)) {
            (Some(s), all) if all != 0.0 => mscale(s, all) * mscale(s, all),
            _ => 1.0,
        }
    }

    pub fn rope_value(&self, key: &str) -> Option<f64> {
        self.rope_dict().f_if(key)
    }
}

fn mscale(s: f64, m: f64) -> f64 {
    if s <= 1.0 { 1.0 } else { 0.1 * m * s.ln() + 1.0 }
}

#[derive(Clone)]
pub struct Rope {
    freqs: Vec<f64>,
    factor: f64,
    pub interleaved: bool,
}

impl Rope {
    pub fn new(dims: usize, theta: f64) -> Rope {
        let freqs = (0..dims / 2).map(|i| theta.powf(-2.0 * i as f64 / dims as f64)).collect();
        Rope { freqs, factor: 1.0, interleaved: false }
    }

    /// The rotation with other frequencies, and a factor of its results.
    pub fn scaled(self, f: impl Fn(usize, f64) -> f64, factor: f64) -> Rope {
        let freqs = self.freqs.iter().enumerate().map(|(i, v)| f(i, *v)).collect();
        Rope { freqs, factor, ..self }
    }

    pub fn interleaved(self) -> Rope {
        Rope { interleaved: true, ..self }
    }

    /// Rotates the first dimensions of each head of `dim`.
    pub fn rotate(&self, x: &Rows, dim: usize) -> Rows {
        let mut x = x.clone();
        let pairs = self.freqs.len();
        for (position, row) in x.iter_mut().enumerate() {
            for head in row.chunks_exact_mut(dim) {
                for (i, f) in self.freqs.iter().enumerate() {
                    let (first, second) = if self.interleaved { (2 * i, 2 * i + 1) } else { (i, i + pairs) };
                    let (sin, cos) = (position as f64 * f).sin_cos();
                    let (a, b) = (head[first], head[second]);
                    head[first] = self.factor * (a * cos - b * sin);
                    head[second] = self.factor * (b * cos + a * sin);
                }
            }
        }
        x
    }
}
