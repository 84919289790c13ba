//! An upper bound of the work that a JSON schema takes to compile.
//!
//! llguidance merges the parts of a schema that apply together (`allOf`, `anyOf`, `oneOf`, `enum`, `$ref` and the other keywords)
//! by copying and intersecting them, and compares every two options of a `oneOf`, again after each intersection. Its own budget
//! counts neither the copies nor the comparisons, so a small schema can take hours. This module computes an upper bound of both
//! from sizes alone. A schema above [`MAX_WORK`] is refused before it is compiled.
//!
//! The computation takes at most about [`MAX_WORK`] steps, because it stops as soon as the bound is exceeded.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde_json::{Map, Value};

/// Greatest number of nodes copied and compared; takes about a second.
const MAX_WORK: u64 = 20_000_000;

/// Work charged for each name in [`Shape::inner`] when shapes are merged or copied, in nodes. It accounts for the time of this
/// computation itself, and keeps that at a fraction of a second.
const OWN_WORK: u64 = 16;

/// Work charged for each two patterns of `patternProperties`, which are compared, and for each `pattern`, which is tested for texts
/// that match: llguidance spends at most 10,000 steps on each.
const PATTERN_WORK: u64 = 5_000;

/// Beginning of the keys in [`Shape::inner`] of the properties that match a pattern.
const PATTERN: &str = "patternProperties ";

/// Keywords that do not take part in merging.
const ANNOTATIONS: [&str; 15] = [
    "$anchor",
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "default",
    "definitions",
    "deprecated",
    "description",
    "discriminator",
    "examples",
    "id",
    "readOnly",
    "title",
    "writeOnly",
];

/// Keywords that merge other schemas into their own.
const APPLICATORS: [&str; 6] = ["const", "enum", "allOf", "anyOf", "oneOf", "$ref"];

/// Keys in [`Shape::inner`] for all other properties, and for all other elements of an array.
const OTHER: &str = "*";
const ELEMENT: &str = "[]";

/// The size of a part of a schema.
#[derive(Clone, Debug)]
struct Shape {
    /// Number of alternatives.
    options: u64,
    /// Number of values in the largest alternative.
    nodes: u64,
    /// The alternatives are those of a `oneOf`.
    exclusive: bool,
    /// Number of values in all alternatives that a comparison with another alternative reads: of an object, those of required
    /// properties.
    compared: u64,
    /// Keys of required properties.
    required: BTreeSet<String>,
    /// Parts that are merged one by one in an intersection: properties, and elements of an array.
    inner: BTreeMap<String, Shape>,
}

impl Shape {
    fn of(nodes: u64) -> Shape {
        Shape { options: 1, nodes, exclusive: false, compared: 1, required: BTreeSet::new(), inner: BTreeMap::new() }
    }

    fn total(&self) -> u64 {
        self.options.saturating_mul(self.nodes)
    }

    /// Number of compared values in the properties `required`.
    fn compared_in(&self, required: &BTreeSet<String>) -> u64 {
        let inner = |key: &String| self.inner.get(key).or_else(|| self.inner.get(OTHER));
        required.iter().map(|key| inner(key).map_or(1, |shape| shape.compared)).fold(0, u64::saturating_add)
    }
}

/// The error for a schema that takes too much work.
pub(super) struct TooMuch;

/// Refuses schemas whose compilation may take more than [`MAX_WORK`] together.
pub(super) fn check<'a>(schemas: impl IntoIterator<Item = &'a Value>) -> Result<(), String> {
    let mut work = 0;
    for schema in schemas {
        let mut count = Count { root: schema, work, known: HashMap::new() };
        count.shape(schema, false).map_err(|TooMuch| {
            format!(
                "found a schema whose alternatives take more than {MAX_WORK} copies and comparisons; expected fewer options in \
                 oneOf, anyOf and enum, or less beside them: use anyOf for oneOf, leave out allOf, and use fewer patterns"
            )
        })?;
        work = count.work;
    }
    Ok(())
}

struct Count<'a> {
    root: &'a Value,
    work: u64,
    /// Shapes of referenced schemas; `None` while they are being computed.
    known: HashMap<&'a str, Option<Shape>>,
}

