//! The rules of an EBNF or GBNF grammar, as its reader gives them to the choice of lexemes and to the writer.

/// A part of a grammar. Parts are named by their index.
#[derive(Clone, Debug)]
pub(super) enum Node {
    Char(char),
    /// Ranges of characters; or, if negated, all others.
    Class(Vec<(char, char)>, bool),
    /// The use of a rule.
    Rule(usize),
    Seq(Vec<usize>),
    Alt(Vec<usize>),
    /// A part, its least count and its greatest.
    Repeat(usize, u32, Option<u32>),
}

/// A grammar: its parts, and the part of each rule.
pub(super) struct Rules {
    pub nodes: Vec<Node>,
    pub bodies: Vec<usize>,
    pub root: usize,
}
