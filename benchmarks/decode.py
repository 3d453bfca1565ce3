"""Time a decode step of published models with random weights, next to the time of the bytes that it moves.

python -m benchmarks.decode
python -m benchmarks.decode --models llama-1b --batch 1 64 --transformers

`graph` is a replay of the captured step, `step` a step with its copies from the host, `engine` a step of an `Engine`,
which draws tokens and reads them; all in microseconds. `bytes` is the time that what a step must read and write takes,
at the measured bandwidth, and `ratio` is graph / bytes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pyops import compile_ahead
from pyops._core.launch.kernel import Launch, Specialisation
from pyops._core.op.op import Op
from pyops._core.system import device
from pyops.models import Config, Decoder, Engine, SamplingParams
from pyops.models.kernels import planned
from pyops.models.runner import Part, Runner, decode_batch, row_size

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
# Sizes from the models' public configs.
MODELS: dict[str, dict[str, Any]] = {
    "llama-1b": {"architectures": ["LlamaForCausalLM"]} | SIZES,
    "llama-8b": {  # Llama 3.1 8B
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "qwen3-moe": {  # Qwen3-30B-A3B
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "deepseek-lite": {  # DeepSeek-V2-Lite
        "architectures": ["DeepseekV2ForCausalLM"],
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 163840,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
}
_BLOCK_SIZE, _WARM, _STEPS, _ROUNDS = 16, 8, 48, 3


def weight_bytes(model: Decoder) -> int:
    """Bytes of all weights that a step reads completely: all but the embedding, unless the LM head is tied to it."""
    weights = sum(int(tensor.nbytes) for tensor in model.tensors().values())
    return weights if model.config.tie_word_embeddings else weights - int(model.embedding.nbytes)


def idle_expert_bytes(model: Decoder, batch: int) -> float:
    """Bytes of the weights of experts that no sequence chooses, if all choices are equally likely and independent."""
    mixture = model.config.mixture
    if mixture is None:
        return 0.0
    of_experts = sum(int(tensor.nbytes) for name, tensor in model.tensors().items() if ".experts." in name)
    return float(of_experts * (1 - mixture.top_k / mixture.num_experts) ** batch)


def step_bytes(model: Decoder, batch: int, context: int) -> float:
    """Bytes that a step must move: all weights but those of idle experts, one embedding row per sequence, all keys and
    values."""
    row = 0 if model.config.tie_word_embeddings else model.config.hidden_size * int(model.dtype.itemsize)
    cached = batch * (context + 1) * model.token_bytes()
    return weight_bytes(model) - idle_expert_bytes(model, batch) + batch * row + cached


Kernels = dict[Any, tuple[Op, Specialisation]]


def step_kernels(config: Config, batch: int, context: int, on: device.Device) -> Kernels:
    """The kernels of a decode step, planned without weights, so that all of them can be compiled at a time."""
    found: Kernels = {}

    def observe(op: Op, launches: list[Launch]) -> None:
        for one in launches:
            found[one.specialisation.kernel, one.specialisation.key] = op, one.specialisation

    decoder = Decoder(config, "bfloat16", "meta")
    decoder.prepare(checked=False)
    decoder.layers = [decoder.layers[0], decoder.layers[-1]]
    cache = decoder.new_cache(batch * -(-context // _BLOCK_SIZE), _BLOCK_SIZE, batch)
    rows = torch.empty(batch, row_size(config, context, _BLOCK_SIZE), dtype=torch.int64, device="meta")
    starts = torch.empty(batch + 1, dtype=torch.int64, device="meta")
    with torch.no_grad(), planned(on, observe):
        batch_of_step = decode_batch(rows, starts, decoder.slot_bytes > 0, starts)
        decoder.step(batch_of_step, cache, decoder.new_tables(context))
    return found


def ours(model: Decoder, batch: int, context: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(a call that replays the captured graph, a call that runs a whole step), for `batch` sequences.

    A whole step also copies tokens and block tables to the device.
    """
    each = -(-context // _BLOCK_SIZE)
    runner = Runner(model, batch * each, _BLOCK_SIZE, batch, context)
    for kept in runner.cache:
        for tensor in kept:
            tensor.normal_()
    parts = [Part([i], context - 1, range(i * each, (i + 1) * each)) for i in range(batch)]
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


def alternated(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """The median `step_us` of each of these calls, which alternate: the first one finds a GPU that was idle."""
    rounds = [[step_us(call) for call in calls] for _ in range(_ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def engine_us(model: Decoder, batch: int, context: int) -> float:
    """Microseconds per step of an engine that decodes `batch` sequences greedily, on the clock of the host."""
    count = _WARM + _STEPS
    engine = Engine(model, num_blocks=batch * -(-context // _BLOCK_SIZE), max_num_seqs=batch, max_seq_len=context)
    for i in range(batch):
        engine.add([i] * (context - count), SamplingParams(max_tokens=count, ignore_eos=True))
    marks = [0.0, 0.0]
    for found, _ in enumerate(engine.run(), start=1):
        if found in (_WARM * batch, (count - 2) * batch):
            marks[found > _WARM * batch] = time.perf_counter()
    return (marks[1] - marks[0]) * 1e6 / (_STEPS - 2)


def measure(name: str, batches: Sequence[int], context: int, bandwidth: float, transformers: bool) -> None:
    """Print a row for each batch."""
    config = Config.parse(MODELS[name])
    here = device.get(torch.cuda.current_device())
    wanted = {at: one for batch in batches for at, one in step_kernels(config, batch, context, here).items()}
    compile_ahead.load(list(wanted.values()), here.index)
    model = Decoder(config, "bfloat16", "cuda").randomise(0)
    model.prepare()
    for batch in batches:
        floor = step_bytes(model, batch, context) / bandwidth / 1e3
        graph, step = alternated(ours(model, batch, context))
        torch.cuda.empty_cache()
        engine = engine_us(model, batch, context)
        torch.cuda.empty_cache()
        row = f"{name:13} {batch:5} {floor:8.0f} {graph:8.0f} {graph / floor:6.2f} {step:8.0f} {engine:8.0f}"
        rival = f"{step_us(theirs(batch, context)):14.0f}" if transformers and name == "llama-1b" else ""
        print(row + rival, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each model and batch."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="which")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 256], help="sequences")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each, 128 or more")
    parser.add_argument("--transformers", action="store_true", help="next to transformers, for llama-1b")
    options = parser.parse_args(arguments)
    bandwidth = streaming_gbs(QUICK)
    print(f"{torch.cuda.get_device_name()}, {bandwidth:.0f} GB/s, torch {torch.__version__}; microseconds of a step of")
    print(f"{options.context} tokens; bytes: the time that what it must read and write takes\n")
    columns = f"{'bytes':>8} {'graph':>8} {'ratio':>6} {'step':>8} {'engine':>8} {'transformers':>13}"
    print(f"{'model':13} {'batch':>5} {columns}", flush=True)
    with torch.no_grad():
        for name in options.models:
            measure(name, options.batch, options.context, bandwidth, options.transformers)


if __name__ == "__main__":
    main()
