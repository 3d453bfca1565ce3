"""The page docs/refusals.md: ops of vLLM, and arguments that they accept, which this library refuses."""

from __future__ import annotations

from ..integrations.vllm.refusals import REFUSALS, REFUSED_OPS

_HEAD = """# Refusals

What vLLM 0.22 or 0.33 takes and this library refuses by an `OpError`, op by op. `python -m pyops coverage --refusals`
prints this page. An op that is not listed takes all that vLLM takes, as far as that has a meaning. Arguments have the
names of this library, or those of vLLM if the op here does not have them.

| op | argument | what is refused | why |
|---|---|---|---|"""

_OPS = """
## Ops

Ops of vLLM that this library does not have. `override()` leaves them to vLLM.

| op | why: it |
|---|---|"""


def text() -> str:
    """The page, with one table row per refusal."""
    rows = [
        f"| `{op}` | `{one.argument}` | {one.what} | {one.why} |"
        for op, refusals in sorted(REFUSALS.items())
        for one in refusals
    ]
    ops = [f"| `{op}` | {why} |" for op, why in sorted(REFUSED_OPS.items())]
    return "\n".join((_HEAD, *rows, _OPS, *ops))
