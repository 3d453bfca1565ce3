"""vLLM's linear layers use this library's GEMMs on Hopper only, because they are measured only there."""

from __future__ import annotations

from vllm import envs
from vllm.platforms import current_platform

_CAPABILITY = 90


def refusal(compute_capability: int | None = None) -> str | None:
    """Why layers on a GPU keep vLLM's kernels; None if they need not.

    Args:
        compute_capability: the GPU's, such as 90 for 9.0; None for the current GPU.
    """
    if compute_capability is None:
        found = current_platform.get_device_capability()
        compute_capability = None if found is None else found.to_int()
    if compute_capability != _CAPABILITY:
        return f"was measured on compute capability {_CAPABILITY} alone, got {compute_capability}"
    if envs.VLLM_BATCH_INVARIANT:
        return "sums a row in an order that depends on the number of rows"
    return None
