//! `docs/configuration.md` lists every flag, environment variable and key that the code declares, and no other.
//!
//! Flags are read from the `#[arg(long, …)]` attributes of the server, their defaults from there, from the help text or
//! from `EngineConfig`, keys of `[kernels]` from the struct that the table is read into, and variables from the texts
//! `"QUIRE_…"` wherever they stand.

use std::collections::{BTreeMap, BTreeSet};

use super::markdown::{self, Row};
use super::{File, Finding, Tree};

const PAGE: &str = "docs/configuration.md";
const PREFIX: &str = "QUIRE_";

/// A flag as it is declared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Flag {
    /// With its dashes.
    name: String,
    variable: Option<String>,
    /// As clap, the help text (`[default: …]`) or `EngineConfig` states it.
    default: Option<String>,
}

impl Flag {
    /// Its key in a settings file.
    fn key(&self) -> String {
        self.name.trim_start_matches('-').replace('-', "_")
    }
}

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let page = match tree.require(PAGE) {
        Ok(page) => page,
        Err(missing) => return vec![missing],
    };
    let rows = markdown::rows(&page.text);
    let mut findings = Vec::new();
    let sources = tree.files.iter().filter(|file| file.is_source() && ["cli", "bench"].contains(&file.top()));
    let mut flags: Vec<Flag> = sources.flat_map(|file| flags(&file.text)).collect();
    let defaults: Vec<(&str, &str)> =
        tree.files.iter().filter(|file| file.top() == "engine").flat_map(|file| defaults(&file.text)).collect();
    for flag in &mut flags {
        let stated = defaults.iter().find(|(field, _)| *field == flag.key()).map(|(_, value)| (*value).to_owned());
        flag.default = flag.default.take().or(stated);
    }
    let documented = entries(&rows, |code| code.starts_with("--"));
    let names: BTreeSet<&str> = flags.iter().map(|flag| flag.name.as_str()).collect();
    findings.extend(compare(page, "the flag", &names, &documented));
    for flag in &flags {
        let rows = documented.get(flag.name.as_str()).into_iter().flatten();
        // Commands may differ in a flag of one name: one of its rows is that of this one.
        let wrong: Vec<Option<Finding>> = rows.map(|row| check_row(page, row, flag)).collect();
        if wrong.iter().all(Option::is_some) {
            findings.extend(wrong.into_iter().next().flatten());
        }
    }

    let mut variables: BTreeSet<&str> = tree
        .files
        .iter()
        .filter(|file| file.is_rust() && !["testkit", "xtask"].contains(&file.top()))
        .flat_map(variables)
        .collect();
    variables.retain(|name| !flags.iter().any(|flag| flag.variable.as_deref() == Some(*name)));
    findings.extend(compare(page, "the variable", &variables, &entries(&rows, |code| code.starts_with(PREFIX))));

    let kernels = tree
        .files
        .iter()
        .filter(|file| file.top() == "attention-kernels")
        .flat_map(|file| fields(&file.text, "KernelChoice"));
    let keys: Vec<String> = kernels.map(|field| format!("kernels.{field}")).collect();
    let keys: BTreeSet<&str> = keys.iter().map(String::as_str).collect();
    findings.extend(compare(page, "the key", &keys, &entries(&rows, |code| code.starts_with("kernels."))));
    findings
}

/// Rows by what their first cell names, where it is such a name.
fn entries<'a, 'b>(rows: &'b [Row<'a>], is_name: impl Fn(&str) -> bool) -> BTreeMap<&'a str, Vec<&'b Row<'a>>> {
    let mut entries: BTreeMap<&str, Vec<&Row<'_>>> = BTreeMap::new();
    for (code, row) in rows.iter().flat_map(|row| row.code(0).map(move |code| (code, row))) {
        if is_name(code) {
            entries.entry(code).or_default().push(row);
        }
    }
    entries
}

