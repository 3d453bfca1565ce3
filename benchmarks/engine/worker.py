"""A process with one vLLM engine: ``python -m benchmarks.engine.worker FOLDER OPTIONS``, started by __main__.

It creates the engine, prints a line ``@@ {"ready": ...}``, and answers each request on standard input with a line
``@@ {...}``. vLLM's own output comes in between.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import kernels_cu
from pyops._core.text import source

from .models import MODELS, Model, fill, small

# {row: (sequences, tokens per prompt, generated tokens, whether to sample with top-k and top-p)}
ROWS: dict[str, tuple[int, int, int, bool]] = {
    "prefill 1 x 2048": (1, 2048, 1, False),
    "prefill 16 x 1024": (16, 1024, 1, False),
    "decode 1": (1, 256, 72, False),
    "decode 16": (16, 256, 72, False),
    "decode 128": (128, 256, 40, False),
    "decode 16, top-k top-p": (16, 256, 40, True),
    "decode 128, top-k top-p": (128, 256, 40, True),
}
_SETTLE, _TAIL = 4, 4  # untimed decode steps before and after the timed ones
_LENGTH = 4096
_PROMPTS, _PROMPT_TOKENS = 4, 300  # prompts for the comparison of logprobs


class Engine:
    """vLLM's ``LLM`` for a model with random weights, run step by step."""

    def __init__(self, folder: Path, model: Model, cache_gib: int, full_graphs: bool, backend: str | None) -> None:
        from vllm import LLM

        folder.mkdir(parents=True, exist_ok=True)
        config = {"torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, **model.config}
        (folder / "config.json").write_text(json.dumps(config))
        compilation: dict[str, Any] = {"cudagraph_capture_sizes": [1, 16, 128]}
        if full_graphs:
            compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "custom_ops": ["all"]}
        self.vocabulary = model.config["vocab_size"]
        with _weights(model.config["hidden_size"]):
            self.llm = LLM(
                str(folder),
                skip_tokenizer_init=True,
                load_format="dummy",
                dtype="bfloat16",
                max_model_len=_LENGTH,
                max_num_batched_tokens=16384,
                max_num_seqs=128,
                enable_prefix_caching=False,
                gpu_memory_utilization=0.05,  # small, because engines share the GPU and vLLM checks that it is free
                kv_cache_memory_bytes=cache_gib << 30,
                compilation_config=compilation,
                attention_config={"backend": backend} if backend else None,
                seed=0,
                **model.arguments,
            )
        self._count = 0

    def run(self, sequences: int, prompt: int, made: int, draw: bool = False, **options: Any) -> tuple[list[Any], Any]:
        """([start time, end time of each step], outputs in the order of the sequences)."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        how = {"temperature": 0.8, "top_k": 50, "top_p": 0.95} if draw else {"temperature": 0.0}
        params = SamplingParams(max_tokens=made, ignore_eos=True, detokenize=False, **how, **options)
        generator = torch.Generator().manual_seed(prompt)
        names = []
        for _ in range(sequences):
            tokens = torch.randint(3, self.vocabulary, (prompt,), generator=generator).tolist()
            names.append(str(self._count))
            engine.add_request(names[-1], {"prompt_token_ids": tokens}, params)
            self._count += 1
        torch.cuda.synchronize()
        times, outputs = [time.perf_counter()], {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[output.request_id.partition("-")[0]] = output
            times.append(time.perf_counter())
        return times, [outputs[name] for name in names]

    def milliseconds(self, row: str, repeats: int) -> list[float]:
        """Milliseconds of a prefill or of a decode step, one number per repetition."""
        sequences, prompt, made, draw = ROWS[row]
        found = []
        for _ in range(repeats):
            times, _ = self.run(sequences, prompt, made, draw)
            if made == 1:
                found.append(1e3 * (times[-1] - times[0]))
            else:
                # Steps with prefills come first, and sequences that were prefilled first also end first.
                steps = made - 1 - _SETTLE - _TAIL
                found.append(1e3 * (times[-1 - _TAIL] - times[-1 - _TAIL - steps]) / steps)
        return found

    def logprobs(self) -> dict[str, list[Any]]:
        """The logprobs of all prompt tokens except the first of each prompt, and the tokens of greedy decoding."""
        _, outputs = self.run(_PROMPTS, _PROMPT_TOKENS, 16, prompt_logprobs=0)
        logprobs = [
            float(at[token].logprob)
            for output in outputs
            for token, at in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        ]
        return {"logprobs": logprobs, "tokens": [list(output.outputs[0].token_ids) for output in outputs]}

    def kernels(self, row: str) -> list[tuple[str, int, float]]:
        """[(kernel, launches, total microseconds)] of one run of the row, in descending order of time."""
        sequences, prompt, made, draw = ROWS[row]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.run(sequences, prompt, min(made, 9), draw)
            torch.cuda.synchronize()
        events = [(one.key, one.count, one.self_device_time_total) for one in profile.key_averages()]
        return sorted((one for one in events if one[2] > 0), key=lambda one: -one[2])


@contextlib.contextmanager
def _weights(hidden_size: int) -> Iterator[None]:
    """Within this context, vLLM's dummy weight loader fills parameters with `fill`."""
    from vllm.model_executor.model_loader import dummy_loader

    def load(self: Any, model: Any, model_config: Any) -> None:
        for name, layer in model.named_modules():
            info = dummy_loader.get_layerwise_info(layer)
            if not info.can_load():
                for own, parameter in layer.named_parameters(recurse=False):
                    if parameter.device.type != "meta":
                        fill(f"{name}.{own}", parameter.data, hidden_size)
                continue
            # Online quantization: the 16-bit weight is created only here.
            dummy_loader.materialize_layer(layer, info)
            tensors = dummy_loader.get_layer_tensors(layer)
            for own, tensor in tensors.items():
                fill(f"{name}.{own}", tensor.data, hidden_size)
                tensor.weight_loader = dummy_loader._get_original_loader(tensor)
            if isinstance(method := getattr(layer, "quant_method", None), dummy_loader.QuantizeMethodBase):
                method.process_weights_after_loading(layer)
            info.reset()

    before = dummy_loader.DummyModelLoader.load_weights
    dummy_loader.DummyModelLoader.load_weights = load
    try:
        yield
    finally:
        dummy_loader.DummyModelLoader.load_weights = before


