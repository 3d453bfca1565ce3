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
from . import prefill_sm90
from .layout import absent, heads_stride
from .prefill_items import ItemConfig
from .prefill_panels import Panels
from .prefill_problem import PrefillProblem
from .prefill_sm90 import MIN_CODE_STAGES, stages_of

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
# The rate of fp8 MMAs as a multiple of that of 16 bits: 1 x 8192 takes 675 us ("Tiles and warpgroups of e4m3").
_RATE = 1.4
_UPCAST_US = 2.2  # microseconds of the kernel that upcasts queries


@dataclass(frozen=True, slots=True)
class E4m3Config(ItemConfig):
    """The geometry of prefill_sm90_fp8.cu.

    Attributes:
        overlap: Q K^T of the next KV tile is computed during P V of the current one.
        ping_pong: consumer warpgroups alternate in issuing WGMMAs.
    """

    overlap: bool = True
    ping_pong: bool = True

    def __post_init__(self) -> None:
        if self.tokens % 32 or not 0 < self.tokens < 256 or self.consumers not in (2, 3):
            raise ValueError(f"no geometry of prefill_sm90_fp8.cu: {self}")

    def candidates(self, problem: PrefillProblem, device: Device) -> list[E4m3Config]:
        """The other geometries of the head size."""
        found = (E4m3Config(*geometry) for geometry in GEOMETRIES[problem.query.shape[2]])
        return [one for one in found if one != self]

    @property
    def rate(self) -> float:
        return _RATE

    def launch(self, problem: PrefillProblem, constants: dict[str, Any], arguments: dict[str, Any]) -> list[Launch]:
        """The grid, and the combine kernel of split-KV."""
        codes = problem.codes
        assert codes is not None
        panels, device = Panels.of(*problem.keys_and_values), codes.device
        row_bytes = -(-codes.shape[2] // panels.row_bytes) * panels.row_bytes
        tile_bytes = self.tokens * row_bytes
        others = ("PACKED", "X", "HAS_SOFTCAP", "HAS_ALIBI")
        own = {"OVERLAP": self.overlap, "PING_PONG": self.ping_pong}
        return self.launch_items(
            problem,
            _e4m3.for_arch(device.arch_feature),
            codes,
            panels,
            panels.map_of_cache,
            stages_of(device, self.rows * row_bytes, 2 * tile_bytes, tile_bytes, MIN_CODE_STAGES),
            {name: value for name, value in constants.items() if name not in others} | own,
            arguments | _query_scale(problem.q_scale),
        )


def _query_scale(q_scale: TensorArg | None) -> dict[str, int]:
    """The kernel arguments for the scale of the queries."""
    return absent(q_scale=q_scale) | {"q_scale_step": int(q_scale is not None and q_scale.numel > 1)}


def choose(problem: PrefillProblem, device: Device) -> E4m3Config | None:
    """The geometry by head size, with split-KV; None where prefill_sm90_fp8.cu does not support the call, or few rows
    take less time after upcasting."""
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
    tokens, consumers, overlap = GEOMETRIES[codes.shape[2]][0]
    one = E4m3Config(tokens, consumers, overlap)
    one = one.split(problem, device, one.fastest_splits(problem, one.work(problem, device)))
    if one.max_splits == 1:
        return one
    upcast_us = prefill_sm90.choose(problem, device).us(problem, device) + _UPCAST_US
    return one if one.us(problem, device) <= upcast_us else None


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
