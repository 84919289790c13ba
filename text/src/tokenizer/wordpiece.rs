//! The reader of `vocab.txt`: WordPiece as BERT has it, one token per line.

use serde_json::{Value, json};
use tokenizers::models::bpe::Vocab;
use tokenizers::models::wordpiece::WordPiece;

use super::model::AnyModel;
use super::scored::Entry;
use super::stated::{Around, Stated, Table};
use super::steps::{Parts, Steps};
use crate::error::{LoadError, one_line};

/// The steps around the model. `accents`: whether accents are dropped, if not with the upper letters.
pub(super) fn steps(lowercase: bool, chinese: bool, accents: Option<bool>) -> Steps {
    Steps {
        normalizer: json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": chinese,
            "strip_accents": accents.map_or(Value::Null, Value::from), "lowercase": lowercase}),
        pre_tokenizer: json!({"type": "BertPreTokenizer"}),
        decoder: json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
    }
}

/// Builds the tokenizer of a file.
///
/// # Errors
/// A token occurs twice, or the file is not UTF-8.
pub(super) fn read(file: &str, bytes: &[u8], stated: &Stated) -> Result<Parts, LoadError> {
    let wrong = |found: String, expected: &str| LoadError::file(file.to_string(), format!("found {found}"), expected);
    let text = std::str::from_utf8(bytes).map_err(|error| wrong(one_line(error), "UTF-8"))?;
    let special = |key: &str, usual: &'static str| stated.token(key).unwrap_or(usual).to_string();
    let unknown = special("unk_token", "[UNK]");
    let (start, end) = (special("cls_token", "[CLS]"), special("sep_token", "[SEP]"));
    let others = [special("pad_token", "[PAD]"), special("mask_token", "[MASK]")];
    let specials = [&unknown, &start, &end, &others[0], &others[1]];
    let mut table = Table::new(file);
    for token in text.lines().map(str::trim_end) {
        table.push(token, Entry::Named, specials.iter().any(|special| *special == token))?;
    }
    table.extend(stated)?;
    if table.id(&unknown).is_none() {
        return Err(wrong(format!("no token {unknown:?}"), "a vocabulary with the unknown token"));
    }
    let around = table.around(stated, Around { before: &[&start], after: &end, adds: (true, true) })?;
    let lowercase = stated.flag("do_lower_case")?.unwrap_or(true);
    let chinese = stated.flag("tokenize_chinese_chars")?.unwrap_or(true);
    let steps = steps(lowercase, chinese, stated.flag("strip_accents")?);
    let (tokens, added) = table.finish();
    let vocab = tokens.into_iter().zip(0..).filter_map(|(token, id)| Some((token?.0, id)));
    let model = WordPiece::builder().vocab(vocab.collect::<Vocab>()).unk_token(unknown).build();
    let model = model.map_err(|error| LoadError::tokenizer(file, error))?;
    Ok(Parts { model: AnyModel::Library(model.into()), steps, added, around })
}