/// What is declared and not documented, and the other way round.
fn compare(
    page: &File,
    what: &str,
    declared: &BTreeSet<&str>,
    documented: &BTreeMap<&str, Vec<&Row<'_>>>,
) -> Vec<Finding> {
    let missing = declared.iter().filter(|name| !documented.contains_key(*name));
    let missing =
        missing.map(|name| page.finding(format!("{what} `{name}` is missing; add a row with its default and unit")));
    let gone = documented.iter().filter(|(name, _)| !declared.contains(*name));
    missing
        .chain(gone.map(|(name, rows)| {
            page.at(rows[0].index, format!("{what} `{name}` does not exist in the code; remove the row"))
        }))
        .collect()
}

/// Columns: flag, variable, key, default, meaning.
fn check_row(page: &File, row: &Row<'_>, flag: &Flag) -> Option<Finding> {
    let variable = row.code(1).next();
    if variable != flag.variable.as_deref() {
        let expected = flag.variable.as_deref().map_or("no variable".to_owned(), |name| format!("`{name}`"));
        return Some(page.at(row.index, format!("{} has {expected} in the code; mend the second cell", flag.name)));
    }
    let key = flag.key();
    // The one flag that can not stand in the file it names.
    let expected = (key != "config").then_some(key.as_str());
    if row.code(2).next() != expected {
        return Some(page.at(
            row.index,
            format!("the key of {} is {}; mend the third cell", flag.name, expected.unwrap_or("none")),
        ));
    }
    let default = flag.default.as_deref()?;
    let stated = row.cell(3).replace('`', "");
    (stated != default).then(|| {
        page.at(
            row.index,
            format!("the default of {} is {default:?} in the code, {stated:?} here; mend the fourth cell", flag.name),
        )
    })
}

/// The flags that a file declares.
fn flags(text: &str) -> Vec<Flag> {
    let mut found = Vec::new();
    let (mut help, mut attribute) = (String::new(), None::<String>);
    for line in text.lines().map(str::trim) {
        if let Some(open) = attribute.as_mut().filter(|attribute| !attribute.ends_with(")]")) {
            *open += " ";
            *open += line;
        } else if line.starts_with("#[arg(") {
            attribute = Some(line.to_owned());
        } else if let Some(doc) = line.strip_prefix("///") {
            help += doc;
        } else if !line.starts_with("#[") {
            let field = line.trim_start_matches("pub ").split(':').next().unwrap_or_default();
            found.extend(attribute.take().and_then(|attribute| flag(&attribute, field, &help)));
            help.clear();
        }
    }
    found
}

/// A field with its attribute and help, if it is a flag.
fn flag(attribute: &str, field: &str, help: &str) -> Option<Flag> {
    let inside = attribute.strip_prefix("#[arg(")?.strip_suffix(")]")?;
    let settings: BTreeMap<&str, &str> = split(inside)
        .into_iter()
        .map(|setting| {
            setting
                .split_once('=')
                .map_or((setting.trim(), ""), |(name, value)| (name.trim(), value.trim().trim_matches('"')))
        })
        .collect();
    let long = *settings.get("long")?;
    let name = if long.is_empty() { field.replace('_', "-") } else { long.to_owned() };
    let stated = help.split_once("[default: ").and_then(|(_, rest)| rest.split(']').next());
    let default =
        settings.get("default_value").or(settings.get("default_value_t")).copied().or(stated).map(str::to_owned);
    Some(Flag { name: format!("--{name}"), variable: settings.get("env").map(|name| (*name).to_owned()), default })
}

/// The plain values of `EngineConfig::default`, by field.
fn defaults(text: &str) -> Vec<(&str, &str)> {
    let body = text
        .split_once("impl Default for EngineConfig {")
        .and_then(|(_, rest)| rest.split("\n}").next())
        .unwrap_or_default();
    let fields = body.lines().filter_map(|line| line.trim().strip_suffix(',')?.split_once(": "));
    fields.filter(|(_, value)| value.parse::<f64>().is_ok() || value.parse::<bool>().is_ok()).collect()
}

/// Splits at commas outside of texts.
fn split(text: &str) -> Vec<&str> {
    let mut quoted = false;
    text.split(|c| {
        quoted ^= c == '"';
        c == ',' && !quoted
    })
    .collect()
}

