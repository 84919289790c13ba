//! No files of a crate import each other in a circle: each can be read after the files that it uses.
//!
//! Imports are the paths of `use` items, and the paths within code that begin with `crate`, `super` or `self`, except in tests.
//! A name is followed through re-exports to the file that defines it. A re-export itself is not an import.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::TokenTree;

use super::tokens::{self, body, ident, is_ident, is_punct};
use super::{File, Finding, Tree};

/// A path as its words: `["crate", "a", "B"]`.
type Path = Vec<String>;

/// A source file of a crate.
struct Module<'a> {
    file: &'a File,
    /// From the root of the crate: empty for `lib.rs`.
    path: Path,
    /// Paths in code and in private `use` items.
    named: Vec<Path>,
    /// Names that the file imports or re-exports, and their paths.
    aliases: BTreeMap<String, Path>,
}

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    tree.crates().into_iter().flat_map(|name| check_crate(tree, name)).collect()
}

fn check_crate(tree: &Tree, name: &str) -> Vec<Finding> {
    let source = format!("{name}/src/");
    let files = tree.files.iter().filter(|file| file.is_rust() && file.path.starts_with(&source));
    let modules: Vec<Module<'_>> = files.map(|file| Module::new(file, &file.path[source.len()..])).collect();
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
            "found files that import each other in a circle: {}; move what they share to a third file",
            names.join(" -> ")
        )));
    }
    findings
}

/// Returns the files of the shortest circle through `start`, which comes first.
fn shortest_circle(imports: &[BTreeSet<usize>], start: usize) -> Option<Vec<usize>> {
    let mut before: BTreeMap<usize, usize> = BTreeMap::new();
    let mut reached = vec![start];
    for next in 0.. {
        let at = *reached.get(next)?;
        for &other in &imports[at] {
            if other == start {
                let back = std::iter::successors(Some(at), |at| before.get(at).copied());
                let mut circle: Vec<usize> = back.collect();
                circle.reverse();
                return Some(circle);
            }
            if let Entry::Vacant(vacant) = before.entry(other) {
                vacant.insert(at);
                reached.push(other);
            }
        }
    }
    None
}

/// Returns the file that a path of file `at` leads to, or `None` if it is in another crate.
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

impl<'a> Module<'a> {
    fn new(file: &'a File, path: &str) -> Module<'a> {
        let mut words: Path = path.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
        if words.last().is_some_and(|last| last == "mod") || words == ["lib"] || words == ["main"] {
            words.pop();
        }
        let mut module = Module { file, path: words, named: Vec::new(), aliases: BTreeMap::new() };
        module.add(&tokens::without_tests(tokens::read(file)), 0);
        module
    }

    /// Adds the paths of code that is inside `depth` inner modules.
    fn add(&mut self, trees: &[TokenTree], mut depth: usize) {
        let mut at = 0;
        while let Some(tree) = trees.get(at) {
            let before = &trees[..at];
            let (path, length) = tokens::path(&trees[at..]);
            match tree {
                // `use<'a>` in a type is not an import.
                _ if is_ident(tree, "use") && trees.get(at + 1).is_some_and(|next| !is_punct(next, '<')) => {
                    let length = trees[at..].iter().position(|tree| is_punct(tree, ';')).unwrap_or(trees.len() - at);
                    self.add_use(&trees[at + 1..at + length], is_public(before), depth);
                    at += length;
                }
                TokenTree::Group(group) => {
                    let is_module = matches!(before, [.., word, _] if is_ident(word, "mod")) && body(tree).is_some();
                    depth += usize::from(is_module);
                    self.add(&tokens::without_tests(group.stream()), depth);
                    depth -= usize::from(is_module);
                    at += 1;
                }
                _ => {
                    let is_anchored =
                        matches!(path[..], [ref first, _, ..] if ["crate", "super", "self"].contains(&&first[..]));
                    if is_anchored && !before.last().is_some_and(|last| is_punct(last, '$')) {
                        self.named.push(from_file(path, depth));
                    }
                    at += length.max(1);
                }
            }
        }
    }

    fn add_use(&mut self, item: &[TokenTree], is_public: bool, depth: usize) {
        let mut found = Vec::new();
        expand(item, &[], &mut found);
        for (path, name) in found {
            let path = from_file(path, depth);
            self.aliases.insert(name, path.clone());
            if !is_public {
                self.named.push(path);
            }
        }
    }
}

/// Returns whether an item with these trees before it begins with `pub` or `pub(…)`.
fn is_public(before: &[TokenTree]) -> bool {
    match before {
        [.., word, TokenTree::Group(_)] => is_ident(word, "pub"),
        [.., word] => is_ident(word, "pub"),
        [] => false,
    }
}

/// Returns a path inside `depth` inner modules as the file would write it: there the `super` of an inner module is `self`.
fn from_file(path: Path, depth: usize) -> Path {
    let climbs = path.iter().take_while(|word| *word == "super").count();
    let dropped = depth.min(climbs);
    let anchor = (dropped > 0 && dropped == climbs).then(|| "self".to_owned());
    anchor.into_iter().chain(path.into_iter().skip(dropped)).collect()
}

/// Adds the paths of a `use` item, each with the name that it imports.
fn expand(item: &[TokenTree], before: &[String], found: &mut Vec<(Path, String)>) {
    for part in item.split(|tree| is_punct(tree, ',')).filter(|part| !part.is_empty()) {
        let list = part.iter().find_map(body);
        let (words, name) = match part.iter().position(|tree| is_ident(tree, "as")) {
            Some(at) => (&part[..at], part.last().and_then(ident)),
            None => (part, None),
        };
        let mut path: Path = before.iter().cloned().chain(words.iter().filter_map(ident)).collect();
        if let Some(list) = list {
            expand(&list.into_iter().collect::<Vec<_>>(), &path, found);
            continue;
        }
        path.pop_if(|last| *last == "self");
        let name = name.or_else(|| path.last().cloned()).unwrap_or_default();
        found.push((path, name));
    }
}
