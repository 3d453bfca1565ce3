"""Text from a model of random weights, checked against a plain PyTorch implementation of the same model."""

from __future__ import annotations

import string
import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING

from .._core import config
from .._core.errors import pip_line
from .._core.op.op import registry
from .._core.system.lazy import torch
from ..host.toolchain import toolchains
from ..models import Config, Decoder, Engine, Output, Rope, SamplingParams
from . import progress
from .generate import run, usable_device

if TYPE_CHECKING:
    from torch import Tensor

_ALPHABET = string.printable[:95]  # a token is a character
_PROMPTS = ("The quick brown fox ", "2 + 2 = ", "A model of random weights has nothing to say, and says it: ")
_SMALL = Config(
    vocab_size=len(_ALPHABET),
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
    rope=Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 64),
)
# The layers of a Llama of a billion weights.
_LARGE = replace(
    _SMALL,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    layer_types=(),
    sliding_windows=(),
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    dtype="bfloat16",
)
_MAX_TOKENS = {"cuda": 48, "cpu": 24}  # tokens of each text: on the CPU they take a quarter of a minute
# How far below the reference's best logit a token may lie: twice the error of a logit. Logits have the deviation 1, so
# that a token taken at random lies 2.5 below.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.125}


def demo() -> bool:
    """Continue three prompts; print the texts, the speed and what that proves. False if a token is wrong.

    Without a GPU the kernels run on the host backend, or the references where there is no C++ compiler. PYOPS_CPU and
    PYOPS_REFERENCE choose as everywhere.
    """
    with config.cpu("kernels" if config.kernels_on_cpu("kernels" if toolchains() else "reference") else "reference"):
        with progress.status("importing torch"):
            assert torch.__version__  # it is imported now
        return _demo(usable_device())


def _demo(device: str) -> bool:
    sizes = _LARGE if device == "cuda" else _SMALL
    with progress.status("drawing the weights"):
        model = Decoder(sizes, device=device).randomise(seed=0)
    count = sum(tensor.numel() for tensor in model.tensors().values())
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    kernels = not config.reference() and (device == "cuda" or config.kernels_on_cpu())
    print(f"a Llama of {sizes.num_hidden_layers} layers and {count / 1e6:.1f} million random weights, {sizes.dtype}")
    print(f"on {name}, by {'the kernels' if kernels else 'the PyTorch references'} (torch {torch.__version__})\n")

    engine = Engine(model, max_seq_len=sizes.max_position_embeddings, max_num_seqs=len(_PROMPTS))
    params = SamplingParams(max_tokens=_MAX_TOKENS[device])
    texts = {engine.add(_tokens(prompt), params): _tokens(prompt) for prompt in _PROMPTS}
    total = len(texts) * params.max_tokens
    with progress.status(f"the first of {total} tokens: kernels are compiled and loaded") as say:

        def add(output: Output) -> None:
            texts[output.request].append(output.token)
            say(f"{sum(map(len, texts.values())) - sum(map(len, _PROMPTS))} of {total} tokens")

        speed = run(engine, add)
        say("comparing the tokens with plain PyTorch")
        equal, shortfall = _compared(model, list(texts.values()))
    for prompt, text in zip(_PROMPTS, texts.values(), strict=True):
        print(f"{prompt}| {''.join(_ALPHABET[token] for token in text[len(prompt) :])}")
    print(f"\n{speed}\n\nwhat this proves:\n{_ran(device) if kernels else _none_ran()}")
    good = shortfall <= _TOLERANCE[sizes.dtype]
    found = f"{equal} of {total} tokens are the likeliest of the same model in plain float32 PyTorch, whose logits put "
    print(_point(f"{found}none further than {shortfall:.1e} below: {'a match' if good else 'NO MATCH'}"))
    return good


def _ran(device: str) -> str:
    """Which kernels have run, and what that shows."""
    launched = sorted({one.kernel for op in registry.values() for one in op.compiled()})
    ran = f"{len(launched)} kernels have run on {'the GPU' if device == 'cuda' else 'the CPU'}: {', '.join(launched)}."
    if device == "cpu":
        ran += (
            " Every access of every thread was checked: none was out of bounds, none read shared memory that had not "
            "been written, no two were a data race. The speed is that of these checks, not of a GPU."
        )
    return _point(ran)


