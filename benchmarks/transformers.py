"""Time a decode step of transformers' models, before and after `accelerate`.

python -m benchmarks.transformers --batch 1 16 --context 1024
python -m benchmarks.transformers --family Phi3 Gemma2
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
import transformers

from pyops.integrations.transformers import PagedCache, accelerate
from pyops.integrations.transformers.cache import CACHE

from .decode import SIZES

# A small model for machines without a GPU. There the references run, so its times say nothing about kernels.
SMALL = SIZES | {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_STEPS = {"cuda": (8, 64), "cpu": (1, 3)}  # (steps to warm up, timed steps)


def model_of(device: str, family: str) -> Any:
    """A model with random weights: a billion in bfloat16 on a GPU, a small one in float32 on a CPU."""
    sizes, dtype = (SIZES, torch.bfloat16) if device == "cuda" else (SMALL, torch.float32)
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes, pad_token_id=None)
    with torch.device(device):
        return getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).eval()


def prepared(model: Any, cache: Any, batch: int, context: int, compiled: bool) -> Callable[[], Any]:
    """A decode step of `batch` sequences, which have `context` tokens after the last step."""
    count = context - sum(_STEPS[model.device.type])
    tokens = torch.randint(0, 100, (batch, count), device=model.device)
    with torch.no_grad():
        model(tokens, **{CACHE: cache}, logits_to_keep=1)
    # On a CPU the traced graph runs uncompiled, because compiling would take longer than all steps.
    how = {"mode": "reduce-overhead"} if model.device.type == "cuda" else {"backend": "aot_eager"}
    call = torch.compile(model, fullgraph=True, **how) if compiled else model
    last = tokens[:, :1].clone()

    def step() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            return call(last, **{CACHE: cache}).logits

    return step


def step_us(step: Callable[[], Any], device: str) -> float:
    """Microseconds per step over consecutive steps, host time included."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    warm, timed = _STEPS[device]
    for _ in range(warm):
        step()
    synchronize()
    started = time.perf_counter()
    for _ in range(timed):
        step()
    synchronize()
    return (time.perf_counter() - started) * 1e6 / timed


def measure(device: str, family: str, batch: int, context: int) -> dict[str, tuple[float, float]]:
    """{"eager" or "compiled": microseconds of a step (before `accelerate`, after it)}."""
    model = model_of(device, family)
    config = model.config
    caches: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "eager": (lambda: transformers.DynamicCache(config=config), lambda: PagedCache(config)),
        "compiled": (
            lambda: transformers.StaticCache(config=config, max_cache_len=context),
            lambda: PagedCache(config, context),
        ),
    }
    times: dict[str, list[float]] = {how: [] for how in caches}
    for after in (False, True):
        if after:
            accelerate(model)
        for how, makers in caches.items():
            torch._dynamo.reset()
            step = prepared(model, makers[after](), batch, context, how == "compiled")
            times[how].append(step_us(step, device))
    return {how: (before, after) for how, (before, after) in times.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each family and batch, eager and compiled."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.transformers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", nargs="+", default=["Llama"], help="as transformers' classes are called")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="texts")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each, 128 or more")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args(arguments)
    if options.context < 128:
        parser.error("--context: 128 or more")
    name = torch.cuda.get_device_name() if options.device == "cuda" else "a CPU, a small model, references of the ops"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}; microseconds of a step of")
    print(f"{options.context} tokens\n")
    print(f"{'family':>12} {'batch':>5} {'run':>9} {'before':>9} {'after':>9} {'ratio':>6}")
    for family, batch in product(options.family, options.batch):
        for how, (before, after) in measure(options.device, family, batch, options.context).items():
            print(f"{family:>12} {batch:5} {how:>9} {before:9.0f} {after:9.0f} {before / after:6.2f}")


if __name__ == "__main__":
    main()
