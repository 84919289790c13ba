//! Chat templates that would fill the memory or the stack, or run for hours: each ends with an error, in a process that may use
//! little memory.

use std::process::Command;

use serde_json::{Map, json};
use text::{ChatInput, ChatTemplate};

use crate::checkpoints::Copy;

/// Address space of the process that renders, in KiB: programs, their libraries and a rendering at its limits.
const MEMORY: &str = "1048576";

/// Set in the process that renders.
const PROGRAM: &str = "HOSTILE_TEMPLATES";

/// Templates by what they do. What stands between two `§` is repeated seventy times.
const TEMPLATES: [(&str, &str); 56] = [
    ("~ in a loop", "{% set ns = namespace(x='x') %}{% for i in range(70) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"),
    ("+ in a loop", "{% set ns = namespace(x='x') %}{% for i in range(70) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"),
    ("* in a loop", "{% set ns = namespace(x='x') %}{% for i in range(70) %}{% set ns.x = ns.x * 9 %}{% endfor %}"),
    ("~ without a loop", "{% set x = 'x' %}§{% set x = x ~ x %}§"),
    ("~ in one expression", "{% set x = 'x' * 9000000 %}{{ x§~x§ }}{{ x§~x§ }}"),
    ("constants", "{{ 'x' * 99999999 §~ 'x' * 99999999§ }}"),
    ("constants in one list", "{{ ['x' * 99999999 §, 'x' * 99999999§] }}"),
    ("a block that is set", "{% set x = 'x' %}§{% set x %}{{ x }}{{ x }}{% endset %}§"),
    ("a filter block", "{% set x = 'x' * 9000000 %}{% filter upper %}§{{ x }}§{% endfilter %}"),
    (
        "text between tags",
        "{% set x %}{% for i in range(99999) %}{% for j in range(99999) %}TEXT{% endfor %}{% endfor %}{% endset %}",
    ),
    ("a macro", "{% macro m(x, n) %}{{ x }}{% if n %}{{ m(x ~ x, n - 1) }}{% endif %}{% endmacro %}{{ m('x', 70) }}"),
    (
        "a macro that forks",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}TEXT{% endmacro %}{{ m(70) }}",
    ),
    (
        "a call block",
        "{% macro m() %}{% for i in range(99999) %}{{ caller() }}{% endfor %}{% endmacro %}{% call m() %}{% call m() %}TEXT{% endcall %}{% endcall %}",
    ),
    ("join", "{% set x = 'x' * 9000000 %}{{ range(99999)|join(x) }}"),
    ("join of a text", "{% set x = 'x' * 9000000 %}{{ x.join(range(99999)|map('string')|list) }}"),
    ("replace", "{% set x = 'x' * 9000000 %}{{ x|replace('x', x) }}"),
    ("replace of nothing", "{% set x = 'x' * 9000000 %}{{ x.replace('', x) }}"),
    ("replace of many", "{{ (['x' * 9999] * 99)|map('replace', 'x', 'y' * 9999)|list }}"),
    ("indent", "{% set x = '\\n' * 9000000 %}{{ x|indent(9000000) }}"),
    ("format", "{{ '%9999999999d'|format(1) }}"),
    ("format of a text", "{{ '{:>9999999999}'.format('x') }}"),
    ("a wide text", "{{ 'x'.center(9999999999) }}"),
    ("a text that is split from its end", "{% set x = 'x ' * 4000000 %}{{ x.rsplit() }}"),
    ("batch", "{{ [1]|batch(9999999999, 'x')|list }}"),
    ("slice", "{{ [1]|slice(9999999999)|list }}"),
    ("a list of characters", "{% set x = 'x' * 9000000 %}{{ x|list|length }}"),
    (
        "a list that doubles",
        "{% set ns = namespace(x=['x']) %}{% for i in range(70) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x|join }}",
    ),
    ("lists in lists", "{% set x = ['x'] %}§{% set x = [x, x] %}§{{ x|upper }}"),
    ("maps in maps", "{% set x = {'x': 1} %}§{% set x = {'a': x, 'b': x} %}§{{ x|tojson }}"),
    (
        "slices that are kept",
        "{% set x = 'x' * 9000000 %}{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = ns.l + [x[1:]] %}{% endfor %}",
    ),
    ("a namespace in itself", "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns }}"),
    ("namespaces in namespaces", "{% set x = namespace(a=1) %}§{% set x = namespace(a=x, b=x) %}§{{ x }}"),
    ("tojson with long separators", "{{ ([0] * 99999)|tojson(separators=('x' * 9000000, ':')) }}"),
    (
        "tojson with a deep indent",
        "{% set ns = namespace(x=[0] * 16000) %}{% for i in range(100) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x|tojson(indent=255) }}",
    ),
    ("format of one text many times", "{{ ('{0}' * 999999).format('x' * 9000000) }}"),
    ("format of a named text", "{{ ('{a}' * 999999).format(a='x' * 9000000) }}"),
    ("format of one text by a filter", "{{ ('%(a)s' * 999999)|format(a='x' * 9000000) }}"),
    ("a format of a date", "{{ strftime_now('%c' * 4000000) }}"),
    ("an empty list many times", "{{ ([] * 999999999999)|list }}"),
    ("many times an empty list", "{{ (999999999999 * [])|list }}"),
    ("all variables of the template", "{% set x = 'x' * 9000000 %}§{% set VAR = x %}§{{ debug() }}"),
    ("comparisons", "{% set x = 'x' * 9000000 %}{% set y = 'x' ~ x[1:] %}LOOP{% if x != y %}{% endif %}END"),
    (
        "comparisons of lists",
        "{% set x = ['x' * 99999] * 99 %}{% set y = ['x' * 99999] * 99 %}LOOP{% if x != y %}{% endif %}END",
    ),
    ("searches", "{% set x = 'x' * 9000000 %}LOOP{% if 'y' in x %}{% endif %}END"),
    ("searches of a list", "{% set x = [1] * 999999 %}LOOP{% if 2 in x %}{% endif %}END"),
    ("lengths", "{% set x = 'x' * 9000000 %}LOOP{% if x|length %}{% endif %}END"),
    ("tests", "{% set x = 'x' * 9000000 %}LOOP{% if x is upper %}{% endif %}END"),
    ("methods", "{% set x = 'x' * 9000000 %}LOOP{% if x.startswith('y') or x.find('y') > 0 %}{% endif %}END"),
    ("characters of a text", "{% set x = 'x' * 9000000 %}LOOP{% if x[8999999] == 'y' %}{% endif %}END"),
    ("greatest items", "{% set x = range(99999)|list %}LOOP{% if x|max < 1 %}{% endif %}END"),
    ("searches by a filter", "{% set x = 'x' * 9000000 %}{{ (['y'] * 99999)|select('in', x)|list }}"),
    (
        "searches by a filter of attributes",
        "{% set x = 'x' * 9000000 %}{{ ([{'a': 'y'}] * 99999)|selectattr('a', 'in', x)|list }}",
    ),
    ("lengths by a filter", "{% set x = ['x' * 999999] * 9 %}LOOP{% set y = x|map('length')|list %}END"),
    (
        "lists repeated once",
        "{% set ns = namespace(x=[1]) %}LOOP{% set ns.x = ns.x * 1 %}END{% for i in range(999) %}{% for j in range(999) %}{{ ns.x }}{% endfor %}{% endfor %}{{ 1 // 0 }}",
    ),
    ("empty lists zipped", "{% set ns = namespace(x=[]) %}LOOP{% set ns.x = ns.x|zip([]) %}END{{ ns.x }}"),
    ("empty lists chained", "{% set ns = namespace(x=[]) %}LOOP{% set ns.x = ns.x|chain([]) %}END{{ ns.x }}"),
];

