"""Text from a model of random weights, checked against a plain PyTorch implementation of the same model."""

from __future__ import annotations

import string
from dataclasses import replace
from typing import TYPE_CHECKING

from .._core import config
from .._core.system.lazy import torch
from ..models import Config, Decoder, Engine, Rope, SamplingParams
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
# How far below the reference's best logit a token may lie: twice the error of a logit. Logits have the deviation 1, so
# that a token taken at random lies 2.5 below.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.125}


def demo() -> bool:
    """Continue three prompts and print the texts, the speed and the match; False if a token is wrong."""
    device = usable_device()
    sizes = _LARGE if device == "cuda" else _SMALL
    model = Decoder(sizes, device=device).randomise(seed=0)
    count = sum(tensor.numel() for tensor in model.tensors().values())
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    kernels = not config.reference() if device == "cuda" else config.kernels_on_cpu()
    print(f"a Llama of {sizes.num_hidden_layers} layers and {count / 1e6:.1f} million random weights, {sizes.dtype}")
    print(f"on {name}, by {'the kernels' if kernels else 'the PyTorch references'} (torch {torch.__version__})\n")

    engine = Engine(model, max_seq_len=sizes.max_position_embeddings, max_num_seqs=len(_PROMPTS))
    texts = {engine.add(_tokens(prompt), SamplingParams(max_tokens=48)): _tokens(prompt) for prompt in _PROMPTS}
    speed = run(engine, lambda output: texts[output.request].append(output.token))
    for prompt, text in zip(_PROMPTS, texts.values(), strict=True):
        print(f"{prompt}| {''.join(_ALPHABET[token] for token in text[len(prompt) :])}")
    print(f"\n{speed}")

    equal, shortfall = 0, 0.0
    for prompt, text in zip(_PROMPTS, texts.values(), strict=True):
        logits = reference(model, text[:-1])[len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(text[len(prompt) :], dtype=torch.int64, device=device)[:, None])[:, 0]
        below = logits.amax(-1) - chosen
        equal, shortfall = equal + int((below == 0).sum()), max(shortfall, float(below.max()))
    good = shortfall <= _TOLERANCE[sizes.dtype]
    total = sum(map(len, texts.values())) - sum(map(len, _PROMPTS))
    print(f"{equal} of {total} tokens are the likeliest of the same model in plain float32 PyTorch, whose logits put")
    print(f"none further than {shortfall:.1e} below: {'a match' if good else 'NO MATCH'}")
    return good


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
