#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""KV beyond one process, measured: `bench/kv/stores.py BATON MODEL [redis|faults|disk|pd|kills|router|router_kills|route_kills ...]`.

redis     A computes 4,000 tokens and is killed; B answers the same prompt from Redis. TTFT of both, cached tokens, same text.
faults    Redis is stopped (SIGSTOP), killed and filled with garbage under load: failed requests, p99 of TTFT.
disk      kill -9 in the middle of storing, again and again; every answer afterwards is compared.
pd        Prefill and decode in two processes with a core each: gaps between tokens of running streams while long prompts come,
          beside one process with both cores.
kills     The prefill and the decode worker are killed by turns under load (ROUNDS times each, 20 unless the environment says otherwise);
          every answer is compared with one process. router_kills and route_kills: through vllm-router, through `baton route`.
router    vllm-router (PyPI; VLLM_ROUTER names it) in P/D mode in front of a prefill and a decode worker.
Everything runs on loopback. Needs redis-server. RESULTS names a folder of bench/runs whose `results.json` takes the figures.
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

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import figures  # noqa: E402 - beside this folder

BATON, MODEL = sys.argv[1], sys.argv[2]
WHAT = sys.argv[3:] or ["redis", "faults", "disk", "pd", "kills"]
SWAP_SPACE = os.environ.get("SWAP_SPACE", "1GiB")
FIGURES = []
ENV = dict(os.environ, BATON_KV_KEY="measured", NO_COLOR="1")


def note(part, name, value, unit, lower=False, **more):
    command = f"bench/kv/stores.py target/release/baton {pathlib.Path(MODEL).name} {sys._getframe(1).f_code.co_name}"
    FIGURES.append(figures.figure(part, name, value, unit, [command], lower=lower, max_loss=0.2, **more))


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Server:
    def __init__(self, *flags, cores=None, port=0):
        command = [BATON, "serve", MODEL, "--port", str(port), "--max-model-len", "8192", "--swap-space", SWAP_SPACE,
                   "--served-model-name", "baton", *map(str, flags)]
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

    def ask(self, *words, **named):
        return ask(self.url, *words, **named)


def ask(url, tokens, max_tokens=8, salt="me", timeout=120):
    """Time to the first token in seconds, cached tokens, token ids."""
    body = dict(model="baton", prompt=tokens, max_tokens=max_tokens, temperature=0, ignore_eos=True, stream=True, cache_salt=salt,
                return_token_ids=True, stream_options=dict(include_usage=True))
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    start, first, cached, ids, is_whole = time.perf_counter(), None, 0, [], False
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
    if not is_whole:
        raise ConnectionError("the answer was cut off")
    return first, cached, ids


def forget(server):
    """The server's own tiers forget all KV."""
    urllib.request.urlopen(urllib.request.Request(server.url + "/reset_prefix_cache", b"", method="POST")).close()


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
    goal = float(os.environ.get("REDIS_GOAL", 8))
    note("KV from Redis", f"{pathlib.Path(MODEL).stem}: 4,000 tokens of another process, time to the first token", computed / fetched, "×",
         others={"computed, ms": round(computed * 1e3), "from Redis, ms": round(fetched * 1e3), "cached tokens": cached, "MB": round(size)},
         goal=f"≥ {goal:.0f} ×", met=computed / fetched >= goal and cached >= 3900 and same == tokens and stranger == 0)
    other.kill()
    redis.process.kill()


def load(server, seconds, errors, times, offset, workers=4, length=300, gives_up=False, pause=0.0):
    """`pause` is the time from a worker's request to its next: with it the server has less to do than it could, and a wait is seen
    as it is, not as the steps of others that it lets pass."""
    begun = time.perf_counter()
    end = begun + seconds

    def work(index):
        count = 0
        while time.perf_counter() < end:
            time.sleep(max(0.0, begun + pause * (count + index / workers) - time.perf_counter()))
            try:
                times.append(server.ask(prompt(length, offset + index * 1000 + count), 4)[0])
            except Exception as error:  # every failure counts
                errors.append(repr(error))
                if gives_up:
                    return
            count += 1

    threads = [threading.Thread(target=work, args=(index,)) for index in range(workers)]
    [thread.start() for thread in threads]
    return threads


