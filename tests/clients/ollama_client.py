"""Ollama's own Python client against the routes under /api/."""

import json

import ollama
from common import KEY, URL, run

client = ollama.Client(host=URL, headers={"Authorization": f"Bearer {KEY}"})
MODEL = client.list().models[0].model


def models_are_listed():
    assert MODEL and client.list().models[0].details.family == "llama"
    running = client.ps().models[0]
    assert running.model == MODEL and running.context_length > 0, running
    shown = client.show(MODEL)
    assert "completion" in shown.capabilities and "temperature" in shown.parameters, shown


def a_chat_is_answered():
    answer = client.chat(MODEL, [{"role": "user", "content": "Say hello."}], options={"num_predict": 16, "temperature": 0})
    assert answer.done and answer.message.role == "assistant" and answer.message.content, answer
    assert answer.eval_count <= 16 and answer.prompt_eval_count > 0, answer


def a_stream_gives_the_same():
    def ask(stream):
        messages = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Name a river."}]
        return client.chat(f"{MODEL}:latest", messages, stream=stream, options={"num_predict": 24, "temperature": 0})

    whole, pieces = ask(False), list(ask(True))
    assert len(pieces) > 2 and pieces[-1].done and pieces[-1].done_reason in ("stop", "length"), pieces[-1]
    assert "".join(piece.message.content for piece in pieces) == whole.message.content


def a_prompt_is_continued():
    raw = client.generate(MODEL, "Once upon a time", raw=True, options={"num_predict": 8, "temperature": 0})
    assert raw.response and raw.eval_count == 8, raw
    assert list(client.generate(MODEL, "Hi", stream=True, options={"num_predict": 4}))[-1].done


def an_answer_has_the_wanted_shape():
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    answer = client.chat(MODEL, [{"role": "user", "content": "Is water wet? Answer as JSON."}], format=schema)
    assert isinstance(json.loads(answer.message.content)["yes"], bool), answer


def errors_are_told():
    try:
        client.chat("no-such-model", [{"role": "user", "content": "Hi"}])
    except ollama.ResponseError as error:
        assert error.status_code == 404 and "no-such-model" in error.error, error
    else:
        raise AssertionError("a model that is not served was found")


run([models_are_listed, a_chat_is_answered, a_stream_gives_the_same, a_prompt_is_continued,
     an_answer_has_the_wanted_shape, errors_are_told])
