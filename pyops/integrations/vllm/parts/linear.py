"""The part `linear`: puts this library's kernels first in the lists from which vLLM chooses one for each linear layer.

A layer that they do not support gets the kernel that vLLM would have chosen without them, and so does every layer if
the user names a backend (``--linear-backend``). ``VLLM_DISABLED_KERNELS`` excludes a kernel by its class name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm import envs
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.layers import utils
from vllm.platforms import current_platform

import pyops

from ..choice import keeps
from . import _hopper
from ._dense_linear import unquantized_gemm
from ._packed_linear import PyopsMarlinLinearKernel
from ._scaled_linear import (
    PyopsFp8BlockScaledMMLinearKernel,
    PyopsFP8ScaledMMLinearKernel,
    PyopsInt8ScaledMMLinearKernel,
)

_undo: list[Callable[[], Any]] = []  # callbacks that undo the changes to vLLM, in the order of the changes


def install() -> str:
    """Offer this library's kernels to vLLM for layers that it creates from now on, on Hopper.

    Returns:
        The kernels that vLLM may choose, as a line for the log; "" if there are none.
    """
    if _undo or not current_platform.is_cuda() or _hopper.refusal() is not None:
        return ""
    offers = {case: offer for case, offer in _offers().items() if keeps("linear", case)}
    if not offers:
        return ""
    for offer in offers.values():
        offer()
    _name_compiled_code(list(offers))
    return ", ".join(offers)


def uninstall() -> None:
    """Restore vLLM's lists and functions. Existing layers keep their kernels."""
    while _undo:
        _undo.pop()()


def _offers() -> dict[str, Callable[[], None]]:
    """{case of `keeps`: the function that offers its kernel to vLLM}."""
    platform = current_platform._enum
    packed, fp8 = kernels._POSSIBLE_KERNELS[platform], kernels._POSSIBLE_FP8_KERNELS[platform]
    blocks, int8 = kernels._POSSIBLE_FP8_BLOCK_KERNELS[platform], kernels._POSSIBLE_INT8_KERNELS[platform]
    return {
        "fp8_channel": partial(_insert, fp8, PyopsFP8ScaledMMLinearKernel),
        # DeepGEMM stays first, because this library has not been measured against it.
        "fp8_block": partial(_insert, blocks, PyopsFp8BlockScaledMMLinearKernel, kernels.CutlassFp8BlockScaledMMKernel),
        "int8": partial(_insert, int8, PyopsInt8ScaledMMLinearKernel),
        "w4a16": partial(_offer_bits, packed, 4),
        "w8a16": partial(_offer_bits, packed, 8),
        "bf16": partial(_replace, utils, "default_unquantized_gemm", unquantized_gemm),
    }


def _insert(offered: list[type], kernel: type, before: type | None = None) -> None:
    """Insert `kernel` into a list of vLLM: at the front, or before another kernel."""
    offered.insert(offered.index(before) if before in offered else 0, kernel)
    _undo.append(partial(offered.remove, kernel))


def _offer_bits(packed: list[type], bits: int) -> None:
    """Let the kernel for packed weights accept weights of `bits`, too."""
    if PyopsMarlinLinearKernel not in packed:
        _insert(packed, PyopsMarlinLinearKernel)
    _replace(PyopsMarlinLinearKernel, "served_bits", (*PyopsMarlinLinearKernel.served_bits, bits))


def _replace(owner: Any, name: str, value: Any) -> None:
    _undo.append(partial(setattr, owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def _name_compiled_code(served: list[str]) -> None:
    """Make the key of vLLM's compile cache depend on the chosen kernels.

    vLLM's cache on disk does not record which kernels were chosen, and code compiled for another kernel would misread
    weights that this library has repacked.
    """
    factors, own = envs.compile_factors, {"PYOPS_LINEAR": ",".join(served), "PYOPS_VERSION": pyops.__version__}
    _replace(envs, "compile_factors", lambda: {**factors(), **own})
