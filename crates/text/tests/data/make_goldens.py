"""Renders every chat template for every conversation as transformers does.

Writes goldens.json beside the templates (ten of them, in full) and hashes.json: for all templates that llama.cpp's
repository lists, committed here or not, a hash of every rendering. Give the folder with all of them:

Run: TZ=UTC python make_goldens.py llama.cpp/models/templates (needs transformers and jinja2)
Show one rendering: python make_goldens.py llama.cpp/models/templates NAME CONVERSATION
"""
import datetime
import json
import pathlib
import sys

from transformers.utils import chat_template_utils

FOLDER = pathlib.Path(__file__).parent / "chat-templates"
# strftime_now must not depend on the day: the tests hand in the same moment.
NOW = 1_700_000_000

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a <city> & 'its' surroundings",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where"},
                    "unit": {"type": "string", "enum": ["°C", "°F"]},
                    "days": {"type": "integer", "default": 1},
                },
                "required": ["city"],
            },
            "return": {"type": "object", "description": "the weather"},
        },
    },
    {"type": "function", "function": {"name": "now", "description": "Time", "parameters": {"type": "object", "properties": {}}}},
]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2, "exact": True, "x": 0.5, "none": None}}}
    ],
}
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": '{"temperature": 21.5}'}
SYSTEM = {"role": "system", "content": "You are terse.\nAnswer in German."}
ASK = {"role": "user", "content": "  What's 1 < 2?  "}
ANSWER = {"role": "assistant", "content": "Ja.\n\n"}
WEATHER = {"role": "user", "content": "Weather in Zürich?"}

CONVERSATIONS = {
    "user": ([ASK], {}),
    "user, prompt": ([ASK], {"add_generation_prompt": True}),
    "system": ([SYSTEM, ASK], {"add_generation_prompt": True}),
    "turns": ([ASK, ANSWER, {"role": "user", "content": "Und 3 > 4? 🦙"}], {"add_generation_prompt": True}),
    "turns with system": ([SYSTEM, ASK, ANSWER, {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Darum."}], {}),
    "tools": ([WEATHER], {"tools": TOOLS, "add_generation_prompt": True}),
    "tools with system": ([SYSTEM, WEATHER], {"tools": TOOLS, "add_generation_prompt": True}),
    "tool call": ([WEATHER, CALL], {"tools": TOOLS}),
    "tool result": ([WEATHER, CALL, RESULT], {"tools": TOOLS, "add_generation_prompt": True}),
    "tool result, answered": ([SYSTEM, WEATHER, CALL, RESULT, {"role": "assistant", "content": "21.5 °C"}, ASK], {"tools": TOOLS, "add_generation_prompt": True}),
    "no thinking": ([SYSTEM, ASK], {"add_generation_prompt": True, "enable_thinking": False}),
    "thinking": ([ASK, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nJa."}, {"role": "user", "content": "Why?"}], {"add_generation_prompt": True, "enable_thinking": True}),
    "reasoning": ([ASK, {"role": "assistant", "content": "Ja.", "reasoning_content": "1 is less"}, {"role": "user", "content": "Why?"}], {"add_generation_prompt": True}),
    "date": ([ASK], {"add_generation_prompt": True, "date_string": "01 Jan 2025"}),
    "empty": ([], {"add_generation_prompt": True}),
    "two users": ([ASK, ASK], {"add_generation_prompt": True}),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]}], {"add_generation_prompt": True}),
    "unknown role": ([{"role": "narrator", "content": "x"}], {}),
}

# Those in `goldens.json`, in full.
FULL_TEMPLATES = [
    "HuggingFaceTB-SmolLM3-3B",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "google-gemma-2-2b-it",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "microsoft-Phi-3.5-mini-instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
]


def call(arguments, content=None, name="get_weather", **more):
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": content, "tool_calls": [{"id": "call00001", "type": "function", "function": function}], **more}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def result(content, identifier="call00001", **more):
    return {"role": "tool", "tool_call_id": identifier, "content": content, **more}


NUMBERS = {"tiny": 1e-7, "huge": 1e22, "half": 0.5, "whole": 3.0, "big": 123456789012, "minus": -0.25, "list": [1, 2.0, None, True], "object": {"a": {"b": []}, "c": ""}}
RICH_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Finds\nthings: \u2028 \"quoted\" \\ \x7f",
            "strict": True,
            "parameters": {
                "type": "object",
                "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}}},
                "properties": {
                    "query": {"type": ["string", "null"], "description": "What", "minLength": 1, "default": None},
                    "where": {"$ref": "#/$defs/point"},
                    "kinds": {"type": "array", "items": {"type": "string", "enum": ["a", "b", None, 3]}, "minItems": 1},
                    "either": {"anyOf": [{"type": "integer"}, {"type": "boolean"}], "description": "One"},
                    "deep": {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}}, "required": ["a"], "additionalProperties": False},
                    "level": {"type": "number", "minimum": 1e-7, "maximum": 1e22, "default": 0.5, "description": ""},
                },
                "required": ["query", "kinds"],
            },
        },
    },
    {"type": "function", "function": {"name": "bare"}},
    {"type": "function", "function": {"name": "empty", "description": "", "parameters": {}}},
]
TWO_CALLS = assistant(
    None,
    tool_calls=[
        {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "A"}}},
        {"id": "call00002", "type": "function", "function": {"name": "now", "arguments": {}}},
    ],
)
PROMPT = {"add_generation_prompt": True}
WITH_TOOLS = {"tools": TOOLS, "add_generation_prompt": True}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}

