"""Renders single constructs of Jinja2 as transformers does, and writes small-cases.json.

Run: TZ=UTC python make_small_cases.py (needs transformers and jinja2)
"""
import datetime
import json
import pathlib

from transformers.utils import chat_template_utils

# strftime_now must not depend on the day: the tests hand in the same moment.
NOW = 1_700_000_000
VARIABLES = {
    "text": "Hi <b>&'\"é\u2028\x7f\x06 you",
    "lines": "a\n\n  b\r\nc\x0bd\n",
    "none": None,
    "number": 3.5,
    "tiny": 1e-7,
    "huge": 1e22,
    "mixed": [3, 1.0, None, True, "x'y", 'x"y', "x'\"y", "tab\t\\ \u200b\ud7ff\xa0é🦙"],
    "words": ["b", "A", "c", "a"],
    "people": [{"name": "Zoe", "age": 3, "in": {"a": 1}}, {"name": "adam", "age": 7, "in": {"a": 2}}, {"name": "Bo", "age": 3}],
    "object": {"b": 1, "a": {"x": [1, 2.5]}, "c": None},
    "empty": {},
}

EXPRESSIONS = r"""
none is iterable
undefined_name is iterable
1 is iterable
text is iterable
object is iterable
true is iterable
none is sequence
undefined_name is sequence
1 is sequence
text is sequence
object is sequence
mixed is sequence
none is mapping
object is mapping
mixed is mapping
none is string
none is defined
undefined_name is defined
true is number
true is integer
1.0 is integer
1.0 is float
1 is float
true is boolean
1 is true
true is true
'a' is lower
'A1' is upper
3 is odd
4 is divisibleby 2
1 is sameas 1
1 in [1]
none is none
'a' is in 'abc'
object is callable
'upper' is filter
'odd' is test
'nope' is filter
1e-7
tiny
huge
1e16
1e15
123456789.123
0.1 + 0.2
1.0
-0.0
5 / 2
4 / 2
1e300 * 10
3.0 * 2
0.0001
0.00001
100000000000000000000.0
mixed
object
people
[1e-7, 'a']
(1,)
(1, 'b')
()
[none, true]
{'a': 1e22}
{1: 2, none: 3}
[undefined_name]
text ~ tiny
'%s' % 'x'
'%s and %s' % ('a', 1.0)
'%d%%' % 3.7
'%5.2f|' % 3.14159
'%-6s|' % 'ab'
'%06d' % 42
'%+d' % 5
'%x %X %o' % (255, 255, 8)
'%e' % 12345.678
'%g' % 1e-7
'%g' % 1234567
'%g' % 0.5
'%r' % 'it'
'%s' % none
'%s' % [1, 'a']
'%(a)s-%(b)d' % {'a': 'x', 'b': 2}
'%c' % 'x'
'%.3s|' % 'abcdef'
'%s' % true
'%i' % 7
'%5s|%-5s|' % ('a', 'b')
'%s %s' % 'x'
'%d' % 'x'
'%q' % 1
'%s'|format('x')
'%s=%.1f'|format('x', 2)
'%(k)s'|format(k='v')
7 % 3
-7 % 3
7 % -3
7.5 % 2
-7 // 2
7 // 2
7.0 // 2
2 ** 3
2 ** -1
2 ** 0.5
10 - 3.5
7 // 0
7 % 0
1 / 0
'{:.2f}'.format(3.14159)
'{}'.format(1e-7)
'{0} {1} {0}'.format('a', 'b')
'{a}'.format(a=1)
'{:>5}|{:<5}|{:^5}|'.format(1, 2, 3)
'{:*^9}'.format('mid')
'{:05d}'.format(42)
'{:+.1e}'.format(12345.6)
'{:,}'.format(1234567)
'{:_}'.format(1234567)
'{:,.2f}'.format(1234567.891)
'{:%}'.format(0.25)
'{:.0%}'.format(0.25)
'{:x}'.format(255)
'{:#x}'.format(255)
'{:b}'.format(5)
'{:g}'.format(0.00001)
'{!r}'.format('a')
'{!s:>4}'.format('a')
'{{}}'.format()
'{:d}'.format(true)
'{}'.format(none)
'{:5}|'.format(true)
'{0[1]}'.format(words)
'{0[name]}'.format(people[0])
'{:s}'.format('x')
'{:.2}'.format('xyz')
'{:.3}'.format(3.14159)
'{:10.3f}|'.format(2.5)
'{:<10}|'.format('ab')
'{:d}'.format(1.5)
'{:d}'.format('x')
'{:{}}|'.format('a', 5)
'{}'.format()
'{} {}'.format('a')
'{:n}'.format(5)
'{:c}'.format(65)
'{:08.3f}'.format(-3.14159)
'{: d}'.format(5)
'{:e}'.format(0.0)
'x'|int
'12'|int
' 12 '|int
'1.9'|int
'x'|int(5)
'x'|int(default=6)
'ff'|int(0, 16)
'0x1f'|int(0, 16)
3.99|int
-3.99|int
none|int
true|int
[]|int
'1_000'|int
'x'|float
'1.5'|float
'1e5'|float
none|float
'x'|float(2.5)
3|float
true|float
'inf'|float
'nan'|float
text|e
text|escape
'<a>'|forceescape
('<a>'|e) ~ '<b>'
'a<b'|e|upper
none|e
3|e
people|join(attribute='name')
people|join(', ', attribute='name')
words|join
words|join('-')
'abc'|join('.')
[1, none, 2.0]|join(',')
none|join
undefined_name|join
people|map(attribute='name')|join(',')
people|map(attribute='in.a')|list
people|map(attribute='nope', default='-')|join
words|map('upper')|join
none|map('upper')|list
words|map('replace', 'a', 'z')|join
people|sum(attribute='age')
[1, 2.5]|sum
[]|sum
people|sort(attribute='name')|map(attribute='name')|join
words|sort
words|sort(reverse=true)
words|sort(case_sensitive=true)
people|sort(attribute='age,name')|map(attribute='name')|join
people|groupby('age')|list|length
words|unique|list
words|unique(case_sensitive=true)|list
words|min
words|max
people|min(attribute='age')
people|selectattr('age', 'gt', 3)|map(attribute='name')|list
people|selectattr('in')|list|length
people|rejectattr('in')|map(attribute='name')|list
people|selectattr('in', 'defined')|list|length
words|select('in', 'abc')|list
words|reject('equalto', 'a')|list
[0, 1, none]|select|list
none|select|list
words|first
words|last
[]|first
none|first
none|list
none|length
undefined_name|length
undefined_name|list
'abc'|list
object|list
object|length
'é'|length
words|reverse|list
'abc'|reverse
object|dictsort
object|items|list
none|items|list
undefined_name|items|list
words|batch(3, '-')|list
words|slice(3)|list
words|slice(3, 'x')|list
3.14159|round(2)
2.5|round
3.5|round
2.4|round(method='ceil')
7|round
3.0|round|int
1234.5|round(-2)
lines|indent
lines|indent(2, true)
lines|indent(width='> ', first=true)
lines|indent(2, blank=true)
''|indent(2, true)
'a\n'|indent(2)
text|truncate(9)
'hello big world'|truncate(9, true)
'hello big world'|truncate(11, false, '…')
'hello big world'|truncate(14, leeway=0)
'a b  c'|wordcount
'ab'|center(7)
'a b/c?d=é'|urlencode
{'a b': 1, 'c': 'd&'}|urlencode
'hello big world out there'|wordwrap(10)
none|default('x')
none|default('x', true)
none|default('x', boolean=true)
''|default('d')
undefined_name|default
undefined_name|d('e')
undefined_name|default(default_value='f')
'a-b c_d(e'|title
'hELLO wORLD'|capitalize
"they're bill's"|title
"they're bill's x1y".title()
'ß'|upper
'İ'|lower
none|upper
3|trim
none|trim
'  x '|trim
'xxaxx'|trim('x')
'<p>a <b>c</b></p>'|striptags
true|string
none|string
1e22|string
-5|abs
none|abs
object|tojson
object|tojson(indent=2)
text|tojson
text|tojson(ensure_ascii=true)
'\x7f'|tojson(ensure_ascii=true)
'🦙'|tojson(ensure_ascii=true)
[1e-7, 1e22, none, true]|tojson
(1, 2)|tojson
{}|tojson(indent=2)
[]|tojson(indent=4)
undefined_name|tojson
{1: 2}|tojson
{'b': 1, 'a': 2}|tojson(sort_keys=true)
object|tojson(separators=(',', ':'))
object|tojson(indent='--')
[[], {}]|tojson(indent=1)
'a/b</script>'|tojson
object|tojson(indent=0)
[1]|tojson(none)
{true: 1, none: 2, 1.5: 3}|tojson
words.index('c')
words.index('nope')
'hello'.index('l')
'hello'.index('z')
'hello'.rindex('l')
(1, 2).index(2)
words.count('a')
words.copy()
object.copy()
'éa'.find('a')
'abcabc'.find('b', 2)
'abcabc'.rfind('b')
'abc'.count('')
'aXbXc'.count('X', 2)
'ab'.ljust(5) ~ '|'
'ab'.ljust(5, '.')
'ab'.rjust(5, '*')
'ab'.center(5, '-')
'abc'.center(6, '-')
'42'.zfill(5)
'-42'.zfill(5)
'+4'.zfill(4)
'abcdef'.zfill(3)
'Ab'.swapcase()
'ẞ'.casefold()
'a\tb'.expandtabs(4)
'a1'.isalnum()
'١'.isdigit()
'½'.isdigit()
'½'.isnumeric()
'½'.isdecimal()
''.isalpha()
'Ab Cd'.istitle()
'a_1'.isidentifier()
'\n'.isprintable()
'a b  c '.split()
'a,b,,c'.split(',')
'a,b,c'.split(',', 1)
'a,b,c'.split(',', maxsplit=1)
' a b c'.split(none, 1)
'a,b,c'.rsplit(',', 1)
'a b c'.rsplit(none, 1)
'a b c'.rsplit(maxsplit=1)
''.split()
''.split(',')
'abc'.split('')
lines.splitlines()
lines.splitlines(true)
'a\r\nb'.splitlines(keepends=true)
'xxaxx'.strip('x')
'xxaxx'.lstrip('x')
'xxaxx'.rstrip('x')
'\x1c a \x1f'.strip()
'a.b'.partition('.')
'ab'.partition('.')
'a.b.c'.rpartition('.')
'ab'.rpartition('.')
'abc'.removeprefix('a')
'abc'.removesuffix('c')
'abc'.replace('', '-')
'aaa'.replace('a', 'b', 2)
'aaa'.replace('a', 'b', -1)
'abc'.startswith(('x', 'a'))
'abc'.startswith('b', 1)
'abc'.endswith('c')
'abc'.startswith('')
'a'.join(['1', '2'])
'a'.join([1])
'-'.join('abc')
'a'.upper().lower()
'abc'.capitalize()
'abc'.format('x')
'abc'.nope()
'ab'.islower()
'AB'.isupper()
' '.isspace()
'é'.isascii()
'b'.title()
'abc'[1:]
'abc'[::-1]
'abc'[-2:]
words[1:3]
words[::-1]
words[::2]
words[-1]
words[9]
'abc'[9]
'abc'[5:]
words[-1:0:-1]
'abcdef'[4:1:-1]
words[2::-1]
object.get('b')
object.get('nope')
object.get('nope', 5)
object.keys()|list
object.values()|list
object.items()|list
object['b']
object.b
object.nope
object['nope']
object.nope.more
none.x
undefined_name.x
object.items|first
object.keys() | join(',')
'b' in object
'b' in object.keys()
words.append('x')
object.update({'a': 1})
object.pop('b')
dict(a=1, b='x')
dict([['a', 1]])
dict({'a': 1}, b=2)
undefined_name
undefined_name ~ 'x'
undefined_name + 'x'
'x' in undefined_name
undefined_name == none
undefined_name == undefined_name
not undefined_name
undefined_name or 'x'
'x' if undefined_name
none ~ ''
none + 1
'a' + 1
[1] + [2]
(1,) + (2,)
[1] * 2
'ab' * 0
2 * 'ab'
true + true
1 == 1.0
1 == true
'1' == 1
none == none
[1] == [1.0]
{'a': 1} == {'a': 1.0}
(1,) == [1]
'a' < 'b'
words[0] < 1
object.c < 1
object.b >= 1
words[0] > words[1]
1 < 2 < 3
1 < 3 < 2
[1, 2] < [1, 3]
not 1
1 and 'x'
0 or 'y'
'' or none
1 if 0 else 2
range(3)|list
range(5, 0, -2)|list
range(2)|length
range(0)|list
'a' ~ 1 ~ 2.0 ~ none ~ true
1 ~ 2
-1
- 2 ** 2
2 + 3 * 4
(2 + 3) * 4
10 // 3 * 3
1 - 1 - 1
2 ** 3 ** 2
not true and false
1 in [1, 2] and 3 not in [1]
cycler is defined
joiner is defined
"a\nb"
'a\tb'
'\x41'
'\u00e9'
'\\n'
'it\'s'
"q\"q"
'a' 'b'
'\101'
'\q'
1_000
0x1f
0b11
0o17
1.5e3
True
None
False
true
none
[1, 2,]
{'a': 1,}
(1, 2,)
strftime_now('%d %b %Y')
strftime_now('%A %a %w %u %B %b %h %m %d %e %j %y %Y %C %G %g %V %U %W')
strftime_now('%H %I %k %l %M %S %f %p %P')
strftime_now('%c')
strftime_now('%x|%X|%D|%F|%T|%R|%r')
strftime_now('[%z][%Z]')
strftime_now('%s')
strftime_now('%n%t%%')
strftime_now('%-d %-m %_d %0e %^a %#p %-H')
strftime_now('%Ey %Od')
strftime_now('%5Y|%10d')
strftime_now('%q %')
strftime_now('é %Y')
""".strip("\n")

