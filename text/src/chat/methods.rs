//! Methods of Python's texts and lists that `minijinja_contrib::pycompat` does not have.

use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Error, ErrorKind, Value};

use super::python;

/// Charges the bytes of a text before it is made.
type Charge<'a> = &'a dyn Fn(usize) -> Result<(), Error>;

/// Calls a method; `None` if it is not one of these.
pub(super) fn call(
    value: &Value,
    method: &str,
    arguments: &[Value],
    charge: Charge<'_>,
) -> Option<Result<Value, Error>> {
    match (value.kind(), value.as_str()) {
        (_, Some(text)) => of_text(text, method, arguments, charge),
        (ValueKind::Seq, _) if method == "index" => Some(index_in_list(value, arguments)),
        _ => None,
    }
}

fn of_text(text: &str, method: &str, arguments: &[Value], charge: Charge<'_>) -> Option<Result<Value, Error>> {
    let one = || from_args::<(&str,)>(arguments).map(|(argument,)| argument);
    Some(match method {
        "casefold" => from_args::<()>(arguments).map(|()| text.to_lowercase().replace('ß', "ss").into()),
        "removeprefix" => one().map(|prefix| text.strip_prefix(prefix).unwrap_or(text).into()),
        "removesuffix" => one().map(|suffix| text.strip_suffix(suffix).unwrap_or(text).into()),
        "partition" => one().and_then(|by| parts(text, by, text.split_once(by), false)),
        "rpartition" => one().and_then(|by| parts(text, by, text.rsplit_once(by), true)),
        // The library counts bytes.
        "find" | "rfind" if arguments.len() == 1 => one().map(|wanted| {
            let found = if method == "find" { text.find(wanted) } else { text.rfind(wanted) };
            found.map_or(Value::from(-1), |at| text[..at].chars().count().into())
        }),
        "index" => one().and_then(|wanted| place(text, text.find(wanted))),
        "rindex" => one().and_then(|wanted| place(text, text.rfind(wanted))),
        "rsplit" => rsplit(text, arguments),
        "zfill" => from_args::<(usize,)>(arguments).and_then(|(width,)| {
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
            padded(text, width, '0', charge, |zeros| (format!("{sign}{zeros}{digits}"), String::new()))
        }),
        "ljust" => justified(text, arguments, charge, |fill| (text.to_string(), fill)),
        "rjust" => justified(text, arguments, charge, |fill| (fill, text.to_string())),
        "center" => justified(text, arguments, charge, |fill| {
            let (count, width) = (fill.chars().count(), fill.chars().count() + text.chars().count());
            // Python puts the odd character to the left if the width is odd.
            let left = count / 2 + (count & width & 1);
            let (left, right): (String, String) =
                (fill.chars().take(left).collect(), fill.chars().skip(left).collect());
            (left + text, right)
        }),
        _ => return None,
    })
}

/// `left % right` of numbers, as Python has it: the sign is that of the divisor.
pub(super) fn remainder(left: &Value, right: &Value) -> Result<Value, Error> {
    if let (Some(left), Some(right)) = (left.as_i64(), right.as_i64()) {
        let remainder = left.checked_rem(right).ok_or_else(|| wrong("`%` by zero"))?;
        return Ok(if remainder != 0 && (remainder < 0) != (right < 0) { remainder + right } else { remainder }.into());
    }
    let (left, right) = (f64::try_from(left.clone())?, f64::try_from(right.clone())?);
    let remainder = left % right;
    Ok(if remainder != 0.0 && (remainder < 0.0) != (right < 0.0) { remainder + right } else { remainder }.into())
}

/// The arguments of the filter `format` for `format % right`: a list has several, and a map has names.
pub(super) fn format_arguments(format: Value, right: &Value) -> Result<Vec<Value>, Error> {
    // Python writes True and None.
    let written = |value: Value| match value.kind() {
        ValueKind::String | ValueKind::Number => Ok(value),
        _ => python::str(&value).map(Value::from),
    };
    let mut arguments = vec![format];
    match right.kind() {
        ValueKind::Seq => arguments.extend(right.try_iter()?.map(written).collect::<Result<Vec<_>, _>>()?),
        ValueKind::Map => arguments.push(right.clone()),
        _ => arguments.push(written(right.clone())?),
    }
    Ok(arguments)
}

/// The three parts of a text around a separator that was found.
fn parts(text: &str, by: &str, found: Option<(&str, &str)>, from_end: bool) -> Result<Value, Error> {
    if by.is_empty() {
        return Err(wrong("the separator is empty"));
    }
    let [first, second, third] = match found {
        Some((before, after)) => [before, by, after],
        None if from_end => ["", "", text],
        None => [text, "", ""],
    };
    Ok([first, second, third].into_iter().map(Value::from).collect())
}

/// The place of a character, counted in characters.
fn place(text: &str, found: Option<usize>) -> Result<Value, Error> {
    found.map(|at| text[..at].chars().count().into()).ok_or_else(|| wrong("the text is not found"))
}

fn index_in_list(list: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let (wanted,) = from_args::<(Value,)>(arguments)?;
    let found = list.try_iter()?.position(|item| item == wanted);
    found.map(Value::from).ok_or_else(|| wrong("the item is not in the list"))
}

/// `rsplit(sep=None, maxsplit=-1)`.
fn rsplit(text: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (places, named) = from_args::<(&[Value], Kwargs)>(arguments)?;
    let (by, most) = from_args::<(Option<Value>, Option<i64>)>(places)?;
    let by = by.or(named.get::<Option<Value>>("sep")?).filter(|by| !by.is_none());
    let most = most.or(named.get::<Option<i64>>("maxsplit")?);
    named.assert_all_used()?;
    let most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
    let mut found = Vec::new();
    let mut rest = text;
    match by.as_ref().map(|by| by.as_str().filter(|by| !by.is_empty())) {
        Some(None) => return Err(wrong("the separator is not a text with characters")),
        Some(Some(by)) => {
            while let Some((before, after)) = rest.rsplit_once(by).filter(|_| found.len() < most) {
                found.push(after);
                rest = before;
            }
            found.push(rest);
        }
        None => {
            rest = rest.trim();
            while let Some((before, after)) = rest.rsplit_once(char::is_whitespace).filter(|_| found.len() < most) {
                found.push(after);
                rest = before.trim_end();
            }
            found.extend((!rest.is_empty()).then_some(rest));
        }
    }
    Ok(found.into_iter().rev().map(Value::from).collect())
}

/// A method with a width and perhaps a character to fill it with.
fn justified(
    text: &str,
    arguments: &[Value],
    charge: Charge<'_>,
    join: impl Fn(String) -> (String, String),
) -> Result<Value, Error> {
    let (width, fill) = from_args::<(usize, Option<&str>)>(arguments)?;
    let mut fill = fill.unwrap_or(" ").chars();
    match (fill.next(), fill.next()) {
        (Some(fill), None) => padded(text, width, fill, charge, join),
        _ => Err(wrong("the text to fill with is not one character")),
    }
}

/// The text with as many characters as it lacks of `width`.
fn padded(
    text: &str,
    width: usize,
    fill: char,
    charge: Charge<'_>,
    join: impl Fn(String) -> (String, String),
) -> Result<Value, Error> {
    let lacking = width.saturating_sub(text.chars().count());
    charge(lacking.saturating_mul(fill.len_utf8()).saturating_add(text.len()))?;
    let (left, right) = join(std::iter::repeat_n(fill, lacking).collect());
    Ok((left + &right).into())
}

fn wrong(problem: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem)
}
