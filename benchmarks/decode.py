"""Time a decode step of a Llama with a billion weights, next to its memory bound and to transformers.

python -m benchmarks.decode --batch 1 64 --context 1024
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pyops.models import Config, Decoder
from pyops.models.runner import Part, Runner

from .timing import QUICK, streaming_gbs

# Layers and heads of Llama 3.2 1B with the vocabulary of Llama 2: 1.1 billion weights.
SIZES: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
_BLOCK_SIZE, _WARM, _STEPS = 16, 8, 64


def weight_bytes(model: Decoder) -> int:
    """Bytes of all weights that a step reads completely: all but the embedding, unless the LM head is tied to it."""
    weights = sum(int(tensor.nbytes) for tensor in model.tensors().values())
    return weights if model.config.tie_word_embeddings else weights - int(model.embedding.nbytes)


def step_bytes(model: Decoder, batch: int, context: int) -> int:
    """Bytes that a step must move: all weights, one embedding row per sequence, all keys and values."""
    row = 0 if model.config.tie_word_embeddings else model.config.hidden_size * int(model.dtype.itemsize)
    return weight_bytes(model) + batch * row + batch * (context + 1) * model.token_bytes()


def ours(model: Decoder, batch: int, context: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(a call that replays the captured graph, a call that runs a whole step), for `batch` sequences.

    A whole step also copies tokens and block tables to the device.
    """
    each = -(-context // _BLOCK_SIZE)
    runner = Runner(model, batch * each, _BLOCK_SIZE, batch, context)
    for kept in runner.cache:
        for tensor in kept:
            tensor.normal_()
    parts = [Part([i % 100], context - 1, range(i * each, (i + 1) * each)) for i in range(batch)]
    runner.run(parts)  # captures the graph
    return lambda: runner.step(batch), lambda: runner.run(parts)


def theirs(batch: int, context: int) -> Callable[[], Any]:
    """A decode step of transformers' model with a static cache, compiled into a CUDA graph."""
    import transformers

    from pyops.integrations.transformers.cache import CACHE

    config = transformers.LlamaConfig(**SIZES, dtype="bfloat16")
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).bfloat16().eval()
    cache = transformers.StaticCache(config=config, max_cache_len=context)
    room = _WARM + _STEPS + 1  # each step adds a token to the cache
    tokens = torch.randint(0, 100, (batch, context - room), device="cuda")
    with torch.no_grad():
        model(tokens, **{CACHE: cache}, logits_to_keep=1)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    last = tokens[:, :1].clone()

    def step() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            return compiled(last, **{CACHE: cache}).logits

    return step


def step_us(step: Callable[[], Any]) -> float:
    """Microseconds per step over consecutive steps, host time included."""
    for _ in range(_WARM):
        step()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(_STEPS):
        step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / _STEPS


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each batch."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64], help="sequences")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each, 128 or more")
    parser.add_argument("--alone", action="store_true", help="without transformers")
    options = parser.parse_args(arguments)
    bandwidth = streaming_gbs(QUICK)
    print(f"{torch.cuda.get_device_name()}, {bandwidth:.0f} GB/s, torch {torch.__version__}; microseconds of a step of")
    print(f"{options.context} tokens; bytes: the time that what it must read and write takes\n")
    print(f"{'batch':>5} {'bytes':>8} {'graph':>8} {'ratio':>6} {'step':>8} {'transformers':>13}")
    for batch in options.batch:
        model = Decoder(Config(**SIZES), "bfloat16", "cuda").randomise(0)
        floor = step_bytes(model, batch, options.context) / bandwidth / 1e3
        graph, step = (step_us(call) for call in ours(model, batch, options.context))
        del model
        rival = "" if options.alone else f"{step_us(theirs(batch, options.context)):13.0f}"
        print(f"{batch:5} {floor:8.0f} {graph:8.0f} {graph / floor:6.2f} {step:8.0f} {rival}")


if __name__ == "__main__":
    main()
