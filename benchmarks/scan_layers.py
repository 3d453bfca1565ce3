"""The kinds of `benchmarks.models` with scans and convolutions: prompts of mixed lengths through published layers.

delta_rule is `gated_delta_rule`, kda is `kda`, ssd is `mamba_chunk_scan_varlen`, selective_scan is
`selective_scan_fwd`, and conv is `causal_conv1d_prefill` over the channels of any of these layers. A row draws a model,
its GPUs of tensor parallelism and up to 64 sequences with 64 to 65536 tokens together. delta_rule_step and kda_step are
the ops that update states by one token of up to 512 sequences. Rivals: `benchmarks.scan_rivals`. Those in Triton
compile and choose their tiles for each number of heads, which takes up to a minute, so all rows of such a kind are of
one layer in a run.
"""

from __future__ import annotations

import random
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

import pyops

from . import drawn, products, scan_rivals
from .gemm_layers import PARTS

KINDS = "delta_rule", "kda", "delta_rule_step", "kda_step", "ssd", "selective_scan", "conv"
MAX_SEQS, MIN_TOKENS, MAX_TOKENS = 64, 64, 65536
MAX_STEPS = 512
_TUNED = "delta_rule", "kda", "ssd"  # kinds with rivals that tune themselves for a layer
_CHUNK_SIZE = 256  # tokens of a chunk of ssd, as models are trained
_WIDTH = 4  # of convolutions
_SCAN_DTYPE = torch.bfloat16
_ALLOWED = 0.02  # largest difference of a rival from pyops in the 2-norm: bf16 operands, rounded elsewhere


