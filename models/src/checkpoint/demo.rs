//! The demo model, embedded in the binary. It is loaded like any folder.

use crate::checkpoint::files::ModelFiles;

/// The files of the demo model.
pub fn demo() -> ModelFiles {
    ModelFiles::Embedded {
        name: "quire-demo",
        files: &[
            ("config.json", include_bytes!("../../demo/config.json")),
            ("generation_config.json", include_bytes!("../../demo/generation_config.json")),
            ("tokenizer.json", include_bytes!("../../demo/tokenizer.json")),
            ("tokenizer_config.json", include_bytes!("../../demo/tokenizer_config.json")),
            ("model.safetensors", include_bytes!("../../demo/model.safetensors")),
        ],
    }
}
