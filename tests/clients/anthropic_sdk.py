"""Anthropic's Python SDK against a running server."""

import json
import urllib.request

import anthropic
from anthropic import Anthropic

from common import KEY, URL, run

client = Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=120)
with urllib.request.urlopen(urllib.request.Request(f"{URL}/v1/models", headers={"x-api-key": KEY})) as models:
    MODEL = json.load(models)["data"][0]["id"]
MESSAGES = [{"role": "user", "content": "Say hello in one short sentence."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "get_weather", "description": "The weather of a city", "input_schema": SCHEMA}


# This SDK no longer has a parameter for it; the API does.
GREEDY = {"temperature": 0}


def create(**more):
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "extra_body": GREEDY} | more
    return client.messages.create(**body)


def check_message():
    answer = create(system="You are brief.")
    assert answer.content[0].type == "text" and answer.content[0].text
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.output_tokens > 0


def check_stream():
    whole = create().content[0].text
    with client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=24, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole == final.content[0].text, (text, whole)
    assert final.usage.output_tokens > 0 and final.stop_reason


def check_stop_sequence():
    text = create().content[0].text
    stop = text[3:6]
    answer = create(stop_sequences=[stop])
    assert answer.stop_reason == "stop_sequence" and answer.stop_sequence == stop


def check_tool_result():
    messages = MESSAGES + [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}]},
    ]
    assert create(messages=messages, tools=[TOOL]).role == "assistant"


def check_tool_forced():
    """Needs constrained decoding: the input must be valid for the schema whatever the model would like."""
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        answer = create(tools=[TOOL], tool_choice=choice | {"disable_parallel_tool_use": True}, max_tokens=96)
        block = answer.content[0]
        assert block.type == "tool_use" and block.name == "get_weather" and set(block.input) == {"city"}, answer
        assert answer.stop_reason == "tool_use"
        with client.messages.stream(
            model=MODEL, messages=MESSAGES, max_tokens=96, extra_body=GREEDY, tools=[TOOL], tool_choice=choice
        ) as stream:
            final = stream.get_final_message()
        assert final.content[0].type == "tool_use" and json.dumps(final.content[0].input)


def check_count():
    count = client.messages.count_tokens(model=MODEL, messages=MESSAGES)
    usage = create().usage
    total = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert count.input_tokens == total, (count, usage)


def check_errors():
    def expect(kind, call):
        try:
            call()
        except kind as error:
            return error
        raise AssertionError(f"expected {kind.__name__}")

    error = expect(anthropic.BadRequestError, lambda: create(extra_body={"temperature": -1}))
    assert error.body["error"]["type"] == "invalid_request_error", error.body
    expect(anthropic.NotFoundError, lambda: create(model="no-such-model"))
    image = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}]}]
    error = expect(anthropic.BadRequestError, lambda: create(messages=image))
    assert "messages[0].content[0]" in error.body["error"]["message"]
    if KEY != "none":
        stranger = Anthropic(base_url=URL, api_key="wrong", max_retries=0)
        expect(
            anthropic.AuthenticationError,
            lambda: stranger.messages.create(model=MODEL, messages=MESSAGES, max_tokens=4),
        )


if __name__ == "__main__":
    run(
        [
            check_message,
            check_stream,
            check_stop_sequence,
            check_tool_result,
            check_tool_forced,
            check_count,
            check_errors,
        ]
    )
