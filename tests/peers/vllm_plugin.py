# SPDX-License-Identifier: Apache-2.0
"""Loaded by pytest into vLLM's tests of its server: Baton is started in the place of vLLM.

The tests import helpers of vLLM's own (`tests.utils`, `vllm.*`, `torch`). What they use of them over HTTP is written here; the rest
are names that may be imported and do nothing. Their models come from a hub: the default model takes every name. Its tokenizer is
built from the model's file by Hugging Face's library, so that what Baton says of tokens is compared with somebody else's word.
Flags are passed on as they are, but for adapters, which are left out, and contexts that are longer than the model's.
"""

import importlib.abc
import importlib.machinery
import os
import socket
import subprocess
import sys
import time
import types
import unittest.mock

import anthropic
import gguf
import huggingface_hub
import openai
import pytest
import requests
import transformers

BINARY, MODEL = os.environ["BATON_BIN"], os.environ["BATON_TEST_MODEL"]
MAX_MODEL_LEN = 8192
# Flags of adapters, and of random weights, with the number of their values; the port is given here.
LEFT_OUT = {"--enable-lora": 0, "--lora-modules": 1, "--max-lora-rank": 1, "--max-cpu-loras": 1, "--load-format": 1, "--port": 1}


class RemoteOpenAIServer:
    """`baton serve` with vLLM's flags."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model, vllm_serve_args, *, env_dict=None, seed=0, max_wait_seconds=None, **_):
        self.uds, self.host = None, "127.0.0.1"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        if "--port" in vllm_serve_args:
            self.port = int(vllm_serve_args[vllm_serve_args.index("--port") + 1])
        keys = {"BATON_API_KEY": env_dict["VLLM_API_KEY"]} if env_dict and "VLLM_API_KEY" in env_dict else {}
        line = [BINARY, "serve", MODEL, "--port", str(self.port), "--log-level", "warn", *flags(vllm_serve_args)]
        if "--served-model-name" not in line:
            line += ["--served-model-name", model]
        self.show_hidden_metrics = False
        self.proc = subprocess.Popen(line, env={**os.environ, **keys})
        deadline = time.time() + (max_wait_seconds or 60)
        while not self._is_up():
            if self.proc.poll() is not None or time.time() > deadline:
                raise RuntimeError(f"the server did not start: {' '.join(line)}")
            time.sleep(0.1)

    def _is_up(self):
        try:
            return requests.get(self.url_for("health"), timeout=5).status_code == 200
        except requests.RequestException:
            return False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.proc.terminate()
        try:
            self.proc.wait(8)
        except subprocess.TimeoutExpired:
            self.proc.kill()

    @property
    def url_root(self):
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts):
        return "/".join([self.url_root, *parts])

    def _client(self, kind, base_url, options):
        return kind(base_url=base_url, api_key=self.DUMMY_API_KEY, max_retries=0, **{"timeout": 120, **options})

    def get_client(self, **options):
        return self._client(openai.OpenAI, self.url_for("v1"), options)

    def get_async_client(self, **options):
        return self._client(openai.AsyncOpenAI, self.url_for("v1"), options)

    def get_client_anthropic(self, **options):
        return self._client(anthropic.Anthropic, self.url_root, options)

    def get_async_client_anthropic(self, **options):
        return self._client(anthropic.AsyncAnthropic, self.url_root, options)


def flags(given):
    """vLLM's flags, less what this model cannot do."""
    given, kept = iter(given), []
    for flag in given:
        if flag in LEFT_OUT:
            for _ in range(LEFT_OUT[flag]):
                next(given)
        elif flag == "--max-model-len":
            kept += [flag, str(min(MAX_MODEL_LEN, int(next(given))))]
        else:
            kept.append(flag)
    return kept


class ModelConfig:
    """What the tests ask of a model's configuration."""

    def __init__(self, *_, **__):
        pass

    def get_vocab_size(self):
        return len(gguf.GGUFReader(MODEL).fields["tokenizer.ggml.tokens"].data)


def get_tokenizer(*_, **__):
    """The model's tokenizer as Hugging Face's library has it."""
    import tokenizers

    fields = gguf.GGUFReader(MODEL).fields
    vocabulary = {text: at for at, text in enumerate(fields["tokenizer.ggml.tokens"].contents())}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    digits, byte_level = tokenizers.pre_tokenizers.Digits(individual_digits=True), tokenizers.pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, byte_level(add_prefix_space=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    control = [text for text, kind in zip(vocabulary, fields["tokenizer.ggml.token_type"].contents()) if kind == 3]
    tokenizer.add_special_tokens(control)
    text = lambda key: list(vocabulary)[fields[f"tokenizer.ggml.{key}_token_id"].contents()]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=text("bos"), eos_token=text("eos"), chat_template=fields["tokenizer.chat_template"].contents()
    )


def version():
    return subprocess.run([BINARY, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]


class Anything(types.ModuleType):
    """A module in which every name is there."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return unittest.mock.MagicMock()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        ours = name in ("tests.utils", "tests.conftest") or name.split(".")[0] in ("vllm", "torch")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec):
        module = Anything(spec.name)
        if spec.name == "tests.utils":
            module.RemoteOpenAIServer = RemoteOpenAIServer
        elif spec.name == "vllm.config":
            module.ModelConfig = ModelConfig
        elif spec.name == "vllm.tokenizers":
            module.get_tokenizer = get_tokenizer
        elif spec.name in ("vllm", "vllm.version"):
            module.__version__ = version()
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())
os.environ["HF_HUB_OFFLINE"] = "1"


huggingface_hub.snapshot_download = lambda **_: "none"
transformers.AutoTokenizer.from_pretrained = staticmethod(get_tokenizer)


@pytest.fixture
def local_asset_server():
    """Serves pictures, which no test of text needs."""


def pytest_collection_modifyitems(config, items):
    """Adapters and pictures are another matter."""
    others = [item for item in items if "lora" in item.name.lower() or "multimodal" in item.name]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]
