"""OpenAI's Python SDK against a running server."""

import json

import openai
from openai import OpenAI

from common import KEY, URL, run

client = OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=120)
MODEL = client.models.list().data[0].id
MESSAGES = [{"role": "user", "content": "Say hello in one short sentence."}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city", "parameters": PARAMETERS},
}


def chat(**more):
    body = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24} | more
    return client.chat.completions.create(**body)


def check_models():
    assert client.models.retrieve(MODEL).id == MODEL


def check_chat():
    answer = chat()
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens > 0


def check_stream():
    whole = chat().choices[0].message.content
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole, (text, whole)
    assert chunks[-1].usage.completion_tokens > 0
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=24) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.content == whole


def check_many():
    answer = chat(n=2, temperature=1, seed=1, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


def check_completions():
    answer = client.completions.create(model=MODEL, prompt=["One, two,", "A, b,"], max_tokens=4, temperature=0)
    assert len(answer.choices) == 2
    pieces = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=4, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == answer.choices[0].text


def check_tools_offered():
    answer = chat(tools=[TOOL], max_tokens=48).choices[0]
    assert answer.message.content or answer.message.tool_calls
    if answer.message.tool_calls:
        assert answer.finish_reason in ("tool_calls", "length")
    messages = MESSAGES + [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Rome", "days": 1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    assert chat(messages=messages, tools=[TOOL]).choices[0].message.content is not None


def check_tools_forced():
    """Needs constrained decoding: arguments must be valid for the schema whatever the model would like."""
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        whole = chat(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, max_tokens=96).choices[0]
        call = whole.message.tool_calls[0]
        assert call.function.name == "get_weather"
        assert whole.finish_reason == "tool_calls", whole
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == {"city", "days"} and 1 <= arguments["days"] <= 9, arguments
        text = ""
        for chunk in chat(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, max_tokens=96, stream=True):
            for delta in chunk.choices[0].delta.tool_calls or []:
                text += delta.function.arguments or ""
        assert json.loads(text) == arguments


def check_json_schema():
    """Needs constrained decoding."""
    shape = {"type": "json_schema", "json_schema": {"name": "weather", "schema": PARAMETERS, "strict": True}}
    answer = json.loads(chat(response_format=shape, max_tokens=96).choices[0].message.content)
    assert set(answer) == {"city", "days"}, answer
    response = client.responses.create(
        model=MODEL,
        input="The weather?",
        temperature=0,
        max_output_tokens=96,
        text={"format": {"type": "json_schema", "name": "weather", "schema": PARAMETERS, "strict": True}},
    )
    assert set(json.loads(response.output_text)) == {"city", "days"}


def check_responses():
    first = client.responses.create(model=MODEL, input="My name is Ada.", temperature=0, max_output_tokens=16)
    assert first.output_text and first.status in ("completed", "incomplete")
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(
        model=MODEL, input="What is my name?", previous_response_id=first.id, temperature=0, max_output_tokens=16
    )
    assert second.usage.input_tokens > first.usage.input_tokens
    kinds, text = [], ""
    for event in client.responses.create(
        model=MODEL, input="My name is Ada.", temperature=0, max_output_tokens=16, stream=True
    ):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
    assert text == first.output_text, (text, first.output_text)
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    background = client.responses.create(model=MODEL, input="Count.", background=True, max_output_tokens=200)
    cancelled = client.responses.cancel(background.id)
    assert cancelled.status in ("cancelled", "completed", "incomplete")
    client.responses.delete(first.id)
    expect_error(openai.NotFoundError, lambda: client.responses.retrieve(first.id))


def check_embeddings():
    answer = client.embeddings.create(model=MODEL, input=["a cat", "a kitten", "the stock market"])
    assert [item.index for item in answer.data] == [0, 1, 2]
    first, second, third = (item.embedding for item in answer.data)
    assert abs(sum(x * x for x in first) - 1) < 1e-3

    def dot(a, b):
        return sum(x * y for x, y in zip(a, b, strict=True))

    assert dot(first, second) > dot(first, third)
    short = client.embeddings.create(model=MODEL, input="a cat", dimensions=16, encoding_format="float")
    assert len(short.data[0].embedding) == 16
    assert answer.usage.prompt_tokens > 0


def expect_error(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}")


def check_errors():
    error = expect_error(openai.BadRequestError, lambda: chat(temperature=-1))
    assert error.param == "temperature", error.param
    expect_error(openai.NotFoundError, lambda: chat(model="no-such-model"))
    error = expect_error(openai.BadRequestError, lambda: chat(tools=[{"type": "function", "function": {"name": "a b"}}]))
    assert error.param == "tools[0].function.name"
    if KEY != "none":
        stranger = OpenAI(base_url=f"{URL}/v1", api_key="wrong", max_retries=0)
        expect_error(openai.AuthenticationError, lambda: stranger.models.list())


def check_timeout():
    hasty = client.with_options(timeout=0.001)
    expect_error(
        openai.APITimeoutError,
        lambda: hasty.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=400),
    )
    # A client that went away has not broken anything.
    assert chat(max_tokens=4).choices[0].message.content is not None


if __name__ == "__main__":
    run(
        [
            check_models,
            check_chat,
            check_stream,
            check_many,
            check_completions,
            check_tools_offered,
            check_tools_forced,
            check_json_schema,
            check_responses,
            check_embeddings,
            check_errors,
            check_timeout,
        ]
    )
