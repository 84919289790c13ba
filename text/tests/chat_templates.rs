//! The Jinja of chat templates against what transformers 5.23 (Jinja2 3.1) prints for the same template.

use std::path::Path;

use serde_json::{Map, Value, json};
use testkit::reference::{CASES, folder};
use text::{ChatInput, ChatTemplate, ReasoningFormat, TemplateError, ToolFormat};

use crate::checkpoints::{Copy, message};

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::load(with_template(source).folder()).unwrap().unwrap()
}

fn with_template(source: &str) -> Copy {
    Copy::of("llama").set("tokenizer_config.json", json!({"chat_template": source}))
}

#[derive(Default)]
struct Request {
    tools: Option<Value>,
    add_generation_prompt: bool,
    continue_final_message: bool,
    kwargs: Map<String, Value>,
}

fn render(
    template: &ChatTemplate,
    messages: Value,
    adjust: impl FnOnce(&mut Request),
) -> Result<String, TemplateError> {
    let mut request = Request::default();
    adjust(&mut request);
    template.render(&ChatInput {
        messages: messages.as_array().unwrap(),
        tools: request.tools.as_ref(),
        add_generation_prompt: request.add_generation_prompt,
        continue_final_message: request.continue_final_message,
        kwargs: &request.kwargs,
    })
}