/// Names of environment variables that stand as whole texts in a file.
fn variables(file: &File) -> Vec<&str> {
    let texts = file.text.split('"').skip(1);
    let is_name = |text: &&str| {
        text.starts_with(PREFIX) && text.chars().all(|c| c.is_ascii_uppercase() || c == '_' || c.is_ascii_digit())
    };
    texts.filter(is_name).collect()
}

/// Public fields of a struct.
fn fields<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
    let body = text
        .split_once(&format!("pub struct {name} {{"))
        .and_then(|(_, rest)| rest.split('}').next())
        .unwrap_or_default();
    body.lines().filter_map(|line| line.trim().strip_prefix("pub ")?.split(':').next()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ARGS: &str = r#"
/// Engine.
pub struct Args {
    /// Folder
    #[arg(value_name = "MODEL")]
    pub model_path: Option<PathBuf>,
    /// Tokens per block [default: 16]
    #[arg(long, value_name = "a, b)", env = "QUIRE_BLOCK_SIZE")]
    pub block_size: Option<usize>,
    /// Off
    #[arg(long = "no-cache", num_args = 0..=1,
          require_equals = true)]
    pub off: bool,
    #[arg(short, long, default_value_t = 8000)]
    pub port: u16,
    #[arg(long)]
    pub share: Option<f64>,
}
"#;

    fn page(rows: &str) -> Vec<String> {
        let tree = Tree {
            files: vec![
                File::new("cli/src/args.rs", ARGS),
                File::new(
                    "engine/src/api.rs",
                    "impl Default for EngineConfig {\n    fn default() -> Self {\n        EngineConfig {\n            seed: None,\n            share: 0.4,\n        }\n    }\n}\n",
                ),
                File::new("cli/src/log.rs", "env(\"QUIRE_LOG\"); \"QUIRE_x\"; \"a QUIRE_B\""),
                File::new(
                    "attention-kernels/src/select.rs",
                    "pub struct KernelChoice {\n    /// D.\n    pub decode: String,\n}\n",
                ),
                File::new(PAGE, rows),
            ],
            ..Tree::default()
        };
        check(&tree).iter().map(ToString::to_string).collect()
    }

    const GOOD: &str = "| `--block-size` | `QUIRE_BLOCK_SIZE` | `block_size` | 16 | tokens |\n| `--no-cache` | – | `no_cache` | off | |\n\
        | `--port` | | `port` | `8000` | |\n| `--share` | | `share` | 0.4 | |\n| `QUIRE_LOG` | `warn` | |\n| `kernels.decode` | auto | |\n";

    #[test]
    fn flags_are_read_from_their_attributes() {
        let flag = |name: &str, variable: Option<&str>, default: Option<&str>| Flag {
            name: name.to_owned(),
            variable: variable.map(str::to_owned),
            default: default.map(str::to_owned),
        };
        let expected = [
            flag("--block-size", Some("QUIRE_BLOCK_SIZE"), Some("16")),
            flag("--no-cache", None, None),
            flag("--port", None, Some("8000")),
            flag("--share", None, None),
        ];
        assert_eq!(flags(ARGS), expected);
    }

    #[test]
    fn a_page_that_says_what_the_code_says_is_good() {
        assert_eq!(page(GOOD), [""; 0]);
    }

    #[test]
    fn each_difference_is_found() {
        for (from, to, message) in [
            ("| `--port` |", "| `--port2` |", "the flag `--port` is missing"),
            ("| `--port` | | `port`", "| `--port` | `QUIRE_PORT` | `port`", "--port has no variable in the code"),
            ("`no_cache`", "`cache`", "the key of --no-cache is no_cache"),
            ("| 16 |", "| 32 |", "the default of --block-size is \"16\" in the code, \"32\" here"),
            ("| 0.4 |", "| 0.9 |", "the default of --share is \"0.4\" in the code, \"0.9\" here"),
            ("`QUIRE_LOG`", "`QUIRE_LOGS`", "the variable `QUIRE_LOG` is missing"),
            ("`kernels.decode`", "`kernels.prefill`", "the key `kernels.prefill` does not exist in the code"),
        ] {
            let findings = page(&GOOD.replace(from, to));
            assert!(findings.iter().any(|finding| finding.contains(message)), "{message}: {findings:?}");
        }
    }
}
