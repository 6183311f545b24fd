"""The figures of a run, kept as `results.json`.

`bench/gpu` and `bench/compare-llamacpp` write it, `cargo xtask results` makes `bench/RESULTS.md` of it, and the next run of the
same kind of machine is compared with it. One folder under `bench/runs` holds the last baseline of one machine.

A figure has a `part` (its table on the page), a `name`, a `value` with its `unit`, whether `lower` is better, the `command`, the
`commit` and the `date` that made it, and where there are any: `goal` (as text) and whether it is `met`, `others` (name of another
engine or setting: its value), and `max_loss`, the share that may be lost before a run counts as slower. `files` says of other files
in the folder (`kernels.json`) what made them.
"""

import json
import pathlib
import re
import subprocess
import time

RUNS = pathlib.Path(__file__).parent / "runs"
MAX_LOSS = 0.03


def commit():
    """The commit of this tree, marked where files differ from it."""
    git = ["git", "-C", str(pathlib.Path(__file__).parent)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    if head.returncode != 0:
        return "unknown"
    dirty = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True).stdout
    return head.stdout.strip() + ("+" if dirty.strip() else "")


def shown(command):
    """A command as a reader would type it: no folders of this machine."""
    words = [part.name if isinstance(part, pathlib.PurePath) else str(part) for part in command]
    # Paths may also stand within JSON.
    return " ".join(re.sub(r'"/[^"]*/', '"', word) for word in words)


def made_by(command):
    """What made a figure or a file, and when."""
    return {"command": shown(command), "commit": commit(), "date": time.strftime("%Y-%m-%d")}


def figure(part, name, value, unit, command, **more):
    """One figure of now; see the top for what `more` may say."""
    return {"part": part, "name": name, "value": round(value, 4), "unit": unit} | more | made_by(command)


def read(folder):
    file = pathlib.Path(folder) / "results.json"
    return json.loads(file.read_text()) if file.is_file() else {"machine": None, "figures": [], "checks": [], "files": {}}


def write(folder, machine, figures, checks=(), files=None):
    """Writes what was measured over what was there; parts that were not measured this time stay as they were."""
    before = read(folder)
    if before["machine"] != machine:
        before = {"figures": [], "checks": [], "files": {}}
    parts = {one["part"] for one in figures}
    names = {one["name"] for one in checks}
    figures = [one for one in before["figures"] if one["part"] not in parts] + list(figures)
    checks = [one for one in before["checks"] if one["name"] not in names] + list(checks)
    result = {"machine": machine, "figures": figures, "checks": checks, "files": before["files"] | (files or {})}
    (pathlib.Path(folder) / "results.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def merge(folder, measured):
    """Writes single figures over those of the same name; others of their part stay as they were."""
    before, names = read(folder), {one["name"] for one in measured}
    parts = {one["part"] for one in measured}
    kept = [one for one in before["figures"] if one["part"] in parts and one["name"] not in names]
    write(folder, before["machine"], kept + list(measured))


def loss(now, before):
    """The share by which a figure is worse than the same figure before; below 0 where it is better."""
    if not now["value"] or not before["value"]:
        return float("inf") if before["value"] else 0.0
    ratio = now["value"] / before["value"]
    return ratio - 1 if now.get("lower") else 1 - ratio


def compare(machine, figures, baseline):
    """Prints every figure beside the baseline's and returns the names of those that lost more than they may."""
    if baseline["machine"] != machine:
        print(f"no baseline of this machine ({machine}); the one given is of {baseline['machine']}")
        return []
    known = {(one["part"], one["name"]): one for one in baseline["figures"]}
    lost = []
    for one in figures:
        before = known.get((one["part"], one["name"]))
        if before is None:
            print(f"{one['name']:<40} {'new':>30} {one['value']:>12,.2f} {one['unit']}")
            continue
        share = loss(one, before)
        is_lost = share > one.get("max_loss", MAX_LOSS)
        lost += [f"{one['name']} ({-100 * share:+.1f} %)"] if is_lost else []
        change = f"{before['value']:,.2f} -> {one['value']:,.2f}"
        print(f"{one['name']:<40} {change:>30} {-100 * share:>+10.1f} % {'LOST' if is_lost else ''}")
    return lost
