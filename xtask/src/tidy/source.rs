//! Rust source split into code and comments, line by line.
//!
//! A small lexer: it knows strings (raw ones too), characters, lifetimes and nested block comments, and nothing else of
//! the language. That is enough to look for a word in code without finding it in a text or a comment.

/// One line, taken apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Line {
    /// Code, the contents of strings and characters left out.
    pub code: String,
    /// Text of ordinary comments (`//`, `/* */`), without their marks.
    pub comment: String,
    /// Text of doc comments (`///`, `//!`), without their marks.
    pub doc: String,
    /// Inside an item under `#[cfg(test)]`.
    pub test: bool,
}

enum State {
    Code,
    Comment,
    Doc,
    /// Depth of nesting.
    Block(usize),
    Text,
    /// Number of `#` that close it.
    RawText(usize),
}

/// Takes a file apart.
pub fn lines(text: &str) -> Vec<Line> {
    let chars: Vec<char> = text.chars().collect();
    let starts = |at: usize, mark: &str| mark.chars().enumerate().all(|(i, c)| chars.get(at + i) == Some(&c));
    let (mut lines, mut line, mut state, mut at) = (Vec::new(), Line::default(), State::Code, 0);
    while let Some(&c) = chars.get(at) {
        at += 1;
        if c == '\n' {
            lines.push(std::mem::take(&mut line));
            if matches!(state, State::Comment | State::Doc) {
                state = State::Code;
            }
            continue;
        }
        match &mut state {
            State::Comment => line.comment.push(c),
            State::Doc => line.doc.push(c),
            State::Block(depth) if c == '*' && starts(at, "/") => {
                at += 1;
                *depth -= 1;
                if *depth == 0 {
                    state = State::Code;
                }
            }
            State::Block(depth) if c == '/' && starts(at, "*") => {
                at += 1;
                *depth += 1;
            }
            State::Block(_) => line.comment.push(c),
            // A backslash at the end of a line leaves that end to be counted.
            State::Text if c == '\\' => at += usize::from(!starts(at, "\n")),
            State::Text if c == '"' => {
                line.code.push(c);
                state = State::Code;
            }
            State::Text => {}
            State::RawText(hashes) if c == '"' && starts(at, &"#".repeat(*hashes)) => {
                at += *hashes;
                line.code.push(c);
                state = State::Code;
            }
            State::RawText(_) => {}
            State::Code if c == '/' && starts(at, "/") => {
                let doc = (starts(at, "//") && !starts(at, "///")) || starts(at, "/!");
                at += if doc { 2 } else { 1 };
                state = if doc { State::Doc } else { State::Comment };
            }
            State::Code if c == '/' && starts(at, "*") => {
                at += 1;
                state = State::Block(1);
            }
            State::Code if c == '\'' => {
                // 'x' and '\n' are characters; 'x without an end is a lifetime.
                let length = if starts(at, "\\") {
                    chars[at + 1..].iter().skip(1).position(|&c| c == '\'').map(|p| p + 3)
                } else {
                    starts(at + 1, "'").then_some(2)
                };
                line.code.push(c);
                if let Some(length) = length {
                    at += length;
                    line.code.push(c);
                }
            }
            State::Code => {
                line.code.push(c);
                if c == '"' {
                    state = opens_raw_text(&line.code).map_or(State::Text, State::RawText);
                }
            }
        }
    }
    lines.push(line);
    mark_tests(&mut lines);
    lines
}

/// Whether this code, which ends in a quote, opens a raw string, and with how many `#`.
fn opens_raw_text(code: &str) -> Option<usize> {
    let before = code.trim_end_matches('"');
    let prefix = before.trim_end_matches('#');
    let word = prefix.rsplit(|c: char| !c.is_alphanumeric() && c != '_').next()?;
    ["r", "br", "cr"].contains(&word).then(|| before.len() - prefix.len())
}

/// Marks every item behind `#[cfg(test)]`: up to its closing brace, or to a semicolon if that comes first; and a whole file that
/// says so of itself.
fn mark_tests(lines: &mut [Line]) {
    if lines.iter().any(|line| line.code.trim() == "#![cfg(test)]") {
        lines.iter_mut().for_each(|line| line.test = true);
        return;
    }
    let mut depth: Option<usize> = None;
    for line in lines {
        if depth.is_none() && line.code.contains("#[cfg(test)]") {
            depth = Some(0);
        }
        let Some(open) = &mut depth else { continue };
        line.test = true;
        let mut ended = false;
        for c in line.code.chars() {
            match c {
                '{' => *open += 1,
                '}' => *open = open.saturating_sub(1),
                _ => {}
            }
            ended |= (c == '}' || c == ';') && *open == 0;
        }
        if ended {
            depth = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> String {
        lines(text).into_iter().map(|line| line.code).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn strings_and_characters_are_emptied() {
        assert_eq!(code(r#"f("a \" // b", 'x', '"', '\'', b'\n')"#), r#"f("", '', '', '', b'')"#);
        assert_eq!(code("r#\"a \" b\"#; r\"c\\\"; d"), "r#\"\"; r\"\"; d");
        assert_eq!(code("fn f<'a>(x: &'a str)"), "fn f<'a>(x: &'a str)");
        assert_eq!(code("\"one\\\n two\" + '\\u{e9}'"), "\"\n\" + ''");
        assert_eq!(code("var\"x\""), "var\"\"");
    }

    #[test]
    fn comments_and_docs_are_told_apart() {
        let found = lines("a /* b /* c */ d */ e // f\n/// g\n//! h\n//// i");
        assert_eq!((found[0].code.as_str(), found[0].comment.as_str()), ("a  e ", " b  c  d  f"));
        assert_eq!((found[1].doc.as_str(), found[2].doc.as_str(), found[3].comment.as_str()), (" g", " h", "// i"));
    }

    #[test]
    fn a_test_module_ends_with_its_brace() {
        let found = lines(
            "fn a() {}\n#[cfg(test)]\nmod tests {\n fn b() { \"}\"; }\n}\nfn c() {}\n#[cfg(test)]\nuse d;\nfn e() {}",
        );
        let marks: Vec<bool> = found.iter().map(|line| line.test).collect();
        assert_eq!(marks, [false, true, true, true, true, false, true, true, false]);
        assert!(lines("//! Tests.\n#![cfg(test)]\nfn a() {}").iter().all(|line| line.test));
    }
}
