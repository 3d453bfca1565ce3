"""The specialisations that plans compile for AMD GPUs."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import pyops
from pyops._core.launch.kernel import Specialisation
from pyops._core.op.op import Op
from pyops._core.system import device
from pyops._core.tensors import dtypes
from pyops._core.tensors.tensor import TensorArg
from pyops._core.text import source
from pyops.example import ArgMaker
from pyops.ops.collective import custom_all_reduce, custom_gather_scatter, expert_parallel, minimax, quick_all_reduce
from pyops.ops.collective.communicator import unroll
from pyops.ops.collective.shared_memory import PACKET_BYTES, SIGNAL_BYTES
from tests.support import axes

ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
# Architectures with the instructions of another: only the name for the compiler differs.
RELATIVES = {"gfx1101": "gfx1100", "gfx1102": "gfx1100", "gfx1200": "gfx1201"}
_OF_RELATIVES = ("attention/attention_decode.cu", "linear/gemm_sm80.cu")  # the kernels for RELATIVES
# What a text says where it depends on the architecture, and not just on the size of a warp.
_NAMES_ARCH = re.compile(r"__gfx|__GFX1[12]__")
_SITUATIONS = ((16, True), (4096, True), (4096, False))  # (num_tokens, whether tensors begin at multiples of 16 bytes)


def of_op(op: Op, arch: str) -> Iterator[Specialisation]:
    """The op's specialisations for every axis, few and many tokens, aligned and not."""
    assert op.example is not None
    for case in axes.combinations(op):
        for num_tokens, aligned in _SITUATIONS:
            args = op.example(ArgMaker(device.model(arch)), num_tokens=num_tokens, **case)
            for launch in op.launches(*(arg if aligned else _unaligned(arg) for arg in args)):
                yield launch.specialisation


def _unaligned(arg: Any) -> Any:
    return replace(arg, alignment=arg.dtype.itemsize) if isinstance(arg, TensorArg) else arg


def of_ranks() -> list[Specialisation]:
    """Specialisations of kernels of several ranks, which no op of the registry launches."""
    shared = {"WORLD_SIZE": 8, "SIGNAL_BYTES": SIGNAL_BYTES, "NUM_THREADS": 512, "scalar_t": dtypes.bfloat16}
    packets = shared | {"PACKET_BYTES": PACKET_BYTES, "VEC_SIZE": 8}
    rows = shared | {"VEC_SIZE": 8, "HIDDEN_SIZE": 7168, "TOP_K": 8, "NUM_EXPERTS": 256}
    rows |= {"id_t": dtypes.int64, "code_t": dtypes.float8_e4m3fn, "CODES": False}
    of_experts = [rows | {"WORLD_SIZE": size, "UNROLL": unroll(size)} for size in (2, 4, 8)]
    return [
        custom_all_reduce._packets(**packets),
        *(
            custom_all_reduce._all_reduce(
                **packets | {"WORLD_SIZE": size}, TWO_SHOT=two, SCATTER=scatter, UNROLL=unroll(size)
            )
            for size, two, scatter in ((2, False, False), (4, True, False), (8, False, True), (8, True, False))
        ),
        custom_gather_scatter._all_gather(**shared),
        custom_all_reduce._add_rms_norm(**packets, HIDDEN_SIZE=8192),
        minimax._kernel(**shared, Q_SIZE=768, K_SIZE=128, VEC_SIZE=8),
        quick_all_reduce._kernel(**shared, BITS=16, compute_t=dtypes.bfloat16),
        quick_all_reduce._kernel(**shared, BITS=6, compute_t=dtypes.float16),
        *(expert_parallel._dispatch(**one | {"CODES": codes}) for one in of_experts for codes in (False, True)),
        *(expert_parallel._combine(**one) for one in of_experts),
    ]


@cache
def of_arch(arch: str) -> dict[str, list[Specialisation]]:
    """{kernel file: its specialisations}, each text once."""
    found: dict[str, dict[tuple[Any, ...], Specialisation]] = {}
    for op in pyops.registry.values():
        for one in of_op(op, arch):
            found.setdefault(one.kernel.file, {})[one.key] = one
    for one in of_ranks():
        found.setdefault(one.kernel.file, {})[one.key] = one
    return {file: list(by_key.values()) for file, by_key in sorted(found.items())}


def of_relatives(archs: Sequence[str]) -> list[tuple[str, Specialisation]]:
    """One specialisation of each entry of two matrix core kernel files for each relative of these architectures."""
    return [
        (relative, one)
        for relative, arch in RELATIVES.items()
        if arch in archs
        for one in sample(arch, 1)
        if one.kernel.file in _OF_RELATIVES
    ]


def sample(arch: str, per_kernel: int | None) -> list[Specialisation]:
    """At most this many specialisations of each entry of a kernel file, the same ones at each call; all of them for
    None.
    """
    of_entry: dict[tuple[str, str], list[Specialisation]] = {}
    for one in chain(*of_arch(arch).values()):
        of_entry.setdefault((one.kernel.file, one.kernel.signature.entry), []).append(one)
    chosen = []
    for (file, _), every in of_entry.items():
        few = per_kernel is not None and len(every) > per_kernel
        chosen += random.Random(f"{file} {arch}").sample(every, per_kernel or 0) if few else every
    return chosen


def _asks_for_warps(text: str) -> bool:
    """Whether a text mentions the size of a warp, besides the header that defines it."""
    return text.count("WARP_SIZE") > source.inline("include/platform.cuh").count("WARP_SIZE")


def of_archs(archs: Sequence[str], per_kernel: int | None, every_arch: bool) -> Iterator[tuple[str, Specialisation]]:
    """`sample` for each architecture. Unless for `every_arch`, an entry of a text that names no architecture is taken
    for one with warps of 32 threads and one with warps of 64, or for one of either if the text does not depend on the
    size of a warp: compilers differ little between the others.
    """
    alike: dict[tuple[str, str, int], list[tuple[str, list[Specialisation]]]] = {}
    for arch in archs:
        of_entry: dict[tuple[str, str], list[Specialisation]] = {}
        for one in sample(arch, per_kernel):
            of_entry.setdefault((one.kernel.file, one.kernel.signature.entry), []).append(one)
        for entry, few in of_entry.items():
            if every_arch or _NAMES_ARCH.search(few[0].text):
                yield from ((arch, one) for one in few)
            else:
                warp_size = device.model(arch).warp_size if _asks_for_warps(few[0].text) else 0
                alike.setdefault((*entry, warp_size), []).append((arch, few))
    for key, every in alike.items():
        arch, few = random.Random(str(key)).choice(every)
        yield from ((arch, one) for one in few)
