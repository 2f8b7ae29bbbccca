"""The table of error codes in docs/api.md."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.generated_docs.markdown import table

import headwater.core.http_errors  # noqa: F401 - its errors are in the table
from headwater.core.errors import Refusal
from headwater.core.subscription_errors import SubscriptionRefusal


def error_codes() -> str:
    """Every error code with its status, cause and remedy."""
    by_code = {(kind.status, kind.code): _cause_and_remedy(kind) for kind in _refusals(Refusal)}
    rows = ((str(status), f"`{code}`", *texts) for (status, code), texts in sorted(by_code.items()))
    return table("| status | code | cause | what to do |", rows)


def _refusals(base: type[Refusal]) -> Iterator[type[Refusal]]:
    for kind in base.__subclasses__():
        if kind is not SubscriptionRefusal:  # only a base class
            yield kind
        yield from _refusals(kind)


def _cause_and_remedy(kind: type[Refusal]) -> tuple[str, str]:
    cause, _, remedy = (vars(kind).get("__doc__") or "").partition("\n\n")
    if not cause or not remedy:
        raise SystemExit(f"the docstring of {kind.__name__} in headwater.core must state a cause and a remedy")
    return " ".join(cause.split()), " ".join(remedy.split())
