//! Grammars in the EBNF of xgrammar and of llama.cpp (GBNF), which are translated to Lark.
//!
//! ```text
//! root ::= "[" (item ("," item)*)? "]"     # a comment
//! item ::= [0-9]{1,3} | "\"" [^"\\]* "\"" | root
//! ```
//!
//! Both forms are grammars of characters, and llguidance's are grammars of lexemes, each as long as possible. [`lexemes`] finds
//! parts that mean the same as lexemes. A grammar without recursion becomes a single one.
//!
//! Costs: a definition has at most [`MAX_NODES`] parts and nests at most as deep as brackets may, so the parser recurses no deeper.

use std::collections::{HashMap, HashSet};

use super::bounds::MAX_NESTING;
use super::lark::quote;
use super::lexemes;
use super::rules::{Node, Rules};

/// Greatest number of parts of a grammar: characters, classes, groups, repetitions and uses of rules.
const MAX_NODES: usize = 20_000;

/// Greatest count of a repetition.
const MAX_COUNT: u32 = 100_000;

/// Whether a text is EBNF: behind white space and comments, it begins with `name ::=`.
pub(super) fn is_ebnf(text: &str) -> bool {
    let mut reader = Reader::new(text);
    reader.blank();
    !reader.name().is_empty() && {
        reader.blank();
        reader.rest().starts_with("::=")
    }
}

/// Translates a grammar to Lark.
pub(super) fn to_lark(text: &str) -> Result<String, String> {
    let mut reader = Reader::new(text);
    let rules = reader.grammar().map_err(|problem| {
        let line = 1 + text[..reader.at].matches('\n').count();
        format!("line {line} of the EBNF grammar: {problem}")
    })?;
    let kinds = lexemes::choose(&rules);
    let mut writer = Writer { rules: &rules, kinds, lark: String::new(), known: HashSet::new() };
    writer.rule(rules.root);
    let root = format!("start: r{}\n", rules.root);
    Ok(root + &writer.lark)
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
    nodes: Vec<Node>,
    /// Rules by name. Those that are used and not yet defined have no body.
    names: HashMap<&'a str, usize>,
    bodies: Vec<Option<usize>>,
    nesting: usize,
}

impl<'a> Reader<'a> {
    fn new(text: &'a str) -> Reader<'a> {
        Reader { text, at: 0, nodes: Vec::new(), names: HashMap::new(), bodies: Vec::new(), nesting: 0 }
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += c.len_utf8();
        Some(c)
    }

    fn take(&mut self, text: &str) -> bool {
        let is_next = self.rest().starts_with(text);
        self.at += if is_next { text.len() } else { 0 };
        is_next
    }

    /// Skips white space and comments.
    fn blank(&mut self) {
        loop {
            let rest = self.rest().trim_start();
            self.at = self.text.len() - rest.len();
            if !rest.starts_with('#') {
                return;
            }
            self.at += rest.find('\n').unwrap_or(rest.len());
        }
    }

    fn name(&mut self) -> &'a str {
        let rest = self.rest();
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        let name = &rest[..rest.find(|c| !is_part(c)).unwrap_or(rest.len())];
        self.at += name.len();
        name
    }

    fn node(&mut self, node: Node) -> Result<usize, String> {
        if self.nodes.len() == MAX_NODES {
            return Err(format!("found more than {MAX_NODES} characters, classes and other parts"));
        }
        self.nodes.push(node);
        Ok(self.nodes.len() - 1)
    }

    fn rule_of(&mut self, name: &'a str) -> usize {
        let next = self.bodies.len();
        let rule = *self.names.entry(name).or_insert(next);
        if rule == next {
            self.bodies.push(None);
        }
        rule
    }

    fn grammar(&mut self) -> Result<Rules, String> {
        self.blank();
        while self.peek().is_some() {
            let name = self.name();
            self.blank();
            if name.is_empty() || !self.take("::=") {
                let found: String = self.rest().chars().take(20).collect();
                return Err(format!("found {found:?}, expected a rule, such as name ::= \"text\""));
            }
            let (rule, body) = (self.rule_of(name), self.alternatives()?);
            if self.bodies[rule].replace(body).is_some() {
                return Err(format!("found a second rule {name:?}"));
            }
        }
        let root = *self.names.get("root").ok_or("found no rule root, with which the text begins")?;
        let name = |rule: usize| self.names.iter().find(|(_, of)| **of == rule).map_or("", |(name, _)| *name);
        let body =
            |(rule, body): (usize, &Option<usize>)| body.ok_or_else(|| format!("found no rule {:?}", name(rule)));
        let bodies = self.bodies.iter().enumerate().map(body).collect::<Result<_, _>>()?;
        Ok(Rules { bodies, root, nodes: std::mem::take(&mut self.nodes) })
    }

