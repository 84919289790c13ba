//! `docs/configuration.md`: its tables of flags are written from the command line as clap describes it.
//! `QUIRE_WRITE_DOCS=1 cargo test -p cli --test all configuration` writes them.

use std::collections::BTreeSet;

use clap::{Arg, Command};
use engine::EngineConfig;
use serde_json::{Value, json};
use testkit::markdown;

const PAGE: &str = "docs/configuration.md";

/// Begins the line before a table: `<!-- flags of serve: Engine -->` is followed by the flags of a command under a heading of its help,
/// `<!-- flags of chat, generate -->` by those of commands that no table has listed yet, and `<!-- flags of vllm serve alone -->` by
/// those that only vLLM has.
const MARK: &str = "<!-- flags of ";
const HEAD: &str = "| flag | environment | key | default | unit and meaning |\n|---|---|---|---|---|\n";

/// Flag, variable, key, default, and meaning.
type Row = [String; 5];

/// The row of an argument, unless it is positional.
fn row(arg: &Arg, engine: &Value) -> Option<Row> {
    let name = arg.get_long()?;
    let long = [name].into_iter().chain(arg.get_visible_aliases().unwrap_or_default());
    let short = arg.get_short().map(|letter| format!("`-{letter}`"));
    let names: Vec<_> = long.map(|name| format!("`--{name}`")).chain(short).collect();
    let variable = arg.get_env().map(|name| format!("`{}`", name.to_string_lossy()));
    let key = (name != "config").then(|| format!("`{}`", name.replace('-', "_")));
    let help = arg.get_long_help().or(arg.get_help()).unwrap().to_string();
    let (meaning, of_help) = match help.split_once(" [default: ") {
        Some((before, rest)) => {
            let (default, after) = rest.split_once(']').unwrap();
            (before.to_string() + after, Some(default.to_string()))
        }
        None => (help, None),
    };
    let mut paragraphs: Vec<String> =
        meaning.split("\n\n").map(|text| text.trim().trim_end_matches('.').to_string()).collect();
    let values = arg.get_possible_values();
    let values: Vec<_> = values.iter().map(|value| format!("`{}`", value.get_name())).collect();
    if arg.get_action().takes_values() && !values.iter().all(|value| meaning.contains(value.trim_matches('`'))) {
        paragraphs[0] += &format!(" ({})", values.join(", "));
    }
    let meaning = paragraphs.join(". ").replace('|', "\\|");
    let of_clap: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    let of_engine = engine[name.replace('-', "_")].as_u64().map(|number| number.to_string());
    let default = match arg.get_action().takes_values() {
        true if of_clap.is_empty() => of_help.or(of_engine),
        true => Some(of_clap.join(",")),
        false => Some("false".to_string()),
    };
    let or_none = |cell: Option<String>| cell.unwrap_or_else(|| "–".to_string());
    Some([names.join(", "), or_none(variable), or_none(key), with_code(&or_none(default)), with_code(&meaning)])
}

/// Flags in backticks, which the help does without.
fn with_code(text: &str) -> String {
    let parts = text.split('`').enumerate().map(|(index, part)| {
        let words = part.split(' ').map(|word| match word.trim_end_matches([',', ';', '.', ')', ':']) {
            flag if index % 2 == 0 && flag.starts_with("--") => word.replace(flag, &format!("`{flag}`")),
            _ => word.to_string(),
        });
        words.collect::<Vec<_>>().join(" ")
    });
    parts.collect::<Vec<_>>().join("`")
}

/// Every argument of the commands that have no subcommands.
fn leaves(command: &Command) -> Vec<&Arg> {
    command.get_arguments().chain(command.get_subcommands().flat_map(leaves)).collect()
}

