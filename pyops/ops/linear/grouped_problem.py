"""A grouped GEMM, rows times the weights of their experts: the problem that its plan chooses a kernel by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ... import check, tuning
from ..._core.launch.kernel import Kernel
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import DType, float32, int32
from ..._core.tensors.tensor import TensorArg
from .._shared.packed_layouts import ColumnOrder
from .gemm_problem import SCALE_BLOCK, Epilogue, Operand

# {activation: order of gates and ups in the rows of a weight: 0 no gates, 1 all gates before all ups, 2 alternating}
ACTIVATIONS = {
    "none": 0,
    "silu": 1,
    "gelu": 1,
    "swigluoai": 2,
    "swiglustep": 1,
    "silu_no_mul": 0,
    "gelu_no_mul": 0,
    "relu2_no_mul": 0,
}
# Row tiles of an expert that run together for each column tile, so that the L2 cache holds the rows that they share.
GROUP = 16


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLists:
    """Rows sorted by experts, as `moe_align_block_size` writes them: arguments of the op, or outputs of a launch.

    Attributes:
        sorted_token_ids, expert_ids, num_tokens_post_pad: names and contents are those of `moe_align_block_size`.
        block_size: slots of a block.
        num_blocks: capacity of the lists, in blocks.
    """

    sorted_token_ids: TensorArg | Scratch
    expert_ids: TensorArg | Scratch
    num_tokens_post_pad: TensorArg | Scratch
    block_size: int
    num_blocks: int

    @classmethod
    def of(
        cls,
        sorted_token_ids: TensorArg,
        expert_ids: TensorArg,
        num_tokens_post_pad: TensorArg,
        block_size: int,
        name: str = "block_size",
        multiple: int = 8,
    ) -> ExpertLists:
        """The lists of the op's arguments; OpError for invalid ones."""
        for ids in (sorted_token_ids, expert_ids):
            check.sizes(ids, count=None)
            check.dtype(ids, int32)
            check.contiguous(ids)
        check.scalar(num_tokens_post_pad, int32)
        if not 1 <= block_size <= 2**20 or block_size % multiple:
            message = f"expected a multiple of {multiple} up to 2^20, got {block_size}"
            raise check.refuse(sorted_token_ids, name, message)
        num_blocks = min(expert_ids.numel, sorted_token_ids.numel // block_size)
        return cls(sorted_token_ids, expert_ids, num_tokens_post_pad, block_size, num_blocks)


@dataclass(frozen=True, slots=True, eq=False)
class GroupedProblem:
    """A grouped GEMM: names and formula are those of grouped.cuh.

    Attributes:
        out: [num_rows, N], constant row stride.
        a: [num_rows / top_k, K]; b: [experts * b_rows, K], of the same dtype.
        num_experts: experts; their rows of b are contiguous. k: elements of K.
        lists: the rows of each expert.
        topk_weights: a weight for each row of out, or None; a_scales, b_scales, bias: tensors or None.
        top_k: rows of out that share a row of a.
        activation: one of `ACTIVATIONS`.
        block_scaled: scales are block scales; the main loop applies them.
        column_order: the column order of the bias.
    """

    out: TensorArg
    a: Operand
    b: Operand
    num_experts: int
    k: int
    lists: ExpertLists
    topk_weights: TensorArg | None = None
    a_scales: TensorArg | None = None
    b_scales: TensorArg | None = None
    bias: TensorArg | None = None
    top_k: int = 1
    activation: str = "none"
    block_scaled: bool = False
    column_order: ColumnOrder = "natural"

    @property
    def device(self) -> Device:
        return self.out.device

    @property
    def dtype(self) -> DType:
        return self.a.dtype

    @property
    def num_rows(self) -> int:
        return self.out.shape[0]

    @property
    def n(self) -> int:
        """Columns of out."""
        return self.out.shape[1]

    @property
    def b_rows(self) -> int:
        """Rows of b of an expert."""
        return self.b.rows // max(1, self.num_experts)

    @property
    def gated(self) -> int:
        return ACTIVATIONS[self.activation]

    @property
    def vec_size(self) -> int:
        """Elements of one access to a and b."""
        return min(self.a.vec_size(self.k), self.b.vec_size(self.k))

    @property
    def out_is_aligned(self) -> bool:
        """Whether rows of out begin at multiples of 16 bytes."""
        stride = check.row_stride(self.out) * self.out.dtype.itemsize
        return self.out.alignment >= 16 and (tuning.pinned(self.num_rows) == 1 or stride % 16 == 0)

    @property
    def has_tiles(self) -> bool:
        """Whether the epilogue exists in CUDA Tile C++ (grouped_gemm_sm100.cu)."""
        return self.column_order == "natural" and not self.activation.startswith("gelu")

    @property
    def empty(self) -> bool:
        return 0 in (self.num_rows, self.n, self.num_experts, self.lists.num_blocks)

    @property
    def rounded_rows(self) -> int:
        """Rows as kernels are chosen by."""
        return rounded(self.num_rows)

    def bucket(self) -> str:
        words = [
            f"rows={self.rounded_rows} top_k={self.top_k}",
            f"weights={self.num_experts}x{self.b_rows}x{self.k}",
            f"{self.dtype.name}-{self.out.dtype.name}",
            f"block_size={self.lists.block_size}",
            f"vec_size={self.vec_size}",
            *(["blocks"] if self.block_scaled else []),
            self.activation,
        ]
        return " ".join(words)

    def constants(self) -> dict[str, Any]:
        """Constants of every kernel that includes grouped.cuh."""
        epilogue = Epilogue(
            self.out,
            self.a_scales,
            self.b_scales,
            bias=self.bias,
            block_scaled=self.block_scaled,
            column_order=self.column_order,
            of_experts=True,
        )
        return {
            "scalar_t": self.dtype,
            **epilogue.constants(),
            "ROUTED": self.topk_weights is not None,
            "ACTIVATION": f"expert_{self.activation}",
            "GATED": self.gated,
            "SCALE_BLOCK": SCALE_BLOCK if self.block_scaled else 0,
        }

    def kernel(self, kernel: Kernel, **others: TensorArg | Scratch | None) -> Kernel:
        """`kernel` with its pointers fed by the op's tensors and by `others`, or by names that no tensor of an op
        has."""
        tensors = {**self._tensors(), **others}
        fed = {name: one.name if isinstance(one, TensorArg) else f"no_{name}" for name, one in tensors.items()}
        return kernel.renamed(**fed)

    def arguments(self, kernel: Kernel, tile_m: int, **others: TensorArg | Scratch | None) -> dict[str, Any]:
        """The arguments of `kernel` except the op's tensors: sizes, strides and steps in elements, and other
        pointers."""
        steps = dict.fromkeys(("a_scale_step", "a_scale_block_step", "b_scale_expert_step"), 0)
        steps |= dict.fromkeys(("b_scale_step", "b_scale_block_step"), 0)
        if self.block_scaled:
            assert self.a_scales is not None
            assert self.b_scales is not None
            steps["a_scale_step"], steps["a_scale_block_step"] = self.a_scales.strides
            names = "b_scale_expert_step", "b_scale_step", "b_scale_block_step"
            steps |= dict(zip(names, self.b_scales.strides, strict=True))
        else:
            steps["a_scale_step"] = int(self.a_scales is not None and self.a_scales.numel > 1)
            if self.b_scales is not None:
                of_expert = self.b_scales.numel // max(1, self.num_experts)
                steps["b_scale_expert_step"] = of_expert
                steps["b_scale_step"] = int(of_expert > 1)
        found = {
            "num_rows": self.num_rows,
            "n": self.n,
            "k": self.k,
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "block_tiles": self.lists.block_size // tile_m,
            "max_tiles": self.max_tiles(tile_m),
            "a_stride": self.a.stride,
            "b_stride": self.b.stride,
            "out_stride": check.row_stride(self.out),
            **steps,
        }
        tensors = {**self._tensors(), **others}
        pointers = {f"no_{name}": one or 0 for name, one in tensors.items() if not isinstance(one, TensorArg)}
        return kernel.taken(found | pointers)

    def max_tiles(self, tile_m: int) -> int:
        """Capacity of the lists, in row tiles."""
        return self.lists.num_blocks * (self.lists.block_size // tile_m)

    def _tensors(self) -> dict[str, TensorArg | Scratch | None]:
        """Pointers of the kernels by parameter."""
        return {
            "out": self.out,
            "a": self.a.source,
            "b": self.b.source,
            "sorted_token_ids": self.lists.sorted_token_ids,
            "expert_ids": self.lists.expert_ids,
            "num_tokens_post_pad": self.lists.num_tokens_post_pad,
            "topk_weights": self.topk_weights,
            "a_scales": self.a_scales,
            "b_scales": self.b_scales,
            "bias": self.bias,
        }


def rounded(rows: int) -> int:
    """Rows rounded up, to a power of two up to 16, then to a sixteenth of one: few of them need another choice."""
    power = tuning.power_of_two(rows)
    unit = power if power <= 16 else power // 16
    return -(-rows // unit) * unit


def check_scales(
    a: TensorArg, sizes: tuple[int, int, int], a_scales: TensorArg | None, b_scales: TensorArg | None
) -> bool:
    """Check the scales of a [rows, K] and of weights [experts, b_rows, K]; returns whether they are block scales."""
    rows, (experts, b_rows, k) = a.shape[0], sizes
    columns = -(-k // SCALE_BLOCK)
    of_experts = (experts,), (experts, 1), (experts, 1, 1), (experts, b_rows), (experts, b_rows, 1)
    plain_a = a_scales is None or a_scales.numel in (1, rows)
    plain_b = b_scales is None or b_scales.shape in of_experts
    for scales, arg, plain, blocks in (
        (a_scales, a, f"1 or {rows} elements", (rows, columns)),
        (b_scales, a, f"shape ({experts},) or ({experts}, {b_rows})", (experts, -(-b_rows // SCALE_BLOCK), columns)),
    ):
        if scales is not None:
            check.dtype(scales, float32)
        if plain_a and plain_b:
            check.contiguous(scales) if scales is not None else None
        elif scales is None:
            raise arg.error("expected scales of blocks for both operands, or for none")
        elif scales.shape != blocks:
            raise scales.error(f"expected {plain}, or {blocks} for blocks, got shape {scales.shape}")
    return not (plain_a and plain_b)
