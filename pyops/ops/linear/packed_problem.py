"""A product with a weight of packed codes: the problem that `packed_plan` chooses kernels by.

``out = epilogue(a' @ w)`` for a weight w [K, N] whose codes, zero points and scales lie as checkpoints have them (the
layouts and orders are those of `_shared/packed_layouts.py`), and a' the activations, their columns permuted if the
weight's rows are:

    w[k, n] = scale * (code[k, n] - zero)            which a kernel may round once, to `PackedProblem.compute_dtype`
    scale, zero: of group g(k), column n
    g(k) = k // group_size, or g_idx[k]
    a'[m, k] = a[m, k], or a[m, perm[k]]

Where the weight has no scales, there is one for each column or none, and the epilogue has them: w is the exact
difference then. A row whose group is out of range is 0, and so is a column of a' that is out of range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..._core import tuning
from ..._core.device import Device
from ..._core.dtypes import DType
from ..._core.kernel import Kernel, Scratch
from ..._core.tensor import TensorArg
from .._shared.packed_layouts import ColumnOrder, Layout, ZeroLayout
from .._shared.scalar_type import ScalarType
from .gemm_problem import Epilogue, Operand
from .grouped_problem import ExpertLists

# What an entry of scales is: a float of 16 bits; the upper bits of a float16 without its sign (Marlin's NVFP4); a power
# of two by its exponent; an integer in the bits of a float of 16 bits (Marlin's int8 activations); the products of a
# scale of e4m3 with -8 ... -1, rounded to e4m3, as all products with codes are (W4A8).
ScaleKind = Literal["float", "e5m3", "e8m0", "int16", "products"]
# What zero points are: none; codes in words; floats in the order of the scales; the same, added to code * scale.
ZeroKind = Literal["none", "codes", "floats", "added"]
# What becomes of a code before its zero point is taken: nothing, or the inverse of `marlin_int4_fp8_preprocess`.
Recoding = Literal["none", "marlin_fp8"]


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [K, N] of packed codes.

    Attributes:
        codes: int32 words or uint8 bytes, contiguous.
        layout: where the code of a row and a column lies.
        type: what number a code is, before its zero point is taken.
        k, n: rows and columns.
        groups: of rows; those of scales and zero points.
        group_size: rows of a group; K for one group.
        scales: [groups, N], contiguous, columns in `scale_order`; None: the epilogue has a scale for each column. Of
            "products" [groups, N, 8], in any shape.
        scale_kind: what an entry of scales is.
        scale_exponent: a scale is its entry times two to this.
        zeros: codes [groups, N bits / 32] int32 in `zero_layout`, or floats [groups, N] in `scale_order`.
        zero_kind: what they are.
        zero_offset: added to a zero point that is a code.
        g_idx: [K] int32, the group of each row, where groups are not consecutive.
        perm: [K] int32: row k of the weight multiplies column perm[k] of the activations.
        recoding: what was made of the codes.
        places: of marlin_24: [K / 16, N] int16, which two of four rows the codes are of, as `gptq_marlin_24_gemm` has
            them; the codes are those of a weight [K / 2, N].
    """

    codes: TensorArg
    layout: Layout
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
        """Of a code."""
        return self.type.size_bits


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """Rows of out that belong to experts, each with a weight; those of a `PackedWeight` lie one after another.

    Attributes:
        num_experts: how many weights there are.
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
        epilogue: what becomes of the sums. Scales of columns, where the weight has none, and a bias are in
            `Epilogue.column_order`. Of experts: a scale of rows is that of a whole weight, for each of them.
        experts: to which rows belong; or None.
    """

    a: Operand
    weight: PackedWeight
    epilogue: Epilogue
    experts: PackedExperts | None = None

    @property
    def compute_dtype(self) -> DType:
        """The dtype of what is multiplied, where the weight is written in full.

        That of the activations; of 8-bit activations and a weight under several scales, or of experts, the dtype of
        out, in which the activations are exact. Products of W4A8 are of float8_e4m3fn, by the rule of its scales.
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
        """Weights, which lie one after another: one, or one of each expert."""
        return 1 if self.experts is None else self.experts.num_experts

    @property
    def places(self) -> int:
        """Rows of out, or places of the lists that experts have them in."""
        return self.m if self.experts is None else self.experts.lists.num_blocks * self.experts.lists.block_size

    @property
    def rows_of_weight(self) -> int:
        """Rows of out that a weight is likely to have if it has any, a power of two: rows choose at random."""
        rows = tuning.power_of_two(self.m)
        if self.experts is None:
            return rows
        count = max(1, self.experts.num_experts)
        return tuning.power_of_two(-(-rows // max(1, round(count * (1.0 - (1.0 - 1.0 / count) ** rows)))))

    def bucket(self) -> str:
        w, out = self.weight, self.epilogue.out
        words = [
            f"rows={tuning.power_of_two(self.m)}",
            f"weight={w.n}x{w.k}",
            f"{w.layout} {w.type} of {w.group_size}",
            f"{self.a.dtype.name}-{out.dtype.name}",
            *([f"experts={self.experts.num_experts} of {self.experts.lists.block_size}"] if self.experts else []),
        ]
        return " ".join(words)

    # For kernels that read codes themselves: wq_gemm_sm90.cu and wq_gemm_sm80.cu.

    def kernel(self, kernel: Kernel) -> Kernel:
        """`kernel`, its pointers fed by the op's tensors, or by names that no tensor of an op has."""
        fed = {name: one.name if isinstance(one, TensorArg) else f"no_{name}" for name, one in self._tensors().items()}
        return kernel.renamed(**fed)

    def arguments(self, kernel: Kernel) -> dict[str, Any]:
        """Those arguments that the kernel takes, beside the op's tensors."""
        w, taken = self.weight, {name for _, name in kernel.signature.parameters}
        sizes = {"m": self.places, "n": w.n, "k": w.k, "groups": w.groups, "a_stride": self.a.stride}
        sizes |= {"num_rows": self.m, "num_experts": self.num_weights, "block_size": 1, "top_k": 1}
        steps = self.epilogue.arguments()
        if self.experts is not None:
            sizes |= {"top_k": self.experts.top_k, "block_size": self.experts.lists.block_size}
            steps |= {"a_scale_step": 0}
        others = {f"no_{name}": one or 0 for name, one in self._tensors().items() if not isinstance(one, TensorArg)}
        return {name: one for name, one in {**sizes, **steps, **others}.items() if name in taken}

    def constants(self) -> dict[str, Any]:
        """What such a kernel is compiled for."""
        w = self.weight
        return {
            "scalar_t": self.a.dtype,
            **self.epilogue.constants(),
            "BITS": w.bits,
            "EXPONENT": w.type.exponent,
            "LAYOUT": f"layout_{'gptq' if w.layout == 'exllama' and w.bits == 8 else w.layout}",
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
        """Bits of what a column has in a group: its scale and its zero point."""
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
            "codes": w.codes,
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
