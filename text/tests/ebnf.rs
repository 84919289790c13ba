//! Grammars in EBNF: which texts they match, and which are refused.

use std::collections::BTreeSet;

use text::{Grammar, Matcher};

use crate::grammars::{bytes, matches};

fn compile(text: &str) -> Result<Matcher, String> {
    let grammar = Grammar::from_text(text.to_string());
    assert!(matches!(grammar, Grammar::Ebnf(_)), "{text}");
    bytes().compile_blocking(&grammar).map_err(|error| error.to_string())
}

#[track_caller]
fn check(text: &str, yes: &[&str], no: &[&str]) {
    let constraint = compile(text).unwrap();
    for (texts, expected) in [(yes, true), (no, false)] {
        for one in texts {
            assert_eq!(matches(&constraint, one), expected, "{one:?} in {text}");
        }
    }
}

#[test]
fn the_form_of_a_grammar_follows_from_its_first_rule() {
    for text in ["root ::= \"a\"", "# a comment: b\n\n  my-rule_1 ::= root\nroot ::= \"b\""] {
        assert!(matches!(Grammar::from_text(text.into()), Grammar::Ebnf(_)), "{text}");
    }
    for text in ["start: \"::=\"", "// root ::=\nstart: \"a\"", "", "start::_ : \"a\""] {
        assert!(matches!(Grammar::from_text(text.into()), Grammar::Lark(_)), "{text}");
    }
}

#[test]
fn texts_of_the_examples_of_other_servers_match() {
    let sql = r#"
        root ::= select_statement
        select_statement ::= "SELECT " column " from " table " where " condition
        column ::= "col_1 " | "col_2 "
        table ::= "table_1 " | "table_2 "
        condition ::= column "= " number
        number ::= "1 " | "2 "
    "#;
    check(sql, &["SELECT col_1  from table_2  where col_2 = 1 "], &["SELECT col_3  from table_2  where col_2 = 1 "]);
    let arithmetic = r#"
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*"#;
    check(arithmetic, &["1+2= 3\n", "(a +b1)*2 =c\n", "x=1\ny=2\n"], &["1+=2\n", "(a=1\n", "1=2"]);
    let json = r#"
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}"#;
    check(
        json,
        &["{}", r#"{"a": [1, -2.5e3, "x\n\u00e9 \" ,"], "b":{"c":null}}"#, "{\n \"ü🙂\":true}"],
        &["{", r#"{"a"}"#, r#"{"a": 01}"#, "[1]", r#"{"a": "\x"}"#, "{\"a\": \"\n\"}"],
    );
    check("root ::= [^a-y0-9] . \"\\u00e9\\x41\\U0001F642\" '\\'' {2}", &["zzéA🙂''"], &["azéA🙂''", "zzéA🙂'"]);
    check("root ::= a | b # x\na ::= \"1\" |\n \"2\"\nb ::= (\"3\"\n| \"\")", &["1", "2", "3", ""], &["4"]);
    check("root ::= \"a\"{2,} [b]{0,2} (\"c\"){3}", &["aaccc", "aaaabbccc"], &["accc", "aabbbccc", "aacccc"]);
}

#[test]
fn a_grammar_of_characters_keeps_its_language_where_lexemes_would_be_ambiguous() {
    check("root ::= \"a\" x | \"ab\"\nx ::= \"bc\"", &["abc", "ab"], &["a", "abbc"]);
    check("root ::= \"(\" root \")\" | word \"x\"\nword ::= [a-z]+", &["foox", "(xx)"], &["x", "(foo)"]);
    check("root ::= root \"a\" | [a-c]+ \"ab\"", &["cab", "cabaaa", "aabab"], &["ab", "abaaa"]);
}

#[test]
fn an_invalid_grammar_is_refused_with_its_line() {
    for (text, named) in [
        ("root ::= other", "other"),
        ("start ::= \"a\"", "no rule root"),
        ("root ::= \"a", "line 1"),
        ("root ::= \"a\"\nroot ::= \"b\"", "second rule \"root\""),
        ("root ::= \"a\"\n\nx ::= [z-a]", "line 3"),
        ("root ::= (\"a\"", "no )"),
        ("root ::= \"a\"{3,2}", "fewer"),
        ("root ::= \"a\"{999999999}", "100000"),
        ("root ::= \"a\"{\n}", "found {\\n}"),
        ("root ::= <think> \"a\"", "token"),
        ("root ::= \"a\" (= \"b\")", "look-ahead"),
        ("root ::= \"\\q\"", "escape \\q"),
        ("root ::= \"a\" )", "expected a rule"),
        ("root ::= []", "empty class"),
    ] {
        let problem = compile(text).err().unwrap_or_else(|| panic!("{text} was compiled"));
        assert!(problem.contains(named) && !problem.contains('\n'), "{text}: {problem}");
    }
}

/// The parts of random grammars over a and b.
struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % most
    }

    fn part(&mut self, depth: usize) -> Part {
        match self.below(if depth == 0 { 4 } else { 8 }) {
            0 => Part::Text("a"),
            1 => Part::Text(["b", "ab", "ba", "aab"][self.below(4) as usize]),
            2 => Part::Text("[ab]"),
            3 => Part::Rule(self.below(3) as usize),
            4 | 5 => Part::Seq((0..2 + self.below(2)).map(|_| self.part(depth - 1)).collect()),
            6 => Part::Alt((0..2 + self.below(2)).map(|_| self.part(depth - 1)).collect()),
            _ => Part::Repeat(Box::new(self.part(depth - 1)), ["*", "+", "?"][self.below(3) as usize]),
        }
    }
}

