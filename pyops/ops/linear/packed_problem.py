"""A GEMM with a packed quantized weight: the problem that `packed_plan` chooses kernels by.

``out = epilogue(a' @ w)`` for a weight w [K, N] with quants, zero points and scales in the layouts of checkpoints (the
layouts and orders are those of `_shared/packed_layouts.py`), and the activations a', with permuted columns if the
weight's rows are permuted:

    w[k, n] = scale * (quant[k, n] - zero)           which a kernel may round once, to `PackedProblem.compute_dtype`
    scale, zero: of group g(k), column n
    g(k) = k // group_size, or g_idx[k]
    a'[m, k] = a[m, k], or a[m, perm[k]]

Without `scales`, w is the exact difference quant - zero, and the epilogue may apply a per-column scale. A row of w is 0
if its group index is out of range; a column of a' is 0 if its index is out of range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ... import tuning
from ..._core.launch.kernel import Kernel
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from ..._core.tensors.dtypes import DType
from ..._core.tensors.tensor import TensorArg
from .._shared.packed_layouts import LAYOUTS, ColumnOrder, Layout, LayoutName, ZeroLayout
from .._shared.scalar_type import ScalarType
from .gemm_problem import Epilogue, Operand
from .grouped_problem import ExpertLists

# The format of a scale: a 16-bit float; the upper bits of a float16 without its sign (Marlin's NVFP4); the exponent of
# a power of two; an integer in the bits of a 16-bit float (Marlin's int8 activations); a lookup table with the products
# of an e4m3 scale and -8 ... -1, rounded to e4m3, as all products with quants are (W4A8).
ScaleKind = Literal["float", "e5m3", "e8m0", "int16", "products"]
# The format of zero points: none; quants in words; floats in the order of the scales; floats that are added to quant *
# scale.
ZeroKind = Literal["none", "codes", "floats", "added"]
# The transform of a quant before its zero point is subtracted: none, or the inverse of `marlin_int4_fp8_preprocess`.
Recoding = Literal["none", "marlin_fp8"]


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A packed quantized weight [K, N].

    Attributes:
        codes: the quants in int32 words or uint8 bytes, contiguous.
        layout: the position of the quant of each row and column.
        type: the type of a quant, before its zero point is subtracted.
        k, n: rows and columns.
        groups: groups of rows, each with its own scales and zero points.
        group_size: rows of a group; K for one group.
        scales: [groups, N], contiguous, columns in `scale_order`; None: the epilogue has a per-column scale. With
            "products" [groups, N, 8], in any shape.
        scale_kind: the format of a scale.
        scale_exponent: a stored scale is multiplied by two to this power.
        zeros: quants [groups, N bits / 32] int32 in `zero_layout`, or floats [groups, N] in `scale_order`.
        zero_kind: the format of zero points.
        zero_offset: is added to a zero point that is a quant.
        g_idx: [K] int32, the group of each row, where groups are not consecutive.
        perm: [K] int32: row k of the weight multiplies column perm[k] of the activations.
        recoding: the transform that the quants have gone through.
        places: metadata of marlin_24 (2:4 sparsity): [K / 16, N] int16, the two of every four rows that are stored, in
            the format of `gptq_marlin_24_gemm`; the quants are those of a weight [K / 2, N].
    """

    codes: TensorArg
    layout: LayoutName
    type: ScalarType
    k: int
    n: int
    groups: int
    group_size: int
    scales: TensorArg | None = None
    scale_order: ColumnOrder = "natural"
    scale_kind: ScaleKind = "float"
    scale_exponent: int = 0
    zeros: TensorArg | None = None
    zero_kind: ZeroKind = "none"
    zero_layout: ZeroLayout = "awq"
    zero_offset: int = 0
    g_idx: TensorArg | None = None
    perm: TensorArg | None = None
    recoding: Recoding = "none"
    places: TensorArg | None = None

    @property
    def bits(self) -> int:
        """Bits of a quant."""
        return self.type.size_bits

    @property
    def format(self) -> Layout:
        """The declaration of the layout."""
        return LAYOUTS[self.layout]


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """Rows of out that belong to experts, each with its own weight; the weights of a `PackedWeight` are contiguous.

    Attributes:
        num_experts: number of weights.
        lists: the rows of each expert.
        top_k: rows of out that share a row of a.
        topk_weights: a weight for each row of out, or None.
    """

    num_experts: int
    lists: ExpertLists
    top_k: int
    topk_weights: TensorArg | None


