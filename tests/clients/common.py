"""What the Python clients share: where the server is, and a way to run named checks."""

import os
import sys
import time
import traceback

URL = os.environ["BATON_URL"].rstrip("/")
KEY = os.environ.get("BATON_API_KEY", "none")


def run(checks):
    """Runs the checks in order and exits with 1 if any failed. Names as arguments choose some of them; a name after a
    minus leaves that one out."""
    wanted = {name for name in sys.argv[1:] if not name.startswith("-")}
    unwanted = {name[1:] for name in sys.argv[1:] if name.startswith("-")}
    failed = []
    for check in checks:
        name = check.__name__
        if (wanted and name not in wanted) or name in unwanted:
            continue
        started = time.monotonic()
        try:
            check()
        except Exception:  # noqa: BLE001 - whatever went wrong is the result
            traceback.print_exc()
            failed.append(name)
        outcome = "FAILED" if name in failed else "ok"
        print(f"{outcome} {name} ({time.monotonic() - started:.1f} s)", flush=True)
    sys.exit(1 if failed else 0)
