"""Time a decode step of tensor-parallel models on the GPUs of a node, next to its memory bound.

torchrun --nproc-per-node 4 -m benchmarks.parallel
torchrun --nproc-per-node 2 -m benchmarks.parallel --models mixtral --batch 1 64 --context 4096

Weights are random. Before a model is timed, a small model of its kind must generate the same tokens on all GPUs and on
one. `step` is a replay of a captured decode step, in microseconds, on the slowest process; `bytes` is the time to read
the weights and the cache of one process at the measured memory bandwidth.
"""

from __future__ import annotations

import argparse
import os
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pyops.models import Config, Decoder, Engine, Group, ParallelDecoder, SamplingParams

from . import decode
from .decode import ours, step_us, weight_bytes
from .timing import QUICK, streaming_gbs

# Sizes from the models' public configs.
MODELS: dict[str, dict[str, Any]] = {
    "llama": decode.MODELS["llama-8b"],
    "mixtral": {  # Mixtral 8x7B
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "deepseek": decode.MODELS["deepseek-lite"],
}
_SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
_PROMPTS = [[1, 2, 3, 4, 5], [7, 11, 13], list(range(20, 90))]


def small(sizes: dict[str, Any]) -> Config:
    """A small model of the same kind; its weights are generated on the CPU."""
    latent = {"num_key_value_heads": 16, "moe_intermediate_size": 128} if "kv_lora_rank" in sizes else {}
    return Config.parse(sizes | _SMALL | latent)


def check_tokens(name: str, config: Config, group: Group) -> None:
    """AssertionError unless all GPUs together generate the tokens of one GPU, in float32."""
    divided, whole = ParallelDecoder(config, group, "float32"), Decoder(config, "float32", group.device)
    divided.randomise(0, 4.0)
    for key, tensor in Decoder(config, "float32").randomise(0, 4.0).tensors().items():
        whole.write(key, tensor)
    engines = (Engine(model, max_num_seqs=4, num_blocks=64) for model in (divided, whole))
    found = [engine.generate(_PROMPTS, SamplingParams(max_tokens=24)) for engine in engines]
    if found[0] != found[1]:
        raise AssertionError(f"{name}: {group.world_size} GPUs generate {found[0]}, one {found[1]}")


def fill(model: Decoder) -> Decoder:
    """Fill weights with random values that depend on their names, so that replicated weights are equal everywhere."""
    for name, tensor in model.tensors().items():
        generator = torch.Generator(model.device).manual_seed(zlib.crc32(name.encode()))
        tensor.normal_(0.0, 0.02, generator=generator)
    return model


def step_floor_us(model: Decoder, batch: int, context: int, bandwidth: float) -> float:
    """Microseconds to read this process's weights, including all experts, and its part of the cache once."""
    return (weight_bytes(model) + batch * context * model.token_bytes()) / bandwidth / 1e3


def measure(name: str, group: Group, batches: Sequence[int], context: int) -> list[str]:
    """A row for each batch."""
    sizes = MODELS[name]
    if group.world_size > 1:
        check_tokens(name, small(sizes), group)
    with torch.no_grad():
        model = fill(ParallelDecoder(Config.parse(sizes), group, "bfloat16"))
        bandwidth, rows = streaming_gbs(QUICK), []
        for batch in batches:
            replay, _ = ours(model, batch, context)
            slowest = torch.tensor(step_us(replay), device=group.device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            floor = step_floor_us(model, batch, context, bandwidth)
            rows.append(f"| {name} | {group.world_size} | {batch} | {floor:.0f} | {float(slowest):.0f} |")
            del replay
            torch.cuda.empty_cache()
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.parallel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="which")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64], help="sequences")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each")
    options = parser.parse_args(arguments)
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("expected processes of torchrun: torchrun --nproc-per-node 4 -m benchmarks.parallel")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = Group(device)
    if group.rank == 0:
        print(f"{torch.cuda.get_device_name()}, {options.context} tokens a sequence, torch {torch.__version__}\n")
        print("| model | GPUs | sequences | bytes | step |\n|---|---|---|---|---|", flush=True)
    for name in options.models:
        rows = measure(name, group, options.batch, options.context)
        if group.rank == 0:
            print("\n".join(rows), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
