"""MLA decode on Hopper: shares of the tokens of all sequences (mla_schedule.cuh), and their combine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from ... import tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.launch.scratch import Scratch
from ..._core.system.device import Device
from .decode_launch import workspace
from .layout import absent, heads_stride
from .mla_problem import ENTRY_SIZE, LATENT_SIZE, MlaProblem

_combine = Kernel("attention/mla_combine.cu")

MAX_SHARES = 2**15 - 1  # most shares: a grid has fewer than 2^16 blocks along y, and a cluster two per share
_NUM_THREADS, _BLOCKS = 256, (3, 4)  # threads of a block of mla_combine.cu, blocks that an SM holds
_PARTS = 4  # parts of a head in mla_combine.cu
# The cost model: us of the combine kernel, bytes per us of partial results that blocks write and it reads (of most
# kernels), and us of the schedule that reads all lengths. docs/performance/mla.md, "Clusters for short calls".
_JOIN_US, PARTIAL_BYTES_PER_US, _SCHEDULE_US = 3.8, 2.8e6, 0.6
# The cost model of mla_tree_combine.cuh: us of a node without its bytes (a load, a store, an exchange and a load, one
# after another), and bytes per us between an SM and L2 (of most kernels): 64 per cycle.
_NODE_US, SM_BYTES_PER_US = 1.7, 1.1e5
# The cost model: bytes of a query row and its result, and bytes per us of DRAM.
_ROW_BYTES, _DRAM_BYTES_PER_US = (ENTRY_SIZE + LATENT_SIZE) * 2, 4.1e6
BLOCK_US = 3.0  # the cost model: us of a block without its units: launch, lengths, page numbers and the first tile
# The cost model: us of each item of a block but its first one. docs/performance/mla.md, "One item for each block".
_ITEM_US = 5.0
# Most units of all sequences with their gaps: the kernels count them in ints, also after they have aligned shares to
# sequences.
_MAX_UNITS = 2**29
# The cost model of mla_cluster_combine.cuh: bytes per us that a CTA reads of the others.
_CLUSTER_BYTES_PER_US = 9.5e3
_CLUSTER_SIZES = (2, 4, 8, 16)  # CTAs of a cluster: Hopper allows sixteen where a GPC has as many SMs
# GPCs of the GPU: a cluster lies within one; most SMs of one; SMs of a TPC: any may be disabled.
_GPCS, _GPC_SMS, _TPC_SMS = 8, 18, 2
_ANY_SPLITS = 2**31 - 1  # max_splits without a limit
_SLOTS, _PIECES_BYTES = 2, 8  # slots of a share; bytes of MlaPieces


class SharesConfig(tuning.Config, Protocol):
    """The geometry of a kernel with shares.

    Attributes:
        num_shares: shares of the tokens of all sequences; a block for each, and for each group of heads.
        combines: whether blocks combine the pieces of a sequence (mla_tree_combine.cuh); otherwise mla_combine.cu does.
        split_ctas: CTAs of a cluster that split each sequence, and combine its pieces; 1: no clusters, or for others.
        HEADS, BLOCKS: query heads of a block, blocks that run at once on an SM.
        UNIT: tokens; sequences are cut at multiples of it.
        WARPS, PARTIALS: warps of a block with results, and float32 numbers of a lane's partial result, for
            mla_tree_combine.cuh: accumulators, row maxima and row sums.
        PARTIAL_RATE: bytes per us of partial results that blocks write and mla_combine.cu reads.
        TREE_RATE: bytes per us of partial results that a block writes or reads for mla_tree_combine.cuh.
    """

    @property
    def num_shares(self) -> int: ...
    @property
    def combines(self) -> bool: ...
    @property
    def split_ctas(self) -> int: ...
    @property
    def HEADS(self) -> int: ...
    @property
    def BLOCKS(self) -> int: ...
    @property
    def UNIT(self) -> int: ...
    @property
    def WARPS(self) -> int: ...
    @property
    def PARTIALS(self) -> int: ...
    @property
    def PARTIAL_RATE(self) -> float: ...
    @property
    def TREE_RATE(self) -> float: ...

    def block_us(self, problem: MlaProblem) -> float:
        """The time of a block without its units, in us."""
        ...

    def unit_us(self, problem: MlaProblem, device: Device) -> float:
        """The time of a block for a unit, in us."""
        ...

    def launch(self, problem: MlaProblem, arguments: dict[str, Any]) -> Launch: ...


AnyShares = TypeVar("AnyShares", bound=SharesConfig)


def head_groups(problem: MlaProblem, config: SharesConfig) -> int:
    """Groups of heads; each has its own blocks."""
    return -(-problem.num_heads // config.HEADS)


def choose_shares(problem: MlaProblem, config: SharesConfig, device: Device) -> tuple[int, bool]:
    """The number of shares: one for each of the blocks that run at once, or one per long sequence if none is cut. And
    whether the blocks combine the pieces, by the cost model for sequences of equal lengths."""
    num_seqs, blocks = problem.num_seqs, _blocks(problem, config, device)
    if not may_cut(problem, config):
        # A block of short sequences goes through several: it loads the next queries before it stores results.
        return min(num_seqs, MAX_SHARES if may_be_long(problem, config) else max(1, blocks)), False
    shares = max(1, min(blocks, num_seqs * _units(problem, config)))
    _, pieces, partials = _equal_lengths(problem, config, shares, device)
    return shares, _tree_us(config, pieces) < kernel_us(problem, partials, config.PARTIAL_RATE)


def or_clusters(problem: MlaProblem, config: AnyShares, clusters: Sequence[AnyShares], device: Device) -> AnyShares:
    """The config with shares, or the fastest one with clusters, if it takes less time whatever the lengths are."""
    fastest = min(clusters, key=lambda one: call_us(problem, one, device), default=config)
    return fastest if call_us(problem, fastest, device) < _least_us(problem, config, device) else config


def is_faster(problem: MlaProblem, config: SharesConfig, other: SharesConfig, device: Device) -> bool:
    """Whether a config takes less time than another by the cost model, whether all sequences are as long as the page
    table allows or only one is."""
    return all(us(problem, config, device) < us(problem, other, device) for us in (call_us, _least_us))


def _least_us(problem: MlaProblem, config: SharesConfig, device: Device) -> float:
    """The time of a call by the cost model, in us, if one sequence is as long as the page table allows, and the others
    are empty: most shares are pieces of the long one, which has no more than its own cluster otherwise."""
    units, unit_us = _units(problem, config), config.unit_us(problem, device)
    if not may_cut(problem, config):
        rounds = -(-problem.num_seqs // max(1, _blocks(problem, config, device)))
        return rounds * (config.block_us(problem) + units * unit_us)
    pieces, share_units = min(units, config.num_shares), -(-(units + problem.num_seqs - 1) // config.num_shares)
    combine_us = _tree_us(config, pieces) if config.combines else kernel_us(problem, pieces, config.PARTIAL_RATE)
    return config.block_us(problem) + _SCHEDULE_US + share_units * unit_us + combine_us


def most_blocks(problem: MlaProblem, config: SharesConfig) -> int:
    """Blocks that have a unit: at most one for each unit, or as many as the clusters have."""
    blocks = problem.num_seqs * head_groups(problem, config)
    return blocks * (_units(problem, config) if config.split_ctas == 1 else config.split_ctas)


def cluster_sizes(problem: MlaProblem, config: SharesConfig, device: Device) -> list[int]:
    """Sizes of clusters that may split a sequence: the clusters of all sequences run at once, and the caller allows so
    many splits."""
    splits, num_clusters = problem.num_kv_splits, problem.num_seqs * head_groups(problem, config)

    def run_at_once(size: int) -> bool:
        # A GPC may have blocks to spare that are too few for another cluster, whole TPCs of them.
        spare = max(0, size - config.BLOCKS * _TPC_SMS)
        if 2 * size > config.BLOCKS * _GPC_SMS:  # if one cluster less ran, its GPCs would be whole, and others spare
            others = (_GPCS - num_clusters + 1) * spare
            return (num_clusters - 1) * config.BLOCKS * _GPC_SMS + others < config.BLOCKS * device.num_sms
        return size * num_clusters <= config.BLOCKS * device.num_sms - _GPCS * spare

    return [size for size in _CLUSTER_SIZES if run_at_once(size) and (splits <= 0 or size <= splits)]


def call_us(problem: MlaProblem, config: SharesConfig, device: Device) -> float:
    """The time of a call by the cost model, in us, if all sequences are as long as the page table allows."""
    num_seqs, units, unit_us = problem.num_seqs, _units(problem, config), config.unit_us(problem, device)
    if config.split_ctas > 1:
        return config.block_us(problem) + -(-units // config.split_ctas) * unit_us + _cluster_us(problem, config)
    if not may_cut(problem, config):
        blocks = max(1, _blocks(problem, config, device))
        rows_us = _rows_us(problem, min(num_seqs, blocks))
        return -(-num_seqs // blocks) * (config.block_us(problem) + units * unit_us + rows_us)
    share_units, pieces, partials = _equal_lengths(problem, config, config.num_shares, device)
    by_tree, by_kernel = _tree_us(config, pieces), kernel_us(problem, partials, config.PARTIAL_RATE)
    return config.block_us(problem) + _SCHEDULE_US + share_units * unit_us + (by_tree if config.combines else by_kernel)


def _rows_us(problem: MlaProblem, num_seqs: int) -> float:
    """The time to load the queries and to store the results of sequences that run at once."""
    return num_seqs * problem.num_heads * _ROW_BYTES / _DRAM_BYTES_PER_US


def _equal_lengths(problem: MlaProblem, config: SharesConfig, shares: int, device: Device) -> tuple[int, int, int]:
    """(units of a share with the time of its further items, pieces of a sequence, partial results) if all sequences are
    as long as the page table allows, as MlaSchedule of mla_schedule.cuh cuts them."""
    num_seqs, units = problem.num_seqs, _units(problem, config)
    equal = -(-num_seqs * (units + _item_units(problem, config, device)) // shares)
    if num_seqs <= shares:
        aligned = -(-units // (shares // num_seqs))
        if aligned <= equal:
            pieces = -(-units // aligned)
            return aligned, pieces, num_seqs * pieces
    return equal, _pieces(shares, num_seqs), shares + min(shares, num_seqs)


def launch(problem: MlaProblem, config: SharesConfig) -> list[Launch]:
    """The kernel that computes the shares, and the combine if sequences may be cut and its blocks do not combine."""
    device, num_seqs, num_heads, shares = problem.cache.device, problem.num_seqs, problem.num_heads, config.num_shares
    is_cut = may_cut(problem, config)
    in_tree, by_kernel = is_cut and config.combines, is_cut and not config.combines
    unit_us = config.unit_us(problem, device)
    shared = {
        **absent(lse=problem.lse),
        **workspace(_SLOTS * shares * num_heads if by_kernel else 0, LATENT_SIZE),
        "pieces": Scratch(num_seqs * _PIECES_BYTES) if by_kernel else 0,
        "num_seqs": num_seqs,
        "num_heads": num_heads,
        "out_stride": heads_stride(problem.out),
    }
    arguments: dict[str, Any] = {
        "max_splits": 1 if not is_cut else problem.num_kv_splits if problem.num_kv_splits > 0 else _ANY_SPLITS,
        "join_units": 0.0 if in_tree else _JOIN_US / unit_us,
        "piece_units": 0.0 if in_tree else _piece_us(problem, config.PARTIAL_RATE) / unit_us,
        "level_units": _level_us(config) / unit_us if in_tree else 0.0,
        "item_units": _item_units(problem, config, device),
        "nodes": 0,
    }
    if in_tree:
        groups = head_groups(problem, config)
        arguments["tmp_out"] = Scratch(_SLOTS * shares * groups * _partial_bytes(config))
        arguments["nodes"] = Scratch(shares * groups * config.WARPS * 4, zeroed=True)
    launches = [config.launch(problem, shared | arguments)]
    if by_kernel:
        tasks = num_seqs * num_heads * _PARTS
        few, many = _BLOCKS
        # With few blocks on an SM a warp has more loads in flight; many are for more tasks than those have warps.
        blocks = many if tasks > few * device.num_sms * _NUM_THREADS // 32 else few
        kernel = _combine(out_t=problem.out.dtype, HAS_LSE=problem.lse is not None, BLOCKS=blocks)
        launches.append(kernel.launch(min(tasks, blocks * device.num_sms), _NUM_THREADS, **shared))
    return launches


def _blocks(problem: MlaProblem, config: SharesConfig, device: Device) -> int:
    """Blocks of a group of heads that run at once."""
    return config.BLOCKS * device.num_sms // head_groups(problem, config)


def _units(problem: MlaProblem, config: SharesConfig) -> int:
    """Units of the longest sequence that the page table holds."""
    return max(1, -(-problem.max_tokens // config.UNIT))


def _item_units(problem: MlaProblem, config: SharesConfig, device: Device) -> int:
    """The time of an item of a block but its first one, in units."""
    return round(_ITEM_US / config.unit_us(problem, device))


def _pieces(shares: int, num_seqs: int) -> int:
    """Pieces of a sequence in equal shares, if all are equally long."""
    return -(-shares // num_seqs) + (shares % num_seqs > 0)


def _partial_bytes(config: SharesConfig) -> int:
    """Bytes of a block's partial result as TreeCombine stores it."""
    return config.WARPS * 32 * 4 * config.PARTIALS