    fn alternatives(&mut self) -> Result<usize, String> {
        let mut all = vec![self.sequence()?];
        while self.take("|") {
            all.push(self.sequence()?);
        }
        if all.len() == 1 { Ok(all[0]) } else { self.node(Node::Alt(all)) }
    }

    fn sequence(&mut self) -> Result<usize, String> {
        let mut all = Vec::new();
        loop {
            self.blank();
            let start = self.at;
            let part = match self.peek() {
                None | Some('|' | ')') => break,
                Some(quote @ ('"' | '\'')) => self.string(quote)?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.at += 1;
                    self.node(Node::Class(Vec::new(), true))?
                }
                Some('(') => self.group()?,
                Some('<' | '!') => {
                    return Err("found a token, expected text: use a Lark grammar for tokens".to_string());
                }
                Some(_) => {
                    let name = self.name();
                    if name.is_empty() {
                        let found: String = self.rest().chars().take(20).collect();
                        return Err(format!("found {found:?}, expected a text, a class, a group or a rule"));
                    }
                    self.blank();
                    if self.rest().starts_with("::=") {
                        self.at = start;
                        break;
                    }
                    let rule = self.rule_of(name);
                    self.node(Node::Rule(rule))?
                }
            };
            let part = self.repeated(part)?;
            all.push(part);
        }
        if all.len() == 1 { Ok(all[0]) } else { self.node(Node::Seq(all)) }
    }

    fn group(&mut self) -> Result<usize, String> {
        self.at += 1;
        self.blank();
        if self.rest().starts_with('=') {
            return Err("found a look-ahead (= …), which is not supported; leave it out".to_string());
        }
        self.nesting += 1;
        if self.nesting > MAX_NESTING {
            return Err(format!("found groups nested more than {MAX_NESTING} deep"));
        }
        let group = self.alternatives()?;
        self.nesting -= 1;
        if self.take(")") { Ok(group) } else { Err("found no ) of a group".to_string()) }
    }

    fn repeated(&mut self, mut part: usize) -> Result<usize, String> {
        for _ in 0..MAX_NESTING {
            self.blank();
            let (least, most) = match self.peek() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => {
                    let rest = self.rest();
                    let end = rest.find('}').ok_or("found no } of a repetition")?;
                    let range = &rest[1..end];
                    self.at += end;
                    let count = |text: &str| {
                        let count = text.trim().parse::<u32>().ok().filter(|count| *count <= MAX_COUNT);
                        count.ok_or_else(|| {
                            let found: String = range.chars().take(20).flat_map(char::escape_debug).collect();
                            format!("found {{{found}}}, expected counts up to {MAX_COUNT}")
                        })
                    };
                    match range.split_once(',') {
                        None => (count(range)?, Some(count(range)?)),
                        Some((least, most)) if most.trim().is_empty() => (count(least)?, None),
                        Some((least, most)) => (count(least)?, Some(count(most)?)),
                    }
                }
                _ => return Ok(part),
            };
            self.at += 1;
            if most.is_some_and(|most| most < least) {
                return Err(format!("found a repetition of at least {least} and fewer times"));
            }
            part = self.node(Node::Repeat(part, least, most))?;
        }
        Err(format!("found more than {MAX_NESTING} repetitions of one part"))
    }

    fn string(&mut self, quote: char) -> Result<usize, String> {
        self.at += 1;
        let mut all = Vec::new();
        while !self.rest().starts_with(quote) {
            let c = self.character("text")?;
            all.push(self.node(Node::Char(c))?);
        }
        self.at += 1;
        if all.len() == 1 { Ok(all[0]) } else { self.node(Node::Seq(all)) }
    }

    fn class(&mut self) -> Result<usize, String> {
        self.at += 1;
        let (is_negated, mut ranges) = (self.take("^"), Vec::new());
        while !self.take("]") {
            let first = self.character("class")?;
            let has_end = self.rest().starts_with('-') && !self.rest().starts_with("-]");
            self.at += usize::from(has_end);
            let last = if has_end { self.character("class")? } else { first };
            if last < first {
                return Err(format!("found the range {first:?} to {last:?}, expected the smaller character first"));
            }
            ranges.push((first, last));
        }
        if ranges.is_empty() && !is_negated {
            return Err("found an empty class, which no text matches".to_string());
        }
        self.node(Node::Class(ranges, is_negated))
    }

    /// A character of a text or a class, which may be escaped.
    fn character(&mut self, of: &str) -> Result<char, String> {
        let unfinished = || format!("found no end of a {of}");
        let c = self.next().ok_or_else(unfinished)?;
        if c != '\\' {
            return if c == '\n' { Err(unfinished()) } else { Ok(c) };
        }
        let digits = match self.next().ok_or_else(unfinished)? {
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            c if c.is_ascii_alphanumeric() => {
                return Err(format!(
                    "found the escape \\{c}, expected \\n, \\r, \\t, \\x, \\u, \\U or an escaped sign"
                ));
            }
            c => return Ok(c),
        };
        let code = self.rest().get(..digits).and_then(|code| u32::from_str_radix(code, 16).ok());
        self.at += if code.is_some() { digits } else { 0 };
        code.and_then(char::from_u32)
            .ok_or_else(|| format!("found an escape without the {digits} digits of a character"))
    }
}

