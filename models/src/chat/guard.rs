//! Bounds what one rendering may make, in bytes, beside the instructions that it may run.
//!
//! Instructions alone bound no memory: `{% set x = x ~ x %}` doubles a text with each. So [`rewrite`](super::rewrite) changes a
//! template after it is parsed: whatever makes a text or a container (`+`, `*`, `~`, slices, literals, calls, filters) goes through the
//! filter [`CHARGE`], and text between tags is written as an expression, so that the formatter sees it. The bytes are charged to the
//! rendering's [`Budget`]; when that is spent, the rendering ends with an error.
//!
//! One operation makes at most the sum of its operands, which have been charged. Those that multiply (`replace`, `join`, `indent`
//! and their like) are charged before they run ([`install`]). A value is charged with all that it contains, and what it contains twice
//! is charged twice: so the text of a value is about as long as its charge, whoever writes it. No value contains itself.

use std::cell::Cell;

use minijinja::value::{Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Bytes that a rendering may make in any case: it takes some ten thousand for a message.
const LEAST: usize = 128 << 20;

/// Bytes that it may make for each byte of its input: templates copy, cut and join what they are given.
const SHARE: usize = 32;

/// Bytes of one text in any case, and for each byte of the input.
const TEXT: (usize, usize) = (16 << 20, 2);

/// Bytes of a value without what it holds.
const VALUE: usize = 64;

/// Bytes of an item that does not exist before it is read, such as a number of a range: its share of the text of all, and of the time
/// to read it, which grows with the sums that it is read through.
const LAZY: usize = 32;

/// Containers in containers.
const MAX_DEPTH: usize = 128;

/// Name of the filter that charges a value and returns it. No template can name it.
pub const CHARGE: &str = "=";

/// Name of the filter for what a namespace takes: a value without a namespace in it, so that none contains itself.
pub const STORE: &str = ".";

/// What a rendering may still make.
#[derive(Clone, Copy, Default)]
struct Budget {
    left: usize,
    text: usize,
}

thread_local! {
    /// Budget of the rendering that runs on this thread.
    static BUDGET: Cell<Budget> = const { Cell::new(Budget { left: 0, text: 0 }) };
}

/// Renders with the budget of an input of so many bytes.
pub fn with_budget<T>(input: usize, render: impl FnOnce() -> T) -> T {
    let budget = |(least, share): (usize, usize)| least.saturating_add(input.saturating_mul(share));
    BUDGET.set(Budget { left: budget((LEAST, SHARE)), text: budget(TEXT) });
    let rendered = render();
    BUDGET.set(Budget::default());
    rendered
}

/// Charges so many bytes of text.
pub fn charge_text(bytes: usize) -> Result<(), Error> {
    if bytes > BUDGET.get().text {
        return Err(too_much());
    }
    charge(bytes)
}

fn charge(bytes: usize) -> Result<(), Error> {
    let budget = BUDGET.get();
    let left = budget.left.checked_sub(bytes).ok_or_else(too_much)?;
    BUDGET.set(Budget { left, ..budget });
    Ok(())
}

fn too_much() -> Error {
    Error::new(ErrorKind::OutOfFuel, "the template makes more text or values than one rendering may")
}

/// Charges a value with all that it contains.
fn charge_value(value: &Value, depth: usize, namespaces: bool) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(Error::new(ErrorKind::InvalidOperation, "the value is nested too deeply"));
    }
    if !namespaces && value.as_object().is_some_and(|object| object.type_name().ends_with("Namespace")) {
        return Err(Error::new(ErrorKind::InvalidOperation, "a namespace cannot be stored in a namespace"));
    }
    let item = |item: &Value, bytes: usize| {
        charge(bytes)?;
        charge_value(item, depth + 1, namespaces)
    };
    match value.kind() {
        ValueKind::String => charge_text(value.as_str().map_or(0, str::len)),
        ValueKind::Seq => value.try_iter()?.try_for_each(|one| item(&one, VALUE)),
        // Its items are made as they are read; without a length, they can be read once.
        ValueKind::Iterable if value.len().is_some() => value.try_iter()?.try_for_each(|one| item(&one, LAZY)),
        ValueKind::Map => value.try_iter()?.try_for_each(|key| {
            item(&key, VALUE)?;
            item(&value.get_item(&key)?, VALUE)
        }),
        _ => Ok(()),
    }
}