def ours() -> frozenset[str]:
    """The names of this library's kernels."""
    files = (name for name in kernels_cu.names() if name.endswith(".cu"))
    return frozenset(entry for name in files for entry in source.entries(name))


def _say(what: dict[str, Any]) -> None:
    print(f"\n@@ {json.dumps(what)}", flush=True)


def main(folder: str, options: str) -> None:
    """Create the engine, then answer requests (JSON lists): ``time ROW REPEATS``, ``kernels ROW``, ``logprobs``."""
    started = time.time()
    given = json.loads(options)
    try:
        model = MODELS[given["model"]]
        model = small(model) if given["small"] else model
        backend = model.floor_backend if given["with"] == "floor" else None
        engine = Engine(Path(folder), model, 1 if given["small"] else 6, given["full_graphs"], backend)
        _say({"ready": time.time() - given["started"], "seconds in python": time.time() - started})
        for line in sys.stdin:
            what, *words = json.loads(line)
            if what == "time":
                found = engine.milliseconds(*words)
                _say({"ms": found, "median": statistics.median(found)})
            elif what == "kernels":
                mine = ours()
                _say({"kernels": [(*one, one[0] in mine) for one in engine.kernels(*words)]})
            elif what == "logprobs":
                _say(engine.logprobs())
    except Exception:
        _say({"error": traceback.format_exc()[-4000:]})
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
