//! Rust source as token trees: no comments, and brackets that match.

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::File;

/// Returns the tokens of a file; none if they cannot be told apart, in which case the file does not compile either.
pub(super) fn read(file: &File) -> TokenStream {
    file.text.parse().unwrap_or_default()
}

/// Returns the tokens without the items under `#[cfg(test)]`; none if the whole file is under `#![cfg(test)]`.
pub(super) fn without_tests(tokens: TokenStream) -> Vec<TokenTree> {
    let mut kept: Vec<TokenTree> = Vec::new();
    let mut trees = tokens.into_iter();
    while let Some(tree) = trees.next() {
        let is_for_tests = is_attribute(&tree, "cfg(test)");
        kept.push(tree);
        if !is_for_tests {
            continue;
        }
        kept.pop();
        if kept.pop().is_some_and(|mark| is_punct(&mark, '!')) {
            return Vec::new();
        }
        trees.by_ref().find(ends_item);
    }
    kept
}

/// Returns whether a tree is the bracketed part of an attribute with this text, which has no spaces.
pub(super) fn is_attribute(tree: &TokenTree, text: &str) -> bool {
    let name = text.split('(').next().unwrap_or_default();
    has_attribute_name(tree, name) && code(tree.clone().into()) == format!("[{text}]")
}

/// Returns whether a tree is the bracketed part of an attribute with this name.
pub(super) fn has_attribute_name(tree: &TokenTree, name: &str) -> bool {
    let TokenTree::Group(group) = tree else { return false };
    group.delimiter() == Delimiter::Bracket
        && group.stream().into_iter().next().is_some_and(|word| is_ident(&word, name))
}

/// Returns whether a tree is the last of an item: its body, or a semicolon.
pub(super) fn ends_item(tree: &TokenTree) -> bool {
    body(tree).is_some() || is_punct(tree, ';')
}

/// Returns what a tree has between braces.
pub(super) fn body(tree: &TokenTree) -> Option<TokenStream> {
    match tree {
        TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => Some(group.stream()),
        _ => None,
    }
}

/// Returns a tree's identifier.
pub(super) fn ident(tree: &TokenTree) -> Option<String> {
    match tree {
        TokenTree::Ident(ident) => Some(ident.to_string()),
        _ => None,
    }
}

/// Returns whether a tree is this punctuation character.
pub(super) fn is_punct(tree: &TokenTree, wanted: char) -> bool {
    matches!(tree, TokenTree::Punct(punct) if punct.as_char() == wanted)
}

/// Returns whether a tree is this identifier.
pub(super) fn is_ident(tree: &TokenTree, wanted: &str) -> bool {
    matches!(tree, TokenTree::Ident(ident) if ident == wanted)
}

/// Returns tokens as text, without the contents of literals, and with spaces only between two words.
pub(super) fn code(tokens: TokenStream) -> String {
    let mut code = String::new();
    for tree in tokens {
        let text = match tree {
            TokenTree::Literal(_) => "\"\"".to_owned(),
            TokenTree::Group(group) => {
                let inside = self::code(group.stream());
                match group.delimiter() {
                    Delimiter::Brace => format!("{{{inside}}}"),
                    Delimiter::Bracket => format!("[{inside}]"),
                    _ => format!("({inside})"),
                }
            }
            word => word.to_string(),
        };
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        if code.ends_with(is_word) && text.starts_with(is_word) {
            code.push(' ');
        }
        code += &text;
    }
    code
}
