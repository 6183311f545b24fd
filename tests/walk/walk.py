# SPDX-License-Identifier: Apache-2.0
"""Runs every command of README.md and docs/, and looks at what it says.

Blocks marked `sh` are run line by line, as a reader would: what is started with `&` runs until its block ends. Sizes are
made small, so that a command takes seconds; nothing else is changed. Commands written within a sentence (`baton …`) are
not run, but their names and flags must exist. `cargo xtask walk` calls this with BATON_BIN and BATON_TEST_MODEL set.
"""

import json
import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
BATON = os.environ["BATON_BIN"]
MODEL = os.environ["BATON_TEST_MODEL"]
CONFIG = ROOT / "crates/model/tests/data/golden/llama/config.json"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

# What cannot run here, and why.
SKIPPED = [
    (r"--device cuda|bench/gpu", "needs a GPU"),
    (r"^(vllm|llama-server|ollama) ", "is another program"),
    (r"^(podman|docker|sudo|systemctl|curl -LO|brew|apt|dpkg|sh install\.sh) ?", "changes the machine"),
    (r"^cargo xtask (test|dist|hook)", "is what calls this, or is long"),
    (r"owner/name|qwen3|Qwen/|--from ", "needs the hub; tests/hub.rs has one"),
    (r"^cargo (add|build)|^git clone", "builds"),
    (r"pip install", "installs"),
    (r"--attack-api-key", "judges latencies, which a busy machine fails"),
]
# Sizes that only take time.
SMALLER = [
    (r"--num-prompts (\$\(\([^)]*\)\)|\d+)", "--num-prompts 4"),
    (r"--max-concurrency (\$c|\d+)", "--max-concurrency 2"),
    (r"--(input|output)-len \d+", r"--\1-len 8"),
    (r"--duration \d+", "--duration 2"),
    (r"--clients \d+", "--clients 4"),
    (r"--num-warmups \d+", "--num-warmups 1"),
    (r"(bench latency(?! \\).*)$", r"\1 --num-iters 1 --num-iters-warmup 1"),
    (r"--row 32x4096\+64/128.*$", "--row 2x64+8/4"),
    (r"bench relay --output-json .*$", "bench relay --row 2x64+8/4 --output-json relay.json --plot relay.html"),
]
# What the output must hold, by what the command has.
EXPECTED = [
    (r"complete .*-n 4", r"── 4"),
    (r"--json\b", "JSON"),
    (r"baton plan", r"SEQUENCES AT ONCE|\"fits\""),
    (r"curl .*\"stream\": true", r"data: \[DONE\]"),
    (r"bench serve", r"Successful requests"),
    (r"bench report", r"report\.html"),
    (r"bench soak", r"(?i)health|verdict|ok"),
    (r"complete --chat", r"\w{3,}"),
]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def blocks(page):
    """The lines of each `sh` block, with continued lines joined."""
    text = page.read_text()
    for match in re.finditer(r"^```(?:sh|bash|console)\n(.*?)^```", text, re.M | re.S):
        yield re.sub(r"\\\n\s*", "", match[1]).splitlines()


