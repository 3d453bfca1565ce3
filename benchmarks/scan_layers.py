"""The kinds of `benchmarks.models` with scans and convolutions: prompts of mixed lengths through published layers.

delta_rule is `gated_delta_rule`, ssd is `mamba_chunk_scan_varlen`, selective_scan is `selective_scan_fwd`, and conv is
`causal_conv1d_prefill` over the channels of any of these layers. A row draws a model, its GPUs of tensor parallelism
and up to 64 sequences with 64 to 65536 tokens together. Rivals: flash-linear-attention (FLA) and FlashInfer for the
delta rule, vLLM's Triton kernels for ssd and conv, vLLM's compiled op for the selective scan, torch for conv.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

import pyops

from . import drawn, products, rivals
from .gemm_layers import PARTS
from .installed import module
from .timing import Call

KINDS = "delta_rule", "ssd", "selective_scan", "conv"
MAX_SEQS, MIN_TOKENS, MAX_TOKENS = 64, 64, 65536
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
    return drawn.draw(kind, count, seed, partial(_row, kind))


def _row(kind: str, generator: random.Random) -> Row | None:
    family = LAYERS[generator.choice(list(LAYERS)) if kind == "conv" else kind]
    name, parts = generator.choice(list(family)), generator.choice(PARTS)
    count, tokens = drawn.log_uniform(generator, MAX_SEQS), drawn.log_uniform(generator, MAX_TOKENS, MIN_TOKENS)
    cuts = sorted(generator.sample(range(1, tokens), count - 1))
    lengths = tuple(b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True))
    return Row(kind, f"{name} tp{parts}", family[name].part(parts), lengths)


def num_bytes(row: Row) -> int:
    """Bytes of the inputs and outputs of a row, without states."""
    of, values = row.of, row.of.heads * row.of.size
    elements = {
        "delta_rule": 2 * values + 2 * of.groups * of.state,
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
    return {"delta_rule": _delta_rule, "ssd": _ssd, "selective_scan": _selective_scan, "conv": _conv}[row.kind](row)


def _delta_rule(row: Row) -> dict[str, Any]:
    of, tokens = row.of, row.tokens
    return {
        "q": _randn(1, tokens, of.groups, of.state),
        "k": _randn(1, tokens, of.groups, of.state),
        "v": _randn(1, tokens, of.heads, of.size),
        "g": F.logsigmoid(torch.randn(1, tokens, of.heads) + 2),
        "beta": torch.rand(1, tokens, of.heads).to(_SCAN_DTYPE),
        "scale": of.state**-0.5,
        "initial_state": torch.zeros(len(row.lengths), of.heads, of.state, of.size),
        "cu_seqlens": _starts(row),
        "use_qk_l2norm_in_kernel": True,
        "final_state": torch.empty(len(row.lengths), of.heads, of.state, of.size),
        "o": torch.empty(1, tokens, of.heads, of.size, dtype=_SCAN_DTYPE),
    }


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


# The op of each kind, and the argument that rivals' results are compared with.
OPS: dict[str, tuple[Any, str]] = {
    "delta_rule": (pyops.gated_delta_rule, "o"),
    "ssd": (pyops.mamba_chunk_scan_varlen, "out"),
    "selective_scan": (pyops.selective_scan_fwd, "z_"),
    "conv": (pyops.causal_conv1d_prefill, "out"),
}


def _fla(call: dict[str, Any]) -> Call:
    """FLA's chunked delta rule; heads of queries and keys are repeated beforehand, as its layers do."""
    function = module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    repeats = call["v"].shape[2] // call["q"].shape[2]
    q, k = (call[name].repeat_interleave(repeats, 2) for name in ("q", "k"))
    named = {name: call[name] for name in ("v", "g", "beta", "scale", "initial_state", "use_qk_l2norm_in_kernel")}
    starts = call["cu_seqlens"].long()
    run = partial(function, q=q, k=k, **named, cu_seqlens=starts, output_final_state=True)
    return lambda: run()[0]


def _flashinfer(call: dict[str, Any]) -> Call:
    """FlashInfer's delta rule. It takes decays instead of logarithms, and normalised queries and keys."""
    function = module("flashinfer.gdn_prefill").chunk_gated_delta_rule
    q, k = (F.normalize(call[name][0].float(), dim=-1).to(call[name].dtype) for name in ("q", "k"))
    v, decay, beta = call["v"][0], call["g"][0].exp(), call["beta"][0].float()
    named = {"initial_state": call["initial_state"], "output_final_state": True}
    run = partial(function, q, k, v, decay, beta, call["scale"], **named, cu_seqlens=call["cu_seqlens"].long())
    return lambda: run()[0]


def _vllm_ssd(call: dict[str, Any]) -> Call:
    """vLLM's Triton kernels. They return states."""
    function = module("vllm.model_executor.layers.mamba.ops.ssd_combined").mamba_chunk_scan_combined_varlen
    run = partial(function, **{name: value for name, value in call.items() if name != "states"})

    def scan() -> None:
        run()

    return scan


def _of_registry(rival: str, op: Any, call: dict[str, Any]) -> Call:
    """A rival of `benchmarks.rivals`, with all arguments of the op."""
    bound = inspect.signature(op).bind(**call)
    bound.apply_defaults()
    op = pyops.registry[op.__name__]
    return rivals.RIVALS[rival](op)(*(bound.arguments[one.name] for one in op.parameters))


def _vllm_conv(call: dict[str, Any]) -> Call:
    """vLLM's Triton kernel. It takes channels before tokens, strided as here."""
    function = module("vllm.model_executor.layers.mamba.ops.causal_conv1d").causal_conv1d_fn
    named = {name: call[name] for name in ("query_start_loc", "cache_indices", "has_initial_state")}
    states = call["conv_states"].transpose(1, 2)
    run = partial(function, call["x"].t(), call["weight"], call["bias"], states, **named, activation="silu")
    return lambda: run().t()


_RIVALS: dict[str, drawn.Contenders] = {
    "delta_rule": {"FLA": _fla, "FlashInfer": _flashinfer},
    "ssd": {"vLLM": _vllm_ssd},
    "selective_scan": {"vLLM": partial(_of_registry, "vllm", pyops.selective_scan_fwd)},
    "conv": {"vLLM": _vllm_conv, "torch": partial(_of_registry, "torch", pyops.causal_conv1d_prefill)},
}


def contenders(row: Row) -> drawn.Contenders:
    """{name: a function from the operands to a call}."""
    op, _ = OPS[row.kind]
    return {"pyops": lambda call: partial(op, **call), **_RIVALS[row.kind]}


def measure(row: Row) -> dict[str, float]:
    """{contender: microseconds}."""
    with torch.device("cuda"):
        sets = [(operands(row),) for _ in range(products.num_sets(num_bytes(row)))]
    return products.in_turn(str(row), drawn.agreeing(row, contenders(row), *sets[0], OPS[row.kind][1], _ALLOWED), sets)
