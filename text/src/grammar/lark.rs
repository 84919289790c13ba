//! How texts are written in Lark grammars.

use serde_json::Value;

/// Quotes a text as a Lark string, which has the syntax of JSON. Brackets are escaped, because the [bound](super::bounds) of nested
/// ones counts those in strings too: a grammar of many calls opens one for each.
pub(crate) fn quote(text: &str) -> String {
    Value::from(text).to_string().chars().fold(String::new(), |mut all, c| {
        match "()[]{}".contains(c) {
            true => all.push_str(&format!("\\u{:04x}", c as u32)),
            false => all.push(c),
        }
        all
    })
}

/// A regular expression of exactly this text, between slashes.
pub(crate) fn regex(text: &str) -> String {
    text.chars().fold(String::new(), |mut all, c| {
        if "\\.+*?()|[]{}^$/&~-#".contains(c) {
            all.push('\\');
        }
        match c {
            '\n' => all.push_str("\\n"),
            c => all.push(c),
        }
        all
    })
}

/// Restricts a terminal to texts that match none of these regular expressions and contain none of these markers.
pub(crate) fn excluding<'a>(expressions: &[String], markers: impl IntoIterator<Item = &'a str>) -> String {
    let markers: Vec<String> = markers.into_iter().map(regex).collect();
    let containing = (!markers.is_empty()).then(|| format!(".*({}).*", markers.join("|")));
    expressions.iter().chain(&containing).map(|one| format!(" & ~/(?s:{one})/")).collect()
}
