//! JSON schemas in the form that llguidance compiles: its options, references that it resolves, and what takes the place of
//! keywords that it would refuse.

use std::collections::BTreeMap;

use llguidance::derivre::{RegexAst, RegexBuilder};
use llguidance::regex_to_lark;
use serde_json::{Map, Value, json};

/// The field of a schema with llguidance's options.
const OPTIONS: &str = "x-guidance";

/// Definitions that references are rewritten to begin with this name.
const DEFINITION: &str = "quire-ref-";

/// Greatest number of values copied for references that are rewritten, and for patterns of named properties.
const MAX_COPIED: usize = 200_000;

/// Greatest cost of the question which names a pattern matches, in llguidance's unit.
const MAX_PATTERN_COST: u64 = 10_000;

/// Greatest magnitude of a bound of numbers, and of integers: llguidance compiles no greater ones.
const MAX_BOUND: (i64, i64) = (100_000_000_000_000_000, 9_000_000_000_000_000_000);

/// Sets how a JSON schema is compiled, in place of what it says itself. With `is_strict`, a keyword that cannot be enforced is
/// refused; otherwise the schema is compiled without it, and [named](crate::Matcher::unenforced).
///
/// Bounds the white space between two tokens of JSON: none, one space, or one line break with its indentation. JSON itself allows any
/// amount, and small models would fill the context with it. Of the schema's own options only those of white space are kept; see
/// [`with_white_space`].
pub fn with_options(mut schema: Value, is_strict: bool) -> Value {
    if let Value::Object(fields) = &mut schema {
        let own = fields.get(OPTIONS);
        let has_space = own.is_none_or(|own| own["whitespace_flexible"] != false);
        let mut options = json!({"lenient": !is_strict, "coerce_one_of": !is_strict, "whitespace_flexible": has_space});
        if has_space {
            let pattern = own.and_then(|own| own["whitespace_pattern"].as_str());
            options["whitespace_pattern"] = pattern.unwrap_or(r" |\r?\n[ \t]{0,64}").into();
        }
        fields.insert(OPTIONS.to_string(), options);
    }
    schema
}

/// Sets the white space between two tokens of JSON: what matches a regular expression, or none.
pub fn with_white_space(schema: Value, pattern: Option<&str>) -> Value {
    let options = match pattern.filter(|pattern| !pattern.is_empty()) {
        Some(pattern) => json!({"whitespace_pattern": pattern}),
        None => json!({"whitespace_flexible": false}),
    };
    match schema {
        // A schema that allows everything.
        Value::Bool(true) => json!({OPTIONS: options}),
        mut schema => {
            if let Value::Object(fields) = &mut schema {
                fields.insert(OPTIONS.to_string(), options);
            }
            schema
        }
    }
}

/// Like [`with_options`] and not strict, unless the schema has options.
pub(crate) fn with_default_options(schema: Value) -> Value {
    if schema.get(OPTIONS).is_some() { schema } else { with_options(schema, false) }
}

/// A schema that llguidance compiles, and the keywords that it does not enforce.
pub(super) struct Prepared {
    pub schema: Value,
    pub unenforced: Vec<&'static str>,
}

/// Rewrites a schema for llguidance. With `fold`, as many or more `patternProperties` of an object are replaced: llguidance refuses
/// them if two may match the same name.
pub(super) fn prepare(mut schema: Value, fold: Option<usize>) -> Result<Prepared, String> {
    references(&mut schema)?;
    let mut copied = 0;
    walk(&mut schema, "", &mut |fields, _| {
        forbid_properties(fields);
        name_patterns(fields, &mut copied);
        tighten_bounds(fields);
    });
    let mut unenforced = Vec::new();
    if schema.get(OPTIONS).is_some_and(|options| options["lenient"] == true) {
        walk(&mut schema, "", &mut |fields, _| {
            if fold.is_some_and(|least| fold_patterns(fields, least)) {
                unenforced.push("patternProperties");
            }
            unenforced.extend(drop_counts(fields));
        });
    }
    Ok(Prepared { schema, unenforced })
}

/// Writes `false` for a property whose schema is `{"not": {}}`, as zod's `never` is written: llguidance knows no `not`.
fn forbid_properties(fields: &mut Map<String, Value>) {
    let all = fields.get_mut("properties").and_then(Value::as_object_mut);
    for one in all.into_iter().flat_map(Map::values_mut) {
        if one.get("not").is_some_and(|not| *not == json!({}) || *not == true) {
            *one = false.into();
        }
    }
}

