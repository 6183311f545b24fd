"""Keeps generated requests short: what is tested is the contract, not the speed of a debug build."""

import schemathesis

LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
MOST = 4


@schemathesis.hook
def before_call(context, case, kwargs):
    """A length that is missing or long becomes a short one; one that is wrong stays wrong."""
    if not isinstance(case.body, dict) or case.operation.method.upper() != "POST":
        return
    for field in LENGTHS:
        length = case.body.get(field)
        if length is None or (type(length) is int and length > MOST):
            case.body[field] = MOST
    if type(case.body.get("n")) is int and case.body["n"] > 2:
        case.body["n"] = 2
