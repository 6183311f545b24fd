"""Every operation of /openapi.json, with requests that follow its schema and requests that do not: no answer is a 5xx, and
each is what the schema says. A fixed seed and a bounded number of examples keep this under a minute and a half."""

import os
import subprocess
import sys

from common import KEY, URL

EXAMPLES = os.environ.get("BATON_CONTRACT_EXAMPLES", "12")
CHECKS = "not_a_server_error,response_schema_conformance,content_type_conformance,status_code_conformance"


def main():
    command = [
        os.path.join(os.path.dirname(sys.executable), "schemathesis"),
        "run",
        f"{URL}/openapi.json",
        "--header",
        f"Authorization: Bearer {KEY}",
        "--checks",
        CHECKS,
        "--max-examples",
        EXAMPLES,
        "--phases",
        "examples,coverage,fuzzing",
        "--seed",
        "1",
        "--request-timeout",
        "60",
        "--no-color",
    ]
    sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
