//! `GET /docs`: the OpenAPI document as a page to read. It has no scripts, and nothing from other servers.

use std::fmt::Write;

use serde_json::Value;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}\
    summary{cursor:pointer;padding:.3rem 0}code{background:#8882;padding:.1rem .3rem}table{border-collapse:collapse}\
    td,th{border-bottom:1px solid #8884;padding:.2rem .6rem;text-align:left;vertical-align:top}";

/// The content security policy: nothing but the style above.
pub const POLICY: &str =
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The page of a document.
pub fn html(document: &Value) -> String {
    let mut page = String::new();
    let info = &document["info"];
    let (title, version) = (text(&info["title"]), text(&info["version"]));
    let head = "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">";
    // Writing to a `String` cannot fail.
    let _ = write!(page, "{head}<title>{title} API</title><style>{STYLE}</style><h1>{title} {version}</h1>");
    let _ = write!(page, "<p>{} <a href=\"openapi.json\">openapi.json</a></p>", text(&info["description"]));
    let paths = document["paths"].as_object().into_iter().flatten();
    for (path, methods) in paths.filter(|(path, _)| !path.starts_with("/page/")) {
        for (method, operation) in methods.as_object().into_iter().flatten() {
            let (method, path, summary) = (method.to_uppercase(), escape(path), text(&operation["summary"]));
            let _ = write!(page, "<details><summary><code>{method} {path}</code> {summary}</summary>");
            let request = &operation["requestBody"]["content"]["application/json"]["schema"];
            fields(&mut page, "Request", resolve(document, request));
            let answer = &operation["responses"]["200"]["content"]["application/json"]["schema"];
            fields(&mut page, "Response", resolve(document, answer));
            page.push_str("</details>");
        }
    }
    page.push_str("</html>");
    page
}

/// A table of the fields of an object.
fn fields(page: &mut String, what: &str, schema: &Value) {
    let Some(properties) = schema["properties"].as_object().filter(|fields| !fields.is_empty()) else { return };
    let required = schema["required"].as_array();
    let is_required = |name: &str| required.is_some_and(|names| names.iter().any(|required| required == name));
    let _ = write!(page, "<table><tr><th>{what}<th>Type<th>Meaning");
    for (name, field) in properties {
        let star = if is_required(name) { "*" } else { "" };
        let _ = write!(
            page,
            "<tr><td><code>{}</code>{star}<td>{}<td>{}",
            escape(name),
            kind(field),
            text(&field["description"])
        );
    }
    page.push_str("</table>");
}

/// The type, the range and the default of a field.
fn kind(field: &Value) -> String {
    let mut words = match &field["type"] {
        Value::String(one) => one.clone(),
        Value::Array(several) => {
            let names = several.iter().filter_map(Value::as_str).filter(|name| *name != "null");
            names.collect::<Vec<_>>().join(" or ")
        }
        _ => String::new(),
    };
    for (name, sign) in [("minimum", " ≥ "), ("exclusiveMinimum", " > "), ("maximum", " ≤ "), ("default", "; default ")]
    {
        if !field[name].is_null() {
            let _ = write!(words, "{sign}{}", field[name]);
        }
    }
    escape(&words)
}

/// The schema that a reference leads to.
fn resolve<'a>(document: &'a Value, schema: &'a Value) -> &'a Value {
    let place = schema["$ref"].as_str().and_then(|place| place.strip_prefix('#'));
    place.and_then(|place| document.pointer(place)).unwrap_or(schema)
}

fn text(value: &Value) -> String {
    escape(value.as_str().unwrap_or_default())
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
