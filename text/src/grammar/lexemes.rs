//! Parts of a grammar of characters that may be lexemes without changing the language.
//!
//! llguidance takes each lexeme as long as possible, and follows all that may come at a place together. So a part is a lexeme only if
//! where it ends never depends on what follows: no character that may follow it extends it, or extends another lexeme that may
//! stand in its place. Parts that are not are split, at last into single characters. All sets are upper bounds, so a part may be
//! split without need, which costs time and changes nothing.

use super::rules::{Node, Rules};

/// Greatest number of parts and of lexemes that are compared. In larger grammars every character is a lexeme.
const MAX_PARTS: usize = 4_000;
const MAX_LEXEMES: usize = 256;

/// Greatest number of times that parts are split. Beyond it, every character is a lexeme.
const MAX_ROUNDS: usize = 32;

/// What a part of a grammar becomes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A lexeme. One that may be empty is optional.
    Lexeme { is_nullable: bool },
    /// A combination of its own parts.
    Split,
}

/// A set of characters: those of ASCII, and whether it may contain others.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Set(u128, bool);

impl Set {
    fn or(self, other: Set) -> Set {
        Set(self.0 | other.0, self.1 | other.1)
    }

    fn meets(self, other: Set) -> bool {
        self.0 & other.0 != 0 || (self.1 && other.1)
    }

    fn of(ranges: &[(char, char)], is_negated: bool) -> Set {
        let holds = |c: char| ranges.iter().any(|(first, last)| (*first..=*last).contains(&c)) != is_negated;
        let ascii = (0..128u8).filter(|byte| holds(char::from(*byte))).fold(0, |set, byte| set | 1 << byte);
        Set(ascii, is_negated || ranges.iter().any(|(_, last)| !last.is_ascii()))
    }
}

/// The characters of the texts of a part without recursion.
#[derive(Clone, Copy, Default)]
struct Texts {
    is_nullable: bool,
    /// Characters that a text may begin with.
    first: Set,
    /// Characters that may stand in a text after the first.
    inner: Set,
    /// Characters with which a longer text may continue a complete one.
    more: Set,
}

impl Texts {
    fn then(self, next: Texts) -> Texts {
        let inner = self.inner.or(next.inner).or(next.first);
        let more = if self.more.meets(next.first) {
            inner
        } else {
            next.more.or(if next.is_nullable { self.more.or(next.first) } else { Set::default() })
        };
        let first = self.first.or(if self.is_nullable { next.first } else { Set::default() });
        Texts { is_nullable: self.is_nullable && next.is_nullable, first, inner, more }
    }

    fn or(self, other: Texts) -> Texts {
        let inner = self.inner.or(other.inner);
        let mut more = self.more.or(other.more);
        if self.first.meets(other.first) {
            more = more.or(inner);
        }
        if self.is_nullable || other.is_nullable {
            more = more.or(self.first).or(other.first);
        }
        let first = self.first.or(other.first);
        Texts { is_nullable: self.is_nullable || other.is_nullable, first, inner, more }
    }
}

/// A set of lexemes.
type Lexemes = [u64; MAX_LEXEMES / 64];

fn add(set: &mut Lexemes, other: &Lexemes) -> bool {
    let old = *set;
    set.iter_mut().zip(other).for_each(|(set, other)| *set |= other);
    *set != old
}

fn members(set: &Lexemes) -> impl Iterator<Item = usize> + '_ {
    (0..MAX_LEXEMES).filter(|at| set[at / 64] >> (at % 64) & 1 == 1)
}