/// Templates that nest without brackets, which no limit on nested brackets stops.
const DEEP: [(&str, &str, &str, &str); 8] = [
    ("sums", "{{ 1", " + 1", " }}"),
    ("concatenations", "{{ 1", " ~ 1", " }}"),
    ("conditions", "{{ x", " and x", " }}"),
    ("filters", "{{ x", "|upper", " }}"),
    ("attributes", "{{ x", ".x", " }}"),
    ("items", "{{ x", "[0]", " }}"),
    ("calls", "{% if false %}{{ x", "()", " }}{% endif %}"),
    ("branches", "{% if x %}", "{% elif x %}", "{% endif %}"),
];

/// A template with its repetitions written out.
fn written(short: &str) -> String {
    let parts = short.split('§').enumerate();
    let repeat = |(i, part): (usize, &str)| match i % 2 {
        1 => (0..70).map(|n| part.replace("VAR", &format!("v{n}"))).collect(),
        _ => part.to_string(),
    };
    let whole: String = parts.map(repeat).collect();
    let whole = whole.replace("TEXT", &"some text ".repeat(100));
    whole
        .replace("LOOP", "{% for i in range(9999) %}{% for j in range(99) %}")
        .replace("END", "{% endfor %}{% endfor %}")
}

#[test]
fn the_process_that_renders_hostile_templates() {
    // Only as the process of the next test.
    if std::env::var_os(PROGRAM).is_some() {
        render_all();
    }
}

fn render_all() {
    let load = |source: String| {
        ChatTemplate::load(Copy::of("llama").set("tokenizer_config.json", json!({"chat_template": source})).folder())
    };
    let messages = [json!({"role": "user", "content": "hi"})];
    let kwargs = Map::from_iter([("go".to_string(), json!(true))]);
    let input = ChatInput {
        messages: &messages,
        tools: None,
        add_generation_prompt: true,
        continue_final_message: false,
        kwargs: &kwargs,
    };
    for (name, short) in TEMPLATES {
        eprintln!("{name}");
        let template = load(format!("{{% if go is defined %}}{}{{% endif %}}", written(short))).unwrap().unwrap();
        let error = template.render(&input).unwrap_err().to_string();
        assert!(error.starts_with("the chat template fails") && !error.contains('\n') && error.len() < 300, "{error}");
        eprintln!("    {error}");
    }
    for (name, start, repeated, end) in DEEP {
        eprintln!("{name}");
        let error = load(format!("{start}{}{end}", repeated.repeat(100_000))).err().unwrap().to_string();
        assert!(error.contains("more than") && !error.contains('\n') && error.len() < 300, "{error}");
        // Templates are a hundred times shorter.
        load(format!("{start}{}{end}", repeated.repeat(1000))).unwrap();
        eprintln!("    {error}");
    }
    let error = load(written(TEMPLATES[0].1)).err().unwrap().to_string();
    assert!(error.contains("more text or values than one rendering may") && !error.contains('\n'), "{error}");
}

#[test]
fn hostile_templates_end_with_an_error_in_little_memory() {
    let output = Command::new("sh")
        .args(["-c", "ulimit -v \"$0\" && exec \"$@\"", MEMORY])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "hostile_templates::the_process_that_renders_hostile_templates", "--nocapture"])
        .env(PROGRAM, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    assert_eq!(said.lines().filter(|line| line.starts_with("    ")).count(), TEMPLATES.len() + DEEP.len(), "{said}");
}
