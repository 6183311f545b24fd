#!/usr/bin/env python3
"""llama.cpp, through the low-level API of llama-cpp-python, as the rival of bench/compare-llamacpp.

    llamacpp.py worker MODEL THREADS           reads JSON commands from stdin, one a line, answers with seconds
    llamacpp.py serve MODEL THREADS SLOTS CTX PORT
    llamacpp.py quantize SOURCE TARGET TYPE    q4_0, q8_0, q4_k_m

The server does what llama.cpp can do on a CPU: every step is one batch with a token of each running sequence and the
prompts of new ones, and the beginning that a prompt shares with any slot's is taken over and not computed again. It speaks as much of /v1/completions as a benchmark needs: token ids or text, streaming, greedy.
"""
import ctypes
import json
import queue
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import llama_cpp as api
import numpy

BATCH = 2048
TYPES = {
    "q4_0": api.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q8_0": api.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_k_m": api.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}


@api.llama_log_callback
def silence(_level, _text, _data):
    pass


class Model:
    """A model with one context of `slots` sequences of up to `context` tokens each."""

    def __init__(self, path, threads, slots, context):
        api.llama_log_set(silence, ctypes.c_void_p(0))
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        if not self.model:
            sys.exit(f"llama.cpp cannot load {path}")
        params = api.llama_context_default_params()
        params.n_ctx = slots * context
        params.n_batch = BATCH
        params.n_seq_max = slots
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            sys.exit("llama.cpp cannot make a context of that size")
        self.memory = api.llama_get_memory(self.context)
        self.vocab = api.llama_model_get_vocab(self.model)
        self.vocab_size = api.llama_vocab_n_tokens(self.vocab)
        self.batch = api.llama_batch_init(BATCH, 0, 1)

    def decode(self, rows):
        """Computes `(token, position, sequence, wants logits)` rows and returns the best token of each that wants it."""
        best = {}
        for start in range(0, len(rows), BATCH):
            part = rows[start : start + BATCH]
            self.batch.n_tokens = len(part)
            for i, (token, position, sequence, wants) in enumerate(part):
                self.batch.token[i] = token
                self.batch.pos[i] = position
                self.batch.n_seq_id[i] = 1
                self.batch.seq_id[i][0] = sequence
                self.batch.logits[i] = wants
            if api.llama_decode(self.context, self.batch) != 0:
                raise RuntimeError("llama_decode failed: the context is too small")
            for i, row in enumerate(part):
                if row[3]:
                    logits = api.llama_get_logits_ith(self.context, i)
                    best[row[2]] = int(numpy.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())
        return best

    def forget(self, sequence, start):
        api.llama_memory_seq_rm(self.memory, sequence, start, -1)

    def tokens(self, text):
        data = text.encode()
        room = (api.llama_token * (len(data) + 8))()
        count = api.llama_tokenize(self.vocab, data, len(data), room, len(room), True, True)
        return list(room[:count])

    def piece(self, token):
        room = ctypes.create_string_buffer(128)
        count = api.llama_token_to_piece(self.vocab, token, room, len(room), 0, True)
        return room.raw[: max(count, 0)].decode(errors="replace")


def prompt(model, sequence, length):
    """The same made-up tokens for the same sequence, far from the special ones."""
    generator = numpy.random.default_rng(sequence)
    return [int(token) for token in generator.integers(100, min(model.vocab_size, 10000), length)]


def worker(path, threads):
    """Commands: {"batch": B, "input": N, "output": M}; answers: seconds of the prompts and of the M - 1 steps after."""
    model = None
    for line in sys.stdin:
        command = json.loads(line)
        batch, length, steps = command["batch"], command["input"], command["output"]
        if model is None:
            model = Model(path, threads, command["slots"], command["context"])
        api.llama_memory_clear(model.memory, True)
        start = time.perf_counter()
        best = {}
        for sequence in range(batch):
            ids = prompt(model, sequence, length)
            rows = [(token, i, sequence, i == length - 1) for i, token in enumerate(ids)]
            best.update(model.decode(rows))
        first = time.perf_counter()
        for step in range(steps - 1):
            best = model.decode([(best[s], length + step, s, True) for s in range(batch)])
        end = time.perf_counter()
        print(json.dumps({"prefill_seconds": first - start, "decode_seconds": end - first}), flush=True)


class Request:
    def __init__(self, ids, max_tokens):
        self.ids, self.max_tokens = ids, max_tokens
        self.answers = queue.Queue()