#[test]
fn templates_print_the_same_text_as_transformers() {
    let messages = json!([{"role": "user", "content": "hi", "extra":
        {"b": [1, 2.5, 1e-7, 1e16, true, null, "é<&>'\"\n\u{1}😀"], "a": {}, "l": [], "2": 1}}]);
    let extra = r#"{%- set x = messages[0].extra %}"#;
    let cases = [
        (
            "{{ x|tojson }}",
            r#"{"b": [1, 2.5, 1e-07, 1e+16, true, null, "é<&>'\"\n\u0001😀"], "a": {}, "l": [], "2": 1}"#,
        ),
        (
            "{{ x|tojson(indent=2) }}",
            "{\n  \"b\": [\n    1,\n    2.5,\n    1e-07,\n    1e+16,\n    true,\n    null,\n    \"é<&>'\\\"\\n\\u0001😀\"\n  ],\n  \"a\": {},\n  \"l\": [],\n  \"2\": 1\n}",
        ),
        (
            "{{ x|tojson(ensure_ascii=True, sort_keys=true) }}",
            r#"{"2": 1, "a": {}, "b": [1, 2.5, 1e-07, 1e+16, true, null, "\u00e9<&>'\"\n\u0001\ud83d\ude00"], "l": []}"#,
        ),
        (
            "{{ x|tojson(separators=(',', ':')) }}",
            r#"{"b":[1,2.5,1e-07,1e+16,true,null,"é<&>'\"\n\u0001😀"],"a":{},"l":[],"2":1}"#,
        ),
        (
            "{{ x|tojson(indent=1, separators=(' ,', ' : ')) }}",
            "{\n \"b\" : [\n  1 ,\n  2.5 ,\n  1e-07 ,\n  1e+16 ,\n  true ,\n  null ,\n  \"é<&>'\\\"\\n\\u0001😀\"\n ] ,\n \"a\" : {} ,\n \"l\" : [] ,\n \"2\" : 1\n}",
        ),
        (
            "{{ x }}|{{ x|string }}",
            r#"{'b': [1, 2.5, 1e-07, 1e+16, True, None, 'é<&>\'"\n\x01😀'], 'a': {}, 'l': [], '2': 1}|{'b': [1, 2.5, 1e-07, 1e+16, True, None, 'é<&>\'"\n\x01😀'], 'a': {}, 'l': [], '2': 1}"#,
        ),
        (
            "{{ none }}|{{ true }}|{{ 1e16 }}|{{ nope }}|{{ [1,'a'] }}|{{ 1|string + 'x' }}",
            "None|True|1e+16||[1, 'a']|1x",
        ),
        ("{{ {1.5: 2, none: 3}|tojson }} {{ {1: 'a'} }}", r#"{"1.5": 2, "null": 3} {1: 'a'}"#),
        ("a\n{% if true %}\n  b\n  {% endif %}\n{# c #}\nd\n", "a\n  b\nd"),
        ("{%- for m in messages -%}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}!", "hi!"),
        (
            "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "02",
        ),
        (
            "{{ tools is none }} {{ tools is defined }} {{ documents is defined }} {{ y is defined }}",
            "True True True False",
        ),
        (
            "{{ ['a','b']|join(', ') }} {{ 'a b'.split(' ')|tojson }} {{ messages|map(attribute='role')|list|tojson }}",
            r#"a, b ["a", "b"] ["user"]"#,
        ),
        ("{{ 'x' ~ 1.0 ~ true ~ none }} {{ 'ab'[::-1] }} {{ 7 // 2 }} {{ 2 ** 3 }}", "x1.0TrueNone ba 3 8"),
        (
            "{{ messages[0].items()|list|length }} {{ messages[0].get('no', 'd') }} {{ messages[0]['no'] is defined }}",
            "3 d False",
        ),
        (
            "{% set ns = namespace(x=1) %}{% set ns.x = ns.x + 1 %}{{ ns.x }} {{ 'a'.startswith('a') }} {{ 'xxaxx'.strip('x') }} {{ 'a\nb'.splitlines() }}",
            "2 True a ['a', 'b']",
        ),
        ("{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ sep_token is defined }}", "<s></s></s>False"),
    ];
    for (source, expected) in cases {
        assert_eq!(
            render(&template(&format!("{extra}{source}")), messages.clone(), |_| ()).unwrap(),
            expected,
            "{source}"
        );
    }
    let undefined = render(&template("{{ nope|tojson }}"), messages, |_| ());
    assert!(matches!(undefined, Err(TemplateError::Failed(message)) if message.contains("undefined")));
}

#[test]
fn floats_and_texts_print_as_in_python() {
    let template = template("{{ x }}");
    let printed = |x: Value| render(&template, json!([]), |request| drop(request.kwargs.insert("x".into(), x)));
    for (value, expected) in [
        (1.5, "1.5"),
        (2.0, "2.0"),
        (-3.5, "-3.5"),
        (0.0, "0.0"),
        (-0.0, "-0.0"),
        (1e-4, "0.0001"),
        (1e-5, "1e-05"),
        (1.25e-7, "1.25e-07"),
        (123456789012345.6, "123456789012345.6"),
        (1e15, "1000000000000000.0"),
        (1e16, "1e+16"),
        (1.7976931348623157e308, "1.7976931348623157e+308"),
        (0.1 + 0.2, "0.30000000000000004"),
    ] {
        assert_eq!(printed(json!(value)).unwrap(), expected);
    }
    let value = json!({"b": [true, null, 1, 2.5, "it's", "a \"b\"\n"], "a": {}, "c": "é\u{1}"});
    let expected = r#"{'b': [True, None, 1, 2.5, "it's", 'a "b"\n'], 'a': {}, 'c': 'é\x01'}"#;
    assert_eq!(printed(value).unwrap(), expected);
    let deep = (0..130).fold(json!(1), |inner, _| json!([inner]));
    assert!(matches!(printed(deep), Err(TemplateError::Failed(message)) if message.contains("too deeply")));
}

#[test]
fn generation_tags_become_a_condition_and_nothing_else_changes() {
    let template = template("a{%- generation -%} b{%endgeneration%}{% if generation %}{{ generation }}{% endif %}");
    let go = |request: &mut Request| drop(request.kwargs.insert("generation".to_string(), "c".into()));
    assert_eq!(render(&template, json!([]), go).unwrap(), "abc");
}

#[test]
fn a_date_is_printed_in_the_format_of_the_template() {
    let date = render(&template("{{ strftime_now('%Y-%m-%d') }}"), json!([]), |_| ()).unwrap();
    let shape: Vec<usize> = date.split('-').map(str::len).collect();
    assert_eq!(shape, [4, 2, 2], "{date}");
    assert!(date.as_str() >= "2024-01-01", "{date}");
}

#[test]
fn a_template_file_takes_precedence_over_the_tokenizer_config() {
    let copy = with_template("from the config").write("chat_template.jinja", "from the file");
    let template = ChatTemplate::load(copy.folder()).unwrap().unwrap();
    assert_eq!(render(&template, json!([]), |_| ()).unwrap(), "from the file");
}

#[test]
fn the_tool_template_is_used_for_requests_with_tools() {
    let named = json!([
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools|length }} tools"},
        {"name": "rag", "template": "{{ documents }}"},
    ]);
    let in_config = Copy::of("llama").set("tokenizer_config.json", json!({ "chat_template": named }));
    let in_files = Copy::of("llama")
        .write("chat_template.jinja", "plain")
        .write("additional_chat_templates/tool_use.jinja", "{{ tools|length }} tools");
    for copy in [in_config, in_files] {
        let template = ChatTemplate::load(copy.folder()).unwrap().unwrap();
        assert_eq!(render(&template, json!([]), |_| ()).unwrap(), "plain");
        assert_eq!(render(&template, json!([]), |request| request.tools = Some(json!([1, 2]))).unwrap(), "2 tools");
    }
}