/// Writes Lark. Its rules are `r1`, and its terminals `R1` for whole rules and `T1` for lexemes.
struct Writer<'a> {
    rules: &'a Rules,
    /// What each part becomes.
    kinds: Vec<lexemes::Kind>,
    lark: String,
    /// Names that are defined or will be.
    known: HashSet<String>,
}

impl Writer<'_> {
    /// Writes a rule and those that it uses, unless they are known.
    fn rule(&mut self, rule: usize) {
        let mut open = vec![rule];
        while let Some(rule) = open.pop() {
            if self.known.insert(format!("r{rule}")) {
                let body = self.part(self.rules.bodies[rule], &mut open);
                self.lark.push_str(&format!("r{rule}: {body}\n"));
            }
        }
    }

    /// A part of a rule. Rules that it uses are added to `open`.
    fn part(&mut self, node: usize, open: &mut Vec<usize>) -> String {
        match (self.kinds[node], &self.rules.nodes[node]) {
            (lexemes::Kind::Lexeme { is_nullable }, _) => {
                if self.known.insert(format!("T{node}")) {
                    let text = self.terminal(node);
                    let not_empty = if is_nullable { " & /(?s:.+)/" } else { "" };
                    self.lark.push_str(&format!("T{node}: ({text}){not_empty}\n"));
                }
                format!("T{node}{}", if is_nullable { "?" } else { "" })
            }
            (_, Node::Rule(rule)) => {
                open.push(*rule);
                format!("r{rule}")
            }
            (_, Node::Seq(parts)) => {
                let parts: Vec<String> = parts.iter().map(|part| self.part(*part, open)).collect();
                if parts.is_empty() { "\"\"".to_string() } else { format!("({})", parts.join(" ")) }
            }
            (_, Node::Alt(parts)) => {
                let parts: Vec<String> = parts.iter().map(|part| self.part(*part, open)).collect();
                format!("({})", parts.join(" | "))
            }
            (_, Node::Repeat(part, least, most)) => format!("({}){}", self.part(*part, open), count(*least, *most)),
            (_, Node::Char(_) | Node::Class(..)) => self.terminal(node),
        }
    }

    /// A part as a terminal. Rules in it become terminals too.
    fn terminal(&mut self, node: usize) -> String {
        match &self.rules.nodes[node] {
            Node::Char(c) => quote(&c.to_string()),
            Node::Class(ranges, is_negated) => class(ranges, *is_negated),
            Node::Rule(rule) => {
                if self.known.insert(format!("R{rule}")) {
                    let text = self.terminal(self.rules.bodies[*rule]);
                    self.lark.push_str(&format!("R{rule}: {text}\n"));
                }
                format!("R{rule}")
            }
            Node::Seq(parts) => {
                let chars: Option<String> = parts
                    .iter()
                    .map(|part| if let Node::Char(c) = self.rules.nodes[*part] { Some(c) } else { None })
                    .collect();
                match chars {
                    Some(text) => quote(&text),
                    None => {
                        let parts: Vec<String> = parts.iter().map(|part| self.terminal(*part)).collect();
                        format!("({})", parts.join(" "))
                    }
                }
            }
            Node::Alt(parts) => {
                let parts: Vec<String> = parts.iter().map(|part| self.terminal(*part)).collect();
                format!("({})", parts.join(" | "))
            }
            Node::Repeat(part, least, most) => format!("({}){}", self.terminal(*part), count(*least, *most)),
        }
    }
}

fn count(least: u32, most: Option<u32>) -> String {
    match (least, most) {
        (0, None) => "*".to_string(),
        (1, None) => "+".to_string(),
        (0, Some(1)) => "?".to_string(),
        (least, None) => format!("{{{least},}}"),
        (least, Some(most)) => format!("{{{least},{most}}}"),
    }
}

/// A regular expression of one character.
fn class(ranges: &[(char, char)], is_negated: bool) -> String {
    if ranges.is_empty() {
        return "/(?s:.)/".to_string();
    }
    let escaped = |c: char| format!("\\x{{{:x}}}", u32::from(c));
    let ranges: String = ranges.iter().map(|(first, last)| format!("{}-{}", escaped(*first), escaped(*last))).collect();
    format!("/[{}{ranges}]/", if is_negated { "^" } else { "" })
}
