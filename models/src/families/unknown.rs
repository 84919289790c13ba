//! The error for a family that is not supported.

use super::{Family, unread};
use crate::checkpoint::error::{LoadError, one_line};
use crate::checkpoint::fields::Fields;

/// Names the supported architectures, the one whose name is nearest, and the keys that it does not read.
pub(super) fn error(
    fields: &Fields<'_>,
    name: Option<&str>,
    families: impl Iterator<Item = &'static Family> + Clone,
) -> LoadError {
    let names = families.clone().flat_map(|family| family.architectures.iter().map(move |name| (*name, family)));
    let supported: Vec<&str> = names.clone().map(|(name, _)| name).collect();
    // Far names are not compared: the time grows with the product of the lengths.
    let similarity = |known: &str| name.map_or(0.0, |name| strsim::jaro_winkler(stem(known), stem(shorten(name))));
    let by_type = names.clone().flat_map(|(class, family)| family.model_types.iter().map(move |t| (*t, class, family)));
    let by_class = names.map(|(class, family)| (class, class, family));
    let nearest = by_class
        .chain(by_type)
        .map(|(known, class, family)| (similarity(known), class, family))
        .max_by(|a, b| a.0.total_cmp(&b.0));
    let advice = match nearest {
        Some((similarity, class, family)) if similarity > 0.0 => {
            format!("; the nearest name is {class}{}", unread_by(fields, family))
        }
        _ => String::new(),
    };
    LoadError::UnsupportedArchitecture {
        file: fields.file().to_string(),
        found: name.map_or("no name".to_string(), |name| one_line(shorten(name))),
        supported: supported.join(", "),
        advice,
    }
}

/// The keys that may change the results and that this family would not read. Nothing if its declaration fails, because then it has not
/// read all its keys.
fn unread_by(fields: &Fields<'_>, family: &Family) -> String {
    for key in family.positions.0 {
        fields.get(key);
    }
    let keys = (family.declare)(fields, 1).map_or(Vec::new(), |decoder| unread::named(fields, &decoder));
    if keys.is_empty() { String::new() } else { format!(", which does not read {}", keys.join(", ")) }
}

/// A name without what names of many families end with, which would make all of them alike.
fn stem(name: &str) -> &str {
    let ends = [
        "ForCausalLM",
        "ForConditionalGeneration",
        "ForMaskedLM",
        "ForSequenceClassification",
        "ForTokenClassification",
        "LMHeadModel",
        "Model",
    ];
    ends.into_iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name)
}

fn shorten(name: &str) -> &str {
    name.char_indices().nth(80).map_or(name, |(end, _)| &name[..end])
}