def spans(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    return set(re.findall(r"`(baton [a-z][^`\n]*)`", text))


class Walker:
    def __init__(self, folder):
        self.folder, self.port, self.servers = folder, free_port(), []
        self.home = pathlib.Path(folder) / "home"
        (self.home / "models").mkdir(parents=True)
        name = "SmolLM2-135M-Instruct.Q4_1.gguf"
        (self.home / "models" / name).symlink_to(MODEL)
        (pathlib.Path(folder) / "model.gguf").symlink_to(MODEL)
        (pathlib.Path(folder) / "house.txt").write_text("You are a helpful assistant of a small shop.\n")
        (pathlib.Path(folder) / "person.json").write_text('{"type": "object", "properties": {"name": {"type": "string"}}}')
        bin = pathlib.Path(folder) / "bin"
        bin.mkdir()
        (bin / "baton").symlink_to(BATON)
        self.env = dict(os.environ, BATON_HOME=str(self.home), HF_ENDPOINT="http://127.0.0.1:9", NO_COLOR="1",
                        PATH=f"{bin}:{os.environ['PATH']}")
        self.env.pop("BATON_API_KEY", None)
        self.counts = {"run": 0, "skipped": 0, "spans": 0}

    def shorten(self, line):
        for pattern, instead in SMALLER:
            line = re.sub(pattern, instead, line)
        line = line.replace("cargo run --release -- ", "baton ").replace("path/to/config.json", str(CONFIG))
        line = line.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}").replace("127.0.0.1:8001", f"127.0.0.1:{self.port}")
        line = re.sub(r"baton serve( --port \d+)?", f"baton serve --port {self.port} --log-level error", line)
        line = re.sub(r"--port 800\d|--port 9000", "", line) if "baton serve" in line else line
        if re.search(r"baton bench (serve|soak)", line) and "--base-url" not in line:
            line = re.sub(r"(baton bench (?:serve|soak))", rf"\1 --port {self.port}", line)
        if "baton ps" in line:
            line = line.replace("baton ps", f"baton ps --port {self.port}")
        return line

    def serve(self, line):
        """Starts a server and waits for it; `$!` is its process."""
        self.stop()
        process = subprocess.Popen(["sh", "-c", "exec env " + line.rstrip("& ")], cwd=self.folder, env=self.env,
                                   stdout=subprocess.DEVNULL, start_new_session=True)
        self.servers.append(process)
        deadline = time.time() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2).read()
                return process.pid
            except OSError:
                if process.poll() is not None or time.time() > deadline:
                    raise SystemExit(f"error: the server does not start: {line}")
                time.sleep(0.2)

    def stop(self):
        for server in self.servers:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait()
        self.servers.clear()

    def run(self, page, lines):
        pid = None
        for line in lines:
            line = re.sub(r"\s+#.*$", "", line).strip()
            if not line or line.startswith("#"):
                continue
            # A loop is walked once.
            if re.match(r"for .*; do$", line) or line == "done":
                continue
            why = next((why for pattern, why in SKIPPED if re.search(pattern, line)), None)
            if why:
                self.counts["skipped"] += 1
                print(f"  - {line[:90]} ({why})")
                continue
            line = self.shorten(line)
            if re.search(r"\bbaton serve\b", line):
                pid = self.serve(line)
                self.counts["run"] += 1
                continue
            needs_server = re.search(r"curl |bench (serve|soak)|baton ps", line)
            if needs_server and not self.servers:
                pid = self.serve(f"baton serve --port {self.port} --log-level error")
            self.one(page, line.replace("$!", str(pid)))
        self.stop()

    def one(self, page, line):
        started = time.time()
        # Whoever reads a terminal says nothing and leaves.
        done = subprocess.run(["sh", "-c", line], cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=300)
        self.counts["run"] += 1
        print(f"  + {line[:90]} ({time.time() - started:.1f} s)")
        if done.returncode != 0:
            raise SystemExit(f"error: {page.name}: `{line}` failed ({done.returncode}): {done.stderr}{done.stdout}")
        for pattern, expect in EXPECTED:
            if not re.search(pattern, line):
                continue
            if expect == "JSON":
                json.loads(done.stdout)
            elif not re.search(expect, done.stdout + done.stderr):
                raise SystemExit(f"error: {page.name}: `{line}` does not say {expect!r}: {done.stdout}{done.stderr}")

    def span(self, page, span):
        """The commands and flags of a span exist."""
        words = shlex.split(re.sub(r"[\[\]…|]|\.\.\.", " ", span))[1:]
        command = []
        for word in words[:2]:
            if re.fullmatch(r"[a-z]+", word):
                tried = subprocess.run([BATON, *command, word, "--help"], capture_output=True, text=True)
                if tried.returncode == 0:
                    command.append(word)
        if not command:
            raise SystemExit(f"error: {page.name}: there is no command in `{span}`")
        help_text = subprocess.run([BATON, *command, "--help"], capture_output=True, text=True).stdout
        for flag in [word.split("=")[0] for word in words if word.startswith("--")]:
            if not re.search(re.escape(flag) + r"\b", help_text):
                raise SystemExit(f"error: {page.name}: `{span}`: baton {' '.join(command)} has no {flag}")
        self.counts["spans"] += 1


def main():
    with tempfile.TemporaryDirectory() as folder:
        walker = Walker(folder)
        try:
            for page in PAGES:
                print(page.relative_to(ROOT))
                for lines in blocks(page):
                    walker.run(page, lines)
                for span in sorted(spans(page)):
                    walker.span(page, span)
        finally:
            walker.stop()
        print("{run} commands run, {spans} looked up, {skipped} skipped".format(**walker.counts))
        if walker.counts["run"] < 10:
            raise SystemExit("error: hardly any command was found")


if __name__ == "__main__":
    sys.exit(main())
