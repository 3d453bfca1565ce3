"""A grouped product, rows times the weights of their experts: the problem that its plan chooses a kernel by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..._core import check, tuning
from ..._core.device import Device
from ..._core.dtypes import DType, float32, int32
from ..._core.tensor import TensorArg
from .gemm_problem import SCALE_BLOCK

# {activation: how gates and ups lie in the rows of a weight: 0 no gates, 1 gates and then ups, 2 by turns}
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


@dataclass(frozen=True, slots=True, eq=False)
class GroupedProblem:
    """Names and formula are those of grouped.cuh.

    Attributes:
        out: [num_rows, N]; a: [num_rows / top_k, K]; b: [experts, N or 2 N, K]: rows of one stride each.
        sorted_token_ids, expert_ids: the rows of blocks, and the expert of each block.
        topk_weights: a weight for each row of out, or None; a_scales, b_scales, bias: tensors or None.
        top_k: rows of out that share a row of a.
        block_size: places of a block.
        activation: one of `ACTIVATIONS`.
        block_scaled: scales are those of blocks, applied while the kernel sums.
    """

    out: TensorArg
    a: TensorArg
    b: TensorArg
    sorted_token_ids: TensorArg
    expert_ids: TensorArg
    topk_weights: TensorArg | None
    a_scales: TensorArg | None
    b_scales: TensorArg | None
    bias: TensorArg | None
    top_k: int
    block_size: int
    activation: str
    block_scaled: bool

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
    def num_experts(self) -> int:
        return self.b.shape[0]

    @property
    def n(self) -> int:
        """Columns of out."""
        return self.out.shape[1]

    @property
    def k(self) -> int:
        return self.a.shape[1]

    @property
    def gated(self) -> int:
        return ACTIVATIONS[self.activation]

    @property
    def vec_size(self) -> int:
        """Elements of one access to a and b."""
        return check.vector_width(self.k, self.a, self.b)

    @property
    def out_is_aligned(self) -> bool:
        """Whether rows of out begin at multiples of 16 bytes."""
        stride = check.row_stride(self.out) * self.out.dtype.itemsize
        return self.out.alignment >= 16 and (self.num_rows == 1 or stride % 16 == 0)

    @property
    def empty(self) -> bool:
        return 0 in (self.num_rows, self.n, self.num_experts, self.max_places)

    @property
    def max_places(self) -> int:
        """Places for which the lists have room."""
        blocks = min(self.expert_ids.numel, self.sorted_token_ids.numel // self.block_size)
        return blocks * self.block_size

    @property
    def chosen_experts(self) -> int:
        """Experts that rows choose which choose at random."""
        experts = self.num_experts
        return max(1, round(experts * (1.0 - (1.0 - 1.0 / experts) ** tuning.power_of_two(self.num_rows))))

    @property
    def rows_of_expert(self) -> int:
        """Rows of an expert that is chosen."""
        return -(-tuning.power_of_two(self.num_rows) // self.chosen_experts)

    def row_tiles(self, tile_m: int) -> int:
        """Tiles of rows that are likely."""
        return self.chosen_experts * -(-self.rows_of_expert // tile_m)

    def bucket(self) -> str:
        words = [
            f"rows={tuning.power_of_two(self.num_rows)}",
            f"weights={self.num_experts}x{self.b.shape[1]}x{self.k}",
            f"{self.dtype.name}-{self.out.dtype.name}",
            f"block_size={self.block_size}",
            f"vec_size={self.vec_size}",
            *(["blocks"] if self.block_scaled else []),
            self.activation,
        ]
        return " ".join(words)

    def constants(self) -> dict[str, Any]:
        """Constants of every kernel that includes grouped.cuh."""
        return {
            "scalar_t": self.dtype,
            "out_t": self.out.dtype,
            "A_SCALES": self.a_scales is not None and not self.block_scaled,
            "B_SCALES": self.b_scales is not None and not self.block_scaled,
            "BIAS": int(self.bias is not None),
            "ROUTED": self.topk_weights is not None,
            "ACTIVATION": f"expert_{self.activation}",
            "GATED": self.gated,
            "SCALE_BLOCK": SCALE_BLOCK if self.block_scaled else 0,
        }

    def arguments(self, tile_m: int) -> dict[str, int]:
        """Sizes, and strides and steps in elements."""
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
        return {
            "num_rows": self.num_rows,
            "n": self.n,
            "k": self.k,
            "num_experts": self.num_experts,
            "block_tiles": self.block_size // tile_m,
            "max_tiles": self.max_places // tile_m,
            "a_stride": check.row_stride(self.a),
            "out_stride": check.row_stride(self.out),
            **steps,
        }


def check_scales(a: TensorArg, b: TensorArg, a_scales: TensorArg | None, b_scales: TensorArg | None) -> bool:
    """Check the scales of a grouped product; returns whether they are those of blocks."""
    for scales in (a_scales, b_scales):
        check.dtype(scales, float32) if scales is not None else None
    rows, experts, b_rows, k = a.shape[0], *b.shape
    columns = -(-k // SCALE_BLOCK)
    blocks = (rows, columns), (experts, -(-b_rows // SCALE_BLOCK), columns)
    plain_a = a_scales is None or a_scales.numel in (1, rows)
    plain_b = b_scales is None or b_scales.shape in (
        (experts,), (experts, 1), (experts, 1, 1), (experts, b_rows), (experts, b_rows, 1)
    )  # fmt: skip
    if plain_a and plain_b:
        for scales in (a_scales, b_scales):
            check.contiguous(scales) if scales is not None else None
        return False
    for scales, arg, shape, plain in (
        (a_scales, a, blocks[0], f"1 or {rows} elements"),
        (b_scales, b, blocks[1], f"shape ({experts},) or ({experts}, {b_rows})"),
    ):
        if scales is None:
            raise arg.error("expected scales of blocks for both operands, or for none")
        if scales.shape != shape:
            raise scales.error(f"expected {plain}, or {shape} for blocks, got shape {scales.shape}")
    return True


def check_lists(
    sorted_token_ids: TensorArg, expert_ids: TensorArg, num_tokens_post_pad: TensorArg, block_size: int
) -> None:
    """Check the lists that sort rows by experts."""
    for ids in (sorted_token_ids, expert_ids):
        check.sizes(ids, count=None)
        check.dtype(ids, int32)
        check.contiguous(ids)
    check.scalar(num_tokens_post_pad, int32)
    if not 1 <= block_size <= 2**20 or block_size % 16:
        raise check.refuse(sorted_token_ids, "block_size", f"expected a multiple of 16 up to 2^20, got {block_size}")
