"""Multi-head latent attention: the two parts of query heads in one tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.system.lazy import torch
from ..._core.tensors.tensor import TensorArg

if TYPE_CHECKING:
    from torch import Tensor

_concat_mla_q = Kernel("cache/concat_mla_q.cu")
# Vectors per thread, if the blocks then still fill the device (as in `_geometry`), and threads of a block.
_BATCH, _NUM_THREADS = 4, 256


@op(out="q_out", ulps=0)
def concat_mla_q(ql_nope: Tensor, q_pe: Tensor, q_out: Tensor) -> None:
    """Concatenate the two parts of query heads: ``q_out[t, h] = [ql_nope[t, h], q_pe[t, h]]``, bits copied.

    This is the layout of queries in the decode of multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434).

    Args:
        ql_nope: [num_tokens, num_heads, latent_size], float32, float16 or bfloat16; any strides but the last.
        q_pe: [num_tokens, num_heads, rope_size] of the same dtype; any strides but the last.
        q_out: [num_tokens, num_heads, latent_size + rope_size] of the same dtype, written; any strides but the last.
    """
    q_out.copy_(torch.cat((ql_nope, q_pe), -1))


@concat_mla_q.result
def result_concat_mla_q(ql_nope: TensorArg, q_pe: TensorArg) -> Result:
    check.sizes(ql_nope, num_tokens=None, num_heads=None, latent_size=None)
    check.sizes(q_pe, num_tokens=None, num_heads=None, rope_size=None)
    return Result((*ql_nope.shape[:2], ql_nope.shape[2] + q_pe.shape[2]), ql_nope.dtype)


@concat_mla_q.plan
def plan_concat_mla_q(ql_nope: TensorArg, q_pe: TensorArg, q_out: TensorArg) -> Launch:
    check.floating(ql_nope)
    check.sizes(ql_nope, num_tokens=None, num_heads=None, latent_size=None)
    num_tokens, num_heads, nope_size = ql_nope.shape
    check.sizes(q_pe, num_tokens=num_tokens, num_heads=num_heads, rope_size=None)
    rope_size = q_pe.shape[2]
    whole_size = {"latent_size + rope_size": nope_size + rope_size}
    check.sizes(q_out, num_tokens=num_tokens, num_heads=num_heads, **whole_size)
    for arg in (ql_nope, q_pe, q_out):
        check.dtype(arg, ql_nope.dtype)
        check.row_size(arg)
    vec_size = check.vector_width(nope_size | rope_size, ql_nope, q_pe, q_out)
    num_vecs = q_out.numel // vec_size
    batch = _BATCH if num_vecs >= _BATCH * _NUM_THREADS * q_out.device.num_sms else 1
    return _concat_mla_q(
        scalar_t=ql_nope.dtype,
        NUM_HEADS=max(1, num_heads),
        NOPE_SIZE=nope_size,
        ROPE_SIZE=rope_size or (0 if nope_size else vec_size),
        VEC_SIZE=vec_size,
        BATCH=batch,
        NUM_THREADS=_NUM_THREADS,
    ).launch(
        grid=-(-num_vecs // (batch * _NUM_THREADS)),
        block=_NUM_THREADS,
        num_vecs=num_vecs,
        nope_stride=ql_nope.strides[0],
        nope_head_stride=ql_nope.strides[1],
        pe_stride=q_pe.strides[0],
        pe_head_stride=q_pe.strides[1],
        out_stride=q_out.strides[0],
        out_head_stride=q_out.strides[1],
    )


@concat_mla_q.example
def example_concat_mla_q(
    make: Any, *, num_tokens: int = 16, num_heads: int = 16, dtype: str = "bfloat16"
) -> tuple[Any, ...]:
    return tuple(
        getattr(make, kind)(num_tokens, num_heads, size, dtype=dtype)
        for kind, size in (("randn", 512), ("randn", 64), ("empty", 576))
    )