impl<'a> Count<'a> {
    fn add(&mut self, work: u64) -> Result<(), TooMuch> {
        self.work = self.work.saturating_add(work);
        if self.work > MAX_WORK { Err(TooMuch) } else { Ok(()) }
    }

    /// Computes the shape of a schema. References are followed only if the schema is `merged` with another.
    fn shape(&mut self, schema: &'a Value, merged: bool) -> Result<Shape, TooMuch> {
        self.add(1)?;
        match schema {
            Value::Object(fields) => self.object(fields, merged),
            Value::Array(elements) => {
                let mut shape = Shape::of(1);
                for element in elements {
                    shape.nodes += self.shape(element, false)?.total();
                }
                Ok(shape)
            }
            _ => Ok(Shape::of(1)),
        }
    }

    fn object(&mut self, fields: &'a Map<String, Value>, merged: bool) -> Result<Shape, TooMuch> {
        let several = |value: &Value| value.as_array().is_some_and(|list| list.len() > 1);
        let (notes, rest): (Vec<_>, Vec<_>) = fields.iter().partition(|(key, _)| ANNOTATIONS.contains(&key.as_str()));
        for (_, value) in notes {
            // Definitions are compiled where they are referenced.
            self.shape(value, false)?;
        }
        let merged = merged || rest.len() > 1 || fields.get("allOf").is_some_and(several);
        let (applicators, simple): (Vec<_>, Vec<_>) =
            rest.into_iter().partition(|(key, _)| APPLICATORS.contains(&key.as_str()));
        let mut whole = None;
        if !simple.is_empty() {
            let mut shape = Shape::of(1);
            for (key, value) in simple {
                self.keyword(&mut shape, key, value)?;
            }
            shape.compared += shape.compared_in(&shape.required);
            whole = Some(shape);
        }
        for (key, value) in applicators {
            let parts = match (key.as_str(), value) {
                ("allOf", Value::Array(all)) => {
                    all.iter().map(|part| self.shape(part, merged)).collect::<Result<_, _>>()?
                }
                ("anyOf" | "oneOf", Value::Array(any)) => vec![self.union(any, key == "oneOf", merged)?],
                ("enum", Value::Array(values)) => {
                    let (nodes, options) = (self.shape(value, false)?.nodes, values.len() as u64);
                    vec![Shape { options, compared: nodes, ..Shape::of(1 + nodes / options.max(1)) }]
                }
                ("const", _) => vec![Shape::of(self.shape(value, false)?.total())],
                ("$ref", Value::String(reference)) if merged => vec![self.referred(reference)?],
                ("$ref", _) => vec![Shape::of(1)],
                _ => continue,
            };
            for part in parts {
                whole = Some(match whole {
                    Some(whole) => self.intersect(whole, part)?,
                    None => part,
                });
            }
        }
        Ok(whole.unwrap_or_else(|| Shape::of(1)))
    }

    /// Adds a keyword that is not an applicator.
    fn keyword(&mut self, shape: &mut Shape, key: &str, value: &'a Value) -> Result<(), TooMuch> {
        let inner: Vec<(String, &'a Value)> = match (key, value) {
            ("properties" | "patternProperties", Value::Object(all)) => {
                all.iter().map(|(name, value)| (format!("{key} {name}"), value)).collect()
            }
            ("prefixItems", Value::Array(all)) => {
                all.iter().zip(0..).map(|(value, at)| (format!("[{at}]"), value)).collect()
            }
            ("required", Value::Array(names)) => {
                let names = names.iter().filter_map(Value::as_str);
                shape.required.extend(names.map(|name| format!("properties {name}")));
                vec![]
            }
            ("additionalProperties", _) => vec![(OTHER.to_string(), value)],
            ("items", _) => vec![(ELEMENT.to_string(), value)],
            _ => {
                if key == "pattern" {
                    self.add(PATTERN_WORK)?;
                }
                shape.nodes += self.shape(value, false)?.total();
                return Ok(());
            }
        };
        for (name, value) in inner {
            // Whether it will be merged is not known yet.
            let one = self.shape(value, false)?;
            shape.nodes = shape.nodes.saturating_add(one.total());
            shape.inner.insert(name, one);
        }
        if key == "patternProperties" { self.compare_patterns(shape) } else { Ok(()) }
    }

