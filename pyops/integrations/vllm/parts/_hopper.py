"""Where vLLM's linear layers may use this library's GEMMs: on Hopper, for which these were measured."""

from __future__ import annotations

from vllm import envs
from vllm.platforms import current_platform

_CAPABILITY = 90


def refusal(compute_capability: int | None = None) -> str | None:
    """Why a GPU gets vLLM's kernels, or None.

    Args:
        compute_capability: of the GPU, 90 for 9.0; None: of the current one.
    """
    if compute_capability is None:
        found = current_platform.get_device_capability()
        compute_capability = None if found is None else found.to_int()
    if compute_capability != _CAPABILITY:
        return f"was measured on compute capability {_CAPABILITY} alone, got {compute_capability}"
    if envs.VLLM_BATCH_INVARIANT:
        return "sums a row in an order that depends on the number of rows"
    return None
