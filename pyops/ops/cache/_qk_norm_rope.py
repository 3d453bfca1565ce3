"""Code shared by the ops that norm and rotate the heads in a row of qkv, and insert keys and values into a cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import DType, bfloat16, float8_e4m3fn, float16, int64
from ..._core.tensors.tensor import TensorArg
from .._shared import fp8
from ._common import encoded, existing_slots, first_stride, fp8_codes, indexable

if TYPE_CHECKING:
    from torch import Tensor

_insert = Kernel("cache/qk_norm_rope_insert.cu")
_HEAD_SIZES = 64, 128, 192, 256
_VEC_SIZE = 8  # elements of a head per lane
# Heads per group of lanes if groups of one head would exceed _FEW_GROUPS per SM; that bound; threads of a block. They
# are those of deepseek_v4_insert.cu, which moves heads in the same way.
_MANY_ROUNDS, _FEW_GROUPS, _NUM_THREADS = 2, 64, 256


def plain(kv_cache_dtype: str) -> str:
    """`kv_cache_dtype`, where the names of 16-bit dtypes mean "auto"."""
    return "auto" if kv_cache_dtype in ("bfloat16", "float16") else kv_cache_dtype


# References


def as_fp8(x: Tensor, scale: Tensor | float) -> Tensor:
    """``x / scale`` as float8_e4m3fn."""
    divisor = (
        torch.full((), scale, dtype=torch.float32, device=x.device) if isinstance(scale, float) else scale.reshape(())
    )
    return fp8_codes(x, divisor, torch.float8_e4m3fn).view(torch.float8_e4m3fn)


def insert(
    x: Tensor, cache: Tensor, slot_mapping: Tensor, known: Tensor, kv_cache_dtype: str, scale: Tensor | None
) -> None:
    """Write heads [num_tokens, heads, head_size] into a cache [num_blocks, block_size, heads, head_size]."""
    tokens = known[: len(slot_mapping)].nonzero().squeeze(1)
    chosen, block, offset = existing_slots(slot_mapping[tokens], *cache.shape[:2])
    divisor = x.new_ones((), dtype=torch.float32) if scale is None else scale
    indexable(cache)[block, offset] = encoded(x[tokens[chosen]], divisor, cache, plain(kv_cache_dtype))


# Plans


@dataclass(frozen=True)
class Rows:
    """The tensors of a launch; None for those that an op lacks. The kernel says what they are.

    Attributes:
        num_q, num_kv, num_index: heads of queries, of keys, and of index queries; `num_index` is None without an index.
        pairs: rotated pairs of a head; 0 without RoPE.
        sin: None if sines follow the cosines in a row of `cos`.
        weights: {parameter of the kernel: weight}.
        outputs: {parameter of the kernel: tensor [num_tokens, heads * head_size]}.
        value_cache: None if the values follow the keys in `key_cache`.
        norms: heads of queries and keys are normed.
        heads_first: caches are [num_blocks, heads, block_size, ...], else [num_blocks, block_size, heads, ...].
        fixed: parameters of the kernel that the op does not have.
        constant_positions: the promise of `fused_qk_rope_cache`.
        renamed: {parameter of the kernel: the op's scalar that feeds it at every call}, where the two names differ.
    """

    qkv: TensorArg
    head_size: int
    num_q: int
    num_kv: int
    positions: TensorArg
    cos: TensorArg | None
    sin: TensorArg | None
    pairs: int
    is_neox: bool
    weights: dict[str, TensorArg]
    outputs: dict[str, TensorArg | None]
    key_cache: TensorArg | None
    value_cache: TensorArg | None
    slot_mapping: TensorArg | None
    kv_cache_dtype: str
    scales: dict[str, TensorArg | None]
    fixed: dict[str, float]
    norms: bool = True
    heads_first: bool = False
    num_index: int | None = None
    index_cache: TensorArg | None = None
    index_slot_mapping: TensorArg | None = None
    constant_positions: bool = False
    renamed: dict[str, str] = field(default_factory=dict)

    def launch(self) -> Launch:
        """Check the tensors, and launch the kernel."""
        qkv, size = self.qkv, self.head_size
        check.dtype(qkv, float16, bfloat16)
        check.sizes(qkv, num_tokens=None, width=None)
        check.row_size(qkv)
        num_tokens = qkv.shape[0]
        if size not in _HEAD_SIZES:
            raise check.refuse(qkv, "head_dim", f"expected {' or '.join(map(str, _HEAD_SIZES))}, got {size}")
        heads = self.num_q + 2 * self.num_kv + (0 if self.num_index is None else self.num_index + 1)
        if min(self.num_q, self.num_kv, self.num_index or 0) < 0 or not heads:
            raise qkv.error(f"expected heads, got {self.num_q} of queries and {self.num_kv} of keys")
        if qkv.shape[1] < heads * size:
            raise qkv.error(f"expected rows of at least {heads} heads of {size} elements, got shape {qkv.shape}")
        self._check_rotation()
        weight_t = self._check_norms()
        self._check_outputs()
        kind, num_blocks, block_size = self._check_cache()
        index_t = _check_index(self)
        slots = self.slot_mapping
        rounds = _MANY_ROUNDS if num_tokens * heads > _FEW_GROUPS * qkv.device.num_sms else 1
        lanes = 1 << (size // _VEC_SIZE - 1).bit_length()
        stored = [
            one for one in (qkv, *self.outputs.values(), self.key_cache, self.value_cache, self.index_cache) if one
        ]
        angles = [one for one in (self.cos, self.sin) if one]
        fed: dict[str, Any] = {
            "qkv": qkv,
            "cos": self.cos,
            "sin": self.sin,
            "positions": self.positions,
            "slot_mapping": slots,
            "index_slot_mapping": self.index_slot_mapping,
            "key_cache": self.key_cache,
            "value_cache": self.value_cache,
            "index_cache": self.index_cache,
            **dict.fromkeys(("q_weight", "k_weight", "index_q_weight", "index_k_weight")),
            **self.weights,
            **dict.fromkeys(("q_out", "q_fp8_out", "k_out", "v_out", "index_q_out")),
            **self.outputs,
            **dict.fromkeys(("q_scale", "k_scale", "v_scale")),
            **self.scales,
            **self.fixed,
        }
        return _insert.renamed(**self.renamed)(
            scalar_t=qkv.dtype,
            weight_t=weight_t,
            angle_t=angles[0].dtype if angles else qkv.dtype,
            slot_t=slots.dtype if slots else int64,
            position_t=self.positions.dtype,
            cache_t=kind,
            index_t=index_t,
            HEAD_SIZE=size,
            LANES=lanes,
            NUM_Q=self.num_q,
            NUM_KV=self.num_kv,
            NUM_INDEX=self.num_index or 0,
            INDEX=self.num_index is not None,
            HALF=self.pairs,
            IS_NEOX=self.is_neox,
            NORMS=self.norms,
            HAS_WEIGHTS=bool(self.weights),
            SPLIT_ANGLES=self.sin is not None,
            INSERT=self.key_cache is not None,
            ONE_CACHE=self.value_cache is None,
            INDEX_SLOTS=self.index_slot_mapping is not None,
            BLOCK_SIZE=block_size,
            ROUNDS=rounds,
            ACCESS_SIZE=check.vector_width(_VEC_SIZE, *stored),
            ANGLE_ACCESS=check.vector_width(_VEC_SIZE, *angles) if angles and self.pairs % _VEC_SIZE == 0 else 1,
            NUM_THREADS=_NUM_THREADS,
            CONSTANT_POSITIONS=self.constant_positions,
        ).launch(
            grid=-(-num_tokens * -(-heads // rounds) * lanes // _NUM_THREADS),
            block=_NUM_THREADS,
            num_tokens=num_tokens,
            num_slots=slots.shape[0] if slots else 0,
            num_index_slots=self.index_slot_mapping.shape[0] if self.index_slot_mapping else 0,
            num_blocks=num_blocks,
            index_cache_slots=self.index_cache.numel // size if self.index_cache else 0,
            max_position=self.cos.shape[0] if self.cos else 0,
            qkv_stride=first_stride(qkv),
            cos_stride=first_stride(self.cos),
            sin_stride=first_stride(self.sin or self.cos),
            **_strides("key", self.key_cache, self.heads_first),
            **_strides("value", self.value_cache or self.key_cache, self.heads_first),
            positions_stride=first_stride(self.positions),
            slot_mapping_stride=first_stride(slots),
            index_slot_mapping_stride=first_stride(self.index_slot_mapping),
            **{name: 0 if value is None else value for name, value in fed.items()},
        )

    def _check_rotation(self) -> None:
        check.index(self.positions, num_tokens=self.qkv.shape[0])
        if self.cos is None or not self.pairs:
            return
        if not 0 < 2 * self.pairs <= self.head_size:
            most = self.head_size // 2
            raise self.cos.error(f"expected at most {most} pairs of elements to rotate, got {self.pairs}")
        for table in (self.cos, self.sin):
            if table is None:
                continue
            check.floating(table)
            check.dtype(table, self.cos.dtype)
            check.sizes(table, max_position=self.cos.shape[0] if self.cos.shape else None, angles=None)
            check.row_size(table)
            least = self.pairs * (2 if self.sin is None else 1)
            if table.shape[1] < least or not table.shape[0]:
                raise table.error(f"expected at least one row, of at least {least} angles, got shape {table.shape}")

    def _check_norms(self) -> DType:
        """Check the weights; returns their dtype."""
        kind = self.qkv.dtype
        for weight in self.weights.values():
            check.floating(weight)
            kind = next(iter(self.weights.values())).dtype
            check.shape(weight, kind, head_dim=self.head_size)
        return kind

    def _check_outputs(self) -> None:
        num_tokens = self.qkv.shape[0]
        counts = {"k_out": self.num_kv, "v_out": self.num_kv, "index_q_out": self.num_index or 0}
        for name, out in self.outputs.items():
            if out is None:
                continue
            kinds = [float8_e4m3fn] if name == "q_fp8_out" else [self.qkv.dtype]
            check.dtype(out, *kinds, *([float8_e4m3fn] if name == "index_q_out" else []))
            width = counts.get(name, self.num_q) * self.head_size
            check.shape(out, out.dtype, num_tokens=num_tokens, **{"heads * head_dim": width})

    def _check_cache(self) -> tuple[DType, int, int]:
        """Check caches and slots; returns the element type, the number of blocks and their slots."""
        key, value, slots = self.key_cache, self.value_cache, self.slot_mapping
        if key is None:
            return self.qkv.dtype, 0, 1
        if slots is None:
            raise check.refuse(self.qkv, "slot_mapping", "expected a tensor, as there is a cache, got None")
        check.index(slots, num_slots=None)
        if slots.shape[0] > self.qkv.shape[0]:
            raise slots.error(f"expected at most num_tokens={self.qkv.shape[0]} slots, got {slots.shape}")
        kind = fp8.cache_dtype(key, plain(self.kv_cache_dtype), self.qkv.dtype)
        width = self.head_size * (2 if value is None else 1)
        names = ("num_kv_heads", "block_size") if self.heads_first else ("block_size", "num_kv_heads")
        sizes = {"num_blocks": None, **dict.fromkeys(names), "num_kv_heads": self.num_kv, "elements": width}
        check.sizes(key, **{name: sizes[name] for name in ("num_blocks", *names, "elements")})
        check.row_size(key)
        if value is not None:
            check.dtype(value, key.dtype)
            check.same_shape(value, key)
            check.row_size(value)
        if kind != self.qkv.dtype:
            for name in ("k_scale", "v_scale"):
                if self.scales.get(name, self.qkv) is None:
                    raise check.refuse(self.qkv, name, "expected a tensor for a cache of fp8, got None")
        for scale in self.scales.values():
            check.scalar(scale)
        return kind, key.shape[0], max(1, key.shape[2 if self.heads_first else 1])


def _check_index(rows: Rows) -> DType:
    """Check the cache of the indexer; returns the element type of its tensors."""
    out, cache = rows.outputs.get("index_q_out"), rows.index_cache
    if cache is not None:
        check.dtype(cache, rows.qkv.dtype, float8_e4m3fn)
        check.contiguous(cache)
        if not cache.shape or cache.shape[-1] != rows.head_size:
            raise cache.error(f"expected a last dimension of {rows.head_size} elements, got shape {cache.shape}")
        if out is not None:
            check.dtype(out, cache.dtype)
    if rows.index_slot_mapping is not None and rows.slot_mapping is not None:
        check.index(rows.index_slot_mapping, num_slots=None)
        check.dtype(rows.index_slot_mapping, rows.slot_mapping.dtype)
        if rows.index_slot_mapping.shape[0] > rows.qkv.shape[0]:
            raise rows.index_slot_mapping.error(f"expected at most {rows.qkv.shape[0]} slots")
    given = cache or out
    return given.dtype if given else rows.qkv.dtype


def _strides(name: str, cache: TensorArg | None, heads_first: bool) -> dict[str, int]:
    """The strides of blocks, slots and heads of a cache."""
    block, one, other, _ = cache.strides if cache else (0, 0, 0, 1)
    slot, head = (other, one) if heads_first else (one, other)
    return {f"{name}_block_stride": block, f"{name}_slot_stride": slot, f"{name}_head_stride": head}
