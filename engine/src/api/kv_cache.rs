//! What `--kv-cache-dtype` can say, in vLLM's names, and which cache of the kernels that is.

use std::fmt;
use std::str::FromStr;

use attention_kernels::{Dtype, KvDtype};

/// How keys and values are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum KvCacheDtype {
    /// As they are computed.
    #[default]
    Auto,
    /// 32 bits.
    Float32,
    /// IEEE halves.
    Float16,
    /// The upper halves of singles.
    Bfloat16,
    /// 8 bits, 4 of exponent, with the checkpoint's scales, such as the first step makes, or 1.
    Fp8E4m3,
    /// 8 bits, 5 of exponent, with scales as those.
    Fp8E5m2,
    /// 8-bit integers with a scale for each token and head, computed from that row alone.
    Int8,
}

impl KvCacheDtype {
    /// All of them.
    pub const ALL: [KvCacheDtype; 7] = [
        KvCacheDtype::Auto,
        KvCacheDtype::Float32,
        KvCacheDtype::Float16,
        KvCacheDtype::Bfloat16,
        KvCacheDtype::Fp8E4m3,
        KvCacheDtype::Fp8E5m2,
        KvCacheDtype::Int8,
    ];

    /// As on the command line.
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

    /// The kernels' cache for a model that computes in `dtype`; `None` if that would be wider than what is computed.
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

    /// `fp8` is e4m3, as in vLLM.
    fn from_str(name: &str) -> Result<KvCacheDtype, &'static str> {
        let name = if name == "fp8" { "fp8_e4m3" } else { name };
        let known = KvCacheDtype::ALL.into_iter().find(|dtype| dtype.name() == name);
        known.ok_or("expected auto, float32, float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2 or int8")
    }
}
