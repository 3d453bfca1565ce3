"""Prefill attention with e4m3 queries: the geometry of prefill_sm90_fp8.cu, and the fallback that upcasts them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ... import check
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.launch.tensor_map import TensorMap
from ..._core.system.device import Device
from ..._core.tensors.tensor import TensorArg
from .layout import absent, heads_stride
from .prefill_panels import Panels
from .prefill_problem import PrefillProblem
from .prefill_sm90 import (
    MIN_CODE_STAGES,
    choose_splits,
    packed_heads,
    section_heads,
    stages_of,
)
from .prefill_work import window_of

_e4m3 = Kernel("attention/prefill_sm90_fp8.cu")
_widen_queries = Kernel("attention/widen_queries.cu")

# {head size: (keys of a KV tile, consumer warpgroups, overlap), ...}: geometries that fit into registers. The first is
# the default; tuning tries the others (docs/performance/prefill.md, "Tiles and warpgroups of e4m3").
GEOMETRIES = {
    64: ((192, 3, False), (128, 3, True), (128, 2, True), (64, 3, True), (128, 3, False)),
    128: (
        *((128, 3, False), (96, 3, False), (128, 2, False), (192, 2, False), (224, 2, False)),
        *((128, 2, True), (64, 2, True), (64, 3, True), (160, 2, True)),
    ),
    256: ((128, 2, False), (64, 2, True)),
}
_NUM_THREADS = 256  # threads of a block of widen_queries.cu; not yet measured


@dataclass(frozen=True, slots=True)
class E4m3Config:
    """The geometry of prefill_sm90_fp8.cu.

    Attributes:
        tokens: keys of a KV tile.
        consumers: consumer warpgroups, each with 64 rows of queries.
        overlap: Q K^T of the next KV tile is computed during P V of the current one.
        ping_pong: consumer warpgroups alternate in issuing WGMMAs.
    """

    tokens: int
    consumers: int
    overlap: bool = True
    ping_pong: bool = True

    def __post_init__(self) -> None:
        if self.tokens % 32 or not 0 < self.tokens < 256 or self.consumers not in (2, 3):
            raise ValueError(f"no geometry of prefill_sm90_fp8.cu: {self}")

    def candidates(self, problem: PrefillProblem, device: Device) -> list[E4m3Config]:
        """The other geometries of the head size."""
        found = (E4m3Config(*geometry) for geometry in GEOMETRIES[problem.query.shape[2]])
        return [one for one in found if one != self]

    def launch(self, problem: PrefillProblem, constants: dict[str, Any], arguments: dict[str, Any]) -> list[Launch]:
        """A persistent grid: one CTA per SM takes work items from a counter."""
        codes, layout = problem.codes, problem.layout
        assert codes is not None
        device, (num_tokens, num_heads, head_size) = codes.device, codes.shape
        caches = problem.keys_and_values
        heads = packed_heads(problem, 64 * self.consumers, self.tokens)
        item_tokens, box_tokens = 64 * self.consumers // heads, problem.box_tokens(self.tokens)
        panels = Panels.of(*caches)
        row_bytes = -(-head_size // panels.row_bytes) * panels.row_bytes
        tile_bytes = self.tokens * row_bytes
        stages, query_stages, code_stages, shared = stages_of(
            device, 64 * self.consumers * row_bytes, 2 * tile_bytes, tile_bytes, MIN_CODE_STAGES
        )
        num_tiles = num_tokens // item_tokens + problem.num_seqs
        num_items = num_tiles * (num_heads // heads)
        kernel = _e4m3.for_arch(device.arch_feature)
        arguments = arguments | {
            "num_tokens": num_tokens,
            "num_kv_heads": layout.num_kv_heads,
            "section_heads": section_heads(problem, device, num_tiles) * problem.group // heads,
            "sliding_window": window_of(problem),
            **_query_scale(problem.q_scale),
        }
        others = ("PACKED", "X", "HAS_SOFTCAP", "HAS_ALIBI")
        return [
            kernel(
                **{name: value for name, value in constants.items() if name not in others},
                TOKENS=self.tokens,
                CONSUMERS=self.consumers,
                OVERLAP=self.overlap,
                PING_PONG=self.ping_pong,
                BOX_TOKENS=box_tokens,
                WHOLE_HEADS=panels.whole_heads,
                PACKED_HEADS=heads,
                STAGES=stages,
                QUERY_STAGES=query_stages,
                CODE_STAGES=code_stages,
            ).launch(
                min(num_items, device.num_sms),
                128 * (self.consumers + 1),
                shared,
                **kernel.taken(arguments),
                query_map=panels.map_of_queries(codes, heads, item_tokens),
                key_map=panels.map_of_cache(caches[0], box_tokens),
                value_map=panels.map_of_cache(caches[1], box_tokens),
                key_head_pitch=panels.head_pitch(caches[0]),
                value_head_pitch=panels.head_pitch(caches[1]),
                num_items=num_items,
                items_taken=Scratch(4, zeroed=True),
            )
        ]


def _query_scale(q_scale: TensorArg | None) -> dict[str, int]:
    """The kernel arguments for the scale of the queries."""
    return absent(q_scale=q_scale) | {"q_scale_step": int(q_scale is not None and q_scale.numel > 1)}


def choose(problem: PrefillProblem, device: Device) -> E4m3Config | None:
    """The geometry by head size; None where prefill_sm90_fp8.cu does not support the call, or split-KV is faster."""
    codes = problem.codes
    if (
        codes is None
        or not problem.uses_wgmma
        or not problem.has_plain_logits
        or problem.value_size != codes.shape[2]
        or codes.shape[2] not in GEOMETRIES
        or codes.alignment < 16
        or heads_stride(codes) % 16
    ):
        return None
    config = E4m3Config(*GEOMETRIES[codes.shape[2]][0])
    return config if choose_splits(problem, 64 * config.consumers, config.tokens, device) == 1 else None


def upcast(problem: PrefillProblem, launches: list[Launch]) -> list[Launch]:
    """`launches` for 16-bit queries; for e4m3 queries after a kernel that upcasts them and folds their scale into the
    scale of the keys."""
    codes = problem.codes
    if codes is None:
        return launches
    num_scales = problem.layout.num_kv_heads if problem.layout.head_scales else 1
    found = {"query": Scratch(max(1, problem.query.nbytes)), "k_scale": Scratch(4 * num_scales)}
    for launch in launches:
        launch.fixed |= launch.specialisation.kernel.taken(found)
        launch.fixed |= {
            name: replace(value, tensor=found["query"])
            for name, value in launch.fixed.items()
            if isinstance(value, TensorMap) and value.tensor is problem.query
        }
    row_size = codes.shape[1] * codes.shape[2]
    access = check.vector_width(row_size, codes, problem.query)
    widen = _widen_queries(scalar_t=problem.query.dtype, VEC_SIZE=access, NUM_THREADS=_NUM_THREADS)
    return [
        widen.launch(
            max(1, -(-codes.numel // (access * _NUM_THREADS))),
            _NUM_THREADS,
            widened=found["query"],
            key_scales=found["k_scale"],
            count=codes.numel,
            row_size=max(1, row_size),
            query_stride=heads_stride(codes),
            num_scales=num_scales,
            **_query_scale(problem.q_scale),
        ),
        *launches,
    ]