#[test]
fn plain_requests_to_a_checkpoint_with_only_a_tool_template_get_an_error() {
    let named = json!([{"name": "tool_use", "template": "tools"}]);
    let copy = Copy::of("llama").set("tokenizer_config.json", json!({ "chat_template": named }));
    let template = ChatTemplate::load(copy.folder()).unwrap().unwrap();
    assert!(matches!(render(&template, json!([]), |_| ()), Err(TemplateError::ToolsOnly)));
}

#[test]
fn a_checkpoint_without_a_template_loads() {
    let without_key = Copy::of("llama").drop_key("tokenizer_config.json", "chat_template");
    let without_file = Copy::of("llama").remove("tokenizer_config.json");
    for copy in [without_key, without_file] {
        assert!(ChatTemplate::load(copy.folder()).unwrap().is_none());
    }
}

#[test]
fn special_tokens_may_be_objects_or_come_from_special_tokens_map() {
    let copy = with_template("{{ bos_token }}{{ eos_token }}{{ unk_token }}")
        .set("tokenizer_config.json", json!({"bos_token": {"content": "<B>"}, "eos_token": null}))
        .drop_key("tokenizer_config.json", "unk_token");
    let template = ChatTemplate::load(copy.folder()).unwrap().unwrap();
    assert_eq!(render(&template, json!([]), |_| ()).unwrap(), "<B></s><unk>");
}

#[test]
fn a_request_can_add_variables_but_not_replace_the_messages() {
    let template = template("{{ messages|length }} {{ extra }} {{ bos_token }}");
    let kwargs = json!({"extra": "E", "messages": [1, 2, 3], "bos_token": "B"});
    let kwargs = kwargs.as_object().unwrap().clone();
    assert_eq!(render(&template, json!([]), |request| request.kwargs = kwargs).unwrap(), "0 E B");
}

#[test]
fn reasoning_is_read_under_each_of_its_names() {
    let template = template("{% for m in messages %}[{{ m.reasoning_content }} {{ m.thinking }}]{% endfor %}");
    let messages = json!([{"reasoning": "a"}, {"thinking": "b"}, {"reasoning_content": "c", "thinking": "d"}, {}]);
    assert_eq!(render(&template, messages, |_| ()).unwrap(), "[a a][b b][c d][ ]");
}

const PLAIN: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}";
const TRIMMED: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content|trim }}</s>{% endfor %}";

fn continued(source: &str, messages: Value) -> Result<String, TemplateError> {
    render(&template(source), messages, |request| request.continue_final_message = true)
}

#[test]
fn a_continued_message_ends_as_transformers_ends_it() {
    let messages = json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": " end  "}]);
    assert_eq!(continued(PLAIN, messages.clone()).unwrap(), "<user>q</s><assistant> end  ");
    assert_eq!(continued(TRIMMED, messages).unwrap(), "<user>q</s><assistant>end");

    let empty = json!([{"role": "assistant", "content": ""}]);
    assert_eq!(continued(PLAIN, empty).unwrap(), "<assistant>");

    // The words of the final message stand in what the template puts behind it, too.
    let short = json!([{"role": "assistant", "content": "s"}]);
    assert_eq!(continued(PLAIN, short).unwrap(), "<assistant>s");

    let parts = json!([{"role": "assistant", "content":
        [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}, {"type": "image"}]}]);
    let template = "{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}";
    assert_eq!(continued(template, parts).unwrap(), "[A][B");
}

#[test]
fn continuing_needs_a_final_message_with_text() {
    let nothing = |source, messages| matches!(continued(source, messages), Err(TemplateError::NothingToContinue(_)));
    assert!(nothing(PLAIN, json!([])));
    assert!(nothing(PLAIN, json!([{"role": "assistant", "content": null}])));
    assert!(nothing(PLAIN, json!([{"role": "assistant", "content": [{"type": "image"}]}])));
    assert!(nothing("only this", json!([{"role": "assistant", "content": "x"}])));
    let both = render(&template(PLAIN), json!([{"role": "assistant", "content": "x"}]), |request| {
        request.continue_final_message = true;
        request.add_generation_prompt = true;
    });
    assert!(matches!(both, Err(TemplateError::ConflictingEnds)));
}

