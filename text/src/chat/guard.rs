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
//!
//! Neither does a limit on instructions bound time: one comparison reads two texts. The operands of comparisons, filters, tests,
//! methods and subscripts pass through [`READ`] or [`READ_ALL`], which charge a second budget, of bytes that are read.

use std::cell::Cell;

use minijinja::value::{Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::methods;

/// Budget of one rendering in bytes: a constant part (a message needs tens of thousands), and a part per byte of input, because
/// templates copy, cut and join their input.
const TOTAL: (usize, usize) = (128 << 20, 32);

/// Greatest size of one text in bytes: a constant part and a part per byte of input.
const TEXT: (usize, usize) = (16 << 20, 2);

/// Budget of bytes that a rendering reads: a constant part and a part per byte of input. Reading that much takes seconds.
const READS: (usize, usize) = (512 << 20, 1024);

/// Bytes charged for an item that is skipped, and for one whose contents are read, without them: what takes as long.
const ITEM: (usize, usize) = (16, 128);

/// Bytes charged for a value, without its contents.
const VALUE: usize = 64;

/// Bytes charged for an item that is created when it is read, such as a number of a range: its part of the printed text and of the
/// time to read it.
const LAZY: usize = 32;

/// Bytes charged for a lazy sequence or map made of others, which may nest without items. Jinja2 has no filter that makes one.
const NESTED: usize = 256 << 10;

/// Greatest nesting depth of containers.
const MAX_DEPTH: usize = 128;

/// Name of the filter that charges a value and returns it. It is no identifier, so templates cannot call it.
pub const CHARGE: &str = "=";

/// Name of the filter for values assigned to attributes of a namespace. It rejects values that contain a namespace, so that no
/// value contains itself.
pub const STORE: &str = ".";

/// Name of the filter for operands that are read without the contents of their items.
pub const READ: &str = "?";

/// Name of the filter for operands that are read with the contents of their items.
pub const READ_ALL: &str = "??";

/// Name of the filter for the operands of `*`. It rejects empty sequences: repeating one takes time and creates nothing.
pub const REPEAT: &str = "*";

/// Name of the filter for `%`.
pub const REMAINDER: &str = "%";

/// The remaining bytes of a rendering, and the greatest size of one text.
#[derive(Clone, Copy, Default)]
struct Budget {
    left: usize,
    text: usize,
    reads: usize,
}

thread_local! {
    /// Budget of the rendering that runs on this thread.
    static BUDGET: Cell<Budget> = const { Cell::new(Budget { left: 0, text: 0, reads: 0 }) };
}

/// Calls `render` with the budget for `input` bytes of variables.
pub fn with_budget<T>(input: usize, render: impl FnOnce() -> T) -> T {
    let budget = |(constant, per_byte): (usize, usize)| constant.saturating_add(input.saturating_mul(per_byte));
    BUDGET.set(Budget { left: budget(TOTAL), text: budget(TEXT), reads: budget(READS) });
    let rendered = render();
    BUDGET.set(Budget::default());
    rendered
}

/// Fails if one text may not have this size.
pub fn check_text(bytes: usize) -> Result<(), Error> {
    if bytes > BUDGET.get().text { Err(too_much()) } else { Ok(()) }
}

/// Charges one text of this size.
pub fn charge_text(bytes: usize) -> Result<(), Error> {
    check_text(bytes)?;
    charge(bytes)
}

/// Charges bytes that are read.
fn charge_read(bytes: usize) -> Result<(), Error> {
    let budget = BUDGET.get();
    let reads = budget.reads.checked_sub(bytes).ok_or_else(|| {
        Error::new(ErrorKind::OutOfFuel, "the template compares or searches more text than one rendering may")
    })?;
    BUDGET.set(Budget { reads, ..budget });
    Ok(())
}

/// Charges reading a value: a text, or the items of a container, with their contents if `all`.
fn read_value(value: &Value, depth: usize, all: bool) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(Error::new(ErrorKind::InvalidOperation, "the value is nested too deeply"));
    }
    match value.kind() {
        ValueKind::String => charge_read(value.as_str().map_or(0, str::len)),
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => {
            let Some(length) = value.len() else { return Ok(()) };
            charge_read(length.saturating_mul(if all { ITEM.1 } else { ITEM.0 }))?;
            if !all {
                return Ok(());
            }
            value.try_iter()?.try_for_each(|item| {
                read_value(&item, depth + 1, all)?;
                if value.kind() == ValueKind::Map {
                    read_value(&value.get_item(&item)?, depth + 1, all)
                } else {
                    Ok(())
                }
            })
        }
        _ => Ok(()),
    }
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
            // Otherwise a loop over `x[1:]` would nest one lazy sequence in another at each turn.
            if value.kind() == ValueKind::Iterable && value.len().is_some() {
                return Ok(value.try_iter()?.collect());
            }
            Ok(value)
        }
    };
    environment.add_filter(CHARGE, returned(true));
    environment.add_filter(STORE, returned(false));
    for (name, all) in [(READ, false), (READ_ALL, true)] {
        environment.add_filter(name, move |value: Value| read_value(&value, 0, all).map(|()| value));
    }
    environment.add_filter(REPEAT, move |value: Value| {
        if matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) && value.len() == Some(0) {
            return Err(Error::new(ErrorKind::InvalidOperation, "an empty list cannot be repeated"));
        }
        returned(true)(value)
    });
    environment.add_filter(REMAINDER, |state: &State, left: Value, right: Value| {
        if left.kind() != ValueKind::String {
            return methods::remainder(&left, &right);
        }
        let arguments = methods::format_arguments(left, &right)?;
        charge_before("format", &arguments)?;
        Value::from_function(filters::format).call(state, &arguments)
    });
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
        ("selectattr", Value::from_function(filters::selectattr)),
        ("reject", Value::from_function(filters::reject)),
        ("rejectattr", Value::from_function(filters::rejectattr)),
        ("chain", Value::from_function(filters::chain)),
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
        all.iter().try_for_each(|value| read_value(value, 0, false))?;
        methods::call(value, method, arguments, &charge_text)
            .unwrap_or_else(|| unknown_method_callback(state, value, method, arguments))
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
            let Some(format) = text(0) else { return Ok(()) };
            if format.bytes().any(is_wide) {
                return Err(too_much());
            }
            // Each directive may print any argument.
            let directives = format.bytes().filter(|byte| matches!(byte, b'%' | b'{')).count();
            (0..directives)
                .try_for_each(|_| arguments.iter().skip(1).try_for_each(|argument| charge_value(argument, 0, true)))
        }
        "chain" => charge(NESTED),
        "batch" | "slice" => charge(text(0).map_or(0, str::len).saturating_add(count(1)).saturating_mul(VALUE)),
        "list" | "lines" | "split" | "rsplit" | "splitlines" | "sort" | "unique" | "groupby" | "map" | "select"
        | "reject" | "selectattr" | "rejectattr" | "zip" => {
            // A text is split into at most as many texts as it has characters.
            let separated = match (name, text(0), text(1)) {
                ("split" | "rsplit", Some(text), Some(by)) => text.matches(by).count() + 1,
                ("split" | "rsplit", Some(text), None) => text.split_whitespace().count(),
                ("lines" | "splitlines", Some(text), _) => {
                    text.bytes().filter(|b| matches!(b, b'\n' | b'\r')).count() + 1
                }
                (_, Some(text), _) => text.len(),
                (_, None, _) => arguments.first().and_then(Value::len).unwrap_or(0),
            };
            // A test or filter of each item may read all arguments.
            if matches!(name, "map" | "select" | "reject" | "selectattr" | "rejectattr") {
                let argument = |value: &Value| value.as_str().map_or_else(|| value.len().unwrap_or(0), str::len);
                let read: usize = arguments.iter().skip(1).map(argument).fold(0, usize::saturating_add);
                charge_read(separated.saturating_mul(read))?;
            }
            charge(if name == "zip" { NESTED } else { 0 })?;
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
