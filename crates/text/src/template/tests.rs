//! Unit tests of single constructs; whole templates are compared with transformers in `tests/chat_templates.rs`.

use std::time::{Duration, Instant};

use serde_json::json;

use super::*;

fn render(source: &str) -> Result<String, TextError> {
    let messages =
        [json!({"role": "user", "content": "Hi <b>&'\"é"}), json!({"role": "assistant", "content": "Yo"})];
    let options = RenderOptions {
        tools: Some(json!([{"z": 1, "a": [1.0, null, true]}])),
        now: Some(UNIX_EPOCH + Duration::from_secs(1_700_000_000)),
        ..RenderOptions::default()
    };
    ChatTemplate::new(source, Some("<s>"), Some("</s>"))?.render(&messages, &options)
}

fn check(source: &str, expect: &str) {
    assert_eq!(render(source).unwrap_or_else(|error| panic!("{source}: {error}")), expect, "{source}");
}

#[test]
fn blocks_are_trimmed_as_in_transformers() {
    check("a\n  {% if true %}\n b\n  {% endif %}\nc\n", "a\n b\nc");
    check("{{ bos_token }}  {%- if true -%}  x{% endif %}{{ eos_token }}", "<s>x</s>");
}

#[test]
fn operators() {
    check(
        "{{ 'a' + 'b' + 'c' }}{{ 1 + 2 * 3 - 4 }}{{ 'x' * 3 }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 5 }}{{ 7 / 2 }}",
        "abc3xxx33323.5",
    );
    check("{{ 'n' ~ 1 ~ none ~ true ~ [1, 'a'] }}", "n1NoneTrue[1, 'a']");
    check("{{ ([1] + [2, 3])|length }}{{ [0] * 3 }}{{ 1 + 0.5 }}{{ true + 1 }}", "3[0, 0, 0]1.52");
    check("{{ 'a' in 'abc' and not 'z' in ['a'] and 1 < 2 <= 2 and 'q' not in {'a': 1} }}", "True");
    check("{{ 'yes' if messages is defined else 'no' }}{{ 'no' if nothing }}", "yes");
    check("{{ -3 }}{{ (-3)|abs }}{{ not true }}", "-33False");
    check(
        "{{ (1, 2)[1] }}{{ () }}{{ {'a': 1}['a'] }}{{ 'abc'[1] }}{{ 'abcd'[1:3] }}{{ [1,2,3][::-1] }}{{ 'abc'[-1] }}",
        "2()1bbc[3, 2, 1]c",
    );
}

#[test]
fn statements() {
    check(
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + loop.index %}{% endfor %}{{ ns.n }}",
        "3",
    );
    check(
        "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}{{ v }}{% if not loop.last %},{% endif %}{% endfor %}",
        "a1,b2",
    );
    check(
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i > 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "023",
    );
    check(
        "{% for x in [] %}{{ x }}{% else %}none{% endfor %}{% for x in [1,2,3] if x != 2 %}{{ x }}{% endfor %}",
        "none13",
    );
    check("{% macro f(a, b='B') %}{{ a }}{{ b }}{% endmacro %}{{ f('A') }}{{ f('x', b='y') }}", "ABxy");
    check("{% macro f() %}<{{ caller() }}>{% endmacro %}{% call f() %}in{% endcall %}", "<in>");
    check(
        "{% set x %}a{{ 1 }}{% endset %}{{ x|upper }}{% set a, b = 1, 2 %}{{ b }}{% with q = 5 %}{{ q }}{% endwith %}",
        "A125",
    );
    check(
        "{% filter upper %}ab{% endfilter %}{% generation %}g{% endgeneration %}{# no #}{% raw %}{{ }}{% endraw %}",
        "ABg{{ }}",
    );
    check("{% if false %}1{% elif true %}2{% else %}3{% endif %}", "2");
}