enum Part {
    Text(&'static str),
    Rule(usize),
    Seq(Vec<Part>),
    Alt(Vec<Part>),
    Repeat(Box<Part>, &'static str),
}

type Texts = BTreeSet<String>;

const LONGEST: usize = 4;

fn joined(a: &Texts, b: &Texts) -> Texts {
    a.iter().flat_map(|a| b.iter().map(move |b| format!("{a}{b}"))).filter(|text| text.len() <= LONGEST).collect()
}

impl Part {
    fn text(&self) -> String {
        let all = |parts: &[Part], by: &str| parts.iter().map(Part::text).collect::<Vec<_>>().join(by);
        match self {
            Part::Text("[ab]") => "[ab]".to_string(),
            Part::Text(text) => format!("{text:?}"),
            Part::Rule(rule) => ["root", "x", "y"][*rule].to_string(),
            Part::Seq(parts) => format!("({})", all(parts, " ")),
            Part::Alt(parts) => format!("({})", all(parts, " | ")),
            Part::Repeat(part, sign) => format!("({}){sign}", part.text()),
        }
    }

    /// The short texts that it matches, given those of the rules.
    fn texts(&self, rules: &[Texts; 3]) -> Texts {
        match self {
            Part::Text("[ab]") => ["a", "b"].map(String::from).into(),
            Part::Text(text) => [text.to_string()].into(),
            Part::Rule(rule) => rules[*rule].clone(),
            Part::Seq(parts) => parts.iter().fold([String::new()].into(), |all, part| joined(&all, &part.texts(rules))),
            Part::Alt(parts) => parts.iter().flat_map(|part| part.texts(rules)).collect(),
            Part::Repeat(part, sign) => {
                let one = part.texts(rules);
                let mut all: Texts = if *sign == "+" { one.clone() } else { [String::new()].into() };
                for _ in 0..if *sign == "?" { 1 } else { LONGEST } {
                    let more = joined(&all, &one);
                    all.extend(more);
                }
                all
            }
        }
    }
}

#[test]
fn random_grammars_match_exactly_the_texts_that_their_rules_derive() {
    let (mut random, mut served) = (Random(1), 0);
    for _ in 0..150 {
        let rules: Vec<Part> = (0..3).map(|_| random.part(2)).collect();
        let texts: Vec<String> = rules.iter().map(Part::text).collect();
        let text = format!("root ::= {}\nx ::= {}\ny ::= {}", texts[0], texts[1], texts[2]);
        let mut known: [Texts; 3] = Default::default();
        loop {
            let next = [0, 1, 2].map(|rule| rules[rule].texts(&known));
            if next == known {
                break;
            }
            known = next;
        }
        // Some match no text at all, or only longer ones.
        let Ok(constraint) = compile(&text) else {
            assert!(known[0].is_empty() || known[0].iter().all(String::is_empty), "refused: {text}");
            continue;
        };
        served += 1;
        let mut open = vec![String::new()];
        while let Some(one) = open.pop() {
            assert_eq!(matches(&constraint, &one), known[0].contains(&one), "{one:?} in {text}");
            if one.len() < LONGEST {
                open.extend([format!("{one}a"), format!("{one}b")]);
            }
        }
    }
    assert!(served > 100, "{served}");
}
