"""RMS norms of rows that are sharded over ranks: MiniMax's norms of queries and keys. Functions have vLLM's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._core.errors import OpError
from ..._core.launch.kernel import Kernel
from ..._core.launch.launch import Bound
from ..._core.system import driver
from ..._core.system.lazy import torch
from ..._core.tensors import dtypes
from .communicator import MAX_BLOCKS, MAX_RANKS, VEC_BYTES, launch_as_rank, lost_record
from .shared_memory import SIGNAL_BYTES

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["minimax_allreduce_rms", "minimax_allreduce_rms_qk"]

_kernel = Kernel("collective/allreduce_rms.cu")
_bound: dict[Any, Bound] = {}
_lost: dict[Any, Tensor] = {}  # {(device, rank): lost_record}
_MAX_THREADS = 512  # most threads of a block


def minimax_allreduce_rms(
    input: Tensor, norm_weight: Tensor, workspace: Tensor, rank: int, nranks: int, eps: float
) -> Tensor:
    """``input / sqrt(mean of squares over the columns of all ranks + eps) * norm_weight``, a new tensor.

    Args:
        input: [num_tokens, hidden_size / nranks], this rank's columns; float32, float16 or bfloat16.
        norm_weight: [hidden_size / nranks], of the same dtype.
        workspace: int64 on the device; elements ``2 nranks`` to ``3 nranks - 1`` are the addresses of each rank's
            memory, as in vLLM's ``LamportWorkspace``: 1536 bytes plus 16 per token, initialised with equal words. The
            memory must be used by these two functions only.
        rank, nranks: this rank of 2, 4 or 8.
        eps: added to the mean.
    """
    op, size = "minimax_allreduce_rms", input.shape[-1]
    out = torch.empty_like(input, memory_format=torch.contiguous_format)
    _launch(op, input, (norm_weight, norm_weight[:0]), (out, out[:0]), (size, 0), workspace, rank, nranks, eps)
    return out


def minimax_allreduce_rms_qk(
    qkv: Tensor,
    norm_weight_q: Tensor,
    norm_weight_k: Tensor,
    workspace: Tensor,
    q_size: int,
    kv_size: int,
    rank: int,
    nranks: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`minimax_allreduce_rms` of the first `q_size` columns of `qkv`, and of the next `kv_size`: two new tensors.

    Args:
        qkv: [num_tokens, q_size + kv_size or more]; the elements of a row are contiguous.
        norm_weight_q: [q_size].
        norm_weight_k: [kv_size].
        q_size, kv_size: columns of the two tensors.
        workspace, rank, nranks, eps: as in `minimax_allreduce_rms`.
    """
    outs = qkv.new_empty(qkv.shape[0], q_size), qkv.new_empty(qkv.shape[0], kv_size)
    weights = norm_weight_q, norm_weight_k
    _launch("minimax_allreduce_rms_qk", qkv, weights, outs, (q_size, kv_size), workspace, rank, nranks, eps)
    return outs


def _launch(
    op: str,
    input: Tensor,
    weights: tuple[Tensor, Tensor],
    outs: tuple[Tensor, Tensor],
    sizes: tuple[int, int],
    workspace: Tensor,
    rank: int,
    nranks: int,
    eps: float,
) -> None:
    name = "input" if op == "minimax_allreduce_rms" else "qkv"
    if input.dtype not in (torch.float32, torch.float16, torch.bfloat16) or input.dim() != 2 or input.stride(-1) != 1:
        raise OpError(op, name, f"expected rows of floats, got {input.dtype} {list(input.shape)}")
    vec_size = VEC_BYTES // input.itemsize
    if any(size % vec_size for size in (*sizes, input.stride(0))) or input.data_ptr() % VEC_BYTES:
        raise OpError(op, name, f"expected rows and parts that {VEC_BYTES} bytes divide, got {sizes}")
    if sum(sizes) > input.shape[1] or sizes[0] < 1 or sizes[1] < 0:
        raise OpError(op, name, f"expected {sum(sizes)} columns or more, got {input.shape[1]}")
    for weight, size in zip(weights, sizes, strict=True):
        if weight.shape != (size,) or weight.dtype != input.dtype or (size and weight.data_ptr() % VEC_BYTES):
            raise OpError(op, "norm_weight", f"expected aligned {input.dtype} [{size}], got {list(weight.shape)}")
    if not 1 < nranks <= MAX_RANKS or not 0 <= rank < nranks:
        raise OpError(op, "rank", f"expected a rank of 2 to {MAX_RANKS}, got {rank} of {nranks}")
    if workspace.dtype != torch.int64 or workspace.numel() < 3 * nranks or workspace.device != input.device:
        got = f"{workspace.dtype} [{workspace.numel()}] on {workspace.device}"
        raise OpError(op, "workspace", f"expected int64 [{3 * nranks} or more] on {input.device}, got {got}")
    if not input.shape[0]:
        return
    needed = -(-max(sizes) // vec_size // 64) * 64
    num_threads = min(_MAX_THREADS, needed)
    specialisation = _kernel(
        scalar_t=dtypes.of(input.dtype),
        WORLD_SIZE=nranks,
        SIGNAL_BYTES=SIGNAL_BYTES,
        NUM_THREADS=num_threads,
        VEC_SIZE=vec_size,
        Q_SIZE=sizes[0],
        K_SIZE=sizes[1],
    )
    fixed = {"num_rows": input.shape[0], "input_stride": input.stride(0), "rank": rank, "epsilon": float(eps)}
    tensors = dict(zip(("q_weight", "k_weight", "q_out", "k_out"), (*weights, *outs), strict=True)) | {"input": input}
    tables = {"signals": workspace.data_ptr() + 8 * 2 * nranks}
    if (key := (input.device, rank)) not in _lost:
        with driver.outside_capture(op, "allocate memory of the host"):
            _lost[key] = lost_record(input.device)
    launch_as_rank(op, specialisation, MAX_BLOCKS, num_threads, fixed, tables, tensors, _lost[key], _bound)