#[test]
fn json_is_pythons() {
    check("{{ tools|tojson }}", r#"[{"z": 1, "a": [1.0, null, true]}]"#);
    check("{{ messages[0].content|tojson }}", r#""Hi <b>&'\"é""#);
    check("{{ messages[0].content|tojson(ensure_ascii=true) }}", r#""Hi <b>&'\"\u00e9""#);
    check(
        "{{ {'b': [1, 2], 'a': {}}|tojson(indent=2) }}",
        "{\n  \"b\": [\n    1,\n    2\n  ],\n  \"a\": {}\n}",
    );
    check("{{ {'b': 1, 'a': 2}|tojson(sort_keys=true, separators=(',', ':')) }}", r#"{"a":2,"b":1}"#);
}

#[test]
fn methods_and_filters() {
    check(
        "{{ ' a '.strip() }}{{ 'a-b'.split('-')[-1] }}{{ 'aXa'.replace('X', 'yy') }}{{ 'ab'.startswith('a') }}",
        "abayyaTrue",
    );
    check(
        "{{ ', '.join(['a', 'b']) }}{{ ['a', 'b']|join('+') }}{{ 'x={}'.format(1) }}{{ 'ab'.title() }}",
        "a, ba+bx=1Ab",
    );
    check(
        "{{ 'pre-x'.removeprefix('pre-') }}{{ 'a.b.c'.rsplit('.', 1) }}{{ 'a=b'.partition('=')[2] }}",
        "x['a.b', 'c']b",
    );
    check(
        "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ messages|map(attribute='role')|join(',') }}",
        "1user,assistant",
    );
    check(
        "{{ nothing|default('d') }}{{ ''|default('e', true) }}{{ 'aXb'|replace('X', '-') }}{{ 3.7|int }}{{ ' x '|trim }}",
        "dea-b3x",
    );
    check(
        "{{ {'b': 1}.get('c', 'dflt') }}{{ {'b': 1}.get('c') }}{{ [3, 1, 2]|sort }}{{ 'ab'|first }}{{ 'a\nb'|indent(2) }}",
        "dfltNone[1, 2, 3]aa\n  b",
    );
    check("{{ '%s=%d'|format('a', 3) }}{{ messages[0]['nope'] is defined }}{{ 'abc'|length }}", "a=3False3");
    check("{{ strftime_now('%d %b %Y') }}", "14 Nov 2023");
    check(
        "{{ 'a' is string }}{{ 'a' is sequence }}{{ messages is iterable }}{{ {} is mapping }}{{ 1 is number }}{{ 1 is string }}",
        "TrueTrueTrueTrueTrueFalse",
    );
}

#[test]
fn refusals_keep_their_message() {
    let error = render("{{ raise_exception('no ' ~ 'tools') }}").expect_err("refused");
    assert!(matches!(&error, TextError::TemplateRefused(message) if message == "no tools"), "{error}");
    let error = render("{{ nothing.field }}").expect_err("undefined");
    assert!(matches!(error, TextError::TemplateRender(_)), "{error}");
    for source in [
        "{% if %}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{{ __baton_add(1) }}",
        "{% endfor %}",
        "{{ 'a",
    ] {
        let error = render(source).expect_err(source);
        assert!(matches!(error, TextError::TemplateSyntax(_)), "{source}: {error}");
    }
}

#[test]
fn the_last_message_can_be_left_open() {
    let template =
        ChatTemplate::new("{% for m in messages %}[{{ m.content }}]{% endfor %}", None, None).expect("valid");
    let messages = [json!({"role": "user", "content": "q"}), json!({"role": "assistant", "content": "so "})];
    let options = RenderOptions { continue_final_message: true, ..RenderOptions::default() };
    assert_eq!(template.render(&messages, &options).expect("renders"), "[q][so");
    assert!(template.render(&[], &options).is_err());
}

/// Each of these asks for endless time or memory.
#[test]
fn hostile_templates_end_quickly() {
    let doubling = |step: &str| {
        format!(
            "{{% set ns = namespace(x='aaaaaaaa', l=[1]) %}}{{% for i in range(1000) %}}{step}{{% endfor %}}{{{{ ns.x }}}}"
        )
    };
    let long_sum = format!("{{{{ 'a'{} }}}}", " + 'a'".repeat(5_000));
    let deep_list = "[".repeat(5_000) + &"]".repeat(5_000);
    let many_ifs = "{% if true %}".repeat(5_000) + &"{% endif %}".repeat(5_000);
    let hostile = [
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}".to_owned(),
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}".to_owned(),
        "{{ 'a' * 10 ** 9 }}".to_owned(),
        "{{ ('a' * 10 ** 8) ~ ('a' * 10 ** 8) }}".to_owned(),
        "{{ [0] * 10 ** 9 }}".to_owned(),
        "{% for i in range(10 ** 12) %}{% endfor %}".to_owned(),
        "{{ range(10 ** 12)|list }}".to_owned(),
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".to_owned(),
        "{% macro f(x) %}{{ f([x]) }}{{ f([x]) }}{% endmacro %}{{ f(1) }}".to_owned(),
        doubling("{% set ns.x = ns.x ~ ns.x %}"),
        doubling("{% set ns.x = ns.x + ns.x %}"),
        doubling("{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
        doubling("{% set ns.x = ns.x.replace('a', ns.x) %}"),
        doubling("{% set ns.x = ns.x|replace('', ns.x) %}"),
        doubling("{% set ns.x = ns.x.join([ns.x, ns.x, ns.x]) %}"),
        doubling("{% set ns.x = ns.x|join(ns.x) %}"),
        doubling("{% set ns.x = '{0}{0}'.format(ns.x) %}"),
        doubling("{% set ns.x = '%s%s'|format(ns.x, ns.x) %}"),
        doubling("{% set ns.l = ns.l + ns.l %}") + "{{ ns.l|length }}",
        doubling("{% set ns.l = [ns.l, ns.l] %}") + "{{ ns.l }}",
        doubling("{% set ns.l = [ns.l, ns.l] %}") + "{{ ns.l|tojson }}",
        doubling("{% set ns.l = [ns.l, ns.l] %}") + "{{ ns.l == [ns.l] }}",
        doubling("{% set ns.l = {'a': ns.l, 'b': ns.l} %}") + "{{ ns.l is eq(ns.l) }}{{ [ns.l, ns.l]|sort }}",
        "{{ '{:>999999999}'.format(1) }}".to_owned(),
        "{{ '%999999999d'|format(1) }}".to_owned(),
        "{{ 'a'|indent(999999999) }}".to_owned(),
        "{{ [1]|batch(999999999, 'x')|list }}".to_owned(),
        "{% set l = range(99999)|list %}{% for i in l %}{{ l|sort|length }}{% endfor %}".to_owned(),
        "{% set l = range(99999)|list %}{{ l|select('in', l)|list }}".to_owned(),
        "{% set l = range(99999)|list %}{% for i in l %}{{ -1 in l }}{% endfor %}".to_owned(),
        "{% set l = 'ab' * 999999 %}{% for i in range(99999) %}{{ l[-1] }}{{ l[1:][0] }}{{ l|length }}{% endfor %}".to_owned(),
        "{% for i in range(99999) %}{% for j in range(99999) %}{% break %}{% endfor %}{% endfor %}".repeat(50),
        long_sum,
        format!("{{{{ {deep_list} }}}}"),
        many_ifs,
        format!("{{{{ {}x }}}}", "not ".repeat(20_000)),
        format!("{{{{ {}1{} }}}}", "(".repeat(20_000), ")".repeat(20_000)),
        format!("{{{{ x{} }}}}", ".a".repeat(20_000)),
        format!("{{{{ x{} }}}}", "|upper".repeat(9_000)),
        format!("{{% if x %}}{}{{% endif %}}", "{% elif x %}".repeat(5_000)),
        "{% set x = 1 %}".repeat(30_000),
    ];
    for source in hostile {
        let start = Instant::now();
        let result = render(&source);
        let (seconds, label) = (start.elapsed().as_secs_f32(), source.chars().take(120).collect::<String>());
        if let Ok(text) = result {
            // Chains of constant length are sound; what they must not do is take long or crash.
            assert!(text.len() < 100_000, "{label}");
        }
        assert!(seconds < 2.0, "{seconds} s: {label}");
    }
}

/// Values nested as deep as the fuel allows must print, compare and drop without exhausting the stack.
#[test]
fn deep_values_do_not_exhaust_the_stack() {
    for step in
        ["[ns.x]", "{'a': ns.x}", "(ns.x,)", "dict(a=ns.x)", "namespace(a=ns.x)", "[ns.x][0:]", "[ns.x]|list"]
    {
        for end in ["", "{{ ns.x }}", "{{ ns.x|tojson }}", "{{ ns.x == ns.x }}"] {
            let source = format!(
                "{{% set ns = namespace(x=1) %}}{{% for j in range(50) %}}{{% for i in range(99999) %}}{{% set ns.x = {step} %}}{{% endfor %}}{{% endfor %}}{end}"
            );
            assert!(render(&source).is_err(), "the fuel must run out: {step}");
            let shorter = source.replace("range(50)", "range(1)");
            let _ = render(&shorter);
        }
    }
}