/// The page with the tables of its marks, and the flags that it has no table for.
fn written(page: &str, root: &Command, engine: &Value) -> (String, Vec<String>) {
    let mut listed = BTreeSet::new();
    let mut text = String::new();
    let mut lines = page.lines().peekable();
    while let Some(line) = lines.next() {
        text += &format!("{line}\n");
        let Some(mark) = line.strip_prefix(MARK).and_then(|mark| mark.strip_suffix(" -->")) else { continue };
        while lines.next_if(|line| line.starts_with('|')).is_some() {}
        if mark == "vllm serve alone" {
            text += &cli::vllm_flags();
            continue;
        }
        let (names, heading) = mark.split_once(": ").map_or((mark, None), |(names, heading)| (names, Some(heading)));
        let names: Vec<&str> = names.split(", ").collect();
        let mut rows: Vec<(Row, Vec<&str>)> = Vec::new();
        for name in &names {
            let words = name.split(' ');
            let command = words.fold(root, |command, word| command.find_subcommand(word).unwrap());
            let under =
                |arg: &&Arg| heading.is_none_or(|heading| arg.get_help_heading().unwrap_or("Options") == heading);
            for row in command.get_arguments().filter(under).filter_map(|arg| row(arg, engine)) {
                match rows.iter_mut().find(|(other, _)| *other == row) {
                    Some((_, of)) => of.push(name),
                    None if listed.contains(&row) => {}
                    None => rows.push((row, vec![name])),
                }
            }
        }
        text += HEAD;
        for (row, of) in rows {
            let of: Vec<_> = of.iter().map(|name| format!("`{}`", name.rsplit(' ').next().unwrap())).collect();
            let of = if of.len() < names.len() { of.join(", ") + ": " } else { String::new() };
            let [flag, variable, key, default, meaning] = &row;
            text += &format!("| {flag} | {variable} | {key} | {default} | {of}{meaning} |\n");
            listed.insert(row);
        }
    }
    let all = leaves(root).into_iter().filter_map(|arg| row(arg, engine));
    let missing = all.filter(|row| !listed.contains(row)).map(|[flag, ..]| flag);
    (text, missing.collect())
}

#[test]
fn the_configuration_page_lists_every_flag_as_the_command_line_describes_it() {
    let path = testkit::workspace::root().join(PAGE);
    let page = std::fs::read_to_string(&path).unwrap();
    let engine = serde_json::to_value(EngineConfig::default()).unwrap();
    let (written, missing) = written(&page, &cli::command(), &engine);
    assert!(missing.is_empty(), "{PAGE} has no table for {missing:?}; add a line {MARK}COMMAND -->");
    if std::env::var_os("QUIRE_WRITE_DOCS").is_some() {
        return std::fs::write(&path, &written).unwrap();
    }
    assert!(
        page == written,
        "{PAGE} is out of date; write its tables with QUIRE_WRITE_DOCS=1 cargo test -p cli --test all configuration"
    );
    let rows = markdown::rows(&page);
    let documented: BTreeSet<&str> = rows.iter().flat_map(|row| row.code(0)).collect();
    let kernels: Vec<String> =
        engine["kernels"].as_object().unwrap().keys().map(|key| format!("kernels.{key}")).collect();
    assert!(kernels.iter().all(|key| documented.contains(key.as_str())), "{PAGE} lists {kernels:?}");
}

#[test]
fn tables_are_written_after_their_marks_and_flags_without_a_table_are_found() {
    let flag = |name: &'static str| Arg::new(name).long(name);
    let root = Command::new("quire")
        .subcommand(
            Command::new("a")
                .arg(Arg::new("path"))
                .arg(flag("size").env("SIZE").help("Tokens, see --off [default: 16]").help_heading("Engine"))
                .arg(flag("off").action(clap::ArgAction::SetTrue).help("No cache").long_help("No cache\n\nSlow."))
                .arg(flag("seqs").help("Most")),
        )
        .subcommand(Command::new("b").arg(flag("off").short('o').help("Other")).arg(flag("seqs").help("Most")));
    let engine = json!({"seqs": 7});
    let page = "<!-- flags of a: Engine -->\n| old |\n\ntext\n\n<!-- flags of a, b -->\n";
    let expected = [
        "<!-- flags of a: Engine -->\n",
        HEAD,
        "| `--size` | `SIZE` | `size` | 16 | Tokens, see `--off` |\n\ntext\n\n<!-- flags of a, b -->\n",
        HEAD,
        "| `--off` | – | `off` | false | `a`: No cache. Slow |\n| `--seqs` | – | `seqs` | 7 | Most |\n",
        "| `--off`, `-o` | – | `off` | – | `b`: Other |\n",
    ];
    assert_eq!(written(page, &root, &engine), (expected.concat(), Vec::new()));
    assert_eq!(written("<!-- flags of b -->\n", &root, &engine).1, ["`--size`", "`--off`"]);
}
