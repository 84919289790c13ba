//! The files of a checkpoint for the crate `text`, which makes the tokenizer and the chat template of them.

use std::borrow::Cow;

use models::{FileBytes, ModelFiles};

/// The files of a checkpoint.
pub(crate) struct TextFiles<'a>(pub &'a ModelFiles);

impl text::Files for TextFiles<'_> {
    fn read(&self, name: &str) -> Result<Option<Cow<'_, [u8]>>, String> {
        let found = self.0.find(name).map_err(|error| error.to_string())?;
        Ok(found.map(|bytes| match bytes {
            FileBytes::Embedded(bytes) => bytes.into(),
            bytes => bytes.to_vec().into(),
        }))
    }

    fn locate(&self, name: &str) -> String {
        self.0.locate(name)
    }
}