#[test]
fn a_template_that_refuses_or_fails_gives_the_reason_in_one_line() {
    let refusing = template("{{ raise_exception('no\nmessages ' ~ messages|length) }}");
    let error = render(&refusing, json!([]), |_| ()).unwrap_err();
    assert!(matches!(&error, TemplateError::Refused(words) if words == "no messages 0"), "{error:?}");

    // Also from within a macro.
    let nested = template("{% macro f() %}{{ raise_exception('deep') }}{% endmacro %}{{ f() }}");
    let error = render(&nested, json!([]), |_| ()).unwrap_err();
    assert_eq!(error.to_string(), "the chat template refuses these messages: deep");

    let failing = template("{{ messages[0].content.nope.nope }}");
    let error = render(&failing, json!([{"content": "x"}]), |_| ()).unwrap_err();
    assert!(matches!(&error, TemplateError::Failed(_)) && !error.to_string().contains('\n'), "{error:?}");
}

#[test]
fn an_endless_template_is_stopped() {
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = 1 %}{% endfor %}{% endfor %}";
    let guarded = template(&format!("{{% if go is defined %}}{endless}{{% endif %}}"));
    let go = |request: &mut Request| drop(request.kwargs.insert("go".to_string(), true.into()));
    let error = render(&guarded, json!([]), go).unwrap_err();
    assert!(matches!(&error, TemplateError::Failed(message) if message.contains("fuel")), "{error:?}");

    let recursive = template("{% macro f() %}{{ f() }}{% endmacro %}{% if messages|length == 0 %}{{ f() }}{% endif %}");
    assert!(matches!(render(&recursive, json!([]), |_| ()), Err(TemplateError::Failed(_))));
}

#[test]
fn a_template_that_can_not_work_is_refused_at_load() {
    let broken = [
        ("{% if %}", "syntax error"),
        ("{% nope %}", "nope"),
        ("{{ 'x'|nope }}", "nope"),
        ("{{ 1 is nope }}", "nope"),
        ("{{ nope() }}", "nope"),
        ("{{ 'x'.nope() }}", "nope"),
        // Behind conditions that only some conversations meet.
        ("{% if tools %}{{ tools|nope }}{% endif %}", "nope"),
        ("{% for m in messages if m.role == 'system' %}{{ m|nope }}{% endfor %}", "nope"),
        ("{% for m in messages if m.tool_calls %}{{ m|nope }}{% endfor %}", "nope"),
        ("{% if add_generation_prompt %}{{ nope() }}{% endif %}", "nope"),
    ];
    for (source, word) in broken {
        let copy = with_template(source);
        message(ChatTemplate::load(copy.folder()), &["tokenizer_config.json", "chat template", word]);
    }
    let copy = Copy::of("llama").write("chat_template.jinja", "{% if %}");
    message(ChatTemplate::load(copy.folder()), &["chat_template.jinja", "syntax error"]);
    let copy = Copy::of("llama").write("chat_template.jinja", b"\xFF");
    message(ChatTemplate::load(copy.folder()), &["chat_template.jinja", "utf-8"]);
    let copy = Copy::of("llama").set("tokenizer_config.json", json!({"chat_template": [{"name": "default"}]}));
    message(ChatTemplate::load(copy.folder()), &["tokenizer_config.json", "`chat_template`", "`template`"]);

    // What a template says about a conversation is its own affair.
    for fine in ["{{ raise_exception('never') }}", "{{ messages[7].content.strip() }}"] {
        template(fine);
    }
}

#[test]
fn methods_of_python_that_the_library_lacks() {
    for (expression, printed) in [
        ("'a,b,,c'.rsplit(',')|join('|')", "a|b||c"),
        ("'a,b,c'.rsplit(',', 1)|join('|')", "a,b|c"),
        ("' a  b c '.rsplit(maxsplit=1)|join('|')", "a  b|c"),
        ("' a  b c '.rsplit()|join('|')", "a|b|c"),
        ("'</think>x</think>y'.rsplit('</think>', maxsplit=1)[-1]", "y"),
        ("'key=v=w'.partition('=')|join('|')", "key|=|v=w"),
        ("'key=v=w'.rpartition('=')|join('|')", "key=v|=|w"),
        ("('key'.partition('=') + 'key'.rpartition('='))|join('|')", "key|||||key"),
        ("'a.b'.removeprefix('a.') ~ 'a.b'.removesuffix('.b') ~ 'x'.removeprefix('y')", "bax"),
        ("'héé'.index('é') ~ 'héé'.rindex('é') ~ 'héé'.find('é') ~ 'héé'.rfind('é') ~ 'h'.find('x')", "1212-1"),
        ("[3, 4, 5].index(4)", "1"),
        ("'-5'.zfill(4) ~ '|' ~ 'abc'.zfill(2)", "-005|abc"),
        ("'a'.ljust(3, '.') ~ 'a'.rjust(3) ~ '|'", "a..  a|"),
        ("'ab'.center(5, '*') ~ 'a'.center(4, '*')", "**ab**a**"),
        ("'STRAßE'.casefold()", "strasse"),
    ] {
        let found = render(&template(&format!("{{{{ {expression} }}}}")), json!([]), |_| ()).unwrap();
        assert_eq!(found, printed, "{expression}");
    }
    for failing in
        ["'a'.index('b')", "[1].index(2)", "'a'.rsplit('')", "'a'.center(3, 'xy')", "'a'.ljust(999999999999)"]
    {
        let guarded = template(&format!("{{% if messages|length == 0 %}}{{{{ {failing} }}}}{{% endif %}}"));
        assert!(matches!(render(&guarded, json!([]), |_| ()), Err(TemplateError::Failed(_))), "{failing}");
    }
}