class Engine(threading.Thread):
    """The loop that owns the model."""

    def __init__(self, model, slots):
        super().__init__(daemon=True)
        self.model = model
        self.waiting = queue.Queue()
        self.next = None
        self.cached = [[] for _ in range(slots)]
        self.running = {}

    def admit(self):
        """Prompts that start now. One whose beginning another of them is about to compute waits for a step."""
        rows, fresh = [], []
        while len(self.running) < len(self.cached):
            if self.next is None:
                try:
                    self.next = self.waiting.get(block=not self.running and not rows)
                except queue.Empty:
                    break
            ids = self.next.ids
            slots = [slot for slot in range(len(self.cached)) if slot not in fresh]
            donor = max(slots, key=lambda slot: common(self.cached[slot], ids))
            # The last token of a running sequence is not computed yet.
            known = min(common(self.cached[donor], ids), len(ids) - 1, max(len(self.cached[donor]) - 1, 0))
            if any(common(self.cached[slot], ids) > known + 32 for slot in fresh):
                break
            free = [slot for slot in slots if slot not in self.running]
            slot = donor if donor in free else min(free, key=lambda slot: len(self.cached[slot]))
            if slot == donor:
                self.model.forget(slot, known)
            else:
                self.model.forget(slot, 0)
                api.llama_memory_seq_cp(self.model.memory, donor, slot, 0, known)
            last = len(ids) - 1
            rows += [(ids[i], i, slot, i == last) for i in range(known, len(ids))]
            self.cached[slot] = list(ids)
            self.running[slot] = [self.next, 0]
            self.next = None
            fresh.append(slot)
        return rows

    def run(self):
        best = {}
        while True:
            rows = [(best[slot], len(self.cached[slot]) - 1, slot, True) for slot in self.running]
            rows += self.admit()
            best = self.model.decode(rows)
            for slot, token in best.items():
                request, count = self.running[slot]
                self.running[slot][1] = count + 1
                self.cached[slot].append(token)
                request.answers.put(token)
                if count + 1 >= request.max_tokens:
                    request.answers.put(None)
                    self.cached[slot].pop()
                    del self.running[slot]


def common(a, b):
    count = 0
    for left, right in zip(a, b):
        if left != right:
            break
        count += 1
    return count


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    engine = None

    def log_message(self, *_):
        pass

    def reply(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.reply({"object": "list", "data": [{"id": "llama.cpp", "object": "model"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body.get("prompt", "")
        ids = self.engine.model.tokens(text) if isinstance(text, str) else [int(token) for token in text]
        request = Request(ids, int(body.get("max_tokens", 16)))
        self.engine.waiting.put(request)
        usage = lambda count: {
            "prompt_tokens": len(ids),
            "completion_tokens": count,
            "total_tokens": len(ids) + count,
        }
        chunk = lambda piece, reason: {
            "id": "cmpl",
            "object": "text_completion",
            "created": 0,
            "model": "llama.cpp",
            "choices": [{"index": 0, "text": piece, "logprobs": None, "finish_reason": reason}],
        }
        if not body.get("stream"):
            pieces = [self.engine.model.piece(token) for token in iter(request.answers.get, None)]
            self.reply(chunk("".join(pieces), "length") | {"usage": usage(len(pieces))})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for count in range(1, request.max_tokens + 1):
            token = request.answers.get()
            self.event(chunk(self.engine.model.piece(token), "length" if count == request.max_tokens else None))
        request.answers.get()
        if (body.get("stream_options") or {}).get("include_usage"):
            self.event(chunk("", None) | {"choices": [], "usage": usage(request.max_tokens)})
        self.send("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, value):
        self.send(f"data: {json.dumps(value)}\n\n")

    def send(self, text):
        data = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def serve(path, threads, slots, context, port):
    Handler.engine = Engine(Model(path, threads, slots, context), slots)
    Handler.engine.start()
    Server(("127.0.0.1", port), Handler).serve_forever()


def quantize(source, target, kind):
    params = api.llama_model_quantize_default_params()
    params.ftype = TYPES[kind]
    params.allow_requantize = True
    api.llama_log_set(silence, ctypes.c_void_p(0))
    if api.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)) != 0:
        sys.exit(f"llama.cpp cannot quantise {source}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["worker", path, threads]:
            worker(path, int(threads))
        case ["serve", path, threads, slots, context, port]:
            serve(path, int(threads), int(slots), int(context), int(port))
        case ["quantize", source, target, kind] if kind in TYPES:
            quantize(source, target, kind)
        case _:
            sys.exit(__doc__)
