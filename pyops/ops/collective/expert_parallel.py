"""Expert parallelism: dispatch of tokens to the GPUs of their experts, and the combine of the results."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._core.errors import OpError
from ..._core.launch.kernel import Kernel
from ..._core.system.lazy import torch
from ..._core.tensors import dtypes
from ...host import ranks
from .communicator import MAX_RANKS, ROW_BYTES, VEC_BYTES, Communicator, naming_lost_ranks, read_lost, spread, unroll
from .custom_all_reduce import keep
from .shared_memory import SIGNAL_BYTES, GroupMemory, exchanged

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DispatchedRows", "ExpertParallel"]

_dispatch = Kernel("collective/expert_dispatch.cu")
_combine = Kernel("collective/expert_combine.cu")
_GROUP = 128  # elements of a row that share one scale: GROUP_SIZE of expert_rows.cuh


class DispatchedRows(NamedTuple):
    """What one rank receives: a row for each token of every rank. The next dispatch of any rank overwrites the memory.

    Row ``t * world_size + r`` is for token t of rank r, where t < `most_tokens`, the argument of `dispatch`. If this
    rank has none of the token's experts, or rank r has no token t, all ids of the row are -1 and its `rows` and
    `scales` are undefined.

    Attributes:
        rows: [most_tokens * world_size, hidden_size] of the `quant_dtype` of `ExpertParallel`, or of its `dtype`
            without one; constant row stride. An fp8 row is at the start of the memory of its row in `results`.
        topk_ids: [most_tokens * world_size, top_k] int32: local indices of this rank's experts, -1 for all others.
        topk_weights: [most_tokens * world_size, top_k] float32; 0 where the id is -1.
        scales: [most_tokens * world_size, hidden_size / 128] float32, for fp8 rows; None for other rows.
        results: [most_tokens * world_size, hidden_size] of `dtype`: memory into which the caller writes the rows that
            `combine` takes. It overlaps `rows`, so write it only after `rows` has been read.
    """

    rows: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    scales: Tensor | None
    results: Tensor


class ExpertParallel:
    """Experts divided among the GPUs of a node: `dispatch` the tokens, run the local experts, `combine` the results.

    Rank r has the experts ``r * num_experts / world_size`` to ``(r + 1) * num_experts / world_size - 1``. A token is
    sent once to each rank that has at least one of its experts. Every rank must make every call, in the same order; a
    `dispatch` is followed by a `combine`. Both may be captured into CUDA graphs. A kernel that has waited 30 seconds
    for a rank ends with a trap, as in `all_reduce`, and the next call raises a RankError.

    ::

        parallel = ExpertParallel(group, "cuda:0", num_experts=256, max_tokens=128, hidden_size=7168, top_k=8)
        sent = parallel.dispatch(x, topk_ids, topk_weights)
        fused_experts(sent.rows, w1, w2, sent.topk_weights, sent.topk_ids, inplace=True)
        out = parallel.combine(sent.results)

    `parallel_fused_experts` does these three steps, also with fp8 rows.

    Args:
        group: as in `CustomAllReduce`. device: the GPU of this process, with peer access to every other.
        num_experts: number of experts on all ranks; a multiple of the number of ranks.
        max_tokens: most tokens of one rank in a call.
        hidden_size: elements of a row; the bytes of a row must be a multiple of 16.
        top_k: experts of a token.
        dtype: dtype of the tokens and of the results: float32, float16 or bfloat16; None for bfloat16.
        quant_dtype: torch.float8_e4m3fn: `dispatch` quantizes rows as `per_token_group_quant_fp8` does, in groups of
            128, and sends fp8. None: it sends rows of `dtype`.

    Attributes:
        experts: the experts of this rank, a range of indices into all experts.

    Raises:
        OpError: for sizes that the kernels do not support. `dispatch` and `combine` raise it for wrong arguments,
            before any launch.
    """

    def __init__(
        self,
        group: Any,
        device: Any,
        num_experts: int,
        max_tokens: int,
        hidden_size: int,
        top_k: int,
        dtype: Any = None,
        quant_dtype: Any = None,
    ) -> None:
        self.group, self.device, self.max_tokens = group, torch.device(device), max_tokens
        self.hidden_size, self.top_k, self.dtype = hidden_size, top_k, dtype or torch.bfloat16
        self.quant_dtype, self.world_size = quant_dtype, len(exchanged(None, group))
        sizes = {"num_experts": num_experts, "max_tokens": max_tokens, "hidden_size": hidden_size, "top_k": top_k}
        _check_sizes(self.world_size, sizes, self.dtype, quant_dtype)
        self._map()
        first, count = self._memory.rank * num_experts // self.world_size, num_experts // self.world_size
        self.experts = range(first, first + count)
        self._constants = {
            "scalar_t": dtypes.of(self.dtype),
            "HIDDEN_SIZE": hidden_size,
            "VEC_SIZE": VEC_BYTES // self.dtype.itemsize,
            "TOP_K": top_k,
            "NUM_EXPERTS": num_experts,
            "UNROLL": unroll(self.world_size),
            "code_t": dtypes.float8_e4m3fn,  # used only with CODES
        }
        self._sent: tuple[Tensor, int] | None = None  # topk_ids and most_tokens of a dispatch not yet combined

    def _map(self) -> None:
        """Allocates signals, rows, ids, weights and scales as one shared allocation."""
        num_rows = self.max_tokens * self.world_size
        groups = 0 if self.quant_dtype is None else self.hidden_size // _GROUP
        columns = {"rows": self.hidden_size, "ids": self.top_k, "weights": self.top_k, "scales": groups}
        kinds = {"rows": self.dtype, "ids": torch.int32, "weights": torch.float32, "scales": torch.float32}
        offsets, end = {}, SIGNAL_BYTES
        for name, count in columns.items():
            offsets[name] = end
            end += -(-num_rows * count * kinds[name].itemsize // VEC_BYTES) * VEC_BYTES
        self._offsets = {f"{name}_offset": offsets[name] for name in ("ids", "weights", "scales")}
        on_gpu = self.device.type == "cuda"
        with torch.cuda.device(self.device) if on_gpu else nullcontext():
            memory = self._memory = GroupMemory(self.group, end)
            # The host backend is told that other ranks access the memory before and after this rank's kernels.
            keep(memory.addresses[memory.rank], early=True)
            table = torch.zeros(ROW_BYTES, dtype=torch.uint8, device=self.device)  # the addresses of all signals
            self._ranks = Communicator(tuple(memory.addresses), table, memory.rank, True)
            own = memory.own(self.device)
            self._rows, self._ids, self._weights, self._scales = (
                own[offsets[name] :][: num_rows * count * kinds[name].itemsize].view(kinds[name]).view(num_rows, count)
                for name, count in columns.items()
            )
        exchanged(None, self.group)  # no rank dispatches before every rank has written its table

    def dispatch(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, most_tokens: int | None = None
    ) -> DispatchedRows:
        """Send every token to the ranks of its experts, and wait for the tokens of the other ranks.

        Args:
            x: [num_tokens, hidden_size], contiguous; num_tokens may be 0, and differ among ranks.
            topk_ids: [num_tokens, top_k] int32 or int64, contiguous; ids out of range are dropped.
            topk_weights: [num_tokens, top_k] float32, contiguous.
            most_tokens: an upper bound of num_tokens on any rank, the same on all ranks: the returned tensors have rows
                for this many tokens of each rank. None for `max_tokens`.
        """
        if self._sent is not None:
            raise OpError("dispatch", "x", "expected a combine of what was dispatched before")
        most = self.max_tokens if most_tokens is None else most_tokens
        if not 1 <= most <= self.max_tokens:
            raise OpError("dispatch", "most_tokens", f"expected 1 to {self.max_tokens}, got {most}")
        if x.dim() != 2 or x.shape[0] > most:
            raise OpError("dispatch", "x", f"expected at most {most} rows, got shape {list(x.shape)}")
        _check_rows("dispatch", "x", x, (x.shape[0], self.hidden_size), self._rows)
        _check_contiguous("dispatch", "x", x)
        _check_choices(x, topk_ids, topk_weights, self.top_k)
        received = self.send(x, topk_ids, topk_weights, most)
        self._sent = topk_ids, most
        return received

    def combine(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """For each token of this rank, the sum of the rows that the ranks of its experts computed for it.

        The sum is float32, in the order of ranks, and rounded once. `combine` reads the topk_ids of the last `dispatch`
        again, so they must not have been modified since.

        Args:
            rows: [most_tokens * world_size, hidden_size] of `dtype`: for each received row, the weighted sum over this
                rank's experts. Either the `results` of `dispatch`, or another tensor, which is copied there.
            out: [num_tokens, hidden_size], contiguous, written; None for a new tensor.

        Returns:
            `out`; zeros for a token without an expert.
        """
        if self._sent is None:
            raise OpError("combine", "rows", "expected a dispatch before")
        topk_ids, most = self._sent
        own, shape = self._rows[: most * self.world_size], (topk_ids.shape[0], self.hidden_size)
        _check_rows("combine", "rows", rows, tuple(own.shape), own)
        if out is None:
            out = torch.empty(shape, dtype=self.dtype, device=self.device)
        _check_rows("combine", "out", out, shape, own)
        _check_contiguous("combine", "out", out)
        if rows.data_ptr() != own.data_ptr():
            own.copy_(rows)
        self.fetch(out, topk_ids, most)
        self._sent = None
        return out

    def send(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, most_tokens: int) -> DispatchedRows:
        """`dispatch` without its checks: neither the arguments nor that a `combine` came before."""
        tensors = {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights}
        fixed = self._offsets | {"num_tokens": x.shape[0], "most_tokens": most_tokens}
        self._launch("dispatch", _dispatch, most_tokens, fixed, tensors, self.quant_dtype is not None)
        received = slice(0, most_tokens * self.world_size)
        ids, weights, results = self._ids[received], self._weights[received], self._rows[received]
        if self.quant_dtype is None:
            return DispatchedRows(results, ids, weights, None, results)
        quantized = results.view(self.quant_dtype)[:, : self.hidden_size]  # fp8 at the start of each result row
        return DispatchedRows(quantized, ids, weights, self._scales[received], results)

    def fetch(self, out: Tensor, topk_ids: Tensor, most_tokens: int) -> None:
        """`combine` of the rows that were written to `results`, without its checks."""
        tensors = {"out": out, "topk_ids": topk_ids}
        self._launch("combine", _combine, most_tokens, {"num_tokens": out.shape[0]}, tensors)

    def _launch(
        self,
        op: str,
        kernel: Kernel,
        most_tokens: int,
        fixed: dict[str, Any],
        tensors: dict[str, Tensor],
        quantizes: bool = False,
    ) -> None:
        constants = self._constants | {"id_t": dtypes.of(tensors["topk_ids"].dtype), "CODES": quantizes}
        geometry = spread(most_tokens * self.hidden_size // self._constants["VEC_SIZE"])
        self._ranks.launch(op, kernel, constants, *geometry, fixed, None, **tensors)

    def naming(self, what: str) -> AbstractContextManager[None]:
        """Within the context, a device error caused by ranks that did not arrive becomes a `RankError` naming them."""
        return naming_lost_ranks(what, self._ranks.lost)

    def lost_ranks(self) -> dict[int, tuple[int, int]]:
        """As the function `lost_ranks`: the ranks that a kernel gave up waiting for."""
        return read_lost(self._ranks.lost)

    def close(self) -> None:
        """Free the memory of the tensors that `dispatch` returned. Every rank must call it, after all kernels have
        ended."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        exchanged(None, self.group)
        self._memory.close()


