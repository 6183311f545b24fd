"""Starts two Batons, their sidecars and Dynamo's front end, and shows where repeated prompts go. Called by `run`."""

import concurrent.futures
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

BATON, MODEL, TOKENIZER, SIDECAR, WORK = sys.argv[1:]
NAME, PATIENCE_S = "baton", 180
STARTED = []


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def start(name, *words, **options):
    log = open(pathlib.Path(WORK) / f"{name}.log", "w")
    process = subprocess.Popen([str(word) for word in words], stdin=subprocess.DEVNULL, stderr=log, **{"stdout": log, **options})
    STARTED.append(process)
    return process


def baton(number):
    """A server; the addresses of its HTTP and its gRPC."""
    grpc, events = free_port(), free_port()
    config = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{events}", "topic": ""}
    process = start(f"baton{number}", BATON, "serve", MODEL, "--tokenizer", TOKENIZER, "--served-model-name", NAME, "--port", 0,
                    "--max-model-len", 4096, "--grpc-port", grpc, "--kv-events-config", json.dumps(config),
                    stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    return next(word for word in line.split() if word.startswith("http://")), f"127.0.0.1:{grpc}"


def metric(url, name):
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def answered(url):
    return metric(url, "vllm:request_success_total")


def cached(url):
    return metric(url, "vllm:prefix_cache_hits_total")


def chat(url, text):
    body = {"model": NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def main():
    found = pathlib.Path(WORK) / "discovery"
    shutil.rmtree(found, ignore_errors=True)
    found.mkdir()
    environment = {**os.environ, "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(found), "DYN_REQUEST_PLANE": "tcp",
                   "DYN_EVENT_PLANE": "zmq", "HF_HUB_OFFLINE": "1"}
    workers, port = [baton(1), baton(2)], free_port()
    start("frontend", sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", port,
          "--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq", "--router-mode", "kv", env=environment)
    for number, (_, grpc) in enumerate(workers, 1):
        start(f"sidecar{number}", SIDECAR, "--grpc-endpoint", grpc, "--endpoint", "dyn://dynamo.backend.generate", env=environment)
    url, ends = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE_S
    while True:
        try:
            print("first answer:", chat(url, "Say hello."))
            break
        except OSError:
            assert time.monotonic() < ends, f"Dynamo has not become ready; the logs are in {WORK}"
            time.sleep(1)
    time.sleep(5)
    # All at once, so that both workers have some; each prompt is then asked twice more, alone.
    texts = [f"Story {number}: " + "the baton is passed from one runner to the next. " * 60 for number in range(6)]
    with concurrent.futures.ThreadPoolExecutor(len(texts)) as pool:
        list(pool.map(lambda text: chat(url, text), texts))
    time.sleep(5)
    shares, missed = [answered(one) for one, _ in workers], 0
    print(f"requests of each worker after {len(texts)} prompts at once: {shares}")
    for number, text in enumerate(texts):
        for _ in range(2):
            before = [(answered(one), cached(one)) for one, _ in workers]
            chat(url, text)
            time.sleep(1)
            after = [(answered(one), cached(one)) for one, _ in workers]
            home = next(index for index in range(2) if after[index][0] > before[index][0])
            found = after[home][1] - before[home][1]
            missed += found < 400
            print(f"prompt {number}: worker {home + 1}, {found:.0f} tokens found cached", flush=True)
    print(f"repeated prompts that did not go to a worker that has them: {missed} of {2 * len(texts)}")
    assert missed == 0 and min(shares) > 0


try:
    main()
finally:
    for process in STARTED:
        process.kill()
        process.wait()
