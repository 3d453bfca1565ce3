"""Mamba and Mamba-2 models made of layers generate the tokens of transformers' models, for any chunking of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pyops import nn as layers
from tests.support.transformers_mamba import random_model

Tensor = torch.Tensor
PROMPTS = [list(range(5, 25)), [3], [(7 * i) % 96 for i in range(40)]]
NUM_TOKENS = 64
CHUNK = 9  # tokens of a chunk
MAMBA: list[dict[str, Any]] = [
    {"hidden_size": 32, "state_size": 8, "conv_kernel": 4, "time_step_rank": 4},
    {"hidden_size": 24, "state_size": 5, "conv_kernel": 2, "time_step_rank": 3, "use_bias": True},
    {"hidden_size": 16, "state_size": 16, "conv_kernel": 3, "use_conv_bias": False, "num_hidden_layers": 3},
]
MAMBA2: list[dict[str, Any]] = [
    {"hidden_size": 32, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
    {"hidden_size": 24, "state_size": 5, "num_heads": 12, "head_dim": 4, "n_groups": 3, "use_bias": True},
    {"hidden_size": 16, "state_size": 16, "num_heads": 2, "head_dim": 16, "n_groups": 2, "num_hidden_layers": 3},
]
CASES = [("Mamba", options) for options in MAMBA] + [("Mamba2", options) for options in MAMBA2]


class Model:
    """A model of layers with the weights of `theirs`, and a cache of `num_slots` states for each of its mixers."""

    def __init__(self, family: str, theirs: Any, num_slots: int) -> None:
        self.config, weights = theirs.config, theirs.state_dict()
        self.embedding, self.head = weights["backbone.embeddings.weight"], weights["lm_head.weight"]
        self.mixers = [self._mixer(family) for _ in range(self.config.num_hidden_layers)]
        self.norms = [self._norm(weights[f"backbone.layers.{i}.norm.weight"]) for i in range(len(self.mixers))]
        self.last_norm = self._norm(weights["backbone.norm_f.weight"])
        for i, mixer in enumerate(self.mixers):
            for name, parameter in mixer.named_parameters():
                weight = weights[f"backbone.layers.{i}.mixer.{'A_log' if name == 'A' else name}"]
                parameter.weight_loader(parameter, weight)  # type: ignore[operator]
        taps = self.config.conv_kernel
        self.states = [
            (torch.randn(num_slots, len(mixer.conv1d.weight), taps - 1), torch.randn(num_slots, *mixer.state_shape))
            for mixer in self.mixers
        ]

    def _norm(self, weight: Tensor) -> layers.RMSNorm:
        norm = layers.RMSNorm(len(weight), self.config.layer_norm_epsilon)
        norm.weight.copy_(weight)
        return norm

    def _mixer(self, family: str) -> Any:
        c = self.config
        sizes = (c.hidden_size, c.state_size, c.conv_kernel, 2 * c.hidden_size)
        if family == "Mamba":
            return layers.MambaMixer(*sizes, c.time_step_rank, c.use_conv_bias, c.use_bias, use_rms_norm=False)
        heads = c.n_groups, c.num_heads, c.head_dim, c.layer_norm_epsilon
        return layers.MambaMixer2(*sizes, c.use_conv_bias, c.use_bias, *heads)

    def tokens(self, parts: Sequence[Sequence[int]], slots: Tensor, initial: Tensor, num_decodes: int) -> list[int]:
        """The most likely token after each part of a sequence."""
        starts = torch.tensor([0, *map(len, parts)]).cumsum(0)
        hidden = self.embedding[torch.tensor([token for part in parts for token in part])]
        for mixer, norm, states in zip(self.mixers, self.norms, self.states, strict=True):
            hidden = hidden + mixer(norm(hidden), *states, starts, slots, initial, num_decodes)
        logits = self.last_norm(hidden[starts[1:] - 1]) @ self.head.T
        return logits.argmax(-1).tolist()

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the states of slots `source`, and restore them in slots `target`."""
        for state in (state for states in self.states for state in states):
            kept = state[source].clone()
            state.normal_()
            state[target] = kept


def _texts(model: Model) -> list[list[int]]:
    """Greedy tokens after the prompts: prompts in chunks, then decode steps; states move to other slots half way."""
    texts: list[list[int]] = [[] for _ in PROMPTS]
    slots = torch.tensor([4, 0, 2])
    for begin in range(0, max(map(len, PROMPTS)), CHUNK):
        here = [i for i, prompt in enumerate(PROMPTS) if begin < len(prompt)]
        parts = [PROMPTS[i][begin : begin + CHUNK] for i in here]
        initial = torch.tensor([begin > 0] * len(here))
        for i, token in zip(here, model.tokens(parts, slots[here], initial, 0), strict=True):
            if begin + CHUNK >= len(PROMPTS[i]):
                texts[i].append(token)
    for step in range(1, NUM_TOKENS):
        if step == NUM_TOKENS // 2:
            model.move(slots, slots + 1)
            slots = slots + 1
        last, initial = [[text[-1]] for text in texts], torch.tensor([True] * len(texts))
        for text, token in zip(texts, model.tokens(last, slots, initial, len(texts)), strict=True):
            text.append(token)
    return texts


@pytest.mark.parametrize(("family", "options"), CASES, ids=str)
def test_tokens_match_transformers(family: str, options: dict[str, Any]) -> None:
    with torch.no_grad():
        theirs = random_model(family, options)
        texts = _texts(Model(family, theirs, num_slots=6))
        for prompt, text in zip(PROMPTS, texts, strict=True):
            written = theirs.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)
            assert text == written[0, len(prompt) :].tolist()
    assert len({token for text in texts for token in text}) > 8