def _check_sizes(world_size: int, sizes: dict[str, int], dtype: Any, quant_dtype: Any) -> None:
    def refuse(name: str, expected: str, got: Any) -> OpError:
        return OpError("ExpertParallel", name, f"expected {expected}, got {got}")

    for name, value in sizes.items():
        if not 1 <= value < 1 << 31:
            raise refuse(name, "1 or more", value)
    num_experts, max_tokens, hidden_size, top_k = sizes.values()
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise refuse("dtype", "float32, float16 or bfloat16", dtype)
    if quant_dtype is not None and (quant_dtype != torch.float8_e4m3fn or hidden_size % _GROUP):
        got = f"{quant_dtype} and {hidden_size}"
        raise refuse("quant_dtype", f"None, or float8_e4m3fn and a hidden_size that {_GROUP} divides", got)
    if hidden_size * dtype.itemsize % VEC_BYTES:
        raise refuse("hidden_size", f"rows that {VEC_BYTES} bytes divide", f"{hidden_size} of {dtype}")
    if not 1 <= world_size <= MAX_RANKS or (world_size % 2 and ranks.here() is None):
        raise refuse("group", "2, 4, 6 or 8 ranks", world_size)
    if max_tokens * world_size * max(hidden_size, top_k) >= 1 << 31:
        raise refuse("max_tokens", "fewer than 2^31 elements", f"{max_tokens} tokens of {world_size} ranks")
    if num_experts % world_size:
        raise refuse("num_experts", f"a multiple of {world_size}", num_experts)