def _none_ran() -> str:
    how = "" if toolchains() else f" To run the kernels on the CPU: {pip_line('cpu')}"
    return _point(f"No kernel has run, only the ops' references in PyTorch.{how}")


def _point(text: str) -> str:
    return textwrap.fill(text, 116, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)


def _compared(model: Decoder, texts: list[list[int]]) -> tuple[int, float]:
    """(how many tokens the reference finds likeliest, the most by which its logit of a token is below its best)."""
    equal, shortfall = 0, 0.0
    for prompt, text in zip(_PROMPTS, texts, strict=True):
        logits = reference(model, text[:-1])[len(prompt) - 1 :]
        chosen = torch.tensor(text[len(prompt) :], dtype=torch.int64, device=model.device)
        below = logits.amax(-1) - logits.gather(1, chosen[:, None])[:, 0]
        equal, shortfall = equal + int((below == 0).sum()), max(shortfall, float(below.max()))
    return equal, shortfall


def _tokens(text: str) -> list[int]:
    return [_ALPHABET.index(character) for character in text]


def reference(model: Decoder, tokens: list[int]) -> Tensor:
    """Logits after every token, [num_tokens, vocab_size] float32: no ops of this library, no cache, no merged weights.

    For models without biases, norms of heads and windows, and with llama3's scaling of the rotary embedding.
    """
    sizes, rope, weights = model.config, model.config.rope, model.tensors()
    functional = torch.nn.functional

    def weight(name: str) -> Tensor:
        return weights[f"{name}.weight"].float()

    def normed(x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], weight(name), sizes.rms_norm_eps)

    pairs = torch.arange(0, sizes.head_dim, 2, dtype=torch.float32, device="cpu")
    wavelengths = 2 * torch.pi * rope.theta ** (pairs / sizes.head_dim)
    longest, shortest = (
        rope.original_max_position_embeddings / factor for factor in (rope.low_freq_factor, rope.high_freq_factor)
    )
    original = rope.original_max_position_embeddings / wavelengths
    share = (original - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    slowed = torch.where(wavelengths > longest, 1 / rope.factor, (1 - share) / rope.factor + share)
    slowed = torch.where(wavelengths < shortest, 1.0, slowed)
    angles = torch.arange(len(tokens), dtype=torch.int64, device="cpu")[:, None] * slowed * 2 * torch.pi / wavelengths
    turns = torch.polar(torch.ones_like(angles), angles).to(model.device)

    def heads(x: Tensor, name: str, turned: bool = True) -> Tensor:
        parts = functional.linear(x, weight(name)).unflatten(-1, (-1, sizes.head_dim)).transpose(0, 1)
        if not turned:
            return parts
        pairs = torch.complex(*parts.chunk(2, -1)) * turns
        return torch.cat((pairs.real, pairs.imag), -1)

    x = functional.embedding(torch.tensor(tokens, dtype=torch.int64, device=model.device), weight("model.embed_tokens"))
    for i in range(sizes.num_hidden_layers):
        at = f"model.layers.{i}"
        y = normed(x, f"{at}.input_layernorm")
        q, k = heads(y, f"{at}.self_attn.q_proj"), heads(y, f"{at}.self_attn.k_proj")
        v = heads(y, f"{at}.self_attn.v_proj", turned=False)
        y = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        x = x + functional.linear(y.transpose(0, 1).flatten(1), weight(f"{at}.self_attn.o_proj"))
        y = normed(x, f"{at}.post_attention_layernorm")
        gate, up = (functional.linear(y, weight(f"{at}.mlp.{name}_proj")) for name in ("gate", "up"))
        x = x + functional.linear(functional.silu(gate) * up, weight(f"{at}.mlp.down_proj"))
    return functional.linear(normed(x, "model.norm"), weight("lm_head"))
