"""The join of attention over two parts of the keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ..._core import check
from ..._core.dtypes import float32
from ..._core.kernel import Kernel, Launch
from ..._core.lazy import torch
from ..._core.op import op
from ..._core.tensor import TensorArg

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["merge_attn_states"]

_merge_attn_states = Kernel("attention/merge_attn_states.cu")


@op(out=("output", "output_lse"), in_place={"output": "prefix_output"})
def merge_attn_states(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
) -> None:
    """Attention over all keys from that over two parts of them: ``output = T((a * prefix + b * suffix) / (a + b))``.

    ``a = exp(prefix_lse - m), b = exp(suffix_lse - m), m = max(prefix_lse, suffix_lse)``, in float32, and ``output_lse
    = log(a + b) + m`` (section 2.2 of Ye et al. 2025, arXiv:2501.01005). A part whose lse is +inf or -inf is empty: the
    other part is copied, whatever it contains. If both parts are empty, the prefix is copied and output_lse is -inf. An
    infinite element of a part whose weight float32 rounds to 0 gives NaN.

    Args:
        output: [num_tokens, num_heads, head_size], float32, float16 or bfloat16, written; may be `prefix_output`.
        prefix_output, suffix_output: the shape and dtype of output. All three may have any strides but the last.
        prefix_lse, suffix_lse: [num_heads, num_tokens] float32, natural log-sum-exp of the logits; any strides.
        output_lse: [num_heads, num_tokens] float32, written; any strides. Or None.
    """
    infinite = float("inf")
    p, s = (lse.where(~lse.isinf(), -infinite).T[..., None] for lse in (prefix_lse, suffix_lse))
    max_logit = torch.maximum(p, s)
    a, b = torch.exp(p - max_logit), torch.exp(s - max_logit)
    total = a + b
    merged = (prefix_output.float() * (a / total) + suffix_output.float() * (b / total)).to(output.dtype)
    only_prefix, only_suffix = (s == -infinite) & ~p.isnan(), (p == -infinite) & ~s.isnan()
    output.copy_(torch.where(only_prefix, prefix_output, torch.where(only_suffix, suffix_output, merged)))
    if output_lse is not None:
        lse = torch.where(max_logit == -infinite, max_logit, torch.log(total) + max_logit)
        output_lse.copy_(lse[..., 0].T)


@merge_attn_states.plan
def plan_merge_attn_states(
    output: TensorArg,
    prefix_output: TensorArg,
    prefix_lse: TensorArg,
    suffix_output: TensorArg,
    suffix_lse: TensorArg,
    output_lse: TensorArg | None,
) -> Launch:
    check.floating(output)
    if len(output.shape) != 3:
        raise output.error(f"expected shape (num_tokens, num_heads, head_size), got {output.shape}")
    num_tokens, num_heads, head_size = output.shape
    for arg in (output, prefix_output, suffix_output):
        check.like(arg, output)
        check.row_size(arg)
    for lse in (prefix_lse, suffix_lse, output_lse):
        check.dtype(lse, float32)
        if lse and lse.shape != (num_heads, num_tokens):
            raise lse.error(f"expected shape (num_heads={num_heads}, num_tokens={num_tokens}), got {lse.shape}")
    vec_size = check.vector_width(head_size, output, prefix_output, suffix_output)
    num_threads = 256
    block_rows = max(1, num_threads // max(1, head_size // vec_size))
    return _merge_attn_states(
        scalar_t=output.dtype,
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        VEC_SIZE=vec_size,
        HAS_LSE=output_lse is not None,
        NUM_THREADS=num_threads,
    ).launch(
        grid=-(-num_tokens * num_heads // block_rows) if head_size else 0,
        block=num_threads,
        num_tokens=num_tokens,
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
) -> tuple[Any, ...]:
    num_heads = 32
    output = make.empty(num_tokens, num_heads, head_size, dtype=dtype)
    prefix, suffix = (make.randn(num_tokens, num_heads, head_size, dtype=dtype) for _ in range(2))
    prefix_lse, suffix_lse = (make.randn(num_heads, num_tokens, dtype="float32", scale=2.0) for _ in range(2))
    output_lse = make.empty(num_heads, num_tokens, dtype="float32") if with_lse else None
    return output, prefix, prefix_lse, suffix, suffix_lse, output_lse
