//! No files of a crate import each other in a circle: each can be read after those that it stands on.
//!
//! Imports are the paths of `use` items and the paths within code that begin with `crate`, `super` or `self`, tests left out.
//! A name is followed through re-exports to the file that defines it; a re-export itself is no import.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::source::lines;
use super::{File, Finding, Tree};

/// A path as its words: `["crate", "a", "B"]`.
type Path = Vec<String>;

/// A source file of a crate.
struct Module<'a> {
    file: &'a File,
    /// From the crate's root: empty for `lib.rs`.
    path: Path,
    /// What code and private `use` items name.
    named: Vec<Path>,
    /// Names that the file passes on, or has of others, and where from.
    aliases: BTreeMap<String, Path>,
}

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    tree.crates().into_iter().flat_map(|name| check_crate(tree, name)).collect()
}

fn check_crate(tree: &Tree, name: &str) -> Vec<Finding> {
    let source = format!("{name}/src/");
    let files = tree.files.iter().filter(|file| file.is_rust() && file.path.starts_with(&source));
    let modules: Vec<Module<'_>> = files.map(|file| read(file, &file.path[source.len()..])).collect();
    let places: BTreeMap<&[String], usize> = modules.iter().enumerate().map(|(i, m)| (&m.path[..], i)).collect();
    let imports: Vec<BTreeSet<usize>> = (0..modules.len())
        .map(|at| {
            let named = modules[at].named.iter().filter_map(|path| find(&modules, &places, at, path, 0));
            named.filter(|other| *other != at).collect()
        })
        .collect();
    let mut findings = Vec::new();
    let mut known: BTreeSet<usize> = BTreeSet::new();
    for at in 0..modules.len() {
        if known.contains(&at) {
            continue;
        }
        let Some(circle) = shortest_circle(&imports, at) else { continue };
        known.extend(&circle);
        let names = circle.iter().chain([&at]).map(|file| modules[*file].file.path.strip_prefix(&source).unwrap_or(""));
        let names: Vec<&str> = names.collect();
        findings.push(modules[at].file.finding(format!(
            "files import each other in a circle: {}; move what they share to a file that both stand on",
            names.join(" -> ")
        )));
    }
    findings
}

/// The shortest way from a file back to itself, which it begins.
fn shortest_circle(imports: &[BTreeSet<usize>], start: usize) -> Option<Vec<usize>> {
    let mut before: BTreeMap<usize, usize> = BTreeMap::new();
    let mut reached = vec![start];
    for next in 0.. {
        let at = *reached.get(next)?;
        for &other in &imports[at] {
            if other == start {
                let back = std::iter::successors(Some(at), |at| before.get(at).copied());
                let mut way: Vec<usize> = back.collect();
                way.reverse();
                return Some(way);
            }
            if let Entry::Vacant(vacant) = before.entry(other) {
                vacant.insert(at);
                reached.push(other);
            }
        }
    }
    None
}

/// The file that a path of file `at` leads to; `None` for another crate's.
fn find(
    modules: &[Module<'_>],
    places: &BTreeMap<&[String], usize>,
    at: usize,
    path: &[String],
    depth: usize,
) -> Option<usize> {
    let module = &modules[at];
    let mut here: Path = module.path.clone();
    let mut words = path;
    let mut is_anchored = false;
    while let [first, rest @ ..] = words {
        match first.as_str() {
            "crate" => here.clear(),
            "self" => {}
            "super" => drop(here.pop()),
            _ => break,
        }
        (words, is_anchored) = (rest, true);
    }
    // Without an anchor the first word is a module of this file, a name that it imports, or another crate.
    let mut found = places.get(&here[..]).copied();
    let mut inner = here.clone();
    while let [first, rest @ ..] = words {
        inner.push(first.clone());
        let Some(&place) = places.get(&inner[..]) else { break };
        (found, words, is_anchored) = (Some(place), rest, true);
    }
    let (file, name) = (found?, words.first());
    let alias = name.and_then(|name| modules[file].aliases.get(name));
    match alias {
        Some(alias) if depth < 8 && (is_anchored || file == at) => {
            let alias: Path = alias.iter().chain(&words[1..]).cloned().collect();
            find(modules, places, file, &alias, depth + 1)
        }
        _ => is_anchored.then_some(file),
    }
}

fn read<'a>(file: &'a File, path: &str) -> Module<'a> {
    let mut words: Path = path.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    if words.last().is_some_and(|last| last == "mod") || words == ["lib"] || words == ["main"] {
        words.pop();
    }
    let mut module = Module { file, path: words, named: Vec::new(), aliases: BTreeMap::new() };
    let code: Vec<String> = lines(&file.text).into_iter().filter(|line| !line.test).map(|line| line.code).collect();
    let code = code.join("\n");
    let inner = inner_modules(&code);
    // In a module of this file `super` is this file.
    let place = |at: usize, path: Path| -> Path {
        let depth = inner.iter().filter(|range| range.contains(&at)).count();
        let climbs = path.iter().take_while(|word| *word == "super").count();
        let dropped = depth.min(climbs);
        let anchor = (dropped > 0 && dropped == climbs).then(|| "self".to_owned());
        anchor.into_iter().chain(path.into_iter().skip(dropped)).collect()
    };
    let mut at = 0;
    while let Some((is_public, item, after)) = next_use(&code[at..]) {
        let start = code.len() - after.len() - item.len();
        inline(&code, at..start, &mut |at, path| module.named.push(place(at, path)));
        for (path, name) in expand(item) {
            let path = place(start, path);
            module.aliases.insert(name, path.clone());
            if !is_public {
                module.named.push(path);
            }
        }
        at = code.len() - after.len();
    }
    inline(&code, at..code.len(), &mut |at, path| module.named.push(place(at, path)));
    module
}

