//! Fill-in-the-middle: a prompt that shows what is before and after the answer, with the marks that the model has learned.

use text::{Frame, Tokenizer};

use super::cost::Cost;
use super::options::check_length;
use super::work::Work;
use crate::http::ApiError;

/// The special tokens in front of the text before, the text after, and the answer; and that in front of the name of another file.
const MARKS: [([&str; 3], &str); 7] = [
    (["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], "<|file_sep|>"),
    (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "<file_sep>"),
    (["<fim-prefix>", "<fim-suffix>", "<fim-middle>"], "<file_sep>"),
    (["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], "<|file_sep|>"),
    (["▁<PRE>", "▁<SUF>", "▁<MID>"], "<|file_sep|>"),
    (["<PRE>", "<SUF>", "<MID>"], "<|file_sep|>"),
    (["<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"], "<|file_sep|>"),
];

/// The marks of a model.
pub struct Infill {
    marks: [u32; 3],
    file: Option<u32>,
}

/// What is around the answer.
#[derive(Clone, Copy, Default)]
pub struct Around<'a> {
    /// Names and texts of other files.
    pub files: &'a [(String, String)],
    /// The text before.
    pub before: &'a str,
    /// The text after.
    pub after: &'a str,
    /// The beginning of the answer.
    pub begun: &'a str,
}

impl Infill {
    /// The marks in a vocabulary, if the model has learned them.
    pub fn of(tokenizer: &Tokenizer) -> Option<Infill> {
        let id = |text: &str| tokenizer.token_to_id(text);
        MARKS.iter().find_map(|([before, after, middle], file)| {
            Some(Infill { marks: [id(before)?, id(after)?, id(middle)?], file: id(file) })
        })
    }

    /// The marks of the served model. `param` is the field that needs them.
    pub fn required(work: &Work, param: &str) -> Result<Infill, ApiError> {
        let advice = "remove it: this model does not support fill-in-the-middle";
        Infill::of(work.tokenizer()).ok_or_else(|| ApiError::unsupported(param, advice))
    }

    /// Token ids of a prompt.
    pub fn prompt(
        &self,
        work: &Work,
        around: Around<'_>,
        add_special: bool,
        param: &str,
    ) -> Result<Vec<u32>, ApiError> {
        let encode = |text: &str| work.encode(text, false, param, true);
        let [before, after, middle] = self.marks;
        let mut ids = Vec::new();
        for (name, text) in around.files {
            ids.extend(self.file);
            ids.extend(encode(&format!("{name}\n{text}\n"))?);
            Cost { prompts: 1, prompt_tokens: ids.len(), ..Cost::default() }.check(&work.options.limits)?;
        }
        ids.push(before);
        ids.extend(encode(around.before)?);
        ids.push(after);
        ids.extend(encode(around.after)?);
        ids.push(middle);
        ids.extend(encode(around.begun)?);
        let frame = if add_special { work.tokenizer().frame() } else { Ok(Frame::default()) };
        let frame = frame.map_err(|error| ApiError::invalid(param, error))?;
        // What the tokenizer puts behind a text would end the answer.
        let ids = [frame.before, ids].concat();
        check_length(work, ids.len(), param)?;
        Ok(ids)
    }
}