MORE_CONVERSATIONS = {
    "null content": ([WEATHER, call({"city": "Bern"})], {"tools": TOOLS}),
    "null content, result": ([WEATHER, call({"city": "Bern"}), result("sunny")], WITH_TOOLS),
    "no content": ([WEATHER, {k: v for k, v in call({"city": "Bern"}).items() if k != "content"}, result("sunny")], WITH_TOOLS),
    "call with content": ([WEATHER, call({"city": "Bern"}, "Let me look."), result("sunny"), assistant("Sunny."), ASK], WITH_TOOLS),
    "call as text": ([WEATHER, call('{"city": "Bern", "days": 2}'), result("sunny")], WITH_TOOLS),
    "call as text, unescaped": ([WEATHER, call('{"city": "Zürich \\u2028"}', ""), result("sunny")], WITH_TOOLS),
    "call without arguments": ([WEATHER, call({}, name="now"), result("12:00")], WITH_TOOLS),
    "numbers": ([WEATHER, call(NUMBERS, ""), result("ok")], WITH_TOOLS),
    "numbers, null content": ([WEATHER, call(NUMBERS), result(json.dumps(NUMBERS))], WITH_TOOLS),
    "two calls": ([WEATHER, TWO_CALLS, result("1", name="get_weather"), result("2", "call00002", name="now")], WITH_TOOLS),
    "two calls, answered": ([SYSTEM, WEATHER, TWO_CALLS, result("1"), result("2", "call00002"), assistant("Done."), user("More?")], WITH_TOOLS),
    "two rounds": ([WEATHER, call({"city": "A"}), result("1"), call({"city": "B"}, ""), result("2")], WITH_TOOLS),
    "two rounds with reasoning": ([WEATHER, call({"city": "A"}, reasoning_content="first"), result("1"), call({"city": "B"}, reasoning_content="second"), result("2")], WITH_TOOLS),
    "result as parts": ([WEATHER, call({"city": "A"}), result([{"type": "text", "text": "sunny"}])], WITH_TOOLS),
    "result as object": ([WEATHER, call({"city": "A"}), result({"t": 1e-7})], WITH_TOOLS),
    "calls without tools": ([WEATHER, call({"city": "A"}), result("1"), user("And?")], PROMPT),
    "rich tools": ([user("go")], {"tools": RICH_TOOLS, "add_generation_prompt": True}),
    "rich tools with system": ([SYSTEM, user("go")], {"tools": RICH_TOOLS, "add_generation_prompt": True}),
    "rich call": ([user("go"), call({"query": None, "kinds": ["a", None], "deep": {"a": [[0.1]]}, "either": False}, name="search"), result("[]", name="search")], {"tools": RICH_TOOLS, "add_generation_prompt": True}),
    "no tools at all": ([WEATHER], {"tools": [], "add_generation_prompt": True}),
    "system parts": ([{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, ASK], PROMPT),
    "developer": ([{"role": "developer", "content": "Be brief."}, ASK], PROMPT),
    "system only": ([SYSTEM], PROMPT),
    "system later": ([ASK, ANSWER, SYSTEM, user("Why?")], PROMPT),
    "two systems": ([SYSTEM, SYSTEM, ASK], PROMPT),
    "empty texts": ([{"role": "system", "content": ""}, user("")], PROMPT),
    "assistant first": ([assistant("Hello!"), ASK], PROMPT),
    "assistant last": ([ASK, assistant("So")], {}),
    "assistant last, prompt": ([ASK, assistant("So")], PROMPT),
    "two assistants": ([ASK, assistant("a"), assistant("b"), user("c")], PROMPT),
    "null answer": ([ASK, assistant(None), user("c")], PROMPT),
    "parts mixed": ([user([{"type": "text", "text": "a"}, IMAGE, {"type": "text", "text": "b"}])], PROMPT),
    "image": ([user([{"type": "image"}, {"type": "text", "text": "what?"}])], PROMPT),
    "answer parts": ([ASK, assistant([{"type": "text", "text": "x"}]), user("c")], PROMPT),
    "reasoning, thinking off": ([ASK, assistant("Ja.", reasoning_content="1 is less"), user("Why?")], {"add_generation_prompt": True, "enable_thinking": False}),
    "reasoning, last": ([ASK, assistant("Ja.", reasoning_content="1 is less\n")], {}),
    "reasoning with call": ([WEATHER, call({"city": "A"}, reasoning_content="look"), result("1")], {"tools": TOOLS, "add_generation_prompt": True, "enable_thinking": True}),
    "thinking field": ([ASK, assistant("Ja.", thinking="1 is less"), user("Why?")], {"add_generation_prompt": True, "thinking": True}),
    "think in text": ([ASK, assistant("<think>a</think>b</think>c"), user("Why?")], PROMPT),
    "think in text, last": ([ASK, assistant("<think>\na\n</think>\n\nb")], {"enable_thinking": True}),
    "effort": ([SYSTEM, ASK], {"add_generation_prompt": True, "reasoning_effort": "high"}),
    "effort low, tools": ([SYSTEM, WEATHER], {"tools": TOOLS, "add_generation_prompt": True, "reasoning_effort": "low", "enable_thinking": True}),
    "model identity": ([ASK], {"add_generation_prompt": True, "model_identity": "You are X.", "builtin_tools": ["browser", "python"]}),
    "documents": ([ASK], {"add_generation_prompt": True, "documents": [{"title": "T", "text": "words"}, {"title": "U", "text": "more"}]}),
    "odd characters": ([user("\u2028\x7f\x06<|im_end|>{{ x }}{% if %}\r\n🦙é")], PROMPT),
    "long": ([m for i in range(6) for m in (user(f"q{i}"), assistant(f"a{i}"))] + [user("last")], PROMPT),
}


def hash_of(text):
    """FNV-1a with 64 bits, which the test can compute without a crate."""
    value = 0xCBF29CE484222325
    for byte in text.encode("utf-8"):
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return f"{value:016x}"


def render(source, messages, options):
    variables = {"tools": None, "documents": None, "add_generation_prompt": False, "bos_token": "<bos>", "eos_token": "<eos>"}
    variables.update(options)
    # What a template changes in its input must not reach the next one.
    messages, variables = json.loads(json.dumps([messages, variables]))
    try:
        return chat_template_utils._compile_jinja_template(source).render(messages=messages, **variables)
    except Exception as error:  # whatever Python raises is a refusal
        return {"error": str(error)}


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(NOW, datetime.timezone.utc)


def main():
    chat_template_utils.datetime = Clock
    every = CONVERSATIONS | MORE_CONVERSATIONS
    all_templates = {path.stem: path.read_bytes().decode() for path in sorted(pathlib.Path(sys.argv[1]).glob("*.jinja"))}
    if len(sys.argv) > 2:
        print(render(all_templates[sys.argv[2]], *every[sys.argv[3]]))
        return
    goldens = {"now": NOW, "conversations": {}, "rendered": {}}
    for name, (messages, options) in CONVERSATIONS.items():
        goldens["conversations"][name] = {"messages": messages, "options": options}
    for name in FULL_TEMPLATES:
        source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
        goldens["rendered"][name] = {key: render(source, *given) for key, given in CONVERSATIONS.items()}
    text = json.dumps(goldens, ensure_ascii=False, indent=1)
    (FOLDER / "goldens.json").write_text(text + "\n", encoding="utf-8")

    hashes = {"now": NOW, "conversations": {}, "hashes": {}}
    for name, (messages, options) in every.items():
        hashes["conversations"][name] = {"messages": messages, "options": options}
    for name, source in all_templates.items():
        # Templates that say today's date by themselves are rendered at NOW as well.
        rendered = (render(source, *given) for given in every.values())
        hashes["hashes"][name] = " ".join(hash_of(text) if isinstance(text, str) else "-" for text in rendered)
    lines = [json.dumps(key) + ": " + json.dumps(value) for key, value in hashes["hashes"].items()]
    text = '{"now": %d,\n"conversations": {\n%s\n},\n"hashes": {\n%s\n}}\n' % (
        NOW,
        ",\n".join(json.dumps(key) + ": " + json.dumps(value) for key, value in hashes["conversations"].items()),
        ",\n".join(lines),
    )
    (FOLDER / "hashes.json").write_text(text, encoding="utf-8")


main()