/// The filters that charge, and those that must be charged before they run.
pub fn install(environment: &mut Environment<'static>) {
    let returned = |namespaces: bool| {
        move |value: Value| -> Result<Value, Error> {
            charge(VALUE)?;
            charge_value(&value, 0, namespaces)?;
            Ok(value)
        }
    };
    environment.add_filter(CHARGE, returned(true));
    environment.add_filter(STORE, returned(false));
    let mut guard = |name: &'static str, filter: Value| {
        environment.add_filter(name, move |state: &State, arguments: Rest<Value>| {
            charge_before(name, &arguments)?;
            filter.call(state, &arguments)
        });
    };
    guard("replace", Value::from_function(filters::replace));
    guard("join", Value::from_function(filters::join));
    guard("indent", Value::from_function(filters::indent));
    guard("format", Value::from_function(filters::format));
    guard("batch", Value::from_function(filters::batch));
    guard("slice", Value::from_function(filters::slice));
    for (name, filter) in [
        ("list", Value::from_function(filters::list)),
        ("lines", Value::from_function(filters::lines)),
        ("split", Value::from_function(filters::split)),
        ("sort", Value::from_function(filters::sort)),
        ("unique", Value::from_function(filters::unique)),
        ("groupby", Value::from_function(filters::groupby)),
        ("map", Value::from_function(filters::map)),
        ("select", Value::from_function(filters::select)),
        ("reject", Value::from_function(filters::reject)),
        ("zip", Value::from_function(filters::zip)),
    ] {
        guard(name, filter);
    }
    environment.set_unknown_method_callback(|state, value, method, arguments| {
        let all: Vec<Value> = std::iter::once(value).chain(arguments).cloned().collect();
        match method {
            // Called on the separator, with the items as the argument.
            "join" => charge_between(value, arguments.first())?,
            _ => charge_before(method, &all)?,
        }
        unknown_method_callback(state, value, method, arguments)
    });
}

/// Charges the result of a filter or method that may make much more than it is given; the first argument is what it is applied to.
fn charge_before(name: &str, arguments: &[Value]) -> Result<(), Error> {
    let text = |index: usize| arguments.get(index).and_then(Value::as_str);
    let count = |index: usize| arguments.get(index).and_then(Value::as_usize).unwrap_or(0);
    match name {
        "replace" => {
            let (Some(whole), Some(from), Some(to)) = (text(0), text(1), text(2)) else { return Ok(()) };
            charge_text(whole.len().saturating_add(whole.matches(from).count().saturating_mul(to.len())))
        }
        "join" => charge_between(arguments.get(1).unwrap_or(&Value::UNDEFINED), arguments.first()),
        "indent" => {
            let width = arguments.iter().skip(1).find_map(Value::as_usize).unwrap_or(4);
            let lines = text(0).map_or(0, |text| text.lines().count());
            let named = arguments.last().and_then(|last| last.get_attr("width").ok()).and_then(|w| w.as_usize());
            charge_text(lines.saturating_add(1).saturating_mul(named.unwrap_or(0).max(width)))
        }
        // A width has few digits, and is not an argument.
        "format" => {
            let mut digits = 0;
            let is_wide = |byte: u8| {
                digits = if byte.is_ascii_digit() { digits + 1 } else { 0 };
                digits > 3 || byte == b'*'
            };
            if text(0).is_some_and(|text| text.bytes().any(is_wide)) { Err(too_much()) } else { Ok(()) }
        }
        "batch" | "slice" => charge(text(0).map_or(0, str::len).saturating_add(count(1)).saturating_mul(VALUE)),
        "list" | "lines" | "split" | "splitlines" | "sort" | "unique" | "groupby" | "map" | "select" | "reject"
        | "zip" => {
            // A text becomes at most as many texts as it has characters.
            let separated = match (name, text(0), text(1)) {
                ("split", Some(text), Some(by)) => text.matches(by).count() + 1,
                ("split", Some(text), None) => text.split_whitespace().count(),
                ("lines" | "splitlines", Some(text), _) => {
                    text.bytes().filter(|b| matches!(b, b'\n' | b'\r')).count() + 1
                }
                (_, Some(text), _) => text.len(),
                (_, None, _) => arguments.first().and_then(Value::len).unwrap_or(0),
            };
            charge(separated.saturating_mul(VALUE))
        }
        _ => Ok(()),
    }
}

/// Charges a separator between the items of a sequence, and the items.
fn charge_between(separator: &Value, items: Option<&Value>) -> Result<(), Error> {
    let Some(items) = items else { return Ok(()) };
    charge_value(items, 0, true)?;
    let between = separator.as_str().map_or(0, str::len);
    charge_text(items.len().unwrap_or(0).saturating_mul(between.saturating_add(VALUE / 2)))
}
