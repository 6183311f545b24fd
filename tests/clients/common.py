"""What the Python clients share: where the server is, and a way to run named checks."""

import os
import sys
import time

URL = os.environ["BATON_URL"].rstrip("/")
KEY = os.environ.get("BATON_API_KEY", "none")


def run(checks):
    """Runs the checks in order; the first failure ends the script."""
    for check in checks:
        started = time.monotonic()
        try:
            check()
        except Exception as error:  # noqa: BLE001 - whatever went wrong is the result
            print(f"FAILED {check.__name__}: {type(error).__name__}: {error}", file=sys.stderr)
            raise
        print(f"ok {check.__name__} ({time.monotonic() - started:.1f} s)", flush=True)
