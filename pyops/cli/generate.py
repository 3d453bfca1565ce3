"""Text from a model in a folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .._core.errors import MissingDependencyError, ModelError
from .._core.lazy import cupy, optional, torch
from ..models import Engine, Output, SamplingParams, load
from . import progress


def generate(
    folder: str, prompts: Sequence[str], params: SamplingParams, dtype: str | None = None, device: str | None = None
) -> bool:
    """Print what the model in `folder` writes behind the prompts: one as it comes, several when all are done."""
    tokenizer = _tokenizer(Path(folder))
    device = device or usable_device()
    tokens = [tokenizer.encode(prompt).ids for prompt in prompts]
    started = time.perf_counter()
    model = load(folder, device, dtype, lambda done, total: progress.show(done, total, f"{total / 1e9:.2f} GB"))
    print(f"{folder} on {device}, loaded in {time.perf_counter() - started:.1f} s", file=sys.stderr)

    engine = Engine(
        model,
        max_seq_len=max(len(prompt) for prompt in tokens) + params.max_tokens,
        max_num_seqs=len(tokens),
    )
    streams = {engine.add(prompt, params): _stream(tokenizer, prompt) for prompt in tokens}
    texts = dict.fromkeys(streams, "")

    def show(output: Output) -> None:
        piece = streams[output.request](output.token)
        texts[output.request] += piece
        if len(prompts) == 1:
            print(piece, end="", flush=True)

    if len(prompts) == 1:
        print(prompts[0], end="", flush=True)
    speed = run(engine, show)
    print("\n".join(p + text for p, text in zip(prompts, texts.values(), strict=True)) if len(prompts) > 1 else "")
    print(speed, file=sys.stderr)
    return True


def run(engine: Engine, show: Callable[[Output], Any]) -> str:
    """Show all that the engine was asked for, as it comes; how fast that was, in words."""
    started = time.perf_counter()
    first, early, count = started, 0, 0
    while engine.busy:
        for output in engine.step():
            count += 1
            show(output)
        if count and not early:  # the kernels are compiled and loaded by now
            first, early = time.perf_counter(), count
    later = time.perf_counter() - first
    speed = f", then {(count - early) / later:.1f} tokens/s" if count > early else ""
    return f"{count} tokens, the first after {first - started:.2f} s{speed}"


def usable_device() -> str:
    """Where there is a GPU, the GPU; without cupy its kernels cannot be compiled."""
    if not torch.cuda.is_available():
        return "cpu"
    try:
        assert cupy.__version__
    except MissingDependencyError as missing:
        print(f"the GPU is not used: {missing}", file=sys.stderr)
        return "cpu"
    return "cuda"


def _stream(tokenizer: Any, prompt: Sequence[int]) -> Callable[[int], str]:
    """What each token adds to the text, "" while a character is not whole; the prompt says where words begin."""
    decoders = optional("tokenizers.decoders", "text", "models")
    stream = decoders.DecodeStream(skip_special_tokens=True)
    for token in prompt:
        stream.step(tokenizer, token)
    return lambda token: stream.step(tokenizer, token) or ""


def _tokenizer(folder: Path) -> Any:
    tokenizers = optional("tokenizers", "text", "models")
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(file, "is missing")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # it raises no class of its own
        raise ModelError(file, f"is no tokenizer: {error}") from None