@dataclass(frozen=True)
class Layer:
    """A layer on one GPU.

    Attributes:
        heads: of the values; channels of a selective scan.
        groups: heads of queries and keys, or of B and C.
        size: elements of a head, 1 for a selective scan.
        state: elements of a key, or of a state of a channel.
    """

    heads: int
    groups: int
    size: int
    state: int

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        keys = 2 * self.groups * self.state
        return self.heads * self.size + (keys if self.size > 1 else 0)

    def part(self, parts: int) -> Layer:
        """That of one of `parts` GPUs."""
        return Layer(max(1, self.heads // parts), max(1, self.groups // parts), self.size, self.state)


LAYERS = {
    "delta_rule": {
        "Qwen3-Next 80B-A3B": Layer(32, 16, 128, 128),
        "Qwen3.5 0.8B": Layer(16, 16, 128, 128),
        "Qwen3.5 27B": Layer(48, 16, 128, 128),
        "Qwen3.5 397B-A17B": Layer(64, 16, 128, 128),
    },
    "kda": {"Kimi Linear 48B-A3B": Layer(32, 32, 128, 128)},
    "ssd": {
        "Mamba-2 2.7B": Layer(80, 1, 64, 128),
        "Codestral Mamba 7B": Layer(128, 8, 64, 128),
        "Nemotron-H 8B": Layer(128, 8, 64, 128),
        "Bamba 9B": Layer(128, 1, 64, 128),
        "Zamba2 7B": Layer(112, 2, 64, 64),
        "Falcon-H1 34B": Layer(32, 2, 128, 256),
        "Granite 4.0 H Small": Layer(128, 1, 64, 128),
    },
    "selective_scan": {
        "Mamba 130M": Layer(1536, 1, 1, 16),
        "Mamba 2.8B": Layer(5120, 1, 1, 16),
        "Falcon Mamba 7B": Layer(8192, 1, 1, 16),
        "Jamba 1.5 Large": Layer(16384, 1, 1, 16),
    },
}


@dataclass(frozen=True)
class Row:
    """A layer and the tokens of its sequences."""

    kind: str
    layer: str
    of: Layer
    lengths: tuple[int, ...]

    def __str__(self) -> str:
        of = self.of
        sizes = f"{of.channels}" if self.kind == "conv" else f"{of.heads}/{of.groups}x{of.size}, state {of.state}"
        return f"{self.kind}:{len(self.lengths)} of {min(self.lengths)}-{max(self.lengths)}, {sizes}"

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def draw(kind: str, count: int, seed: int) -> list[Row]:
    """`count` different rows of a kind."""
    family = kind.removesuffix("_step")
    layers = [
        (f"{name} tp{parts}", one.part(parts))
        for name, one in ChainMap(*LAYERS.values() if kind == "conv" else [LAYERS[family]]).items()
        for parts in PARTS
    ]
    if kind in _TUNED:
        layers = [random.Random(f"{seed} layers of {kind}").choice(layers)]
    return drawn.draw(kind, count, seed, partial(_row, kind, layers))


def _row(kind: str, layers: Sequence[tuple[str, Layer]], generator: random.Random) -> Row:
    layer, of = generator.choice(layers)
    if kind.endswith("_step"):
        return Row(kind, layer, of, (1,) * drawn.log_uniform(generator, MAX_STEPS))
    count, tokens = drawn.log_uniform(generator, MAX_SEQS), drawn.log_uniform(generator, MAX_TOKENS, MIN_TOKENS)
    cuts = sorted(generator.sample(range(1, tokens), count - 1))
    lengths = tuple(b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True))
    return Row(kind, layer, of, lengths)


def num_bytes(row: Row) -> int:
    """Bytes of the inputs and outputs of a row; of states alone where they are updated."""
    of, values = row.of, row.of.heads * row.of.size
    if row.kind.endswith("_step"):
        return 4 * row.tokens * values * of.state
    elements = {
        "delta_rule": 2 * values + 2 * of.groups * of.state,
        "kda": 2 * values + 4 * of.groups * of.state,  # with g in float32
        "ssd": 2 * values + 2 * of.groups * of.state,
        "selective_scan": 3 * values + 2 * of.groups * of.state,
        "conv": 2 * of.channels,
    }
    return 2 * row.tokens * elements[row.kind]


def _ints(values: Sequence[int]) -> Any:
    return torch.tensor(list(values), dtype=torch.int32)


def _starts(row: Row) -> Any:
    return _ints((0, *accumulate(row.lengths)))


def _randn(*shape: int) -> Any:
    return torch.randn(*shape).to(_SCAN_DTYPE)


def operands(row: Row) -> dict[str, Any]:
    """The arguments of the op by name, on torch's default device."""
    return _OPERANDS[row.kind](row)


def _rule(row: Row) -> dict[str, Any]:
    """What rules for prefill and for steps share."""
    of, tokens = row.of, row.tokens
    decays = (of.heads, of.state) if row.kind.startswith("kda") else (of.heads,)
    return {
        "q": _randn(1, tokens, of.groups, of.state),
        "k": _randn(1, tokens, of.groups, of.state),
        "v": _randn(1, tokens, of.heads, of.size),
        "g": F.logsigmoid(torch.randn(1, tokens, *decays) + 2),
        "beta": torch.rand(1, tokens, of.heads).to(_SCAN_DTYPE),
        "scale": of.state**-0.5,
        "cu_seqlens": _starts(row),
        "use_qk_l2norm_in_kernel": True,
        "o": torch.empty(1, tokens, of.heads, of.size, dtype=_SCAN_DTYPE),
    }


def _chunked(row: Row) -> dict[str, Any]:
    state = len(row.lengths), row.of.heads, row.of.state, row.of.size
    return _rule(row) | {"initial_state": torch.zeros(state), "final_state": torch.empty(state)}


def _step(row: Row) -> dict[str, Any]:
    """Slot 0 belongs to no sequence, as in vLLM."""
    count = len(row.lengths)
    state = torch.randn(count + 1, row.of.heads, row.of.state, row.of.size)
    return _rule(row) | {"state": state, "ssm_state_indices": torch.randperm(count).int() + 1}


def _ssd(row: Row) -> dict[str, Any]:
    of, tokens = row.of, row.tokens
    bounds, seqs, last = [0], list[int](), list[int]()
    for seq, length in enumerate(row.lengths):
        chunks = [min(_CHUNK_SIZE, length - begin) for begin in range(0, length, _CHUNK_SIZE)]
        bounds += accumulate(chunks[1:], initial=bounds[-1] + chunks[0])
        seqs += [seq] * len(chunks)
        last.append(len(seqs) - 1)
    return {
        "x": _randn(tokens, of.heads, of.size),
        "dt": _randn(tokens, of.heads),
        "A": -torch.rand(of.heads) - 0.5,
        "B": _randn(tokens, of.groups, of.state) * of.state**-0.25,
        "C": _randn(tokens, of.groups, of.state) * of.state**-0.25,
        "chunk_size": _CHUNK_SIZE,
        "cu_seqlens": _starts(row),
        "cu_chunk_seqlens": _ints(bounds),
        "last_chunk_indices": _ints(last),
        "seq_idx": _ints(seqs),
        "out": torch.empty(tokens, of.heads, of.size, dtype=_SCAN_DTYPE),
        "D": torch.randn(of.heads),
        "dt_bias": torch.randn(of.heads) - 2,
        "dt_softplus": True,
        "states": torch.empty(len(row.lengths), of.heads, of.size, of.state, dtype=_SCAN_DTYPE),
    }


def _selective_scan(row: Row) -> dict[str, Any]:
    of, tokens = row.of, row.tokens
    return {
        "u": _randn(of.heads, tokens),
        "delta": _randn(of.heads, tokens),
        "A": -torch.rand(of.heads, of.state) - 0.5,
        "B": _randn(of.groups, of.state, tokens),
        "C": _randn(of.groups, of.state, tokens),
        "D_": torch.randn(of.heads),
        "z_": _randn(of.heads, tokens),
        "delta_bias_": torch.randn(of.heads) - 2,
        "delta_softplus": True,
        "query_start_loc": _starts(row),
        "cache_indices": torch.randperm(len(row.lengths)).int(),
        "has_initial_state": torch.zeros(len(row.lengths), dtype=torch.bool),
        "ssm_states": torch.zeros(len(row.lengths), of.heads, of.state),
        "pad_slot_id": -1,
    }


def _conv(row: Row) -> dict[str, Any]:
    channels, num_seqs = row.of.channels, len(row.lengths)
    return {
        "out": torch.empty(row.tokens, channels, dtype=_SCAN_DTYPE),
        "conv_states": torch.zeros(num_seqs, _WIDTH - 1, channels, dtype=_SCAN_DTYPE),
        "x": _randn(row.tokens, channels),
        "weight": _randn(channels, _WIDTH) * 0.5,
        "bias": _randn(channels),
        "query_start_loc": _starts(row),
        "cache_indices": torch.randperm(num_seqs).int(),
        "has_initial_state": torch.zeros(num_seqs, dtype=torch.bool),
    }


_OPERANDS = {
    "delta_rule": _chunked,
    "kda": _chunked,
    "delta_rule_step": _step,
    "kda_step": _step,
    "ssd": _ssd,
    "selective_scan": _selective_scan,
    "conv": _conv,
}
# The op of each kind, and the argument that rivals' results are compared with.
OPS: dict[str, tuple[Any, str]] = {
    "delta_rule": (pyops.gated_delta_rule, "o"),
    "kda": (pyops.kda, "o"),
    "delta_rule_step": (pyops.gated_delta_rule_update, "o"),
    "kda_step": (pyops.kda_update, "o"),
    "ssd": (pyops.mamba_chunk_scan_varlen, "out"),
    "selective_scan": (pyops.selective_scan_fwd, "z_"),
    "conv": (pyops.causal_conv1d_prefill, "out"),
}


def contenders(row: Row) -> drawn.Contenders:
    """{name: a function from the operands to a call}."""
    op, _ = OPS[row.kind]
    return {"pyops": lambda call: partial(op, **call), **scan_rivals.RIVALS[row.kind]}


def measure(row: Row) -> dict[str, float]:
    """{contender: microseconds}."""
    with torch.device("cuda"):
        sets = [(operands(row),) for _ in range(products.num_sets(num_bytes(row)))]
    return products.in_turn(str(row), drawn.agreeing(row, contenders(row), *sets[0], OPS[row.kind][1], _ALLOWED), sets)
