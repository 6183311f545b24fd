"""Writes pretokenize.json: how the splitting rules of llama.cpp cut test texts.

    python make_pretokenize.py llama-vocab.cpp > pretokenize.json

The expressions are read from src/llama-vocab.cpp of llama.cpp (part of the source package llama-cpp-python 0.3.36 on PyPI, under
vendor/llama.cpp), in the form of the models' own files where a comment gives it, and run by the package `regex`. Rules that
llama.cpp splits by code of its own (kimi-k2, superbpe, afmoe) are not here.
"""

import json
import re
import sys

import regex

NAMES = {
    "LLAMA3": "llama-bpe", "JAIS2": "jais-2", "DBRX": "dbrx", "DEEPSEEK_LLM": "deepseek-llm",
    "DEEPSEEK3_LLM": "deepseek-v3", "SPARK2_5": "spark2_5", "YOUTU": "youtu", "DEEPSEEK_CODER": "deepseek-coder",
    "FALCON": "falcon", "STARCODER": "starcoder", "GPT2": "gpt-2", "QWEN2": "qwen2", "QWEN35": "qwen35",
    "BLOOM": "bloom", "CHATGLM4": "glm4", "VIKING": "viking", "TEKKEN": "tekken", "CHAMELEON": "chameleon",
    "GPT4O": "gpt-4o", "TINY_AYA": "tiny_aya", "BAILINGMOE": "bailingmoe", "SEED_CODER": "seed-coder",
    "UFAKZEKA": "ufakzeka", "GROK_2": "grok-2", "LAGUNA": "laguna", "EXAONE_MOE": "exaone-moe",
    "MINICPM5": "minicpm5", "default": "default",
}

TEXTS = [
    "Hello, wörld! I'm 12345 years\told; they'LL see.",
    "camelCase HTTPServer's XMLHttpRequest iPhone's",
    "a  b   c\n\n  d\r\n\r\ne \n f    ",
    "日本語のテキスト、漢字とカナ。한국어 텍스트",
    "x=1+2*(3-4)/5; // comment\n\tif (a && b) { return 'x'; }",
    "3.14159 1,000,000 2024-01-31 v1.2.3 0xFF 12 1234567",
    "Ünïcödé ÅÄÖ Ελληνικά Русский текст हिन्दी বাংলা",
    "e\u0301 n\u0303o 🦙🚀 👩\u200d💻 … — “quoted” ‘text’",
    "   leading and trailing   ",
    "\n\n\n",
    "https://example.org/a_b?c=d&e=f#g user@example.org",
    "ALLCAPS lower MiXeD'S don't WON'T we've",
]


def literal(text):
    escapes = {"r": "\r", "n": "\n", "t": "\t"}
    return re.sub(r"\\(.)", lambda found: escapes.get(found[1], found[1]), text)


def rules(source):
    body = source.split("struct llm_tokenizer_bpe : llm_tokenizer {")[1].split("std::vector<std::string> regex_exprs;")[0]
    cases, strings, originals = [], [], []
    for line in body.splitlines():
        if found := re.search(r"case LLAMA_VOCAB_PRE_TYPE_(\w+):|(default):", line):
            cases.append(found[1] or found[2])
        elif "break;" in line:
            chosen = originals if len(originals) == len(strings) else strings
            for case in cases:
                yield case, chosen
            cases, strings, originals = [], [], []
        elif found := re.search(r'"((?:[^"\\]|\\.)*)"', line):
            is_comment = line.strip().startswith("//")
            (originals if is_comment else strings).append(literal(found[1]))


def split(expressions, text):
    pieces = [text]
    for expression in expressions:
        compiled = regex.compile(expression.replace("$", r"\Z") if expression.endswith("$") else expression)
        cut = []
        for piece in pieces:
            done = 0
            for found in compiled.finditer(piece):
                if found.start() > done:
                    cut.append(piece[done:found.start()])
                if found.end() > found.start():
                    cut.append(found[0])
                done = found.end()
            if done < len(piece):
                cut.append(piece[done:])
        pieces = cut
    return pieces


with open(sys.argv[1], encoding="utf-8") as file:
    known = dict(rules(file.read()))
missing = NAMES.keys() - known.keys()
assert not missing, missing
golden = {"texts": TEXTS, "pieces": {name: [split(known[case], text) for text in TEXTS] for case, name in NAMES.items()}}
json.dump(golden, sys.stdout, ensure_ascii=True, separators=(",", ":"))
print()