def faults():
    redis = Redis()
    plain = Server()
    errors, times = [], []
    [thread.join() for thread in load(plain, 10, errors, times, 0, pause=1.0)]
    base = p99(times)
    plain.kill()
    limit = 100
    server = Server("--kv-store", f"redis://127.0.0.1:{redis.port}", "--kv-store-timeout-ms", limit)
    rows = []

    def run(name, mishap, offset):
        errors, times = [], []
        threads = load(server, 10, errors, times, offset, pause=1.0)
        time.sleep(1.5)
        mishap()
        [thread.join() for thread in threads]
        rows.append(f"  {name}: {len(times)} requests, {len(errors)} failed, p99 TTFT {p99(times) * 1e3:.0f} ms "
                    f"(without Redis {base * 1e3:.0f} ms)")

    run("healthy", lambda: None, 100000)
    run("hung (SIGSTOP)", lambda: os.kill(redis.process.pid, 19), 200000)
    os.kill(redis.process.pid, 18)

    def garbage():
        # What was asked for before is asked for again, and found in Redis alone.
        forget(server)
        for name in redis.command("KEYS", "baton:kv:*").split():
            redis.command("SET", name, "garbage")

    time.sleep(6)
    run("garbage", garbage, 100000)
    run("killed", lambda: redis.process.kill(), 300000)
    corrupt = server.metric('baton:kv_store_errors_total{store="redis",kind="corrupt"}')
    print(f"faults (limit {limit} ms; {corrupt:.0f} corrupt values seen):", *rows, sep="\n")
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
        threads = load(server, 5, errors, times, 10000 + number * 10000, workers=2, length=200, gives_up=True)
        time.sleep(0.05 + 0.01 * number)
        server.kill()
        [thread.join() for thread in threads]
        if number % 10 == 9:
            print(f"  after {number + 1} kills: {wrong} wrong, {hits} with KV from disk", flush=True)
    left = sum(path.name.startswith(".tmp") for path in pathlib.Path(folder).rglob("*"))
    print(f"disk: {rounds} times kill -9 under load, {8 * rounds} answers compared, {wrong} wrong, {hits} with KV from disk, "
          f"{left} unfinished files left by the last kill")