/// Moves patterns that match nothing but named properties to these properties. llguidance would allow a further property there, and
/// then find no name for it.
fn name_patterns(fields: &mut Map<String, Value>, copied: &mut usize) {
    let (Some(Value::Object(patterns)), Some(Value::Object(properties))) =
        (fields.get("patternProperties"), fields.get("properties"))
    else {
        return;
    };
    let mut moved: Vec<(String, Vec<String>)> = Vec::new();
    for (pattern, schema) in patterns {
        let names = exact_names(pattern, properties).unwrap_or_default();
        *copied += names.len() * num_values(schema);
        if !names.is_empty() && *copied <= MAX_COPIED {
            moved.push((pattern.clone(), names));
        }
    }
    for (pattern, names) in moved {
        let patterns = fields.get_mut("patternProperties").and_then(Value::as_object_mut);
        let Some(schema) = patterns.and_then(|patterns| patterns.shift_remove(&pattern)) else { continue };
        for name in names {
            if let Some(own) = fields.get_mut("properties").and_then(|all| all.get_mut(&name)) {
                *own = json!({"allOf": [own.take(), schema]});
            }
        }
    }
}

/// The names that a pattern matches, if all of them are among these properties.
fn exact_names(pattern: &str, properties: &Map<String, Value>) -> Option<Vec<String>> {
    let mut builder = RegexBuilder::new();
    let whole = builder.mk_regex_for_serach(&regex_to_lark(pattern, "dw")).ok()?;
    let mut matcher = builder.to_regex_limited(whole, MAX_PATTERN_COST).ok()?;
    let names: Vec<String> = properties.keys().filter(|name| matcher.is_match(name)).cloned().collect();
    let known = RegexAst::Or(names.iter().cloned().map(RegexAst::Literal).collect());
    let others = RegexAst::And(vec![RegexAst::ExprRef(whole), RegexAst::Not(Box::new(known))]);
    let others = builder.mk(&others).ok()?;
    builder.to_regex_limited(others, MAX_PATTERN_COST).ok()?.always_empty().then_some(names)
}

/// Brings bounds of numbers into the range that llguidance compiles. What they allow is less, and still valid.
fn tighten_bounds(fields: &mut Map<String, Value>) {
    let is_integer = fields.get("type").is_some_and(|kind| match kind {
        Value::Array(kinds) => kinds.contains(&json!("integer")) && !kinds.contains(&json!("number")),
        kind => kind == "integer",
    });
    let most = if is_integer { MAX_BOUND.1 } else { MAX_BOUND.0 };
    for (key, nearest) in
        [("minimum", -most), ("exclusiveMinimum", -most), ("maximum", most), ("exclusiveMaximum", most)]
    {
        let is_beyond = |bound: f64| if nearest < 0 { bound < nearest as f64 } else { bound > nearest as f64 };
        if let Some(bound) = fields.get_mut(key)
            && bound.as_f64().is_some_and(is_beyond)
        {
            *bound = nearest.into();
        }
    }
}

/// Allows the values of all patterns under every other name, if there are at least so many. Returns whether there are.
fn fold_patterns(fields: &mut Map<String, Value>, least: usize) -> bool {
    let is_enough = |patterns: &Value| patterns.as_object().is_some_and(|patterns| patterns.len() >= least);
    if !fields.get("patternProperties").is_some_and(is_enough) {
        return false;
    }
    if let (Some(Value::Object(patterns)), Some(others)) =
        (fields.shift_remove("patternProperties"), fields.get_mut("additionalProperties"))
    {
        let mut options: Vec<Value> = patterns.into_iter().map(|(_, schema)| schema).collect();
        options.push(others.take());
        *others = json!({"anyOf": options});
    }
    true
}

/// Removes the bounds of the number of properties where some are optional. llguidance would count only the unnamed ones.
fn drop_counts(fields: &mut Map<String, Value>) -> Vec<&'static str> {
    let names = |key: &str| fields.get(key).and_then(Value::as_object).into_iter().flat_map(Map::keys);
    let required: Vec<&str> =
        fields.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
    if names("properties").all(|name| required.contains(&name.as_str())) {
        return Vec::new();
    }
    let least = fields.get("minProperties").and_then(Value::as_u64).unwrap_or(0).saturating_sub(required.len() as u64);
    let most =
        fields.get("maxProperties").and_then(Value::as_u64).map(|most| most.saturating_sub(required.len() as u64));
    let is_closed = fields.get("additionalProperties") == Some(&Value::Bool(false));
    if is_closed && least <= 1 && most.unwrap_or(1) == 1 && names("patternProperties").next().is_none() {
        return Vec::new();
    }
    ["minProperties", "maxProperties"].into_iter().filter(|key| fields.shift_remove(*key).is_some()).collect()
}

/// Calls `visit` with each schema in a schema, outermost first, and the id that its references are relative to.
fn walk(schema: &mut Value, base: &str, visit: &mut impl FnMut(&mut Map<String, Value>, &str)) {
    let Value::Object(fields) = schema else { return };
    let own = fields.get("$id").and_then(Value::as_str).filter(|id| !id.starts_with('#')).map(str::to_string);
    let base = own.as_deref().unwrap_or(base);
    visit(fields, base);
    for (key, value) in fields {
        match (key.as_str(), value) {
            ("properties" | "patternProperties" | "$defs" | "definitions" | "dependentSchemas", Value::Object(all)) => {
                all.values_mut().for_each(|one| walk(one, base, visit))
            }
            ("allOf" | "anyOf" | "oneOf" | "prefixItems" | "items", Value::Array(all)) => {
                all.iter_mut().for_each(|one| walk(one, base, visit));
            }
            (
                "items"
                | "additionalItems"
                | "additionalProperties"
                | "not"
                | "if"
                | "then"
                | "else"
                | "contains"
                | "propertyNames"
                | "unevaluatedProperties"
                | "unevaluatedItems",
                one,
            ) => walk(one, base, visit),
            _ => {}
        }
    }
}