#[test]
fn the_percent_sign_formats_texts_and_divides_numbers_as_in_python() {
    for (expression, printed) in [
        ("'%s is %d' % ('x', 7)", "x is 7"),
        ("'%s' % true", "True"),
        ("'%s' % none", "None"),
        ("'%5.2f|%-3s|%03d|%%' % (1.005, 'a', 7)", " 1.00|a  |007|%"),
        ("'%(a)s-%(b)s' % {'a': 1, 'b': 'c'}", "1-c"),
        ("'%s' % 'a' ~ 'b'", "ab"),
        ("7 % 3", "1"),
        ("-7 % 3", "2"),
        ("7 % -3", "-2"),
        ("7.5 % 2", "1.5"),
        ("(loop_index | default(5)) % 2 == 1", "True"),
    ] {
        let found = render(&template(&format!("{{{{ {expression} }}}}")), json!([]), |_| ()).unwrap();
        assert_eq!(found, printed, "{expression}");
    }
    for failing in ["'%s %s' % 'a'", "1 % 0", "'%999999d' % 1", "[] % 2"] {
        let guarded = template(&format!("{{% if messages|length == 0 %}}{{{{ {failing} }}}}{{% endif %}}"));
        assert!(matches!(render(&guarded, json!([]), |_| ()), Err(TemplateError::Failed(_))), "{failing}");
    }
}

#[test]
fn a_name_chooses_a_template_of_the_checkpoint_or_one_that_is_built_in() {
    let named = json!([
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools|length }} tools"},
        {"name": "rag", "template": "of documents"},
    ]);
    let copy = || {
        Copy::of("llama")
            .set("tokenizer_config.json", json!({ "chat_template": named }))
            .write("additional_chat_templates/more.jinja", "one more")
    };
    let load = |name: &str| ChatTemplate::load_for_serving(copy().folder(), Some(Path::new(name)));
    let user = json!([{"role": "user", "content": "Hi"}]);
    for (name, printed) in [
        ("rag", "of documents"),
        ("more", "one more"),
        ("chatml", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
    ] {
        let template = load(name).unwrap().unwrap();
        let with_tools = |request: &mut Request| {
            request.tools = Some(json!([1]));
            request.add_generation_prompt = true;
        };
        assert_eq!(render(&template, user.clone(), with_tools).unwrap(), printed);
        assert_eq!(template.origin(), format!("the one named {name}"));
    }
    let file = copy();
    let path = file.path("additional_chat_templates/more.jinja");
    let template = ChatTemplate::load_for_serving(file.folder(), Some(&path)).unwrap().unwrap();
    assert_eq!(
        (template.origin(), render(&template, user, |_| ()).unwrap().as_str()),
        (path.to_str().unwrap(), "one more")
    );
    message(load("nope"), &["--chat-template", "\"nope\"", "existing file", "rag", "chatml"]);
    message(load("../tokenizer_config"), &["--chat-template", "existing file"]);
}

#[test]
fn a_template_of_a_client_is_rendered_under_the_same_limits() {
    let own = template("{{ bos_token }}own");
    let messages = json!([{"role": "developer", "content": "Hi"}]);
    let kwargs = Map::new();
    let input = ChatInput {
        messages: messages.as_array().unwrap(),
        tools: None,
        add_generation_prompt: true,
        continue_final_message: false,
        kwargs: &kwargs,
    };
    let render = |source: &str| own.render_with(source, &input);
    assert_eq!(
        render("{{ bos_token }}{% generation %}{{ messages[0].role }}{% endgeneration %}").unwrap(),
        "<s>system"
    );
    for failing in [
        "{% if %}",
        "{{ 'x'.nope() }}",
        "{% for i in range(99999999) %}{% endfor %}",
        "{% include 'x' %}",
        "{{ 'x' * 999999999 }}",
    ] {
        let error = render(failing).unwrap_err().to_string();
        assert!(!error.contains('\n') && error.contains("chat template"), "{error}");
    }
    assert!(matches!(render("{{ raise_exception('no') }}"), Err(TemplateError::Refused(_))));
}