def streams(server, prompts=None, length=700):
    """99th percentile and median of the time between tokens of eight streams, in ms, while a prompt comes each second; how many did."""
    count, is_over = [0], threading.Event()

    def come():
        waiting = []
        while True:
            waiting.append(threading.Thread(target=prompts, args=(count[0],), daemon=True))
            waiting[-1].start()
            count[0] += 1
            if is_over.wait(1):
                break
        [thread.join(60) for thread in waiting]

    coming = threading.Thread(target=come, daemon=True)
    if prompts:
        coming.start()
    result = pathlib.Path(tempfile.mkdtemp()) / "result.json"
    subprocess.run([BATON, "bench", "serve", "--base-url", server.url, "--model", "baton", "--dataset-name", "random",
                    "--input-len", "32", "--output-len", str(length), "--num-prompts", "8", "--ignore-eos",
                    "--percentile-metrics", "itl", "--metric-percentiles", "50,99", "--save-result", "--result-filename", result],
                   check=True, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    is_over.set()
    if prompts:
        coming.join()
    row = json.loads(result.read_text())
    return row["p99_itl_ms"], row["median_itl_ms"], count[0]


def compare(name, server, prompts, during_length=700):
    before, during = streams(server), streams(server, prompts, during_length)
    print(f"{name}: p99 between tokens {before[0]:.1f} ms (median {before[1]:.1f}), with {during[2]} prompts of 4,000 tokens, one each "
          f"second, {during[0]:.1f} ms (median {during[1]:.1f}): {(during[0] / before[0] - 1) * 100:+.0f} %", flush=True)
    return {"p99 before, ms": round(before[0], 1), "p99 during, ms": round(during[0], 1), "prompts": during[2]}


def pd():
    one = Server("--threads", 2)
    part, name = "prefill and decode apart", "p99 between tokens of 8 streams while a 4k prompt comes each second"
    # Prompts come faster than both cores compute them, so that every step has as much of them as fits: few tokens tell enough.
    undivided = compare("one process, both cores", one, lambda number: one.ask(prompt(4000, 9000 + number), 1), 30)
    one.kill()
    # One core cannot compute such a prompt each second. So that KV really moves, that of some prompts is computed before, and the
    # decode worker forgets what it had; the prefill worker goes on computing other prompts all the time.
    port = free_port()
    prefill = Server("--kv-role", "prefill", "--kv-transfer-port", port, "--threads", 1, "--kv-transfer-size", "1GiB",
                     "--kv-transfer-keep", 3600)
    ready = [prompt(4000, 7000 + number) for number in range(3)]
    for tokens in ready:
        prefill.ask(tokens, 1)
    os.system(f"taskset -apc 0 {prefill.process.pid} > /dev/null")
    decode = Server("--kv-role", "decode", "--kv-prefill-workers", f"127.0.0.1:{port}", "--threads", 1, cores="1")
    times, is_over, waiting, lock = [], threading.Event(), [0], threading.Lock()

    def fetch(number):
        with lock:
            # Not while the KV of another is on its way: that would be forgotten, too.
            if waiting[0] == 0:
                forget(decode)
            waiting[0] += 1
        first, cached, _ = decode.ask(ready[number % len(ready)], 1)
        times.append((first, cached))
        with lock:
            waiting[0] -= 1

    def busy():
        number = 0
        while not is_over.is_set():
            try:
                prefill.ask(prompt(2000, 20000 + number), 1, salt=str(number))
            except OSError:
                # The end, where the last one is still being computed.
                return
            number += 1

    apart = compare("prefill and decode on a core each, KV handed over", decode, fetch)
    moved = decode.metric('baton:kv_store_bytes_total{store="peer",kind="fetched"}') / 1e6
    firsts = sorted(first for first, _ in times)
    print(f"  {moved:.0f} MB moved; the prompts' own first tokens: median {firsts[len(firsts) // 2] * 1e3:.0f} ms, "
          f"{sum(cached >= 3900 for _, cached in times)} of {len(times)} with 3,900 or more cached tokens", flush=True)
    threading.Thread(target=busy, daemon=True).start()
    computing = compare("  and while the prefill worker computes others", decode, fetch)
    rows = {"one process, both cores": undivided, "a core each, KV handed over": apart, "the same, prefill at work": computing}
    for title, row in rows.items():
        more = (row["p99 during, ms"] / row["p99 before, ms"] - 1) * 100
        goal = {} if row is undivided else {"goal": "< 20 %", "met": more < 20}
        note(part, f"{name}: {title}", more, "%", lower=True, others=row, **goal)
    is_over.set()
    prefill.kill()
    decode.kill()


def pair():
    """What starts a prefill worker, and what a decode worker, on ports that stay the same."""
    transfer, one, two = free_port(), free_port(), free_port()
    prefill = lambda: Server("--kv-role", "prefill", "--kv-transfer-port", transfer, "--dtype", "float32", port=one)
    decode = lambda: Server("--kv-role", "decode", "--kv-prefill-workers", f"127.0.0.1:{transfer}", "--dtype", "float32", port=two)
    return prefill, decode


def wait_until_healthy(url):
    for _ in range(300):
        try:
            urllib.request.urlopen(url + "/health", timeout=1)
            return
        except OSError:
            time.sleep(0.1)


def vllm_router(prefill, decode):
    port = free_port()
    process = subprocess.Popen([os.environ.get("VLLM_ROUTER", "vllm-router"), "--host", "127.0.0.1", "--port", str(port),
                                "--vllm-pd-disaggregation", "--kv-connector", "nixl", "--prefill", prefill, "--decode", decode,
                                "--policy", "round_robin", "--prometheus-port", str(free_port()), "--health-check-interval-secs", "1",
                                "--worker-startup-check-interval", "1"],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until_healthy(f"http://127.0.0.1:{port}")
    return process, f"http://127.0.0.1:{port}"


def baton_route(prefill, decode):
    port = free_port()
    process = subprocess.Popen([BATON, "route", "--port", str(port), "--health-interval", "0.5", "--prefill", prefill, "--decode", decode],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until_healthy(f"http://127.0.0.1:{port}")
    return process, f"http://127.0.0.1:{port}"


def kills(name="the decode worker asked", router=None, rounds=2 * int(os.environ.get("ROUNDS", 20))):
    """Requests go to the decode worker, or through a router. Either side is killed `ROUNDS` times."""
    seeds = range(4)
    reference = Server("--dtype", "float32")
    expected = {seed: reference.ask(prompt(400, seed))[2] for seed in seeds}
    reference.kill()
    start_prefill, start_decode = pair()
    prefill, decode = start_prefill(), start_decode()
    process, url = router(prefill.url, decode.url) if router else (None, decode.url)
    names = ["answers", "wrong", "hung", "lost with prefill", "lost with decode", "failed after", "taken over"]
    counts, lock = dict.fromkeys(names, 0), threading.Lock()

    def count(name, by=1):
        with lock:
            counts[name] += by

    def check(lost_as):
        for seed in seeds:
            try:
                _, cached, ids = ask(url, prompt(400, seed), salt=f"{time.perf_counter()}", timeout=60)
                count("answers")
                count("wrong", ids != expected[seed])
                count("taken over", cached > 0)
            except TimeoutError:
                count("hung")
            except Exception:
                count(lost_as)

    for number in range(rounds):
        is_prefill = number % 2 == 0
        threads = [threading.Thread(target=check, args=("lost with prefill" if is_prefill else "lost with decode",)) for _ in range(2)]
        [thread.start() for thread in threads]
        time.sleep(0.05 + 0.01 * (number % 40))
        if is_prefill:
            prefill.kill()
            [thread.join() for thread in threads]
            prefill = start_prefill()
        else:
            decode.kill()
            [thread.join() for thread in threads]
            decode = start_decode()
        # A router may need a while to see that a worker is back.
        for _ in range(120):
            try:
                ask(url, prompt(40, 1), timeout=60)
                break
            except Exception:
                time.sleep(0.5)
        check("failed after")
        if number % 10 == 9:
            print(f"  after {number + 1} kills: {counts}", flush=True)
    time.sleep(1)
    print(f"kills, {name}: {rounds // 2} of either side under load: {counts}; KV blocks in use at the end: prefill "
          f"{prefill.metric('baton:kv_blocks_used'):.0f}, decode {decode.metric('baton:kv_blocks_used'):.0f}", flush=True)
    [server.kill() for server in (prefill, decode)]
    if process:
        process.kill()


def router_kills():
    kills("through vllm-router", vllm_router)


def route_kills():
    kills("through baton route", baton_route)


def router():
    start_prefill, start_decode = pair()
    prefill, decode = start_prefill(), start_decode()
    process, url = vllm_router(prefill.url, decode.url)
    same = cached = 0
    reference = Server("--dtype", "float32")
    for number in range(6):
        text = f"Story {number}: " + "the baton is passed from one runner to the next. " * 30
        body = dict(model="baton", prompt=text, max_tokens=16, temperature=0)

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
if os.environ.get("RESULTS"):
    figures.merge(os.environ["RESULTS"], FIGURES)
