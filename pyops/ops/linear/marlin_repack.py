"""Weights of GPTQ and AWQ in Marlin's layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.dtypes import int32
from ..._core.tensors.tensor import TensorArg
from .._shared.packed_layouts import LayoutName
from .repack import TILE_COLUMNS, repack, repacked

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "awq_marlin_moe_repack",
    "awq_marlin_repack",
    "gptq_marlin_moe_repack",
    "gptq_marlin_repack",
]

_BITS = (4, 8)


@op(returns="out", ulps=0)
def gptq_marlin_repack(
    b_q_weight: Tensor,
    perm: Tensor | None,
    size_k: int,
    size_n: int,
    num_bits: int,
    is_a_8bit: bool = False,
    *,
    out: Tensor,
) -> None:
    """A GPTQ weight in Marlin's layout, which `marlin_gemm` takes (Frantar et al. 2024, arXiv:2408.11743).

    Row k becomes row ``perm[k]`` of the given weight, or 0 if that row does not exist. `_shared/packed_layouts.py` has
    the layouts.

    Args:
        b_q_weight: [K * num_bits / 32, N] int32, contiguous; K a multiple of 16, N of 64.
        perm: [K] int32, contiguous; empty or None: rows keep their order, as they must with is_a_8bit.
        size_k, size_n: K, N.
        num_bits: bits of a quant: 4 or 8.
        is_a_8bit: tiles are those for activations of 8 bits; K is a multiple of 32.
        out: [K / 16, N * num_bits / 2] int32, contiguous, returned; new unless given.
    """
    perm = perm if perm is not None and perm.numel() else None
    out.copy_(repacked(b_q_weight, ("gptq", _marlin(is_a_8bit)), num_bits, (size_k, size_n), perm).view(out.shape))


@op(returns="out", ulps=0)
def awq_marlin_repack(
    b_q_weight: Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False, *, out: Tensor
) -> None:
    """An AWQ weight in Marlin's layout, which `marlin_gemm` takes.

    Args:
        b_q_weight: [K, N * num_bits / 32] int32, contiguous, the even columns of a word in its lower half; K a multiple
            of 16, N of 64.
        size_k, size_n: K, N.
        num_bits: bits of a quant: 4 or 8.
        is_a_8bit: tiles are those for activations of 8 bits; K is a multiple of 32.
        out: [K / 16, N * num_bits / 2] int32, contiguous, returned; new unless given.
    """
    out.copy_(repacked(b_q_weight, ("awq", _marlin(is_a_8bit)), num_bits, (size_k, size_n)).view(out.shape))


@op(returns="out", ulps=0)
def gptq_marlin_moe_repack(
    b_q_weight: Tensor,
    perm: Tensor | None,
    size_k: int,
    size_n: int,
    num_bits: int,
    is_a_8bit: bool = False,
    *,
    out: Tensor,
) -> None:
    """`gptq_marlin_repack` of the weights of all experts.

    Args:
        b_q_weight: [num_experts, K * num_bits / 32, N] int32, contiguous.
        perm: [num_experts, K] int32, contiguous; None, or without columns: rows keep their order.
        size_k, size_n, num_bits, is_a_8bit: as in `gptq_marlin_repack`.
        out: [num_experts, K / 16, N * num_bits / 2] int32, contiguous, returned; new unless given.
    """
    for i, expert in enumerate(b_q_weight):
        of_expert = None if perm is None or not perm.numel() else perm[i]
        gptq_marlin_repack.reference(expert, of_expert, size_k, size_n, num_bits, is_a_8bit, out=out[i])


@op(returns="out", ulps=0)
def awq_marlin_moe_repack(
    b_q_weight: Tensor,
    perm: Tensor | None,
    size_k: int,
    size_n: int,
    num_bits: int,
    is_a_8bit: bool = False,
    *,
    out: Tensor,
) -> None:
    """`awq_marlin_repack` of the weights of all experts.

    Args:
        b_q_weight: [num_experts, K, N * num_bits / 32] int32, contiguous.
        perm: for compatibility with vLLM; no effect.
        size_k, size_n, num_bits, is_a_8bit: as in `awq_marlin_repack`.
        out: [num_experts, K / 16, N * num_bits / 2] int32, contiguous, returned; new unless given.
    """
    for i, expert in enumerate(b_q_weight):
        awq_marlin_repack.reference(expert, size_k, size_n, num_bits, is_a_8bit, out=out[i])


def _marlin(is_a_8bit: bool) -> LayoutName:
    return "marlin_8" if is_a_8bit else "marlin"


def _result(b_q_weight: TensorArg, size_k: int, size_n: int, num_bits: int, experts: tuple[int, ...] = ()) -> Result:
    if num_bits not in _BITS:
        raise check.refuse(b_q_weight, "num_bits", f"expected one of {_BITS}, got {num_bits}")
    for name, size, multiple in (("size_k", size_k, 16), ("size_n", size_n, TILE_COLUMNS)):
        if size < 0 or size % multiple:
            raise check.refuse(b_q_weight, name, f"expected a multiple of {multiple}, got {size}")
    return Result((*experts, size_k // 16, size_n * num_bits // 2), int32)


@gptq_marlin_repack.result
def result_gptq_marlin_repack(b_q_weight: TensorArg, size_k: int, size_n: int, num_bits: int) -> Result:
    return _result(b_q_weight, size_k, size_n, num_bits)


@awq_marlin_repack.result
def result_awq_marlin_repack(b_q_weight: TensorArg, size_k: int, size_n: int, num_bits: int) -> Result:
    return _result(b_q_weight, size_k, size_n, num_bits)


def _of_experts(b_q_weight: TensorArg) -> tuple[int, ...]:
    check.sizes(b_q_weight, num_experts=None, rows=None, columns=None)
    return (b_q_weight.shape[0],)


@gptq_marlin_moe_repack.result
def result_gptq_marlin_moe_repack(b_q_weight: TensorArg, size_k: int, size_n: int, num_bits: int) -> Result:
    return _result(b_q_weight, size_k, size_n, num_bits, _of_experts(b_q_weight))


@awq_marlin_moe_repack.result
def result_awq_marlin_moe_repack(b_q_weight: TensorArg, size_k: int, size_n: int, num_bits: int) -> Result:
    return _result(b_q_weight, size_k, size_n, num_bits, _of_experts(b_q_weight))


def _plan(
    out: TensorArg,
    b_q_weight: TensorArg,
    source: LayoutName,
    size: tuple[int, int],
    num_bits: int,
    is_a_8bit: bool,
    perm: TensorArg | None = None,
    experts: tuple[int, ...] = (),
) -> Launch:
    """The launch for one weight, or for the weights of all experts."""
    result = _result(b_q_weight, *size, num_bits, experts)
    k, n = size
    if is_a_8bit and k % 32:
        raise check.refuse(b_q_weight, "size_k", f"expected a multiple of 32 for 8-bit activations, got {k}")
    each = dict(zip(("num_experts",), experts, strict=False))
    fields = 32 // num_bits
    rows, columns = (k // fields, n) if source == "gptq" else (k, n // fields)
    check.shape(b_q_weight, int32, **each, rows=rows, columns=columns)
    check.shape(out, int32, **each, row_tiles=result.shape[-2], words=result.shape[-1])
    check.dtype(perm, int32)
    if perm is not None and perm.shape[-1:] == (0,):
        perm = None
    if perm is not None and is_a_8bit:
        raise perm.error("expected no permutation for 8-bit activations")
    check.shape(perm, int32, **each, K=k)
    layouts: tuple[LayoutName, LayoutName] = source, _marlin(is_a_8bit)
    return repack(out, b_q_weight, layouts, num_bits, size, perm=perm, experts=experts[0] if experts else 1)


@gptq_marlin_repack.plan
def plan_gptq_marlin_repack(
    b_q_weight: TensorArg,
    perm: TensorArg | None,
    size_k: int,
    size_n: int,
    num_bits: int,
    is_a_8bit: bool,
    out: TensorArg,
) -> Launch:
    return _plan(out, b_q_weight, "gptq", (size_k, size_n), num_bits, is_a_8bit, perm)


@awq_marlin_repack.plan
def plan_awq_marlin_repack(
    b_q_weight: TensorArg, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool, out: TensorArg
) -> Launch:
    return _plan(out, b_q_weight, "awq", (size_k, size_n), num_bits, is_a_8bit)


@gptq_marlin_moe_repack.plan
def plan_gptq_marlin_moe_repack(
    b_q_weight: TensorArg,
    perm: TensorArg | None,
    size_k: int,
    size_n: int,
    num_bits: int,
    is_a_8bit: bool,
    out: TensorArg,
) -> Launch:
    experts = _of_experts(b_q_weight)
    return _plan(out, b_q_weight, "gptq", (size_k, size_n), num_bits, is_a_8bit, perm, experts)


@awq_marlin_moe_repack.plan
def plan_awq_marlin_moe_repack(
    b_q_weight: TensorArg, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool, out: TensorArg
) -> Launch:
    return _plan(out, b_q_weight, "awq", (size_k, size_n), num_bits, is_a_8bit, experts=_of_experts(b_q_weight))


@gptq_marlin_repack.bad_indices
def bad_indices_gptq_marlin_repack(perm: Tensor | None, size_k: int) -> dict[str, Tensor]:
    return {} if perm is None else {"perm": (perm < 0) | (perm >= size_k)}


@gptq_marlin_moe_repack.bad_indices
def bad_indices_gptq_marlin_moe_repack(perm: Tensor | None, size_k: int) -> dict[str, Tensor]:
    return {} if perm is None else {"perm": (perm < 0) | (perm >= size_k)}


def _example(make: Any, source: str, num_tokens: int, bits: int, experts: tuple[int, ...]) -> tuple[Any, Any, int, int]:
    """A weight of `num_tokens` tiles of 32 rows, and memory for the repacked weight."""
    k, n = 32 * num_tokens, 128
    rows, columns = (k * bits // 32, n) if source == "gptq" else (k, n * bits // 32)
    codes = make.randint(-(2**31), 2**31, *experts, rows, columns, dtype="int32")
    return codes, make.empty(*experts, k // 16, n * bits // 2, dtype="int32"), k, n


@gptq_marlin_repack.example
def example_gptq_marlin_repack(
    make: Any,
    *,
    num_tokens: int = 16,
    num_bits: Literal[4, 8] = 4,
    order: Literal["kept", "permuted", "8-bit activations"] = "kept",
) -> tuple[Any, ...]:
    codes, out, k, n = _example(make, "gptq", num_tokens, num_bits, ())
    perm = make.permutation(k, k, dtype="int32") if order == "permuted" else None
    return codes, perm, k, n, num_bits, order == "8-bit activations", out


@awq_marlin_repack.example
def example_awq_marlin_repack(
    make: Any, *, num_tokens: int = 16, num_bits: Literal[4, 8] = 4, is_a_8bit: bool = False
) -> tuple[Any, ...]:
    codes, out, k, n = _example(make, "awq", num_tokens, num_bits, ())
    return codes, k, n, num_bits, is_a_8bit, out


@gptq_marlin_moe_repack.example
def example_gptq_marlin_moe_repack(make: Any, *, num_tokens: int = 4, permuted: bool = False) -> tuple[Any, ...]:
    codes, out, k, n = _example(make, "gptq", num_tokens, 4, (3,))
    perm = make.randint(0, max(1, k), 3, k, dtype="int32") if permuted else None
    return codes, perm, k, n, 4, not permuted, out


@awq_marlin_moe_repack.example
def example_awq_marlin_moe_repack(make: Any, *, num_tokens: int = 4) -> tuple[Any, ...]:
    codes, out, k, n = _example(make, "awq", num_tokens, 4, (3,))
    return codes, None, k, n, 4, False, out