/// Decides for each part of a grammar whether it is a lexeme.
pub(super) fn choose(rules: &Rules) -> Vec<Kind> {
    let is_nullable = nullable(rules);
    let texts = texts(rules);
    let is_leaf = |node: usize| matches!(rules.nodes[node], Node::Char(_) | Node::Class(..));
    let all = |is_lexeme: &dyn Fn(usize) -> bool| {
        let kind = |node: usize| match is_lexeme(node) {
            true => Kind::Lexeme { is_nullable: is_nullable[node] },
            false => Kind::Split,
        };
        (0..rules.nodes.len()).map(kind).collect::<Vec<Kind>>()
    };
    let mut is_split: Vec<bool> = (0..rules.nodes.len()).map(|node| texts[node].is_none()).collect();
    // A text that is only empty is no lexeme.
    let is_empty = |node: usize| texts[node].is_some_and(|texts| texts.first == Set::default());
    (0..is_split.len()).filter(|node| is_empty(*node)).for_each(|node| is_split[node] = true);
    for _ in 0..MAX_ROUNDS {
        let used = used(rules, &is_split);
        let lexemes: Vec<usize> = used.iter().copied().filter(|node| !is_split[*node]).collect();
        if used.len() > MAX_PARTS || lexemes.len() > MAX_LEXEMES {
            return all(&is_leaf);
        }
        let conflicts = conflicts(rules, &used, &lexemes, &is_split, &is_nullable, &texts);
        if conflicts.is_empty() {
            return all(&|node| !is_split[node]);
        }
        conflicts.into_iter().for_each(|node| is_split[node] = true);
    }
    all(&is_leaf)
}

/// Parts that are used from the root, down to lexemes.
fn used(rules: &Rules, is_split: &[bool]) -> Vec<usize> {
    let (mut open, mut seen, mut used) = (vec![rules.bodies[rules.root]], vec![false; rules.nodes.len()], Vec::new());
    while let Some(node) = open.pop() {
        if std::mem::replace(&mut seen[node], true) {
            continue;
        }
        used.push(node);
        if is_split[node] {
            open.extend(parts(rules, node));
        }
    }
    used
}

fn parts(rules: &Rules, node: usize) -> Vec<usize> {
    match &rules.nodes[node] {
        Node::Rule(rule) => vec![rules.bodies[*rule]],
        Node::Seq(parts) | Node::Alt(parts) => parts.clone(),
        Node::Repeat(part, ..) => vec![*part],
        Node::Char(_) | Node::Class(..) => Vec::new(),
    }
}

/// Parts that match the empty text.
fn nullable(rules: &Rules) -> Vec<bool> {
    let mut is_nullable = vec![false; rules.nodes.len()];
    // Parts come before what contains them, except in the bodies of rules.
    loop {
        let mut has_changed = false;
        for node in 0..rules.nodes.len() {
            let now = match &rules.nodes[node] {
                Node::Char(_) | Node::Class(..) => false,
                Node::Rule(rule) => is_nullable[rules.bodies[*rule]],
                Node::Seq(parts) => parts.iter().all(|part| is_nullable[*part]),
                Node::Alt(parts) => parts.iter().any(|part| is_nullable[*part]),
                Node::Repeat(part, least, _) => *least == 0 || is_nullable[*part],
            };
            has_changed |= std::mem::replace(&mut is_nullable[node], now) != now;
        }
        if !has_changed {
            return is_nullable;
        }
    }
}

/// The texts of each part; `None` for parts with recursion.
fn texts(rules: &Rules) -> Vec<Option<Texts>> {
    let mut known: Vec<Option<Texts>> = vec![None; rules.nodes.len()];
    // Whether a part has been entered: one that is entered again before it is known contains itself.
    let mut is_entered = vec![false; rules.nodes.len()];
    for start in 0..rules.nodes.len() {
        let mut open = vec![start];
        while let Some(&node) = open.last() {
            if known[node].is_some() {
                open.pop();
                continue;
            }
            let parts = parts(rules, node);
            if !std::mem::replace(&mut is_entered[node], true) {
                open.extend(parts.into_iter().filter(|part| !is_entered[*part]));
                continue;
            }
            known[node] = texts_of(rules, node, &known);
            open.pop();
        }
    }
    known
}

