"""Two servers under what others have: a ZeroMQ subscriber that decodes as vLLM's do, smg and vllm-router from PyPI.

Starts its own servers (`BATON_BIN`, `BATON_TEST_MODEL`), because it needs two of them and their KV events.
"""

import json
import os
import pathlib
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request

import msgspec
import zmq

BINARY, MODEL = os.environ["BATON_BIN"], os.environ["BATON_TEST_MODEL"]
SCRIPTS = pathlib.Path(sys.executable).parent
NAME = "smollm2"
PATIENCE_S = 120
STARTED = []


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(Batch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def start(*words, **options):
    process = subprocess.Popen([str(word) for word in words], stdin=subprocess.DEVNULL, **options)
    STARTED.append(process)
    return process


def serve(*flags):
    """A server that is ready; its address."""
    process = start(BINARY, "serve", MODEL, "--port", 0, "--max-model-len", 2048, "--served-model-name", NAME,
                    "--log-level", "warn", *flags, stdout=subprocess.PIPE, text=True,
                    env={**os.environ, "BATON_KV_KEY": "of the tests"})
    line = process.stdout.readline()
    address = next((word for word in line.split() if word.startswith("http://")), None)
    assert address, f"the server said {line!r}"
    return address


def ask(url, body=None, headers=None, timeout=60):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.load(answer), dict(answer.headers)


def until(what, check):
    """Waits for something that another process will do; gives what the check gave."""
    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends:
        try:
            found = check()
            if found:
                return found
        except (OSError, urllib.error.URLError, ValueError):
            pass
        time.sleep(0.2)
    raise AssertionError(f"{what} did not come within {PATIENCE_S} s")


def complete(address, prompt, headers=None, tokens=4):
    body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    return ask(f"{address}/v1/completions", body, headers)[0]


def served(address):
    """How many generation requests a server has answered."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:request_success_total"))


def a_zmq_subscriber_decodes_events():
    events, replay = free_port(), free_port()
    config = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{events}",
              "replay_endpoint": f"tcp://127.0.0.1:{replay}", "topic": "kv"}
    address = serve("--kv-events-config", json.dumps(config))
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.connect(config["endpoint"])
    subscriber.setsockopt_string(zmq.SUBSCRIBE, "kv")
    decoder = msgspec.msgpack.Decoder(KVEventBatch)

    def first():
        # A subscription takes a while to arrive; until then every prompt is another one.
        first.number += 1
        complete(address, f"{first.number} " + "The river runs through the valley. " * 12)
        return subscriber.poll(500)

    first.number = 0
    until("an event", first)
    numbers, stored = [], {}
    while subscriber.poll(500):
        topic, number, payload = subscriber.recv_multipart()
        assert topic == b"kv"
        numbers.append(struct.unpack(">Q", number)[0])
        batch = decoder.decode(payload)
        assert batch.data_parallel_rank == 0 and abs(batch.ts - time.time()) < 600
        for event in batch.events:
            assert isinstance(event, BlockStored), event
            assert len(event.token_ids) == len(event.block_hashes) * event.block_size and event.medium == "GPU"
            # The subscription may have come in the middle of a prompt.
            assert not stored or event.parent_block_hash is None or event.parent_block_hash in stored
            stored.update(dict.fromkeys(event.block_hashes, event))
    assert stored and numbers == list(range(numbers[0], numbers[0] + len(numbers))), numbers

    # What was missed before the subscription can be asked for.
    request = context.socket(zmq.DEALER)
    request.connect(config["replay_endpoint"])
    request.send_multipart([b"", struct.pack(">Q", 0)])
    replayed = []
    while True:
        assert request.poll(30_000), "the replay does not end"
        _, number, payload = request.recv_multipart()
        if number == b"\xff" * 8:
            break
        replayed.append(struct.unpack(">Q", number)[0])
        decoder.decode(payload)
    assert replayed == list(range(numbers[-1] + 1)), (replayed, numbers)

    # The same over HTTP.
    with urllib.request.urlopen(f"{address}/kv_events?from=0", timeout=30) as stream:
        lines = []
        while len(lines) < len(replayed):
            line = stream.readline().decode()
            if line.startswith("data:"):
                lines.append(json.loads(line[5:]))
    assert lines[0]["events"][0]["type"] == "BlockStored", lines[0]
    ask_reset = urllib.request.Request(f"{address}/reset_prefix_cache", b"", method="POST")
    urllib.request.urlopen(ask_reset, timeout=30).close()
    assert subscriber.poll(30_000)
    assert decoder.decode(subscriber.recv_multipart()[2]).events == [AllBlocksCleared()]
    context.destroy(linger=0)


def behind_smg():
    one, two = serve(), serve()
    port, metrics = free_port(), free_port()
    start(SCRIPTS / "smg", "launch", "--host", "127.0.0.1", "--port", port, "--worker-urls", one, two, "--policy",
          "round_robin", "--prometheus-host", "127.0.0.1", "--prometheus-port", metrics,
          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    router = f"http://127.0.0.1:{port}"
    until("smg with both workers", lambda: complete(router, "Hello")["choices"] and served(one) and served(two))
    listed = ask(f"{router}/v1/models")[0]
    assert any(model["id"] == NAME for model in listed["data"]), listed


def behind_vllm_router():
    one, two = serve(), serve()
    for policy in ("power_of_two", "consistent_hash"):
        port, metrics = free_port(), free_port()
        process = start(SCRIPTS / "vllm-router", "--host", "127.0.0.1", "--port", port, "--worker-urls", one, two,
                        "--policy", policy, "--prometheus-port", metrics, "--worker-startup-check-interval", 1,
                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        router = f"http://127.0.0.1:{port}"
        until(f"vllm-router with {policy}", lambda: complete(router, "Hello")["choices"])
        if policy == "consistent_hash":
            before = served(one), served(two)
            for _ in range(6):
                complete(router, "And again", {"x-session-id": "the same"})
            grown = served(one) - before[0], served(two) - before[1]
            assert sorted(grown) == [0, 6], f"a session has one worker: {grown}"
        process.terminate()
        process.wait(30)


def behind_vllm_router_apart():
    """A prefill and a decode worker: the router visits one after the other, and the answers are those of one server."""
    transfer = free_port()
    same = "--dtype", "float32", "--swap-space", "256MiB", "--kv-store-timeout-ms", 5000
    alone = serve(*same)
    prefill = serve(*same, "--kv-role", "prefill", "--kv-transfer-port", transfer)
    decode = serve(*same, "--kv-role", "decode", "--kv-prefill-workers", f"127.0.0.1:{transfer}")
    port, metrics = free_port(), free_port()
    start(SCRIPTS / "vllm-router", "--host", "127.0.0.1", "--port", port, "--vllm-pd-disaggregation", "--kv-connector", "nixl",
          "--prefill", prefill, "--decode", decode, "--policy", "round_robin", "--prometheus-port", metrics,
          "--worker-startup-check-interval", 1, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    router = f"http://127.0.0.1:{port}"
    until("vllm-router in P/D mode", lambda: complete(router, "Hello")["choices"])
    before = served(prefill), served(decode)
    for number in range(4):
        prompt = f"Story {number}: " + "the baton is passed from one runner to the next. " * 30
        expected, routed = complete(alone, prompt, tokens=16), complete(router, prompt, tokens=16)
        assert routed["choices"][0]["text"] == expected["choices"][0]["text"], (routed, expected)
        cached = routed["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= 200, f"the prefill worker's KV was not used: {routed['usage']}"
    grown = served(prefill) - before[0], served(decode) - before[1]
    assert grown == (4, 4), f"every prompt visits both: {grown}"
    body = {"model": NAME, "prompt": "And once more: " + "the last runner crosses the line. " * 30, "max_tokens": 8,
            "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(f"{router}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        events = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", events
    usage = json.loads(events[-2])["usage"]
    assert usage["completion_tokens"] == 8 and usage["prompt_tokens_details"]["cached_tokens"] >= 150, usage


def main():
    checks = [a_zmq_subscriber_decodes_events, behind_smg, behind_vllm_router, behind_vllm_router_apart]
    failed = []
    for check in checks:
        started = time.monotonic()
        try:
            check()
            print(f"ok {check.__name__} ({time.monotonic() - started:.1f} s)", flush=True)
        except Exception as error:  # noqa: BLE001 - whatever went wrong is the result
            failed.append(check.__name__)
            print(f"FAILED {check.__name__}: {error!r}", flush=True)
        finally:
            for process in STARTED:
                process.kill()
                process.wait()
            STARTED.clear()
    sys.exit(1 if failed else 0)


main()
