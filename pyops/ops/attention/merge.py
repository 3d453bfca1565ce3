"""Merging of attention over two parts of the keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import float8_e4m3fn, float8_e4m3fnuz, float32
from ..._core.tensors.tensor import TensorArg
from .._shared import fp8
from .._shared.fp8 import static_codes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["merge_attn_states"]

_merge_attn_states = Kernel("attention/merge_attn_states.cu")
_NUM_THREADS = 256  # threads of a block: the kernel reaches 97 % of 4.3 TB/s (docs/performance/cache.md)


@op(out=("output", "output_lse"), in_place={"output": "prefix_output"})
def merge_attn_states(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: Tensor | None = None,
) -> None:
    """Attention over all keys, merged from two parts of them: ``output = T((a * prefix + b * suffix) / (a + b))``.

    ``a = exp(prefix_lse - m), b = exp(suffix_lse - m), m = max(prefix_lse, suffix_lse)``, in float32, and ``output_lse
    = log(a + b) + m`` (section 2.2 of Ye et al. 2025, arXiv:2501.01005). A part whose lse is +inf or -inf is empty: the
    other part is copied, whatever it contains. If both parts are empty, the prefix is copied and output_lse is -inf. An
    infinite element gives NaN if float32 rounds the weight of its part to 0. With `output_scale`, output is
    ``fp8(result * (1 / output_scale))`` of the result in float32, saturating as in `static_scaled_fp8_quant`.

    Args:
        output: [num_tokens, num_heads, head_size], written, the dtype of prefix_output; may be `prefix_output`. With
            `output_scale` float8_e4m3fn or float8_e4m3fnuz.
        prefix_output, suffix_output: the shape of output, float32, float16 or bfloat16. All three may have any strides
            but the last.
        prefix_lse, suffix_lse: [num_heads, num_tokens] float32, natural log-sum-exp of the logits; any strides.
        output_lse: [num_heads, num_tokens] float32, written; any strides. Or None.
        prefill_tokens_with_context: tokens from this one on have no prefix: output and output_lse are copies of the
            suffix's, an lse of +inf as well. None: all tokens have one.
        output_scale: one float32, or None.
    """
    infinite = float("inf")
    p, s = (lse.where(~lse.isinf(), -infinite).T[..., None] for lse in (prefix_lse, suffix_lse))
    max_logit = torch.maximum(p, s)
    a, b = torch.exp(p - max_logit), torch.exp(s - max_logit)
    total = a + b
    merged = prefix_output.float() * (a / total) + suffix_output.float() * (b / total)
    only_prefix, only_suffix = (s == -infinite) & ~p.isnan(), (p == -infinite) & ~s.isnan()
    lse = torch.where(max_logit == -infinite, max_logit, torch.log(total) + max_logit)
    if prefill_tokens_with_context is not None:
        no_prefix = (
            torch.arange(len(output), dtype=torch.int64, device=output.device)[:, None, None]
            >= prefill_tokens_with_context
        )
        only_prefix, only_suffix = only_prefix & ~no_prefix, only_suffix | no_prefix
        lse = torch.where(no_prefix, suffix_lse.T[..., None], lse)
    if output_scale is not None:
        prefix_output, suffix_output = prefix_output.float(), suffix_output.float()
    merged = merged.to(prefix_output.dtype)
    result = torch.where(only_prefix, prefix_output, torch.where(only_suffix, suffix_output, merged))
    output.copy_(result if output_scale is None else static_codes(result, output_scale, output.dtype))
    if output_lse is not None:
        output_lse.copy_(lse[..., 0].T)


@merge_attn_states.result
def result_merge_attn_states(
    prefix_output: TensorArg, output_scale: TensorArg | None, *, quant_dtype: torch.dtype | None = None
) -> Result:
    """Rows of `prefix_output`.

    Args:
        quant_dtype: of the output with `output_scale`; None for the e4m3 of the device.
    """
    quants = fp8.chosen(prefix_output, quant_dtype)
    return Result(prefix_output.shape, quants if output_scale else prefix_output.dtype)


@merge_attn_states.plan
def plan_merge_attn_states(
    output: TensorArg,
    prefix_output: TensorArg,
    prefix_lse: TensorArg,
    suffix_output: TensorArg,
    suffix_lse: TensorArg,
    output_lse: TensorArg | None,
    prefill_tokens_with_context: int | None,
    output_scale: TensorArg | None,
) -> Launch:
    check.floating(prefix_output)
    if len(output.shape) != 3:
        raise output.error(f"expected shape (num_tokens, num_heads, head_size), got {output.shape}")
    num_tokens, num_heads, head_size = output.shape
    check.sizes(prefix_output, num_tokens=num_tokens, num_heads=num_heads, head_size=head_size)
    check.like(suffix_output, prefix_output)
    if output_scale is None:
        check.dtype(output, prefix_output.dtype)
    else:
        check.scalar(output_scale)
        check.dtype(output, float8_e4m3fn, float8_e4m3fnuz)
    for arg in (output, prefix_output, suffix_output):
        check.row_size(arg)
    num_prefix_tokens = num_tokens if prefill_tokens_with_context is None else prefill_tokens_with_context
    if num_prefix_tokens < 0:
        raise check.refuse(output, "prefill_tokens_with_context", f"expected at least 0, got {num_prefix_tokens}")
    for lse in (prefix_lse, suffix_lse, output_lse):
        check.dtype(lse, float32)
        if lse and lse.shape != (num_heads, num_tokens):
            raise lse.error(f"expected shape (num_heads={num_heads}, num_tokens={num_tokens}), got {lse.shape}")
    vec_size = check.vector_width(head_size, output, prefix_output, suffix_output)
    block_rows = max(1, _NUM_THREADS // max(1, head_size // vec_size))
    return _merge_attn_states(
        scalar_t=prefix_output.dtype,
        output_t=output.dtype,
        HAS_SCALE=output_scale is not None,
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        VEC_SIZE=vec_size,
        HAS_LSE=output_lse is not None,
        NUM_THREADS=_NUM_THREADS,
    ).launch(
        grid=-(-num_tokens * num_heads // block_rows) if head_size else 0,
        block=_NUM_THREADS,
        num_tokens=num_tokens,
        num_prefix_tokens=num_prefix_tokens,
        **_strides("output", output, 0, 1),
        **_strides("prefix", prefix_output, 0, 1),
        **_strides("suffix", suffix_output, 0, 1),
        **_strides("prefix_lse", prefix_lse, 1, 0),
        **_strides("suffix_lse", suffix_lse, 1, 0),
        **_strides("output_lse", output_lse, 1, 0),
    )


def _strides(name: str, arg: TensorArg | None, token: int, head: int) -> dict[str, int]:
    """The strides of the dimensions `token` and `head` of a tensor, by the names of the kernel's parameters."""
    strides = arg.strides if arg else (0, 0)
    return {f"{name}_stride": strides[token], f"{name}_head_stride": strides[head]}


@merge_attn_states.example
def example_merge_attn_states(
    make: Any,
    *,
    num_tokens: int = 16,
    dtype: str = "bfloat16",
    head_size: Literal[128, 64, 96] = 128,
    with_lse: bool = True,
    with_scale: bool = False,
) -> tuple[Any, ...]:
    num_heads = 32
    output = make.empty(num_tokens, num_heads, head_size, dtype="float8_e4m3fn" if with_scale else dtype)
    prefix, suffix = (make.randn(num_tokens, num_heads, head_size, dtype=dtype) for _ in range(2))
    prefix_lse, suffix_lse = (make.randn(num_heads, num_tokens, dtype="float32", scale=2.0) for _ in range(2))
    output_lse = make.empty(num_heads, num_tokens, dtype="float32") if with_lse else None
    more = (num_tokens * 3 // 4, make.full(1, value=0.02, dtype="float32")) if with_scale else (None, None)
    return output, prefix, prefix_lse, suffix, suffix_lse, output_lse, *more