    /// Charges the comparison of every two patterns of property names.
    fn compare_patterns(&mut self, shape: &Shape) -> Result<(), TooMuch> {
        let patterns = shape.inner.keys().filter(|name| name.starts_with(PATTERN)).count() as u64;
        let pairs = patterns.saturating_mul(patterns.saturating_sub(1)) / 2;
        self.add(pairs.saturating_mul(PATTERN_WORK).saturating_mul(shape.options))
    }

    fn union(&mut self, options: &'a [Value], exclusive: bool, merged: bool) -> Result<Shape, TooMuch> {
        let mut all = Shape { options: 0, exclusive, compared: 0, ..Shape::of(1) };
        for option in options {
            let option = self.shape(option, merged)?;
            self.add(OWN_WORK * option.inner.len() as u64)?;
            all.options = all.options.saturating_add(option.options);
            all.nodes = all.nodes.max(option.nodes);
            all.exclusive |= option.exclusive;
            all.compared = all.compared.saturating_add(option.compared);
            all.required.extend(option.required);
            for (name, shape) in option.inner {
                match all.inner.get_mut(&name) {
                    Some(other) => {
                        other.options = other.options.saturating_add(shape.options);
                        other.nodes = other.nodes.max(shape.nodes);
                        other.exclusive |= shape.exclusive;
                        other.compared = other.compared.saturating_add(shape.compared);
                    }
                    None => drop(all.inner.insert(name, shape)),
                }
            }
        }
        if exclusive {
            self.compare(&all)?;
        }
        Ok(all)
    }

    /// Charges the comparison of every two alternatives.
    fn compare(&mut self, shape: &Shape) -> Result<(), TooMuch> {
        self.add(shape.compared.saturating_mul(shape.compared) / 2)
    }

    fn intersect(&mut self, mut a: Shape, b: Shape) -> Result<Shape, TooMuch> {
        self.add(OWN_WORK * (a.inner.len() + b.inner.len()) as u64)?;
        // Each alternative of one is merged with a copy of the other.
        self.add(a.options.saturating_mul(b.total()).saturating_add(b.options.saturating_mul(a.total())))?;
        let crossed = [
            a.compared_in(&b.required).saturating_mul(b.options),
            b.compared_in(&a.required).saturating_mul(a.options),
            a.compared.saturating_mul(b.options),
            b.compared.saturating_mul(a.options),
        ];
        a.compared = crossed.into_iter().fold(0, u64::saturating_add);
        let others = |name: &str, of: &BTreeMap<String, Shape>| {
            of.get(if name.starts_with('[') { ELEMENT } else { OTHER }).cloned()
        };
        let names: BTreeSet<String> = a.inner.keys().chain(b.inner.keys()).cloned().collect();
        let mut inner = BTreeMap::new();
        for name in names {
            let [here, there] = [&a.inner, &b.inner].map(|of| of.get(&name).cloned().or_else(|| others(&name, of)));
            let both = match (here, there) {
                (Some(here), Some(there)) => Some(self.intersect(here, there)?),
                (one, other) => one.or(other),
            };
            inner.extend(both.map(|both| (name, both)));
        }
        (a.inner, a.required) = (inner, a.required.union(&b.required).cloned().collect());
        a.options = a.options.saturating_mul(b.options);
        a.nodes = a.nodes.saturating_add(b.nodes);
        a.exclusive |= b.exclusive;
        if a.exclusive {
            self.compare(&a)?;
        }
        self.compare_patterns(&a)?;
        Ok(a)
    }

    /// Computes the shape behind a reference into the schema. A reference to elsewhere, or to itself, counts as one value.
    fn referred(&mut self, reference: &'a str) -> Result<Shape, TooMuch> {
        if let Some(known) = self.known.get(reference) {
            let Some(shape) = known else { return Ok(Shape::of(1)) };
            let copied = if shape.inner.is_empty() { 1 } else { OWN_WORK * shape.nodes };
            self.work = self.work.saturating_add(shape.total().max(copied));
            return if self.work > MAX_WORK { Err(TooMuch) } else { Ok(shape.clone()) };
        }
        let Some(target) = reference.strip_prefix('#').and_then(|pointer| self.root.pointer(pointer)) else {
            return Ok(Shape::of(1));
        };
        self.known.insert(reference, None);
        let shape = self.shape(target, true)?;
        self.known.insert(reference, Some(shape.clone()));
        Ok(shape)
    }
}
