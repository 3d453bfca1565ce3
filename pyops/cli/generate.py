"""Generate text with a model from a folder or a GGUF file."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .._core.config import kernels_on_cpu
from .._core.errors import MissingDependencyError
from .._core.system.lazy import cupy, optional, torch
from ..errors import ModelError
from ..models import Config, Engine, Output, SamplingParams, check_request, load
from ..models.gguf_file import GgufFile, is_gguf
from ..models.gguf_tokenizer import tokenizer_of
from . import progress


def generate(
    folder: str,
    prompts: Sequence[str],
    params: SamplingParams,
    dtype: str | None = None,
    device: str | None = None,
    kv_cache_dtype: str = "auto",
) -> bool:
    """Print the continuations of the prompts by the model in `folder`, or in a GGUF file.

    A single continuation is streamed; several are printed when all are complete.
    """
    kernels_on_cpu()  # raises an error for a wrong PYOPS_CPU before anything is loaded
    folder = downloaded(folder)
    config, tokenizer = Config.read(folder), _tokenizer(Path(folder))
    tokens = [_encode(tokenizer, prompt) for prompt in prompts]
    for prompt in tokens:
        check_request(config, prompt, params, config.max_position_embeddings)
    device = device or usable_device()
    started = time.perf_counter()
    model = load(folder, device, dtype, lambda done, total: progress.show(done, total, f"{total / 1e9:.2f} GB"))
    print(f"{folder} on {device}, loaded in {time.perf_counter() - started:.1f} s", file=sys.stderr)

    engine = Engine(
        model,
        max_seq_len=max(len(prompt) for prompt in tokens) + params.max_tokens,
        max_num_seqs=len(tokens),
        kv_cache_dtype=kv_cache_dtype,
    )
    streams = {engine.add(prompt, params): Stream(tokenizer, prompt) for prompt in tokens}
    texts = dict.fromkeys(streams, "")

    def show(output: Output) -> None:
        piece = streams[output.request].add(output.token, last=output.finished is not None)
        texts[output.request] += piece
        if len(prompts) == 1:
            print(piece, end="", flush=True)

    if len(prompts) == 1:
        print(prompts[0], end="", flush=True)
    speed = run(engine, show)
    print("\n".join(p + text for p, text in zip(prompts, texts.values(), strict=True)) if len(prompts) > 1 else "")
    print(speed, file=sys.stderr)
    return True


def downloaded(model: str) -> str:
    """`model` if it is a folder or file; else the local folder of the Hugging Face Hub model ``owner/name``."""
    if Path(model).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return model
    try:
        import huggingface_hub
    except ImportError:
        how = "to download a model of the Hugging Face Hub: pip install huggingface_hub"
        raise ModelError(model, f"is no folder and no file; {how}") from None
    try:
        return str(huggingface_hub.snapshot_download(model, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # any error of the network or the Hub
        raise ModelError(model, f"is no folder and no file, and cannot be downloaded: {error}") from None


def run(engine: Engine, show: Callable[[Output], Any]) -> str:
    """Run the engine and show outputs as they arrive. Returns the speed as text."""
    started = time.perf_counter()
    first, early, count = started, 0, 0
    while engine.busy:
        for output in engine.step():
            count += 1
            show(output)
        if count and not early:  # the clock starts after the first step, which compiles and loads kernels
            first, early = time.perf_counter(), count
    later = time.perf_counter() - first
    speed = f", then {(count - early) / later:.1f} tokens/s" if count > early else ""
    return f"{count} tokens, the first after {first - started:.2f} s{speed}"


def usable_device() -> str:
    """The GPU, if there is one and CuPy, which compiles the kernels, is installed; else the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    try:
        assert cupy.__version__
    except MissingDependencyError as missing:
        print(f"the GPU is not used: {missing}", file=sys.stderr)
        return "cpu"
    return "cuda"


class Stream:
    """Incremental detokenization. Some earlier tokens are decoded again with each token, for word boundaries.

    A character may span several tokens; while the text ends with an incomplete character, nothing is emitted. Emitted
    text is final, although some decoders would change it after later tokens.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer, self._tokens = tokenizer, list(prompt)
        self._before, self._shown = 0, len(prompt)  # first token to decode, and number of tokens shown

    def add(self, token: int, last: bool) -> str:
        """The text that `token` adds; "" while a character is incomplete. The `last` token flushes the rest."""
        self._tokens.append(token)
        tokens = self._tokens[self._before :]
        known = self._tokenizer.decode(tokens[: self._shown - self._before])
        text = self._tokenizer.decode(tokens)
        if len(text) <= len(known) or (text.endswith("\ufffd") and not last):
            return ""
        self._before, self._shown = self._shown, len(self._tokens)
        return str(text[len(known) :])


def _encode(tokenizer: Any, prompt: str) -> list[int]:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ModelError("prompt", f"expected UTF-8, got {prompt!a}") from None
    return list(tokenizer.encode(prompt).ids)


def _tokenizer(folder: Path) -> Any:
    tokenizers = optional("tokenizers", "text", "models")
    if is_gguf(folder):
        return tokenizer_of(GgufFile(folder))
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(file, "is missing")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises a bare Exception
        raise ModelError(file, f"is no tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
