"""The page docs/refusals.md: arguments that vLLM's ops accept and this library refuses."""

from __future__ import annotations

from ..integrations.vllm.refusals import REFUSALS

_HEAD = """# Refusals

What vLLM 0.22 or 0.33 takes and this library refuses by an `OpError`, op by op. `python -m pyops coverage --refusals`
prints this page. An op that is not listed takes all that vLLM takes, as far as that has a meaning. Arguments have the
names of this library, or those of vLLM if the op here does not have them.

| op | argument | what is refused | why |
|---|---|---|---|"""


def text() -> str:
    """The page, with one table row per refusal."""
    rows = [
        f"| `{op}` | `{one.argument}` | {one.what} | {one.why} |"
        for op, refusals in sorted(REFUSALS.items())
        for one in refusals
    ]
    return "\n".join((_HEAD, *rows))