def _level_us(config: SharesConfig) -> float:
    """The time of a level of the tree of TreeCombine."""
    return _NODE_US + 2 * _partial_bytes(config) / config.TREE_RATE


def _tree_us(config: SharesConfig, pieces: int) -> float:
    """The time until the blocks have combined the pieces of a sequence: those of one path to the root."""
    return (pieces - 1).bit_length() * _level_us(config)


def _cluster_us(problem: MlaProblem, config: SharesConfig) -> float:
    """The time until a cluster has combined its pieces: a CTA reads its part of the results of the others."""
    heads, size = min(problem.num_heads, config.HEADS), config.split_ctas
    return heads * LATENT_SIZE * 4 * (size - 1) / size / _CLUSTER_BYTES_PER_US


def _piece_us(problem: MlaProblem, rate: float) -> float:
    """The time of writing and reading a partial result, if all SMs do, at so many bytes per us."""
    return 2 * 4 * problem.num_heads * LATENT_SIZE / rate


def kernel_us(problem: MlaProblem, pieces: int, rate: float = PARTIAL_BYTES_PER_US) -> float:
    """The time of mla_combine.cu for some partial results, and of writing them."""
    return _JOIN_US + pieces * _piece_us(problem, rate)


def may_be_long(problem: MlaProblem, config: SharesConfig) -> bool:
    """Whether sequences may be long enough to be worth a cut: the bytes of two partial results take the time of some
    units. The latency of a combine does not count. Where sequences are many, a block goes through several of them: 195
    of 190 tokens with 128 heads took 50.3 us, and 53.1 with a block for each."""
    two_us = min(2 * _partial_bytes(config) / config.TREE_RATE, 2 * _piece_us(problem, config.PARTIAL_RATE))
    return _units(problem, config) > 1 + two_us / config.unit_us(problem, problem.cache.device)


def may_cut(problem: MlaProblem, config: SharesConfig) -> bool:
    """Whether sequences may be cut."""
    units = _units(problem, config) + _item_units(problem, config, problem.cache.device)
    is_allowed = config.split_ctas == 1 and problem.num_kv_splits != 1 and problem.num_seqs * units <= _MAX_UNITS
    return is_allowed and may_be_long(problem, config)
