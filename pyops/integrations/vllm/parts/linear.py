"""vLLM's linear layers: this library's kernels stand first in the lists from which vLLM chooses one for each layer.

A layer that they do not support gets what vLLM would have chosen without them; so does every layer under a backend that
the user names (``--linear-backend``), and a kernel of the list is left out by its name (``VLLM_DISABLED_KERNELS``).
"""

from __future__ import annotations

from vllm.model_executor.kernels import linear as kernels
from vllm.platforms import current_platform

from . import dense_linear
from .packed_linear import PyopsMarlinLinearKernel
from .scaled_linear import (
    PyopsFp8BlockScaledMMLinearKernel,
    PyopsFP8ScaledMMLinearKernel,
    PyopsInt8ScaledMMLinearKernel,
)

_inserted: list[tuple[list[type], type]] = []  # (list of vLLM's, the kernel in it)


def install() -> str:
    """Offer this library's kernels to vLLM, for the layers that it makes from now on, on NVIDIA GPUs.

    Returns:
        What may be chosen, for the log; "" if nothing may.
    """
    from ..choice import keeps

    if _inserted or not current_platform.is_cuda():
        return ""
    platform = current_platform._enum
    packed, fp8 = kernels._POSSIBLE_KERNELS[platform], kernels._POSSIBLE_FP8_KERNELS[platform]
    blocks, int8 = kernels._POSSIBLE_FP8_BLOCK_KERNELS[platform], kernels._POSSIBLE_INT8_KERNELS[platform]
    served = []
    for case, offered, kernel, before in [
        ("fp8_channel", fp8, PyopsFP8ScaledMMLinearKernel, None),
        # DeepGEMM stays first: nobody has measured beside it.
        ("fp8_block", blocks, PyopsFp8BlockScaledMMLinearKernel, kernels.CutlassFp8BlockScaledMMKernel),
        ("int8", int8, PyopsInt8ScaledMMLinearKernel, None),
    ]:
        if keeps("linear", case):
            _insert(offered, kernel, before)
            served.append(case)
    bits = [bits for bits in (4, 8) if keeps("linear", f"w{bits}a16")]
    if bits:
        PyopsMarlinLinearKernel.served_bits = tuple(bits)
        _insert(packed, PyopsMarlinLinearKernel)
        served += [f"w{one}a16" for one in bits]
    if keeps("linear", "bf16"):
        dense_linear.install()
        served.append("bf16")
    return f"linear: {', '.join(served)}" if served else ""


def uninstall() -> None:
    """Leave vLLM's lists and its unquantized product as they were; layers that have been made keep their kernels."""
    for offered, kernel in _inserted:
        offered.remove(kernel)
    _inserted.clear()
    dense_linear.uninstall()


def _insert(offered: list[type], kernel: type, before: type | None = None) -> None:
    """Put `kernel` into a list of vLLM's: first, or in front of another one."""
    offered.insert(offered.index(before) if before in offered else 0, kernel)
    _inserted.append((offered, kernel))