/// Where the modules stand that the file holds between braces.
fn inner_modules(code: &str) -> Vec<Range<usize>> {
    let begins = code.match_indices("mod ").filter(|(at, _)| {
        let before = code[..*at].rsplit(['\n', ';', '}']).next().unwrap_or_default().trim();
        before.is_empty() || before.starts_with("pub")
    });
    let with_braces = begins.filter_map(|(at, _)| {
        let open = at + code[at..].find(['{', ';'])?;
        code[open..].starts_with('{').then_some(open)
    });
    let mut modules = Vec::new();
    for open in with_braces {
        let mut depth = 0;
        let end = code[open..].char_indices().find_map(|(at, letter)| {
            depth += i32::from(letter == '{') - i32::from(letter == '}');
            (depth == 0).then_some(open + at)
        });
        modules.push(open..end.unwrap_or(code.len()));
    }
    modules
}

/// The next `use` item: whether it is a re-export, what stands between `use` and `;`, and what follows.
fn next_use(code: &str) -> Option<(bool, &str, &str)> {
    let mut from = 0;
    loop {
        let at = from + code[from..].find("use ")?;
        let line = code[..at].rsplit('\n').next().unwrap_or_default().trim();
        let is_public = line.starts_with("pub");
        if line.is_empty() || is_public && !line.contains(';') {
            let item = &code[at + 4..];
            let end = item.find(';')?;
            return Some((is_public, &item[..end], &item[end..]));
        }
        from = at + 4;
    }
}

/// The paths of a `use` item, each with the name that it brings.
fn expand(item: &str) -> Vec<(Path, String)> {
    fn tree(text: &str, before: &[String], found: &mut Vec<(Path, String)>) {
        let text = text.trim();
        if let Some((head, list)) = text.split_once('{') {
            let mut before = before.to_vec();
            before.extend(head.split("::").map(str::trim).filter(|word| !word.is_empty()).map(str::to_owned));
            let list = list.rsplit_once('}').map_or(list, |(list, _)| list);
            let (mut depth, mut start) = (0, 0);
            for (at, letter) in list.char_indices().chain([(list.len(), ',')]) {
                match letter {
                    '{' => depth += 1,
                    '}' => depth -= 1,
                    ',' if depth == 0 => {
                        tree(&list[start..at], &before, found);
                        start = at + 1;
                    }
                    _ => {}
                }
            }
        } else if !text.is_empty() {
            let (path, name) = text.split_once(" as ").map_or((text, None), |(path, name)| (path, Some(name.trim())));
            let mut words = before.to_vec();
            words.extend(path.split("::").map(|word| word.trim().to_owned()));
            if words.last().is_some_and(|last| last == "self" || last == "*") && words.len() > 1 {
                words.pop();
            }
            let name = name.map_or_else(|| words.last().cloned().unwrap_or_default(), str::to_owned);
            found.push((words, name));
        }
    }
    let mut found = Vec::new();
    tree(item, &[], &mut found);
    found
}

/// Paths within a part of the code that begin with an anchor, with their places.
fn inline(code: &str, part: Range<usize>, found: &mut impl FnMut(usize, Path)) {
    let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
    for anchor in ["crate::", "super::", "self::"] {
        for (at, _) in code[part.clone()].match_indices(anchor) {
            let at = part.start + at;
            let is_whole = !code[..at].ends_with(|letter| is_word(letter) || letter == ':' || letter == '$');
            if is_whole && !code[..at].ends_with('(') {
                let end =
                    code[at..].find(|letter| !is_word(letter) && letter != ':').map_or(code.len(), |len| at + len);
                found(at, code[at..end].trim_end_matches(':').split("::").map(str::to_owned).collect());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::Package;

    fn findings(files: &[(&str, &str)]) -> Vec<String> {
        let files = files.iter().map(|(path, text)| File::new(format!("a/src/{path}"), *text)).collect();
        let packages = vec![Package { name: "a".into(), dependencies: Vec::new() }];
        check(&Tree { files, packages }).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_circle_is_found_through_lists_facades_and_paths_in_code_and_is_printed() {
        let house = [
            ("lib.rs", "mod b;\npub mod c;\npub use c::d::Deep;\n"),
            ("b.rs", "use crate::{Deep as Other, c};\nfn f() {}\n"),
            ("c/mod.rs", "pub mod d;\n"),
            ("c/d.rs", "pub struct Deep;\nfn g() { super::super::b::f() }\n"),
        ];
        let found = findings(&house);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("in a circle: b.rs -> c/d.rs -> b.rs; move"), "{found:?}");
    }

    #[test]
    fn re_exports_tests_and_other_crates_are_no_imports() {
        let house = [
            ("lib.rs", "mod b;\npub use b::B;\npub struct Own;\n"),
            ("b.rs", "use super::Own;\nuse std::c;\n#[cfg(test)]\nmod tests { use crate::b::e; }\n"),
            ("b/e.rs", "use crate::b::B;\n"),
            ("c.rs", "pub(crate) struct C;\nmod inner {\n use super::C;\n use super::super::b::B;\n}\n"),
        ];
        assert_eq!(findings(&house), Vec::<String>::new());
    }
}