#[test]
fn the_encoding_of_deepseek_v32_is_a_template_that_its_type_of_model_chooses() {
    let copy = Copy::of("llama")
        .drop_key("tokenizer_config.json", "chat_template")
        .set("config.json", json!({"model_type": "deepseek_v32"}));
    let template = ChatTemplate::load(copy.folder()).unwrap().unwrap();
    assert!(template.origin().starts_with("deepseek_v32"), "{}", template.origin());
    let function = |name: &str| json!({"name": name, "parameters": {"type": "object"}});
    let tools =
        json!([{"type": "function", "function": function("f")}, {"type": "function", "function": function("g")}]);
    let call = |name: &str, arguments: Value| json!({"type": "function", "function": {"name": name, "arguments": arguments.to_string()}});
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello.", "reasoning_content": "dropped"},
        {"role": "user", "content": "Call"},
        {"role": "assistant", "content": "Both.", "reasoning_content": "kept",
            "tool_calls": [call("f", json!({"s": "a \"b\"", "l": [1, "é"]})), call("g", json!({}))]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]);
    let rendered = |messages: Value, thinks: bool, tools: Option<&Value>| {
        render(&template, messages, |request| {
            request.tools = tools.cloned();
            request.kwargs = [("thinking".to_string(), thinks.into())].into_iter().collect();
        })
        .unwrap()
    };
    let whole = rendered(messages, true, Some(&tools));
    let (head, rest) = whole.split_once("## Tools\n").unwrap();
    assert_eq!(head, "<｜begin▁of▁sentence｜>Be brief.\n\n");
    let (text, rest) = rest.split_once("<functions>\n").unwrap();
    assert!(
        text.contains("<｜DSML｜invoke name=\"$FUNCTION_NAME2\">\n...\n")
            && text.contains("<think>...thinking about results</think>\n")
    );
    assert_eq!(
        rest,
        "{\"name\": \"f\", \"parameters\": {\"type\": \"object\"}}\n{\"name\": \"g\", \"parameters\": {\"type\": \"object\"}}\n\
         </functions>\n<｜User｜>Hi<｜Assistant｜></think>Hello.<｜end▁of▁sentence｜><｜User｜>Call<｜Assistant｜><think>\
         kept</think>Both.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n\
         <｜DSML｜parameter name=\"s\" string=\"true\">a \"b\"</｜DSML｜parameter>\n\
         <｜DSML｜parameter name=\"l\" string=\"false\">[1, \"é\"]</｜DSML｜parameter>\n</｜DSML｜invoke>\n\
         <｜DSML｜invoke name=\"g\">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls><｜end▁of▁sentence｜>\n\n\
         <function_results>\n<result>1</result>\n<result>2</result>\n</function_results>\n\n<think>"
    );
    let plain = rendered(json!([{"role": "user", "content": "Hi"}]), false, None);
    assert_eq!(plain, "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>");
    let without_system = rendered(json!([{"role": "user", "content": "Hi"}]), false, Some(&tools));
    assert!(without_system.starts_with("<｜begin▁of▁sentence｜>\n\n## Tools\n"));
    assert_eq!(ToolFormat::of(&template).map(|(format, _)| format), Some(ToolFormat::DeepseekV32));
    assert_eq!(ReasoningFormat::of(&template).map(|(format, _)| format), Some(ReasoningFormat::Qwen3));
}

