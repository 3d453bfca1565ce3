"""Faults of gemm.cu: the change, and the fault that the host reports. The schedule decides among several kinds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WRONG_RESULT = "wrong result"

_GIVE_BACK = """            warpgroup_wait<1>();
            if (previous >= 0) give_back(previous);
            previous = stage;
"""
_LAST_BACK = "        give_back(previous);\n        if"
_STORE_BARRIER = "        fence_proxy_async();\n        named_barrier_sync(1 + warpgroup, 128);\n"
_TILE_TO_LOAD = """            for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
                const int row = (tile / tiles_n * CLUSTER + rank) * BLOCK_M, column = tile % tiles_n * BLOCK_N;"""


@dataclass(frozen=True)
class Fault:
    """Changes of the text, (old, new) each, or of a tensor map; the kinds of fault, or WRONG_RESULT."""

    kinds: set[str]
    changes: tuple[tuple[str, str], ...] = ()
    maps: dict[str, dict[str, Any]] = field(default_factory=dict)

    def apply(self, text: str) -> str:
        for old, new in self.changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text


def _deleted(kinds: set[str], old: str) -> Fault:
    return Fault(kinds, ((old, ""),))


FAULTS = {
    "no proxy fence before the store": _deleted({"missing proxy fence"}, "        fence_proxy_async();\n"),
    "no fence of the mbarriers": _deleted({"missing proxy fence"}, "        fence_mbarrier_init();\n"),
    "no warpgroup_arrive": _deleted({"missing wgmma fence"}, "            warpgroup_arrive();\n"),
    "warpgroup_arrive once": Fault(
        {"missing wgmma fence"},
        (("warpgroup_arrive();", "if (tile == blockIdx.x && step == 0) warpgroup_arrive();"),),
    ),
    "parity of the consumers": Fault(
        {"async copy not waited for", "uninitialised shared memory", "deadlock"},
        (("mbarrier_wait(full + stage, phase)", "mbarrier_wait(full + stage, phase ^ 1)"),),
    ),
    "parity of the producer": Fault({"deadlock"}, (("(empty + stage, phase ^ 1)", "(empty + stage, phase)"),)),
    "phase of the consumers never flips": Fault(
        {"async copy not waited for", "deadlock", "shared memory race", "mbarrier misuse"},
        (("mbarrier_wait(full + stage, phase)", "mbarrier_wait(full + stage, 0)"),),
    ),
    "too few bytes": Fault(
        {"wrong transaction bytes", "shared memory race"},
        (("expect_tx(full + stage, STAGE_BYTES)", "expect_tx(full + stage, A_BYTES)"),),
    ),
    "too many bytes": Fault({"deadlock"}, (("(full + stage, STAGE_BYTES)", "(full + stage, STAGE_BYTES + 64)"),)),
    "no bytes": Fault(
        {"async copy not waited for", "wrong transaction bytes", "shared memory race"},
        (("mbarrier_arrive_expect_tx(full + stage, STAGE_BYTES)", "mbarrier_arrive(full + stage)"),),
    ),
    "swizzle of the descriptor": Fault(
        {"bad wgmma descriptor"},
        (("b = make_smem_desc(from + A_BYTES)", "b = make_smem_desc<SWIZZLE_64B>(from + A_BYTES, 1024)"),),
    ),
    "stride of the descriptor": Fault(
        {"async copy not waited for", "shared memory race", "uninitialised shared memory", "deadlock"},
        (("b = make_smem_desc(from + A_BYTES)", "b = make_smem_desc(from + A_BYTES, 2048)"),),
    ),
    "swizzle of the map": Fault({"bad wgmma descriptor"}, maps={"input": {"swizzle": 0}}),
    "given back before the wait": Fault(
        {"shared memory race"},
        ((_GIVE_BACK, "            give_back(stage);\n            warpgroup_wait<1>();\n"), (_LAST_BACK, "        if")),
    ),
    "given back one group early": Fault(
        {"shared memory race"},
        ((_GIVE_BACK, "            warpgroup_wait<1>();\n            give_back(stage);\n"), (_LAST_BACK, "        if")),
    ),
    "no wait in the loop": _deleted({"shared memory race"}, "            warpgroup_wait<1>();\n"),
    "epilogue before the wait": _deleted(
        {"wgmma not waited for", "shared memory race"}, "        warpgroup_wait<0>();\n"
    ),
    "no commit": _deleted({"shared memory race", "wgmma not waited for"}, "            warpgroup_commit_batch();\n"),
    "column of another tile is loaded": Fault(
        {WRONG_RESULT}, ((_TILE_TO_LOAD, _TILE_TO_LOAD.replace("column = tile", "column = (tile + 1)")),)
    ),
    "stored to another tile": Fault({"global memory race"}, (("column + 64 * i, row)", "column + 64 * i, row / 2)"),)),
    "the last stage is not given back": Fault({"deadlock"}, ((_LAST_BACK, "        if"),)),
    "an arrival too many": Fault(
        {"mbarrier misuse", "shared memory race", "async copy not waited for"},
        (("threadIdx.x % 128 >= CLUSTER", "threadIdx.x % 32 >= CLUSTER"),),
    ),
    "the map is wider than the tensor": Fault(
        {"out-of-bounds global access"}, maps={name: {"sizes": (384, 256)} for name in ("input", "weight")}
    ),
    "box too small": Fault({"deadlock"}, maps={"input": {"box": (64, 64)}}),
    "box too large": Fault(
        {"async copy not waited for", "wrong transaction bytes", "shared memory race", "out-of-bounds shared access"},
        maps={"input": {"box": (64, 256)}},
    ),
    "no wait for an empty stage": _deleted(
        {"mbarrier misuse"}, "                    mbarrier_wait(empty + stage, phase ^ 1);\n"
    ),
    "loaded to another stage": Fault(
        {"async copy not waited for", "shared memory race", "uninitialised shared memory"},
        (("uint8_t* to = shared + stage * STAGE_BYTES", "uint8_t* to = shared + (stage ^ 1) * STAGE_BYTES"),),
    ),
    "the store still reads": _deleted({"shared memory race"}, "        if (thread == 0) tma_store_wait_read<0>();\n"),
    "exit before the store has read": _deleted(
        {"async copy not waited for"}, "    if (thread == 0) tma_store_wait<0>();\n"
    ),
    "no named barrier before the store": Fault(
        {"shared memory race", "uninitialised shared memory"}, ((_STORE_BARRIER, "        fence_proxy_async();\n"),)
    ),
    "a named barrier of too many": Fault(
        {"deadlock", "divergent barrier"}, ((_STORE_BARRIER, _STORE_BARRIER.replace("128", "256")),)
    ),
    "one named barrier for both warpgroups": Fault(
        {"divergent barrier", "deadlock"},
        (
            (_STORE_BARRIER, _STORE_BARRIER.replace("1 + warpgroup", "1")),
            ("        named_barrier_sync(1 + warpgroup, 128);  //", "        named_barrier_sync(1, 128);  //"),
        ),
    ),
    "no barrier after the initialisation": _deleted(
        {"shared memory race", "mbarrier misuse"}, "    sync_cluster<CLUSTER>();\n"
    ),
    "too many registers": Fault({"setmaxnreg"}, (("warpgroup_reg_alloc<232>", "warpgroup_reg_alloc<248>"),)),
    "no registers are given away": _deleted({"setmaxnreg"}, "        warpgroup_reg_dealloc<40>();\n"),
    "half of a warpgroup multiplies": Fault(
        {"deadlock"}, (("                wgmma<bf16_t", "                if (warp < 2) wgmma<bf16_t"),)
    ),
    "pieces of A and B differ": Fault(
        {WRONG_RESULT}, (("step * BLOCK_K, column);", "(step ^ 1) * BLOCK_K, column);"),)
    ),
}
# The same in clusters of two CTAs.
FAULTS_OF_CLUSTERS = {
    "arrival at the own block only": Fault(
        {"deadlock"}, (("threadIdx.x % 128 >= CLUSTER", "threadIdx.x % 128 != rank"),)
    ),
    "arrivals of the own block are counted": Fault(
        {"shared memory race", "mbarrier misuse", "async copy not waited for"},
        (("mbarrier_init(empty + i, CONSUMERS * CLUSTER)", "mbarrier_init(empty + i, CONSUMERS)"),),
    ),
    "blocks wait for their own consumers only": Fault(
        {"shared memory race", "mbarrier misuse", "async copy not waited for", "deadlock"},
        (
            ("mbarrier_init(empty + i, CONSUMERS * CLUSTER)", "mbarrier_init(empty + i, CONSUMERS)"),
            ("threadIdx.x % 128 >= CLUSTER", "threadIdx.x % 128 != rank"),
        ),
    ),
    "a barrier of the block after the initialisation": Fault(
        {"mbarrier misuse", "shared memory race"}, (("    sync_cluster<CLUSTER>();\n", "    __syncthreads();\n"),)
    ),
    "multicast to one block": Fault({"deadlock"}, (("(1 << CLUSTER) - 1", "1 << rank"),)),
    "both parts to one place": Fault(
        {"async copy not waited for", "uninitialised shared memory"},
        (("to + A_BYTES + rank * (B_BYTES / CLUSTER)", "to + A_BYTES"),),
    ),
    "a block leaves early": Fault(
        {"early exit", "async copy not waited for"},
        (
            ("        leave_cluster<CLUSTER>();\n        return;", "        return;"),
            ("    leave_cluster<CLUSTER>();\n}", "}"),
        ),
    ),
    "no fence of the mbarriers": _deleted({"missing proxy fence"}, "        fence_mbarrier_init();\n"),
    "columns of the other block": Fault(
        {WRONG_RESULT}, (("column + rank * (BLOCK_N / CLUSTER)", "column + (rank ^ 1) * (BLOCK_N / CLUSTER)"),)
    ),
}
