#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""KV beyond one process, measured: `bench/kv/stores.py BATON MODEL [redis|faults|disk|pd|kills|router ...]`.

redis     A computes 4,000 tokens and is killed; B answers the same prompt from Redis. TTFT of both, cached tokens, same text.
faults    Redis is stopped (SIGSTOP), killed and filled with garbage under load: failed requests, p99 of TTFT.
disk      kill -9 in the middle of storing, again and again; every answer afterwards is compared.
pd        Prefill and decode in two processes with a core each: gaps between tokens of running streams while long prompts come,
          beside one process with both cores; then either side is killed under load.
kills     The prefill and the decode worker are killed by turns under load; every answer is compared with one process.
router    vllm-router (PyPI; VLLM_ROUTER names it) in P/D mode in front of a prefill and a decode worker.
Everything runs on loopback. Needs redis-server.
"""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

BATON, MODEL = sys.argv[1], sys.argv[2]
WHAT = sys.argv[3:] or ["redis", "faults", "disk", "pd", "kills"]
ENV = dict(os.environ, BATON_KV_KEY="measured", NO_COLOR="1")


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Server:
    def __init__(self, *flags, cores=None):
        command = [BATON, "serve", MODEL, "--port", "0", "--max-model-len", "8192", "--swap-space", "1GiB", *map(str, flags)]
        if cores:
            command = ["taskset", "-c", cores, *command]
        self.process = subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for line in self.process.stdout:
            found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
            if found:
                self.url = f"http://127.0.0.1:{found[1]}"
                break
        threading.Thread(target=lambda: [None for _ in self.process.stdout], daemon=True).start()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def metric(self, name):
        page = urllib.request.urlopen(self.url + "/metrics").read().decode()
        return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name))

    def ask(self, tokens, max_tokens=8, salt="me", gaps=None, timeout=120):
        """Time to the first token in seconds, cached tokens, token ids."""
        body = dict(prompt=tokens, max_tokens=max_tokens, temperature=0, ignore_eos=True, stream=True, cache_salt=salt,
                    return_token_ids=True, stream_options=dict(include_usage=True))
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        start, first, last, cached, ids, is_whole = time.perf_counter(), None, None, 0, [], False
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            for line in answer:
                is_whole |= line.startswith(b"data: [DONE]")
                if not line.startswith(b"data: {"):
                    continue
                event, now = json.loads(line[6:]), time.perf_counter()
                if event.get("usage"):
                    cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
                for choice in event["choices"]:
                    if choice.get("token_ids"):
                        ids += choice["token_ids"]
                        first = first or now - start
                        if gaps is not None and last:
                            gaps.append(now - last)
                        last = now
        if not is_whole:
            raise ConnectionError("the answer was cut off")
        return first, cached, ids


class Redis:
    def __init__(self):
        self.port, self.folder = free_port(), tempfile.mkdtemp()
        self.start()

    def start(self):
        self.process = subprocess.Popen(["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""],
                                        cwd=self.folder, stdout=subprocess.DEVNULL)
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except OSError:
                time.sleep(0.05)

    def command(self, *words):
        return subprocess.run(["redis-cli", "-p", str(self.port), *words], capture_output=True, text=True).stdout


def prompt(length, seed):
    return [1000 + (seed * 7919 + index * 31 + index * index % 97) % 20000 for index in range(length)]


def p99(values):
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))] if values else float("nan")


def redis():
    server, redis = None, Redis()
    flags = ["--kv-store", f"redis://127.0.0.1:{redis.port}", "--kv-store-timeout-ms", 500]
    server = Server(*flags)
    server.ask(prompt(64, 99))
    computed, _, tokens = server.ask(prompt(4000, 1))
    while server.metric('baton:kv_store_rows_total{store="redis",kind="stored"}') < 249:
        time.sleep(0.05)
    server.kill()
    other = Server(*flags)
    other.ask(prompt(64, 98))
    fetched, cached, same = other.ask(prompt(4000, 1))
    stranger = other.ask(prompt(4000, 1), salt="other")[1]
    size = other.metric('baton:kv_store_bytes_total{store="redis",kind="fetched"}') / 1e6
    print(f"redis: computed in {computed * 1e3:.0f} ms, from Redis in {fetched * 1e3:.0f} ms: {computed / fetched:.1f} times faster; "
          f"{cached} cached tokens, {size:.0f} MB, same tokens: {same == tokens}, another tenant: {stranger} cached")
    other.kill()
    redis.process.kill()


def load(server, seconds, errors, times, offset, workers=4, length=300):
    end = time.perf_counter() + seconds

    def work(index):
        count = 0
        while time.perf_counter() < end:
            try:
                times.append(server.ask(prompt(length, offset + index * 1000 + count), 4)[0])
            except Exception as error:  # every failure counts
                errors.append(repr(error))
            count += 1

    threads = [threading.Thread(target=work, args=(index,)) for index in range(workers)]
    [thread.start() for thread in threads]
    return threads


def faults():
    redis = Redis()
    plain = Server()
    errors, times = [], []
    [thread.join() for thread in load(plain, 6, errors, times, 0)]
    base = p99(times)
    plain.kill()
    limit = 100
    server = Server("--kv-store", f"redis://127.0.0.1:{redis.port}", "--kv-store-timeout-ms", limit)
    rows = []

    def run(name, mishap, offset):
        errors, times = [], []
        threads = load(server, 6, errors, times, offset)
        time.sleep(1.5)
        mishap()
        [thread.join() for thread in threads]
        rows.append(f"  {name}: {len(times)} requests, {len(errors)} failed, p99 TTFT {p99(times) * 1e3:.0f} ms (without Redis {base * 1e3:.0f} ms)")

    run("healthy", lambda: None, 100000)
    run("hung (SIGSTOP)", lambda: os.kill(redis.process.pid, 19), 200000)
    os.kill(redis.process.pid, 18)

    def garbage():
        for name in redis.command("KEYS", "baton:kv:*").split():
            redis.command("SET", name, "garbage")

    time.sleep(6)
    run("garbage", garbage, 100000)
    run("killed", lambda: redis.process.kill(), 300000)
    print(f"faults (limit {limit} ms):", *rows, sep="\n")
    server.kill()


def disk(rounds=50):
    folder = tempfile.mkdtemp()
    flags = ["--kv-disk-path", folder, "--kv-disk-size", "512MiB"]
    reference = Server()
    expected = {seed: reference.ask(prompt(400, seed))[2] for seed in range(8)}
    reference.kill()
    wrong = hits = 0
    for number in range(rounds):
        server = Server(*flags)
        for seed in range(8):
            _, cached, ids = server.ask(prompt(400, seed))
            wrong += ids != expected[seed]
            hits += cached > 0
        errors, times = [], []
        load(server, 5, errors, times, 10000 + number * 10000, workers=2, length=200)
        time.sleep(0.05 + 0.01 * number)
        server.kill()
    left = sum(path.name.startswith(".tmp") for path in pathlib.Path(folder).rglob("*"))
    print(f"disk: {rounds} times kill -9 under load, {8 * rounds} answers compared, {wrong} wrong, {hits} with KV from disk, "
          f"{left} unfinished files left by the last kill")


def pd():
    port = free_port()

    def streams(server, seconds, prompts_to=None):
        gaps, end = [], time.perf_counter() + seconds
        threads = [threading.Thread(target=lambda index=index: [server.ask(prompt(32, 500 + index), 200, gaps=gaps)
                                                               for _ in iter(lambda: time.perf_counter() < end, False)])
                   for index in range(8)]
        [thread.start() for thread in threads]
        number = 0
        while prompts_to and time.perf_counter() < end:
            threading.Thread(target=lambda n=number: prompts_to(prompt(4000, 9000 + n)), daemon=True).start()
            number += 1
            time.sleep(1)
        [thread.join() for thread in threads]
        return p99(gaps) * 1e3

    one = Server("--threads", 2)
    before = streams(one, 8)
    during = streams(one, 10, lambda tokens: one.ask(tokens, 1))
    print(f"one process: p99 between tokens {before:.1f} ms, with a 4k prompt each second {during:.1f} ms (+{(during / before - 1) * 100:.0f} %)")
    one.kill()
    prefill = Server("--kv-role", "prefill", "--kv-transfer-port", port, "--threads", 1, cores="0")
    decode = Server("--kv-role", "decode", "--kv-prefill-workers", f"127.0.0.1:{port}", "--threads", 1, cores="1")
    before = streams(decode, 8)
    during = streams(decode, 10, lambda tokens: decode.ask(tokens, 1))
    print(f"prefill and decode: p99 between tokens {before:.1f} ms, with a 4k prompt each second {during:.1f} ms "
          f"(+{(during / before - 1) * 100:.0f} %)")
    # One core cannot compute such a prompt each second. What a faster one would hand over is computed before.
    decode.kill()
    ready = [prompt(4000, 7000 + number) for number in range(3)]
    os.system(f"taskset -apc 0,1 {prefill.process.pid} > /dev/null")
    for tokens in ready:
        prefill.ask(tokens, 1)
    os.system(f"taskset -apc 0 {prefill.process.pid} > /dev/null")
    decode = Server("--kv-role", "decode", "--kv-prefill-workers", f"127.0.0.1:{port}", "--threads", 1, cores="1")
    before, count = streams(decode, 6), iter(range(1000))

    def fetch(_):
        urllib.request.urlopen(urllib.request.Request(decode.url + "/reset_prefix_cache", b"", method="POST")).close()
        decode.ask(ready[next(count) % len(ready)], 1)

    during = streams(decode, 10, fetch)
    moved = decode.metric('baton:kv_store_bytes_total{store="peer",kind="fetched"}') / 1e6
    print(f"  and with 4,000 tokens of KV handed over each second {during:.1f} ms instead of {before:.1f} ms "
          f"(+{(during / before - 1) * 100:.0f} %); {moved:.0f} MB moved")
    prefill.kill()
    decode.kill()


def pair(port=None):
    port = port or free_port()
    prefill = lambda: Server("--kv-role", "prefill", "--kv-transfer-port", port, "--dtype", "float32")
    decode = lambda: Server("--kv-role", "decode", "--kv-prefill-workers", f"127.0.0.1:{port}", "--dtype", "float32")
    return prefill, decode


def kills(rounds=int(os.environ.get("ROUNDS", 20))):
    reference = Server("--dtype", "float32")
    expected = {seed: reference.ask(prompt(400, seed))[2] for seed in range(6)}
    reference.kill()
    start_prefill, start_decode = pair()
    prefill, decode = start_prefill(), start_decode()
    wrong, hung, failed, taken_over, lock = [0], [0], [0], [0], threading.Lock()

    def check(server, counted):
        for seed in range(6):
            try:
                _, cached, ids = server.ask(prompt(400, seed), salt=f"{time.perf_counter()}", timeout=60)
                with lock:
                    wrong[0] += ids != expected[seed]
                    taken_over[0] += cached > 0
            except TimeoutError:
                hung[0] += 1
            except Exception:
                failed[0] += counted

    for number in range(rounds):
        # The prefill worker goes while prompts come: none fails. When the decode worker goes, its own requests do.
        kill_prefill = number % 2 == 0
        threads = [threading.Thread(target=check, args=(decode, kill_prefill)) for _ in range(2)]
        [thread.start() for thread in threads]
        time.sleep(0.1 + 0.05 * number)
        if kill_prefill:
            prefill.kill()
            [thread.join() for thread in threads]
            prefill = start_prefill()
        else:
            decode.kill()
            [thread.join() for thread in threads]
            decode = start_decode()
        check(decode, True)
    time.sleep(1)
    print(f"kills: {rounds} kills of either side under load: {wrong[0]} wrong answers, {failed[0]} failed although their worker lived, "
          f"{hung[0]} hung, {taken_over[0]} with KV of the other; KV blocks in use at the end: prefill {prefill.metric('baton:kv_blocks_used'):.0f}, "
          f"decode {decode.metric('baton:kv_blocks_used'):.0f}")
    prefill.kill()
    decode.kill()


def router():
    start_prefill, start_decode = pair()
    prefill, decode, port = start_prefill(), start_decode(), free_port()
    process = subprocess.Popen([os.environ.get("VLLM_ROUTER", "vllm-router"), "--host", "127.0.0.1", "--port", str(port),
                                "--vllm-pd-disaggregation", "--kv-connector", "nixl", "--prefill", prefill.url, "--decode", decode.url,
                                "--policy", "round_robin", "--prometheus-port", str(free_port())],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, same, cached = f"http://127.0.0.1:{port}", 0, 0
    for _ in range(200):
        try:
            urllib.request.urlopen(url + "/health", timeout=1)
            break
        except OSError:
            time.sleep(0.1)
    reference = Server("--dtype", "float32")
    for number in range(6):
        text = f"Story {number}: " + "the baton is passed from one runner to the next. " * 30
        body = dict(model="any", prompt=text, max_tokens=16, temperature=0)
        body["model"] = json.load(urllib.request.urlopen(decode.url + "/v1/models"))["data"][0]["id"]

        def ask(base):
            request = urllib.request.Request(base + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
            return json.load(urllib.request.urlopen(request, timeout=60))

        routed, own = ask(url), ask(reference.url)
        same += routed["choices"][0]["text"] == own["choices"][0]["text"]
        cached += routed["usage"]["prompt_tokens_details"]["cached_tokens"] > 200
    print(f"vllm-router in P/D mode: {same} of 6 answers as in one process, {cached} with the prefill worker's KV")
    process.kill()
    [server.kill() for server in (prefill, decode, reference)]


for name in WHAT:
    globals()[name]()
