//! The values of `--kv-cache-dtype`, in vLLM's names, and the corresponding cache types of the kernels.

use std::fmt;
use std::str::FromStr;

use attention_kernels::{Dtype, KvDtype};

/// Type in which keys and values are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum KvCacheDtype {
    /// The type of the computation.
    #[default]
    Auto,
    /// IEEE single precision.
    Float32,
    /// IEEE half precision.
    Float16,
    /// bfloat16.
    Bfloat16,
    /// 8 bits with 4 bits of exponent. The scales come from the checkpoint or from the first step, or are 1.
    Fp8E4m3,
    /// 8 bits with 5 bits of exponent, with scales like [`KvCacheDtype::Fp8E4m3`].
    Fp8E5m2,
    /// 8-bit integers with a scale for each token and head, computed from that row alone. The 8-bit type that changes answers least.
    Int8,
}

impl KvCacheDtype {
    /// All values.
    pub const ALL: [KvCacheDtype; 7] = [
        KvCacheDtype::Auto,
        KvCacheDtype::Float32,
        KvCacheDtype::Float16,
        KvCacheDtype::Bfloat16,
        KvCacheDtype::Fp8E4m3,
        KvCacheDtype::Fp8E5m2,
        KvCacheDtype::Int8,
    ];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            KvCacheDtype::Auto => "auto",
            KvCacheDtype::Float32 => "float32",
            KvCacheDtype::Float16 => "float16",
            KvCacheDtype::Bfloat16 => "bfloat16",
            KvCacheDtype::Fp8E4m3 => "fp8_e4m3",
            KvCacheDtype::Fp8E5m2 => "fp8_e5m2",
            KvCacheDtype::Int8 => "int8",
        }
    }

    /// What a start says of a type with which trained models lose more than 1 % of perplexity (`docs/real-models.md`).
    pub(crate) fn caution(self) -> &'static str {
        match self {
            KvCacheDtype::Fp8E5m2 => " (trained models lose up to 6 % of perplexity with it; int8 is as small)",
            _ => "",
        }
    }

    /// The kernels' cache type for a model that computes in `dtype`; `None` if the cache would be wider than `dtype`.
    pub(crate) fn stored(self, dtype: Dtype) -> Option<KvDtype> {
        Some(match (self, dtype) {
            (KvCacheDtype::Auto, _)
            | (KvCacheDtype::Float32, Dtype::F32)
            | (KvCacheDtype::Float16, Dtype::F16)
            | (KvCacheDtype::Bfloat16, Dtype::Bf16) => KvDtype::Same,
            (KvCacheDtype::Float32, _) => return None,
            (KvCacheDtype::Float16, _) => KvDtype::F16,
            (KvCacheDtype::Bfloat16, _) => KvDtype::Bf16,
            (KvCacheDtype::Fp8E4m3, _) => KvDtype::Fp8E4m3,
            (KvCacheDtype::Fp8E5m2, _) => KvDtype::Fp8E5m2,
            (KvCacheDtype::Int8, _) => KvDtype::Int8PerToken,
        })
    }
}

impl fmt::Display for KvCacheDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KvCacheDtype {
    type Err = &'static str;

    /// Parses a name; `fp8` stands for `fp8_e4m3`, as in vLLM.
    fn from_str(name: &str) -> Result<KvCacheDtype, &'static str> {
        let name = if name == "fp8" { "fp8_e4m3" } else { name };
        let known = KvCacheDtype::ALL.into_iter().find(|dtype| dtype.name() == name);
        known.ok_or("expected auto, float32, float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2 or int8")
    }
}