#[test]
fn conversations_of_a_tekken_are_those_of_mistral_common() {
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    let call =
        json!({"id": "abc123xyz", "type": "function", "function": {"name": "f", "arguments": "{\"city\": \"Oslo\"}"}});
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Again"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abc123xyz", "content": "{\"temp\": 3}"},
    ]);
    let listed = "[AVAILABLE_TOOLS][{\"type\": \"function\", \"function\": {\"name\": \"f\", \"parameters\": {\"type\": \"object\"}}}][/AVAILABLE_TOOLS]";
    let call = "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"city\": \"Oslo\"}, \"id\": \"abc123xyz\"}]</s>";
    let result = "[TOOL_RESULTS]abc123xyz[TOOL_CONTENT]{\"temp\": 3}[/TOOL_RESULTS]";
    for (version, expected) in [
        (
            "v3",
            format!(
                "<s>[INST]Hi[/INST]Hello</s>{listed}[INST]Be brief.\n\nAgain[/INST]{call}\
                 [TOOL_RESULTS]{{\"content\": {{\"temp\": 3}}, \"call_id\": \"abc123xyz\"}}[/TOOL_RESULTS]"
            ),
        ),
        (
            "v7",
            format!(
                "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi[/INST]Hello</s>{listed}[INST]Again[/INST]{call}{result}"
            ),
        ),
        (
            "v13",
            format!(
                "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi[/INST]Hello</s>{listed}[INST]Again[/INST]\
                 [TOOL_CALLS]f[ARGS]{{\"city\": \"Oslo\"}}</s>{result}"
            ),
        ),
    ] {
        let copy = Copy::of("llama")
            .drop_key("tokenizer_config.json", "chat_template")
            .remove("tokenizer.json")
            .write("tekken.json", json!({"config": {"version": version}}).to_string());
        let template = ChatTemplate::load(copy.folder()).unwrap().unwrap();
        assert!(template.origin().starts_with("mistral, which is built in"), "{}", template.origin());
        let found = render(&template, messages.clone(), |request| request.tools = Some(tools.clone())).unwrap();
        assert_eq!(found, expected, "{version}");
        assert_eq!(ToolFormat::of(&template).map(|(format, _)| format), Some(ToolFormat::Mistral));
    }
}

#[test]
fn a_template_that_cannot_work_ends_chats_and_not_the_model() {
    let copy = with_template("{{ 'x'.nope() }}");
    let template = ChatTemplate::load_for_serving(copy.folder(), None).unwrap().unwrap();
    assert!(
        template.problem().is_some_and(|problem| problem.contains("nope") && problem.contains("tokenizer_config.json"))
    );
    let error = render(&template, json!([]), |_| ()).unwrap_err().to_string();
    assert!(error.contains("nope") && error.contains("/v1/completions") && !error.contains('\n'), "{error}");
    let working = ChatTemplate::load_for_serving(with_template("{{ 1 }}").folder(), None).unwrap().unwrap();
    assert_eq!((working.problem(), render(&working, json!([]), |_| ()).unwrap().as_str()), (None, "1"));
    // A broken file is not a matter of the template.
    let broken = Copy::of("llama").write("tokenizer_config.json", "{");
    message(ChatTemplate::load_for_serving(broken.folder(), None), &["tokenizer_config.json", "JSON"]);
}