/// Rewrites the references that llguidance does not resolve: by anchor, by id, or with escaped characters.
fn references(root: &mut Value) -> Result<(), String> {
    let top = root.get("$id").and_then(Value::as_str).unwrap_or("").to_string();
    // A reference and the id that it is relative to, and the definition that takes its place.
    let mut known: BTreeMap<(String, String), String> = BTreeMap::new();
    let key = |reference: &str, base: &str| {
        let base = if base == top { "" } else { base };
        (base.to_string(), reference.to_string())
    };
    let original = root.clone();
    walk(root, "", &mut |fields, base| {
        if let Some(Value::String(reference)) = fields.get("$ref") {
            let key = key(reference.as_str(), base);
            if !(key.0.is_empty() && is_plain(&original, reference)) {
                let next = known.len();
                known.entry(key).or_insert_with(|| format!("{DEFINITION}{next}"));
            }
        }
    });
    let (mut copies, mut copied) = (Vec::new(), 0);
    for ((base, reference), name) in &known {
        let target = resolve(&original, &top, base, reference).ok_or_else(|| {
            let reference: String = reference.chars().take(100).collect();
            format!("found the $ref {reference:?}, expected a part of this schema by its path, $anchor or $id")
        })?;
        copied += num_values(target);
        if copied > MAX_COPIED {
            return Err(format!(
                "found references by $anchor, $id or escaped path to more than {MAX_COPIED} values in all"
            ));
        }
        copies.push((name.clone(), target.clone()));
    }
    let Value::Object(fields) = root else { return Ok(()) };
    if copies.is_empty() {
        return Ok(());
    }
    let definitions = fields.entry("$defs").or_insert_with(|| json!({}));
    let definitions = definitions.as_object_mut().ok_or("expected $defs to be an object")?;
    definitions.extend(copies);
    walk(root, "", &mut |fields, base| {
        if let Some(Value::String(reference)) = fields.get_mut("$ref")
            && let Some(name) = known.get(&key(reference.as_str(), base))
        {
            *reference = format!("#/$defs/{name}");
        }
    });
    Ok(())
}

fn num_values(value: &Value) -> usize {
    1 + match value {
        Value::Array(all) => all.iter().map(num_values).sum::<usize>(),
        Value::Object(all) => all.values().map(num_values).sum::<usize>(),
        _ => 0,
    }
}

/// Whether llguidance resolves a reference as this module would: its path has no escaped characters, and numbers as they are written.
fn is_plain(root: &Value, reference: &str) -> bool {
    let Some(path) = reference.strip_prefix('#') else { return false };
    matches!(path, "" | "/") || (!path.contains(['~', '%']) && path.starts_with('/') && root.pointer(path).is_some())
}

/// The part of a schema that a reference names.
fn resolve<'a>(root: &'a Value, top: &str, base: &str, reference: &str) -> Option<&'a Value> {
    let (id, fragment) = reference.split_once('#').unwrap_or((reference, ""));
    let id = if id.is_empty() { base } else { id };
    let document = if id.is_empty() || id == top.trim_end_matches('#') {
        root
    } else {
        // An id may be relative to another one.
        let is_it =
            |own: &str| own.trim_end_matches('#') == id || own.strip_suffix(id).is_some_and(|rest| rest.ends_with('/'));
        find(root, &|fields| {
            ["$id", "id"].iter().any(|key| fields.get(*key).and_then(Value::as_str).is_some_and(is_it))
        })?
    };
    let fragment = unescaped(fragment)?;
    if fragment.is_empty() || fragment.starts_with('/') {
        return document.pointer(&fragment);
    }
    let old = format!("#{fragment}");
    let is_it = |fields: &Map<String, Value>| {
        let has = |key: &str, name: &str| fields.get(key).and_then(Value::as_str) == Some(name);
        has("$anchor", &fragment) || has("$dynamicAnchor", &fragment) || has("$id", &old) || has("id", &old)
    };
    find(document, &is_it)
}

fn find<'a>(value: &'a Value, is_it: &impl Fn(&Map<String, Value>) -> bool) -> Option<&'a Value> {
    match value {
        Value::Object(fields) if is_it(fields) => Some(value),
        Value::Object(fields) => fields.values().find_map(|value| find(value, is_it)),
        Value::Array(values) => values.iter().find_map(|value| find(value, is_it)),
        _ => None,
    }
}

/// Replaces `%` and two digits by a byte.
fn unescaped(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap_or("").as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(part.get(..2)?, 16).ok()?);
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).ok()
}