@dataclass(frozen=True, slots=True, eq=False)
class PackedProblem:
    """``out = epilogue(a' @ w)``.

    Attributes:
        a: [M, K], float16, bfloat16, int8 or float8_e4m3fn.
        weight: w.
        epilogue: the epilogue. Per-column scales, where the weight has none, and a bias are in `Epilogue.column_order`.
            With experts a_scales has one scale for each whole weight; with W4A8 one for each row.
        experts: the experts of the rows, or None.
    """

    a: Operand
    weight: PackedWeight
    epilogue: Epilogue
    experts: PackedExperts | None = None

    @property
    def compute_dtype(self) -> DType:
        """The dtype of the operands of the GEMM where the weight is dequantized first.

        It is that of the activations; for 8-bit activations and a weight with several scales, or with experts, it is
        the dtype of out, which holds the activations exactly. W4A8 multiplies in float8_e4m3fn, as the rule of its
        scales demands.
        """
        w, is_one = self.weight, self.experts is None
        if self.a.dtype.itemsize == 2 or (is_one and w.scales is None) or w.scale_kind == "products":
            return self.a.dtype
        return self.epilogue.out.dtype

    @property
    def op(self) -> str:
        return self.epilogue.out.op

    @property
    def device(self) -> Device:
        return self.epilogue.out.device

    @property
    def m(self) -> int:
        """Rows of out."""
        return self.a.rows if self.experts is None else self.epilogue.out.shape[0]

    @property
    def num_weights(self) -> int:
        """Number of weights, which are contiguous: one, or one per expert."""
        return 1 if self.experts is None else self.experts.num_experts

    @property
    def places(self) -> int:
        """Rows of out, or slots of the sorted lists of experts."""
        return self.m if self.experts is None else self.experts.lists.num_blocks * self.experts.lists.block_size

    def bucket(self) -> str:
        w, out = self.weight, self.epilogue.out
        rounded = tuning.rounded_rows if self.experts is None else tuning.power_of_two
        words = [
            f"rows={rounded(self.m)}",
            f"weight={w.n}x{w.k}",
            f"{w.layout} {w.type} of {w.group_size}",
            f"{self.a.dtype.name}-{out.dtype.name}",
            *([f"experts={self.experts.num_experts} of {self.experts.lists.block_size}"] if self.experts else []),
        ]
        return " ".join(words)

    # For kernels with fused dequantization: wq_gemm_sm90.cu and wq_gemm_sm80.cu.

    def kernel(self, kernel: Kernel) -> Kernel:
        """`kernel` with its pointers fed by the op's tensors, or by names that no tensor of an op has."""
        fed = {name: one.name if isinstance(one, TensorArg) else f"no_{name}" for name, one in self._tensors().items()}
        return kernel.renamed(**fed)

    def arguments(self, kernel: Kernel) -> dict[str, Any]:
        """The arguments that the kernel takes, except the op's tensors."""
        w = self.weight
        sizes = {"m": self.places, "n": w.n, "k": w.k, "groups": w.groups, "a_stride": self.a.stride}
        sizes |= {"num_rows": self.m, "num_experts": self.num_weights, "block_size": 1, "top_k": 1}
        steps = self.epilogue.arguments()
        if self.experts is not None:
            sizes |= {"top_k": self.experts.top_k, "block_size": self.experts.lists.block_size}
            if w.scale_kind != "products":
                steps |= {"a_scale_step": 0}
        others = {f"no_{name}": one or 0 for name, one in self._tensors().items() if not isinstance(one, TensorArg)}
        return kernel.taken({**sizes, **steps, **others})

    def constants(self) -> dict[str, Any]:
        """Compile-time constants of such a kernel."""
        w = self.weight
        return {
            "scalar_t": self.a.dtype,
            **self.epilogue.constants(),
            "BITS": w.bits,
            "EXPONENT": w.type.exponent,
            "LAYOUT": f"layout_{(w.bits == 8 and w.format.of_8_bits) or w.layout}",
            "RECODED": w.recoding == "marlin_fp8",
            "HAS_SCALES": w.scales is not None,
            "scale_t": self.a.dtype if w.scales is None else w.scales.dtype,
            "SCALE": "scale_float" if w.scale_kind == "products" else f"scale_{w.scale_kind}",
            "GROUP_SCALE_EXPONENT": w.scale_exponent,
            "SCALE_ORDER": f"column_{w.scale_order}",
            "ZERO_CODES": w.zero_kind == "codes",
            "ZERO_POINT": w.zero_offset + w.type.bias,
            "ZERO_FLOATS": w.zero_kind == "floats",
            "ADDED": w.zero_kind == "added",
            "GROUP_SIZE": w.group_size if w.groups > 1 else 0,
            "GROUPED": self.experts is not None,
            "ROUTED": self.experts is not None and self.experts.topk_weights is not None,
        }

    def group_bits(self) -> int:
        """Bits of a column's scale and zero point in a group."""
        w = self.weight
        zero = {"none": 0, "codes": w.bits}.get(w.zero_kind, 8 * self.a.dtype.itemsize)
        entries = 8 if w.scale_kind == "products" else 1
        return zero + (0 if w.scales is None else 8 * entries * w.scales.dtype.itemsize)

    def _tensors(self) -> dict[str, TensorArg | Scratch | None]:
        """Pointers by parameter."""
        w, e, x = self.weight, self.epilogue, self.experts
        return {
            "out": e.out,
            "a": self.a.source,
            "quants": w.codes,
            "scales": w.scales,
            "zeros": w.zeros,
            "places": w.places,
            "a_scales": e.a_scales,
            "b_scales": e.b_scales,
            "bias": e.bias,
            "sorted_token_ids": None if x is None else x.lists.sorted_token_ids,
            "expert_ids": None if x is None else x.lists.expert_ids,
            "num_tokens_post_pad": None if x is None else x.lists.num_tokens_post_pad,
            "topk_weights": None if x is None else x.topk_weights,
        }