#[test]
fn a_template_in_the_file_of_a_processor_is_used_if_there_is_no_other() {
    let file = |copy: Copy| copy.write("chat_template.json", r#"{"chat_template": "of the processor"}"#);
    let load = |copy: Copy| ChatTemplate::load(copy.folder()).unwrap().unwrap();
    assert_eq!(render(&load(file(with_template("own"))), json!([]), |_| ()).unwrap(), "own");
    let without = file(Copy::of("llama").drop_key("tokenizer_config.json", "chat_template"));
    assert_eq!(render(&load(without), json!([]), |_| ()).unwrap(), "of the processor");
}

/// The templates of the reference checkpoints, by family.
fn families() -> Vec<(&'static str, ChatTemplate)> {
    let load = |case: &&'static str| Some((*case, ChatTemplate::load(&*folder(case)).unwrap()?));
    let families: Vec<_> = CASES.iter().filter_map(load).collect();
    assert!(families.len() > 10);
    families
}

/// C58 and C59 of public reports: clients repeat answers with all fields that an answer can have.
#[test]
fn absent_content_and_absent_calls_are_accepted_by_every_family_of_templates() {
    let dump = json!({"role": "assistant", "content": "Hello!", "refusal": null, "annotations": [], "audio": null,
        "function_call": null, "name": null, "tool_calls": null});
    let with = |message: &Value| json!([{"role": "user", "content": "A"}, message, {"role": "user", "content": "B"}]);
    let call =
        json!({"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{\"x\": \"paris\"}"}});
    let tools = json!([{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]);
    let mut shown = 0;
    for (family, template) in families() {
        let prompt = |message: Value| render(&template, with(&message), |_| ());
        let plain = prompt(json!({"role": "assistant", "content": "Hello!"})).unwrap();
        let listed = json!({"role": "assistant", "content": "Hello!", "tool_calls": []});
        for message in [dump.clone(), listed] {
            assert_eq!(prompt(message).unwrap(), plain, "{family}");
        }
        let empty = prompt(json!({"role": "assistant", "content": ""})).unwrap();
        for message in [json!({"role": "assistant"}), json!({"role": "assistant", "content": null, "tool_calls": []})] {
            assert_eq!(prompt(message).unwrap(), empty, "{family}");
        }
        if !template.mentions("tool_calls") {
            continue;
        }
        shown += 1;
        let called = |content: Value| {
            let mut message = json!({"role": "assistant", "tool_calls": [call]});
            message.as_object_mut().unwrap().extend(content.as_object().unwrap().clone());
            let result = json!({"role": "tool", "tool_call_id": "call00001", "name": "f", "content": "12"});
            let messages = json!([{"role": "user", "content": "A"}, message, result]);
            render(&template, messages, |request| request.tools = Some(tools.clone())).unwrap()
        };
        let [first, others @ ..] = [json!({"content": ""}), json!({"content": null}), json!({})].map(called);
        assert!(first.contains("paris"), "{family}: {first}");
        assert_eq!(others, [first.clone(), first], "{family}");
    }
    assert!(shown > 5);
}

#[test]
fn a_template_gets_content_and_arguments_of_calls_in_the_form_that_it_shows() {
    // As DeepSeek V3: a message with content has no calls, and arguments are text.
    let source = "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}{{ '>' + m.tool_calls[0].function.arguments }}\
                  {% else %}{{ '|' + m.content }}{% endif %}{% endfor %}";
    let call = json!({"function": {"name": "f", "arguments": "{\"b\":1, \"a\": 2}"}});
    for content in [json!({"content": ""}), json!({"content": null}), json!({})] {
        let mut message = json!({"role": "assistant", "tool_calls": [call]});
        message.as_object_mut().unwrap().extend(content.as_object().unwrap().clone());
        let messages = json!([{"role": "user", "content": "q"}, message]);
        assert_eq!(render(&template(source), messages, |_| ()).unwrap(), "|q>{\"b\":1, \"a\": 2}");
    }
}

/// C54 and C55 of public reports.
#[test]
fn the_role_developer_is_system_where_the_template_does_not_know_it() {
    let developer = json!([{"role": "developer", "content": "Answer in French."}, {"role": "user", "content": "Hi"}]);
    let system = json!([{"role": "system", "content": "Answer in French."}, {"role": "user", "content": "Hi"}]);
    let mut accepted = 0;
    for (family, template) in families() {
        let (found, expected) =
            (render(&template, developer.clone(), |_| ()), render(&template, system.clone(), |_| ()));
        assert_eq!(found.is_ok(), expected.is_ok(), "{family}");
        if let (Ok(found), Ok(expected)) = (found, expected) {
            assert_eq!(found, expected, "{family}");
            assert!(found.contains("Answer in French."), "{family}");
            accepted += 1;
        }
    }
    assert!(accepted > 10);
    let knows =
        template("{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}{{ m.content }}{% endfor %}");
    assert_eq!(render(&knows, developer, |_| ()).unwrap(), "DAnswer in French.Hi");
}

#[test]
fn leading_system_messages_become_one_for_a_template_that_takes_only_one() {
    let messages = json!([{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, {"role": "user", "content": "q"},
        {"role": "system", "content": "c"}]);
    let several = "{% for m in messages %}<{{ m.content }}>{% endfor %}";
    let first = "{% for m in messages %}{% if m.role == 'system' and not loop.first and loop.index < 3 %}{{ raise_exception('late') }}\
                 {% endif %}<{{ m.content }}>{% endfor %}";
    assert_eq!(render(&template(several), messages.clone(), |_| ()).unwrap(), "<a><b><q><c>");
    assert_eq!(render(&template(first), messages, |_| ()).unwrap(), "<a\n\nb><q><c>");
}

#[test]
fn a_system_message_between_turns_joins_the_first_for_a_template_that_does_not_show_it() {
    let messages = json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}, {"role": "user", "content": "s"},
        {"role": "system", "content": "a"}, {"role": "assistant", "content": "t"}, {"role": "developer", "content": "b"}]);
    let raises = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}\
                  <{{ m.content }}>{% endfor %}";
    let drops =
        "{% for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.content }}>{% endif %}{% endfor %}";
    for source in [raises, drops] {
        assert_eq!(render(&template(source), messages.clone(), |_| ()).unwrap(), "<a\n\nb><q><r><s><t>");
        let first = json!([{"role": "system", "content": "z"}, {"role": "user", "content": "q"}, {"role": "system", "content": "a"}]);
        assert_eq!(render(&template(source), first, |_| ()).unwrap(), "<z\n\na><q>");
    }
    let shows = "{% for m in messages %}<{{ m.content }}>{% endfor %}";
    assert_eq!(render(&template(shows), messages.clone(), |_| ()).unwrap(), "<q><r><s><a><t><b>");
    // A template without system messages refuses them wherever they are.
    let none = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}{{ m.content }}{% endfor %}";
    assert!(render(&template(none), messages, |_| ()).is_err());
}
