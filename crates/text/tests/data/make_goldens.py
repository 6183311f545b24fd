"""Renders every chat template for every conversation as transformers does, and writes goldens.json beside them.

Run: python make_goldens.py (needs transformers and jinja2)
"""
import datetime
import json
import pathlib

import jinja2
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


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(NOW, datetime.timezone.utc)


def main():
    chat_template_utils.datetime = Clock
    goldens = {"now": NOW, "conversations": {}, "rendered": {}}
    for name, (messages, options) in CONVERSATIONS.items():
        goldens["conversations"][name] = {"messages": messages, "options": options}
    for path in sorted(FOLDER.glob("*.jinja")):
        template = chat_template_utils._compile_jinja_template(path.read_text(encoding="utf-8"))
        rendered = goldens["rendered"][path.stem] = {}
        for name, (messages, options) in CONVERSATIONS.items():
            variables = {"tools": None, "documents": None, "add_generation_prompt": False, "bos_token": "<bos>", "eos_token": "<eos>"}
            variables.update(options)
            try:
                rendered[name] = template.render(messages=messages, **variables)
            except (jinja2.TemplateError, TypeError, AttributeError) as error:
                rendered[name] = {"error": str(error)}
    text = json.dumps(goldens, ensure_ascii=False, indent=1)
    (FOLDER / "goldens.json").write_text(text + "\n", encoding="utf-8")


main()
