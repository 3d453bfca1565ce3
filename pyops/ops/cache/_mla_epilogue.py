"""Code shared by the MLA epilogues of Kimi K3: references, and the launch of their kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.system.lazy import torch
from ..._core.tensors.dtypes import bfloat16, float8_e4m3fn, float16, float32, int64, uint8
from ..._core.tensors.tensor import TensorArg
from ._common import DS_MLA_BYTES, bad_slots, example_slots, existing_slots, first_stride, fp8_codes, indexable

if TYPE_CHECKING:
    from torch import Tensor

_epilogue = Kernel("cache/mla_epilogue.cu")
_VEC_SIZE, _NUM_THREADS = 8, 256  # elements of a thread; threads of a block
NOPE_SIZE, ROPE_SIZE, LATENT_SIZE = 128, 64, 512  # sizes of Kimi K3, and of the entries "fp8_ds_mla"
BLOCK_SIZE = 64  # slots of a block in examples

# References


def _known(position_ids: Tensor | None, table: Tensor | None, num_tokens: int, device: Any) -> Tensor:
    """Which tokens have a position in the table; all without a table."""
    if position_ids is None or table is None:
        return torch.ones(num_tokens, dtype=torch.bool, device=device)
    return (position_ids >= 0) & (position_ids < len(table))


def rotated(x: Tensor, position_ids: Tensor | None, table: Tensor | None) -> Tensor:
    """The rotary parts [num_tokens, ..., rope_size] in float32, rotated in adjacent pairs if there is a table."""
    x = x.float()
    if position_ids is None or table is None:
        return x
    x, known = x.clone(), _known(position_ids, table, len(x), x.device)
    angles = table[position_ids[known].long()]
    cos, sin = (each.unflatten(0, (-1, *[1] * (x.dim() - 2))) for each in angles.chunk(2, -1))
    a, b = x[known, ..., ::2], x[known, ..., 1::2]
    x[known] = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return x


def as_fp8(x: Tensor, scale_inv: Tensor | float = 1.0) -> Tensor:
    """``x * scale_inv`` as float8_e4m3fn, saturating; NaN stays NaN."""
    kind = torch.float8_e4m3fn
    factor = scale_inv if isinstance(scale_inv, float) else scale_inv.reshape(())
    return fp8_codes(x.float() * factor, x.new_ones((), dtype=torch.float32), kind).view(kind)


def concatenated(nope: Tensor, pe: Tensor) -> Tensor:
    """Heads [num_tokens, heads, nope_size + rope_size] in float32; `pe` [num_tokens, rope_size] if heads share it."""
    pe = pe[:, None].expand(*nope.shape[:2], -1) if pe.dim() == 2 else pe
    return torch.cat((nope.float(), pe.float()), -1)


def insert_latents(
    kv_c: Tensor,
    k_pe: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    block_size: int,
    position_ids: Tensor | None,
    table: Tensor | None,
    scale_inv: Tensor | None = None,
) -> None:
    """Write the cache entries of tokens with a slot, and with a position if there is a table."""
    known = _known(position_ids, table, len(kv_c), kv_c.device).nonzero().squeeze(1)
    known = known[known < len(slot_mapping)]
    tokens, block, offset = existing_slots(slot_mapping[known], len(k_cache), block_size)
    tokens = known[tokens]
    pe = rotated(k_pe, position_ids, table)[tokens]
    entry = torch.cat((kv_c[tokens].float(), pe), -1)
    if k_cache.dtype == torch.uint8:
        tiles = kv_c[tokens].float().unflatten(-1, (4, 128))
        largest = tiles.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(-1, keepdim=True)
        bits = (largest / torch.full_like(largest, 448.0)).clamp(min=1e-4).view(torch.int32)
        scales = (((bits + 0x7FFFFF) >> 23) << 23).view(torch.float32)
        quants = fp8_codes(tiles, scales, torch.float8_e4m3fn).flatten(1)
        rope = k_pe[tokens].contiguous()
        if table is not None:  # NaN becomes that of conversions
            rope = pe.to(kv_c.dtype).view(torch.int16).masked_fill(pe.isnan(), 0x7FFF)
        parts = quants, scales.flatten(1), rope
        entry = torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)
    elif k_cache.dtype == torch.float8_e4m3fn:
        assert scale_inv is not None
        entry = as_fp8(entry, scale_inv)
    indexable(k_cache)[block, offset] = indexable(entry.to(k_cache.dtype))


def bad_tokens(
    k_cache: Tensor, slot_mapping: Tensor, block_size: int, position_ids: Tensor | None, table: Tensor | None
) -> dict[str, Tensor]:
    """The slots after the last, and the positions outside the table."""
    wrong = bad_slots(slot_mapping, len(k_cache), block_size)
    if position_ids is not None and table is not None:
        wrong["position_ids"] = ~_known(position_ids, table, len(position_ids), position_ids.device)
    return wrong


# Plans


@dataclass(frozen=True)
class Epilogue:
    """The tensors of a launch; None for those that an op lacks.

    Attributes:
        k_pe: [num_tokens, rope_size], shared by heads. dtype: that of the other tensors that are read.
        q_nope, q_pe: queries, in one tensor if `q_pe` is None; without `q_nope`, `q_out` is rotated in place.
        q_out, k_nope, k_out, v, v_out: [num_tokens, num_heads, size].
        kv_c, k_cache, slot_mapping, block_size: the latent and where it goes.
        position_ids, cos_sin_cache: the rotation, or None.
        scales: {tensor that is written: its inverse scale}.
    """

    k_pe: TensorArg
    heads: TensorArg  # [num_tokens, num_heads, ...] of the dtype that is read
    q_nope: TensorArg | None = None
    q_pe: TensorArg | None = None
    q_out: TensorArg | None = None
    k_nope: TensorArg | None = None
    k_out: TensorArg | None = None
    v: TensorArg | None = None
    v_out: TensorArg | None = None
    kv_c: TensorArg | None = None
    k_cache: TensorArg | None = None
    slot_mapping: TensorArg | None = None
    block_size: int = 1
    position_ids: TensorArg | None = None
    cos_sin_cache: TensorArg | None = None
    scales: dict[str, TensorArg] | None = None

    def launch(self) -> Launch:
        """Check the tensors, and launch the kernel."""
        heads, k_pe, q_out, k_out, v_out = self.heads, self.k_pe, self.q_out, self.k_out, self.v_out
        check.dtype(heads, float16, bfloat16)
        check.sizes(heads, num_tokens=None, num_heads=None, size=None)
        num_tokens, num_heads, _ = heads.shape
        check.dtype(k_pe, heads.dtype, *([float8_e4m3fn] if k_out and k_out.dtype == float8_e4m3fn else []))
        check.sizes(k_pe, num_tokens=num_tokens, rope_size=None)
        check.row_size(k_pe)
        rope_size = k_pe.shape[1]
        if rope_size % _VEC_SIZE or not rope_size:
            raise k_pe.error(f"expected a rope_size that is a multiple of {_VEC_SIZE}, got shape {k_pe.shape}")
        for out, nope, pe in ((q_out, self.q_nope, self.q_pe), (k_out, self.k_nope, k_pe), (v_out, self.v, None)):
            if out is not None:
                self._check_heads(out, nope, pe, rope_size)
        for scale in (self.scales or {}).values():
            check.scalar(scale)
        table = self._check_rotation(num_tokens, rope_size)
        slot_stride = self._check_cache(num_tokens, rope_size)
        read = [one for one in (self.q_nope, self.q_pe, self.k_nope, k_pe, self.v, self.kv_c) if one is not None]
        written = [one for one in (q_out, k_out, v_out) if one is not None]
        in_place = q_out is not None and self.q_nope is None
        q_size = q_out.shape[2] if q_out else 0
        cache = self.k_cache
        entry = self.kv_c.shape[1] + rope_size if self.kv_c else 0
        constants: dict[str, Any] = {
            "scalar_t": heads.dtype,
            "pe_t": k_pe.dtype,
            "query_t": q_out.dtype if q_out else heads.dtype,
            "key_t": k_out.dtype if k_out else heads.dtype,
            "value_t": v_out.dtype if v_out else heads.dtype,
            "entry_t": cache.dtype if cache else heads.dtype,
            "slot_t": self.slot_mapping.dtype if self.slot_mapping else int64,
            "position_t": self.position_ids.dtype if self.position_ids else int64,
            "NUM_HEADS": num_heads,
            "Q_SIZE": q_size,
            "Q_FIRST": (q_size - (rope_size if table else 0)) if in_place else 0,
            "IN_PLACE": in_place,
            "Q_SPLIT": self.q_pe is not None,
            "K_SIZE": k_out.shape[2] if k_out else 0,
            "V_SIZE": v_out.shape[2] if v_out else 0,
            "LATENT_SIZE": self.kv_c.shape[1] if self.kv_c else 0,
            "ROPE_SIZE": rope_size,
            "APPLY_ROPE": table is not None,
            "BLOCK_SIZE": self.block_size,
            "ACCESS_SIZE": check.vector_width(_VEC_SIZE, *read, *written),
            "ANGLE_ACCESS": check.vector_width(4, table) if table else 4,
            "ENTRY_ACCESS": check.vector_width(16 if cache.dtype == uint8 else _VEC_SIZE, cache) if cache else 8,
            "NUM_THREADS": _NUM_THREADS,
        }
        per_head = constants["Q_SIZE"] - constants["Q_FIRST"] + constants["K_SIZE"] + constants["V_SIZE"]
        items = (entry + num_heads * per_head) // _VEC_SIZE
        if cache and cache.dtype == uint8:
            items = -(-items // 16) * 16
        fed: dict[str, Any] = {
            "q_nope": self.q_nope,
            "q_pe": self.q_pe,
            "k_nope": self.k_nope,
            "k_pe": k_pe,
            "v": self.v,
            "kv_c": self.kv_c,
            "q_out": q_out,
            "k_out": k_out,
            "v_out": v_out,
            "k_cache": cache,
            "slot_mapping": self.slot_mapping,
            "position_ids": self.position_ids,
            "cos_sin_cache": table,
            **dict.fromkeys(("q_scale_inv", "k_scale_inv", "v_scale_inv", "cache_scale_inv")),
            **(self.scales or {}),
            **_strides("q", q_out if in_place else self.q_nope),
            **_strides("q_pe", self.q_pe),
            **_strides("k", self.k_nope),
            **_strides("v", self.v),
            **_strides("q_out", q_out),
            **_strides("k_out", k_out),
            **_strides("v_out", v_out),
        }
        return _epilogue(**constants).launch(
            grid=-(-num_tokens * items // _NUM_THREADS),
            block=_NUM_THREADS,
            num_tokens=num_tokens,
            num_slots=self.slot_mapping.shape[0] if self.slot_mapping else 0,
            num_blocks=cache.shape[0] if cache else 0,
            max_position=table.shape[0] if table else 0,
            k_pe_stride=first_stride(k_pe),
            kv_c_stride=first_stride(self.kv_c),
            block_stride=first_stride(cache),
            slot_stride=slot_stride,
            slot_mapping_stride=first_stride(self.slot_mapping),
            positions_stride=first_stride(self.position_ids),
            table_stride=first_stride(table),
            **{name: 0 if value is None else value for name, value in fed.items()},
        )

    def _check_heads(self, out: TensorArg, nope: TensorArg | None, pe: TensorArg | None, rope_size: int) -> None:
        """Check a tensor of heads that is written, and what it is made of."""
        num_tokens, num_heads, _ = self.heads.shape
        check.dtype(out, self.heads.dtype, float8_e4m3fn)
        check.sizes(out, num_tokens=num_tokens, num_heads=num_heads, size=None)
        check.row_size(out)
        if out.shape[2] % _VEC_SIZE:
            raise out.error(f"expected heads of a multiple of {_VEC_SIZE} elements, got shape {out.shape}")
        if nope is None:
            if out.shape[2] < rope_size:
                raise out.error(f"expected heads of at least rope_size={rope_size} elements, got shape {out.shape}")
            return
        size = out.shape[2] - (rope_size if pe is not None else 0)
        check.dtype(nope, self.heads.dtype)
        check.sizes(nope, num_tokens=num_tokens, num_heads=num_heads, size=max(0, size))
        check.row_size(nope)
        if pe is not None and pe is not self.k_pe:
            check.dtype(pe, self.heads.dtype)
            check.sizes(pe, num_tokens=num_tokens, num_heads=num_heads, rope_size=rope_size)
            check.row_size(pe)

    def _check_rotation(self, num_tokens: int, rope_size: int) -> TensorArg | None:
        """Check positions and table; returns the table."""
        positions, table = self.position_ids, self.cos_sin_cache
        if (positions is None) != (table is None):
            wrong = "cos_sin_cache" if table is None else "position_ids"
            raise check.refuse(self.heads, wrong, "expected both position_ids and cos_sin_cache, or neither, got None")
        if positions is None or table is None:
            return None
        check.index(positions, num_tokens=num_tokens)
        check.dtype(table, float32)
        check.sizes(table, max_position=None, rope_size=rope_size)
        check.row_size(table)
        if not table.numel:
            raise table.error("expected at least one row, got none")
        return table

    def _check_cache(self, num_tokens: int, rope_size: int) -> int:
        """Check the latent, its cache and the slots; returns the elements from a slot to the next."""
        kv_c, cache, slots = self.kv_c, self.k_cache, self.slot_mapping
        if kv_c is None or cache is None or slots is None:
            return 0
        check.dtype(kv_c, self.heads.dtype)
        check.sizes(kv_c, num_tokens=num_tokens, latent_size=None)
        check.row_size(kv_c)
        if kv_c.shape[1] % _VEC_SIZE or not kv_c.shape[1]:
            raise kv_c.error(f"expected a latent_size that is a multiple of {_VEC_SIZE}, got shape {kv_c.shape}")
        check.index(slots, num_slots=None)
        if slots.shape[0] > num_tokens:
            raise slots.error(f"expected at most num_tokens={num_tokens} slots, got {slots.shape}")
        if self.block_size < 1:
            raise check.refuse(self.heads, "cache_block_size", f"expected at least 1, got {self.block_size}")
        check.dtype(cache, uint8, float8_e4m3fn, self.heads.dtype)
        entry_size = kv_c.shape[1] + rope_size
        if cache.dtype == uint8:
            check.sizes(kv_c, num_tokens=num_tokens, latent_size=LATENT_SIZE)
            check.sizes(self.k_pe, num_tokens=num_tokens, rope_size=ROPE_SIZE)
            entry_size = DS_MLA_BYTES
        check.sizes(cache, num_blocks=None, cache_block_size=self.block_size, entry_size=entry_size)
        check.row_size(cache)
        return cache.strides[1]


def _strides(name: str, arg: TensorArg | None) -> dict[str, int]:
    """The strides of tokens and heads."""
    token, head = arg.strides[:2] if arg else (0, 0)
    return {f"{name}_stride": token, f"{name}_head_stride": head}


# Examples


def example_latents(make: Any, num_tokens: int, cache: str) -> tuple[Any, ...]:
    """(kv_c, k_cache, slot_mapping) with a cache of this dtype; "uint8" for entries of "fp8_ds_mla"."""
    num_blocks, slot_mapping = example_slots(make, num_tokens, BLOCK_SIZE)
    size = DS_MLA_BYTES if cache == "uint8" else LATENT_SIZE + ROPE_SIZE
    shape = num_blocks, BLOCK_SIZE, size
    k_cache = make.randint(0, 120, *shape, dtype=cache) if cache == "uint8" else make.randn(*shape, dtype=cache)
    return make.randn(num_tokens, LATENT_SIZE, dtype="bfloat16"), k_cache, slot_mapping


def example_rotation(make: Any, num_tokens: int, rotary: bool) -> tuple[Any, Any]:
    """(position_ids, cos_sin_cache), or None for both."""
    if not rotary:
        return None, None
    return make.randint(0, 4096, num_tokens), make.randn(4096, ROPE_SIZE, dtype="float32")
