"""Compare logprobs and times of vLLM, with random weights, on this library's attention and on Triton's.

PYOPS_VLLM=all python -m benchmarks.vllm_attention llama gemma2 mistral mla
PYOPS_VLLM=all python -m benchmarks.vllm_attention llama --kv-cache-dtype fp8 --eager

Needs a GPU, vLLM 0.22, and this package installed with it, so that vLLM finds the plugin. Each backend runs in its own
process with the same weights, prompts and other kernels. A third process runs Triton's attention with other prefill
chunks; its difference is the noise of rounding. Models have the sizes of real ones, but few layers. Prompts of 1 to
3000 tokens are prefilled in chunks of 512 tokens, so that steps mix prefill and decode.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from statistics import mean
from typing import Any

_DENSE = {
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _DENSE | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "mistral": _DENSE
    | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 1024, "head_dim": 64},
    "gemma2": _DENSE
    | {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "head_dim": 256,
        "num_attention_heads": 16,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "mla": _DENSE
    | {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 4,  # all layers are dense
        "n_routed_experts": 64,
        "moe_layer_freq": 1,
    },
}
LENGTHS = (1, 2, 17, 130, 700, 1500, 3000)
NEW_TOKENS = 24
TIMED = {"prefill 1 x 2048": (1, 2048), "prefill 8 x 1024": (8, 1024)}
DECODED = {"decode 1 x 1024": (1, 1024), "decode 32 x 1024": (32, 1024)}
_RUNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=MODELS)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs and no torch.compile")
    parser.add_argument("--run", metavar="FILE", help=argparse.SUPPRESS)  # run in this process, results to FILE
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    parser.add_argument("--chunk", type=int, default=512, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        Path(args.run).write_text(json.dumps(_run(args.models[0], args)), encoding="utf-8")
        return
    for model in args.models:
        triton = "TRITON_MLA" if model == "mla" else "TRITON_ATTN"
        own = _in_process(model, args, None, args.chunk)
        other, noise = (_in_process(model, args, triton, chunk) for chunk in (args.chunk, 384))
        print(f"{model}: {own['backend']} beside {other['backend']}")
        for name, left in (("difference", own), ("noise", noise)):
            found = _differences(left, other)
            print(f"  {name} of {len(found)} logprobs: mean {mean(found):.5f}, largest {max(found):.5f}")
        for name, milliseconds in own["times"].items():
            print(f"  {name}: {milliseconds:.3f} ms, {other['backend']} {other['times'][name]:.3f}")


def _in_process(model: str, args: argparse.Namespace, backend: str | None, chunk: int) -> dict[str, Any]:
    """Run `_run` in a new process and return its result. With `backend` None, vLLM chooses."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, "-m", "benchmarks.vllm_attention", model, "--run", str(file), "--chunk", str(chunk)]
        command += ["--kv-cache-dtype", args.kv_cache_dtype, *["--eager"] * args.eager]
        command += ["--backend", backend] if backend else []
        subprocess.run(command, check=True, env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found


def _differences(left: dict[str, Any], right: dict[str, Any]) -> list[float]:
    """Differences of the logprobs of prompt tokens, and of new tokens up to the first that differs between the runs."""
    found = [abs(a - b) for a, b in zip(left["prompts"], right["prompts"], strict=True)]
    for own, other in zip(left["new"], right["new"], strict=True):
        for (token, a), (other_token, b) in zip(own, other, strict=True):
            if token != other_token:
                break
            found.append(abs(a - b))
    return found


def _run(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """(logprobs, times in milliseconds, class of the backend)."""
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader import dummy_loader

    dummy_loader.initialize_dummy_weights = _draw_weights
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[model]), encoding="utf-8")
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            kv_cache_dtype=args.kv_cache_dtype,
            enforce_eager=args.eager,
            max_num_batched_tokens=max(args.chunk, 64),
            max_num_seqs=64,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.5,
            **({"attention_backend": args.backend} if args.backend else {}),
        )
    drawn = _prompts(LENGTHS)
    asked = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    results = llm.generate(drawn, asked, use_tqdm=False)
    prompts = [
        at[token].logprob
        for result in results
        for token, at in zip(result.prompt_token_ids, result.prompt_logprobs, strict=True)
        if at is not None
    ]
    new = [
        [(token, at[token].logprob) for token, at in zip(one.token_ids, one.logprobs, strict=True)]
        for one in (result.outputs[0] for result in results)
    ]
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    backend = next(type(layer.impl).__name__ for layer in layers.values() if hasattr(layer, "impl"))
    return {"prompts": prompts, "new": new, "times": _times(llm), "backend": backend}


def _times(llm: Any) -> dict[str, float]:
    """Milliseconds of a prefill, and of a decode step."""
    found = {name: _generate_ms(llm, shape, 1) for name, shape in TIMED.items()}
    for name, shape in DECODED.items():
        found[name] = (_generate_ms(llm, shape, 65) - _generate_ms(llm, shape, 1)) / 64
    return found


def _generate_ms(llm: Any, shape: tuple[int, int], max_tokens: int) -> float:
    """Milliseconds of the fastest of several runs with `shape` (prompts, tokens per prompt) and `max_tokens`."""
    from vllm import SamplingParams

    asked, prompts = SamplingParams(max_tokens=max_tokens, ignore_eos=True), _prompts((shape[1],) * shape[0])
    times = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        llm.generate(prompts, asked, use_tqdm=False)
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def _prompts(lengths: tuple[int, ...]) -> list[dict[str, list[int]]]:
    """Prompts of pseudo-random tokens."""
    return [
        {"prompt_token_ids": [(7919 * (i + 1) * (s + 1) + i * i) % 31000 for i in range(length)]}
        for s, length in enumerate(lengths)
    ]


_seeds = count()


def _draw_weights(layer: Any, _: Any) -> None:
    """Replace vLLM's dummy weights of a layer, which are so small that attention would be uniform."""
    import torch

    for name, weight in layer.named_parameters(recurse=False):
        generator = torch.Generator(weight.device).manual_seed(next(_seeds))
        if weight.dim() > 1:
            weight.data.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
        else:
            weight.data.fill_(1.0 if name == "weight" and "Gemma" not in type(layer).__name__ else 0.0)


if __name__ == "__main__":
    main()