def _check_choices(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, top_k: int) -> None:
    shape = x.shape[0], top_k
    for name, tensor, allowed in (
        ("topk_ids", topk_ids, (torch.int32, torch.int64)),
        ("topk_weights", topk_weights, (torch.float32,)),
    ):
        is_usable = tensor.dtype in allowed and tensor.is_contiguous() and tensor.device == x.device
        if not is_usable or tuple(tensor.shape) != shape:
            expected = f"expected contiguous {' or '.join(map(str, allowed))} {list(shape)} on {x.device}"
            got = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            raise OpError("dispatch", name, f"{expected}, got {got}")


def _check_rows(op: str, name: str, tensor: Tensor, shape: tuple[int, int], like: Tensor) -> None:
    if (tuple(tensor.shape), tensor.dtype, tensor.device) != (shape, like.dtype, like.device):
        expected, got = f"{like.dtype} {list(shape)} on {like.device}", f"{tensor.dtype} {list(tensor.shape)}"
        raise OpError(op, name, f"expected {expected}, got {got} on {tensor.device}")


def _check_contiguous(op: str, name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous() or tensor.data_ptr() % VEC_BYTES:
        got = f"strides {tensor.stride()} at {tensor.data_ptr():#x}"
        raise OpError(op, name, f"expected a contiguous tensor at an address that {VEC_BYTES} divides, got {got}")
