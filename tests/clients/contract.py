"""Every operation of /openapi.json, with requests that follow its schema and requests that do not: no answer is a 5xx, and
each is what the schema says. A fixed seed, few examples and a limit of time keep this under a minute and a half."""

import os
import subprocess
import sys
import tempfile

from common import KEY, URL

CHECKS = "not_a_server_error,response_schema_conformance,content_type_conformance,status_code_conformance"


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    command = [
        os.path.join(os.path.dirname(sys.executable), "schemathesis"),
        "run",
        f"{URL}/openapi.json",
        "--header",
        f"Authorization: Bearer {KEY}",
        "--checks",
        CHECKS,
        "--phases",
        "examples,coverage,fuzzing",
        "--max-examples",
        os.environ.get("BATON_CONTRACT_EXAMPLES", "10"),
        "--max-time",
        "60",
        "--seed",
        "1",
        "--request-timeout",
        "60",
        "--generation-database",
        "none",
        "--warnings",
        "off",
        "--no-color",
    ]
    environment = os.environ | {"SCHEMATHESIS_HOOKS": "contract_hooks", "PYTHONPATH": here}
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(subprocess.run(command, check=False, env=environment, cwd=folder).returncode)


if __name__ == "__main__":
    main()
