//! A budget of bytes for the texts and values that one rendering creates, in addition to the limit on instructions.
//!
//! A limit on instructions does not bound memory: each `{% set x = x ~ x %}` doubles a text. Therefore [`rewrite`](super::rewrite)
//! changes the parsed template: every expression that creates a text or container (`+`, `*`, `~`, slices, literals, calls, filters)
//! passes through the filter [`CHARGE`], and text between tags becomes an expression that the formatter sees. Bytes are charged to
//! the rendering's [`Budget`]. The rendering fails when it is exhausted.
//!
//! Most operations create at most the sum of their operands, which are already charged. Those that multiply (such as `replace`,
//! `join` and `indent`) are charged before they run ([`install`]). A value is charged for everything that it contains, repeated
//! parts repeatedly, so the text of a value is about as long as its charge. No value contains itself.

use std::cell::Cell;

use minijinja::value::{Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Budget of one rendering in bytes: a constant part (a message needs tens of thousands), and a part per byte of input, because
/// templates copy, cut and join their input.
const TOTAL: (usize, usize) = (128 << 20, 32);

/// Greatest size of one text in bytes: a constant part and a part per byte of input.
const TEXT: (usize, usize) = (16 << 20, 2);

/// Bytes charged for a value, without its contents.
const VALUE: usize = 64;

/// Bytes charged for an item that is created when it is read, such as a number of a range: its part of the printed text and of the
/// time to read it.
const LAZY: usize = 32;

/// Greatest nesting depth of containers.
const MAX_DEPTH: usize = 128;

/// Name of the filter that charges a value and returns it. It is no identifier, so templates cannot call it.
pub const CHARGE: &str = "=";

/// Name of the filter for values assigned to attributes of a namespace. It rejects values that contain a namespace, so that no
/// value contains itself.
pub const STORE: &str = ".";

/// The remaining bytes of a rendering, and the greatest size of one text.
#[derive(Clone, Copy, Default)]
struct Budget {
    left: usize,
    text: usize,
}

thread_local! {
    /// Budget of the rendering that runs on this thread.
    static BUDGET: Cell<Budget> = const { Cell::new(Budget { left: 0, text: 0 }) };
}

/// Calls `render` with the budget for `input` bytes of variables.
pub fn with_budget<T>(input: usize, render: impl FnOnce() -> T) -> T {
    let budget = |(constant, per_byte): (usize, usize)| constant.saturating_add(input.saturating_mul(per_byte));
    BUDGET.set(Budget { left: budget(TOTAL), text: budget(TEXT) });
    let rendered = render();
    BUDGET.set(Budget::default());
    rendered
}

/// Charges one text of this size.
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
    Error::new(ErrorKind::OutOfFuel, "the template creates more text or values than one rendering may")
}

/// Charges a value and everything that it contains. Fails on a namespace unless `namespaces`.
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
        // Items are created as they are read. Without a length they can be read only once, so they are not charged here.
        ValueKind::Iterable if value.len().is_some() => value.try_iter()?.try_for_each(|one| item(&one, LAZY)),
        ValueKind::Map => value.try_iter()?.try_for_each(|key| {
            item(&key, VALUE)?;
            item(&value.get_item(&key)?, VALUE)
        }),
        _ => Ok(()),
    }
}

/// Adds the charging filters, and wraps the filters and methods that must be charged before they run.
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
    for (name, filter) in [
        ("replace", Value::from_function(filters::replace)),
        ("join", Value::from_function(filters::join)),
        ("indent", Value::from_function(filters::indent)),
        ("format", Value::from_function(filters::format)),
        ("batch", Value::from_function(filters::batch)),
        ("slice", Value::from_function(filters::slice)),
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
        environment.add_filter(name, move |state: &State, arguments: Rest<Value>| {
            charge_before(name, &arguments)?;
            filter.call(state, &arguments)
        });
    }
    environment.set_unknown_method_callback(|state, value, method, arguments| {
        let all: Vec<Value> = std::iter::once(value).chain(arguments).cloned().collect();
        match method {
            // `separator.join(items)`
            "join" => charge_between(value, arguments.first())?,
            _ => charge_before(method, &all)?,
        }
        unknown_method_callback(state, value, method, arguments)
    });
}

/// Charges the result of a filter or method that may be much larger than its arguments, the first of which is the value it is
/// applied to.
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
        // A width of more than three digits, or one taken from an argument, is refused.
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
            // A text is split into at most as many texts as it has characters.
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

/// Charges the items of a sequence and a separator between them.
fn charge_between(separator: &Value, items: Option<&Value>) -> Result<(), Error> {
    let Some(items) = items else { return Ok(()) };
    charge_value(items, 0, true)?;
    let between = separator.as_str().map_or(0, str::len);
    charge_text(items.len().unwrap_or(0).saturating_mul(between.saturating_add(VALUE / 2)))
}