STATEMENTS = [
    "{{ 'a<'|safe + 'b<' }}{{ 'a<' + 'b<' }}{{ ('a<'|e) + 'b<' }}{{ ('a<'|e)|e }}{{ ('a<'|safe) ~ 'b<' }}",
    "{{ people|map(attribute='name')|tojson }}",
    "{{ people|map(attribute='name')|list|tojson }}{{ words[1:]|tojson }}{{ words|sort|tojson }}{{ words|list|tojson }}",
    "{{ [][::-1] }}{{ ''[::-1] }}{{ [1][5:] }}{{ [1, 2, 3][-2:] }}{{ (1, 2, 3)[1:] }}{{ [1, 2, 3][:-1] }}{{ 'abc'[-9:2] }}",
    "{{ undefined_name[1:] }}",
    "{% for x in undefined_name %}{{ x }}{% else %}empty{% endfor %}",
    "{% for x in none %}{{ x }}{% endfor %}",
    "{% for k, v in object.items() %}{{ loop.index }}{{ k }}={{ v }};{% endfor %}",
    "{% for k in object %}{{ k }}{% endfor %}{% for c in 'añ' %}[{{ c }}]{% endfor %}",
    "{% for x in words %}{{ loop.index0 }}{{ loop.revindex }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }} {% endfor %}",
    "{% for x in words %}{{ loop.cycle('o', 'e') }}{{ loop.changed(x|lower) }}{{ loop.depth }}{% endfor %}",
    "{% for a, b in [[1, 2], [3, 4]] %}{{ a + b }},{% endfor %}",
    "{% set x = 1 %}{% for i in [1, 2] %}{% set x = x + i %}{% endfor %}{{ x }}",
    "{% set ns = namespace(a=1, b='x') %}{% set ns.a = 2.0 %}{{ ns.a }}{{ ns.b }}{{ ns.c }}",
    "{% set x %}a <b> {{ 1e-7 }}{% endset %}{{ x }}{{ x|length }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set (c, d) = [3, 4] %}{{ c }}{{ d }}",
    "{% macro f(a, b=2, c=none) %}[{{ a }}{{ b }}{{ c }}]{% endmacro %}{{ f(1) }}{{ f(1, c=3) }}{{ f(1, 2, 3) }}",
    "{% macro f(a, b=2) %}[{{ a }}{{ b }}]{% endmacro %}{{ f() }}{{ f(1)|upper }}{{ f.name }}",
    "{% macro f(x) %}<{{ caller(x) }}>{% endmacro %}{% call(y) f(3) %}in {{ y }}{% endcall %}",
    "{% if 0 %}a{% elif '' %}b{% elif [] %}c{% elif {} %}d{% elif none %}e{% elif 0.0 %}f{% else %}g{% endif %}",
    "{% if 'False' %}a{% endif %}{% if not undefined_name %}b{% endif %}",
    "{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a }}",
    "{% filter upper %}a{{ 'b' }}{% endfilter %}",
    "{% raw %}{{ x }}{% endraw %}{# comment #}{#- c -#} x",
    "a\n{%- if true -%}\n  b  \n{%- endif %}\n\nc\n\n",
    "  {% if true %}  \n  a\n  {% endif %}\n  {{ 1 }}\n {# c #}\nb\n",
    "  {%+ if true %}x{% endif +%}\n y",
    "{{ 1 -}}  x  {{- 2 }}",
    "a\r\n{% if true %}\r\nb\r\n{% endif %}\r\nc\rd\r\n",
    "{{ 'x\r\ny' }}|{{ \"\r\" }}|",
    "x\n", "x\n\n", "x\r\n", "", "\n",
    "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% for x in people if x.age == 3 %}{{ x.name }}{{ loop.length }}{% else %}no{% endfor %}",
    "{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}",
    "{% for m in words %}{% for n in [1, 2] %}{{ loop.index }}{% endfor %}{{ loop.index }}{% endfor %}",
    "{{ raise_exception('no') }}",
    "{{ raise_exception('no ' ~ 1e-7) }}",
    "{% generation %}g{% endgeneration %}",
    "{% set d = {'a': 1} %}{{ d.a }}{{ d['a'] }}{{ d.items()|list }}{{ d is mapping }}",
    "{% set t = (1, 2) %}{{ t[0] }}{{ t|length }}{{ t }}{{ t is sequence }}",
    "{% set q = joiner(', ') %}{% for x in words %}{{ q() }}{{ x }}{% endfor %}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}",
    "{% do words %}",
    "{{ [1, 2, 3]|map('string')|join(';') }}{{ ['1', 'x']|map('int')|list }}",
    "{% for g in people|groupby('age') %}{{ g.grouper }}:{{ g.list|length }};{% endfor %}",
    "{% for age, who in people|groupby('age') %}{{ age }}:{{ who|map(attribute='name')|join('+') }};{% endfor %}",
    "{%- set ns = namespace(found=false) -%}{%- for p in people -%}{%- if p.name == 'Bo' -%}{%- set ns.found = true -%}{%- endif -%}{%- endfor -%}{{ ns.found }}",
    "{{ people[0]['name'] }}{{ people[0].name }}{{ people[-1]['in'] is defined }}{{ people[0].in.a }}",
    "{% set content = none %}{% if content is string %}s{% elif content is iterable %}i{% else %}n{% endif %}",
    "{% set messages = words %}{{ messages[1:]|length }}{{ (messages|length) - 1 }}{{ messages[messages|length - 1] }}",
    "{{ 'yes' if 'x' in ['x'] else 'no' }}{{ ('a' if false) is defined }}{{ 'a' if false }}",
    "{{- '<|im_start|>' + 'user' + '\\n' -}}  x",
    "{{ object|string }}{{ mixed|string|length }}",
    "{% if object.a.x[1] > 2 %}ok{% endif %}{{ object['a']['x'][0] }}",
]


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(NOW)


def main():
    chat_template_utils.datetime = Clock
    sources = ["{{ " + line + " }}" for line in EXPRESSIONS.split("\n")] + STATEMENTS
    cases = []
    for source in sources:
        try:
            expect = chat_template_utils._compile_jinja_template(source).render(**VARIABLES)
        except Exception:  # whatever Python raises is a refusal
            expect = None
        cases.append([source, expect])
    text = "{\n\"now\": %d,\n\"variables\": %s,\n\"cases\": [\n%s\n]\n}\n" % (
        NOW,
        json.dumps(VARIABLES),
        ",\n".join(json.dumps(case) for case in cases),
    )
    (pathlib.Path(__file__).parent / "chat-templates" / "small-cases.json").write_text(text, encoding="utf-8")


main()