fn texts_of(rules: &Rules, node: usize, known: &[Option<Texts>]) -> Option<Texts> {
    let one = |first: Set| Texts { first, ..Texts::default() };
    let empty = Texts { is_nullable: true, ..Texts::default() };
    Some(match &rules.nodes[node] {
        Node::Char(c) => one(Set::of(&[(*c, *c)], false)),
        Node::Class(ranges, is_negated) => one(Set::of(ranges, *is_negated)),
        Node::Rule(rule) => known[rules.bodies[*rule]]?,
        Node::Seq(parts) => parts.iter().try_fold(empty, |all, part| Some(all.then(known[*part]?)))?,
        Node::Alt(parts) => {
            let mut all = known[*parts.first()?]?;
            for part in &parts[1..] {
                all = all.or(known[*part]?);
            }
            all
        }
        Node::Repeat(part, least, most) => {
            let part = known[*part]?;
            let mut all = if *most == Some(1) { part } else { part.then(part.or(empty)) };
            if *most != Some(1) {
                // Any number of times: what follows one may follow the last.
                all.more = if part.more.meets(part.first) { all.inner.or(all.first) } else { part.more.or(part.first) };
            }
            if *least == 0 { all.or(empty) } else { all }
        }
    })
}

/// Lexemes that must be split.
fn conflicts(
    rules: &Rules,
    used: &[usize],
    lexemes: &[usize],
    is_split: &[bool],
    is_nullable: &[bool],
    texts: &[Option<Texts>],
) -> Vec<usize> {
    let count = rules.nodes.len();
    let (mut first, mut follow) = (vec![Lexemes::default(); count], vec![Lexemes::default(); count]);
    for (at, &node) in lexemes.iter().enumerate() {
        first[node][at / 64] |= 1 << (at % 64);
    }
    loop {
        let mut has_changed = false;
        for &node in used.iter().rev().filter(|node| is_split[**node]) {
            let mut all = Lexemes::default();
            for part in parts(rules, node) {
                add(&mut all, &first[part]);
                if matches!(rules.nodes[node], Node::Seq(_)) && !is_nullable[part] {
                    break;
                }
            }
            has_changed |= add(&mut first[node], &all);
        }
        if !has_changed {
            break;
        }
    }
    loop {
        let mut has_changed = false;
        for &node in used.iter().filter(|node| is_split[**node]) {
            let mut behind = follow[node];
            if let Node::Repeat(part, ..) = rules.nodes[node] {
                add(&mut behind, &first[part]);
            }
            for part in parts(rules, node).into_iter().rev() {
                has_changed |= add(&mut follow[part], &behind);
                if matches!(rules.nodes[node], Node::Seq(_)) {
                    behind = if is_nullable[part] { behind } else { Lexemes::default() };
                    add(&mut behind, &first[part]);
                }
            }
        }
        if !has_changed {
            break;
        }
    }
    let texts: Vec<Texts> = lexemes.iter().map(|node| texts[*node].unwrap_or_default()).collect();
    let follow: Vec<Lexemes> = lexemes.iter().map(|node| follow[*node]).collect();
    let next: Vec<Set> =
        follow.iter().map(|all| members(all).fold(Set::default(), |set, at| set.or(texts[at].first))).collect();
    let mut found: Vec<usize> =
        (0..lexemes.len()).filter(|at| texts[*at].more.meets(next[*at])).map(|at| lexemes[at]).collect();
    for (a, beside) in together(&first[rules.bodies[rules.root]], &follow, &texts).iter().enumerate() {
        let is_conflict = |b: &usize| texts[a].first.meets(texts[*b].first) && texts[*b].inner.meets(next[a]);
        found.extend(members(beside).filter(|b| *b != a).filter(is_conflict).map(|b| lexemes[b]));
    }
    found.sort_unstable();
    found.dedup();
    found
}

/// For each lexeme those that may stand in its place.
fn together(start: &Lexemes, follow: &[Lexemes], texts: &[Texts]) -> Vec<Lexemes> {
    let mut beside = vec![Lexemes::default(); follow.len()];
    let mut open: Vec<(usize, usize)> = Vec::new();
    let mut meet = |from: &Lexemes, to: &Lexemes, open: &mut Vec<(usize, usize)>| {
        for a in members(from) {
            let old = beside[a];
            if add(&mut beside[a], to) {
                open.extend(members(&beside[a]).filter(|b| old[b / 64] >> (b % 64) & 1 == 0).map(|b| (a, b)));
            }
        }
    };
    meet(start, start, &mut open);
    while let Some((a, b)) = open.pop() {
        if a == b || texts[a].first.meets(texts[b].first) {
            meet(&follow[a], &follow[b], &mut open);
        }
    }
    beside
}
