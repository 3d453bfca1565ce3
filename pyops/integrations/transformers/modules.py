"""What the modules of a decoder do instead: each class here stands for the forward of one module of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.generation import GenerationMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...ops.activation import silu_and_mul
from ...ops.norm import fused_add_rms_norm, rms_norm
from ...ops.rotary import rotary_embedding
from .cache import CACHE, PagedCache, Sequences
from .joined import Joined, hooked

PAGED = ("sdpa", "eager")  # implementations of attention whose masks PagedCache reads


def served(x: Tensor) -> bool:
    """Whether the ops compute what the module would: they have no gradients and do not follow autocast."""
    return not (torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type))


class Replacement:
    """The forward of `module`, which falls back on the one that the module's class has."""

    def __init__(self, module: Any) -> None:
        self.module, self.original = module, module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def install(self) -> None:
        self.module.forward = self.forward

    def remove(self) -> None:
        """Leave the module as it was."""
        del self.module.forward


class Left(NamedTuple):
    """What a layer leaves for the next: its hidden states, and what the module `norm` would make of them."""

    hidden_states: Tensor
    normalised: Tensor
    norm: Any


class Step:
    """What the layers of one forward pass share.

    Attributes:
        cos_sin_cache: [rows, head_dim]: cosines, then sines, of the angles of one token in a row.
        positions: [batch, count]: the row of each token.
        sequences: where they lie in a PagedCache, by the size of the sliding window.
        left: by one layer for the next.
    """

    def __init__(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> None:
        self._angles = cos, sin
        half, (batch, count) = cos.shape[-1] // 2, cos.shape[:2]
        self.cos_sin_cache = torch.cat((cos[..., :half], sin[..., :half]), -1).flatten(0, 1)
        positions = torch.arange(batch * count, device=cos.device).view(batch, count)
        self.positions = positions.expand(hidden_states.shape[:2])
        self.sequences: dict[int, Sequences] = {}
        self.left: Left | None = None

    def __iter__(self) -> Iterator[Tensor]:
        """Cosines and sines, for an attention that is not replaced."""
        return iter(self._angles)


class RotaryEmbedding(Replacement):
    """Its angles, as a `Step`: where this is none, the replaced modules do what they did before."""

    op = "rotary_embedding"

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        angles = self.original(x, position_ids)
        return Step(x, *angles) if served(x) else angles


class RMSNorm(Replacement):
    op = "rms_norm"

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not served(hidden_states):
            return self.original(hidden_states)
        out = torch.empty_like(hidden_states)
        rms_norm(out, hidden_states, self.module.weight, self.module.variance_epsilon)
        return out


class MLP(Replacement):
    op = "silu_and_mul"

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.gate_up = Joined(module.gate_proj, module.up_proj)

    def forward(self, x: Tensor) -> Tensor:
        if not served(x):
            return self.original(x)
        gate_up = self.gate_up(x)
        activated = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        silu_and_mul(activated, gate_up)
        return self.module.down_proj(activated)

    def remove(self) -> None:
        super().remove()
        self.gate_up.part()


class Attention(Replacement):
    op = "rotary_embedding, and with a PagedCache reshape_and_cache_flash, paged_attention_v1, paged_attention_varlen"

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.qkv = Joined(module.q_proj, module.k_proj, module.v_proj)
        self.sizes = [linear.out_features for linear in self.qkv.linears]
        # Mistral and Mixtral have one for all layers, which their attention does not keep; Llama has none, whatever its
        # config says.
        is_windowed = type(module).__name__ in ("MistralAttention", "MixtralAttention")
        whole = module.config.sliding_window if is_windowed else None
        self.sliding_window = getattr(module, "sliding_window", whole)
        self.eager = inspect.unwrap(self.original.__func__).__globals__["eager_attention_forward"]
        self.norms = [getattr(module, name) for name in ("q_norm", "k_norm") if hasattr(module, name)]

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        *,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        cache = past_key_values if cache is None else cache
        if not isinstance(position_embeddings, Step):
            kwargs |= {
                "position_embeddings": position_embeddings,
                "attention_mask": attention_mask,
                CACHE: cache,
            }
            return self.original(hidden_states, **kwargs)
        step, module = position_embeddings, self.module
        heads = [part.unflatten(-1, (-1, module.head_dim)) for part in self.qkv(hidden_states).split(self.sizes, -1)]
        query, key, value = heads
        if self.norms:
            # What a hook has seen of them is not turned with them.
            normalised = [(norm, norm(x)) for norm, x in zip(self.norms, heads, strict=False)]
            query, key = (x.clone() if hooked(norm) else x for norm, x in normalised)
        rotary_embedding(step.positions, query, key, module.head_dim, step.cos_sin_cache, True)
        weights = None
        if isinstance(cache, PagedCache) and self._paged(kwargs):
            layer = cache.layers[module.layer_idx]
            window = self.sliding_window or 0
            layer.reserve(key.transpose(1, 2), value.transpose(1, 2))
            if window not in step.sequences:
                step.sequences[window] = layer.locate(query.shape[1], attention_mask, window)
            where = step.sequences[window]
            layer.write(key, value, where.slots)
            out = layer.attend(query, where, module.scaling, window)
        else:
            states = key.transpose(1, 2), value.transpose(1, 2)
            if cache is not None:
                states = cache.update(*states, module.layer_idx)
            dropout = module.attention_dropout if module.training else 0.0
            windowed = {"sliding_window": self.sliding_window} if self.sliding_window else {}
            interface = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, self.eager)
            out, weights = interface(
                module,
                query.transpose(1, 2),
                *states,
                attention_mask,
                dropout=dropout,
                scaling=module.scaling,
                **windowed,
                **kwargs,
            )
        return module.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights

    def remove(self) -> None:
        super().remove()
        self.qkv.part()

    def _paged(self, kwargs: dict[str, Any]) -> bool:
        """Whether attention is what the ops compute: causal, by a mask that they know, without weights to return."""
        module, config = self.module, self.module.config
        return (
            config._attn_implementation in PAGED
            and module.is_causal
            and kwargs.get("is_causal") is not False
            and not (module.training and module.attention_dropout)
            and not kwargs.get("output_attentions", getattr(config, "output_attentions", False))
        )


class DecoderLayer(Replacement):
    """Both sums of a layer with the norm behind them; the norm behind the second is that of the next layer.

    Args:
        following: the next layer, whose first norm is replaced, or None.
        attention, mlp: those of the layer where they are replaced: their results are new, so that sums may be written
            there.
    """

    op = "fused_add_rms_norm"

    def __init__(self, module: Any, following: Any, attention: Any, mlp: Any) -> None:
        super().__init__(module)
        self.following, self.attention, self.mlp = following, attention, mlp

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = False,
        position_embeddings: Any = None,
        *,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        kwargs |= {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            CACHE: past_key_values if cache is None else cache,
            "use_cache": use_cache,
            "position_embeddings": position_embeddings,
        }
        layer, step, following = self.module, position_embeddings, self.following
        if not isinstance(step, Step):
            return self.original(hidden_states, **kwargs)
        before, after = layer.input_layernorm, layer.post_attention_layernorm
        attention, mlp = layer.self_attn, layer.mlp
        left, step.left = step.left, None
        # Hidden states that the layer before has left are seen by nobody else, so they may be written.
        ours = left is not None and left.hidden_states is hidden_states and left.norm is before
        normalised = left.normalised if left and ours else before(hidden_states)
        attended, _ = attention(hidden_states=normalised, **kwargs)
        if ours and attention is self.attention and not hooked(after, attention, attention.o_proj):
            residual, normalised = hidden_states, attended
            fused_add_rms_norm(normalised, residual, after.weight, after.variance_epsilon)
        else:
            residual = hidden_states + attended
            normalised = after(residual)
        out = mlp(normalised)
        norm = following.input_layernorm if following is not None and mlp is self.mlp else None
        if norm is None or hooked(layer, mlp, mlp.down_proj, following, norm):
            return residual + out
        fused_add_rms_norm(out, residual, norm.weight, norm.variance_epsilon)
        step.left = Left(residual, out, norm)
        return residual


class Generation(Replacement):
    """What of `generate` makes a cache: a PagedCache where it would be a dynamic or static one of one text per row."""

    op = "a PagedCache"

    def __init__(self, module: Any) -> None:
        self.module, self.original = module, module._prepare_cache_for_generation

    def install(self) -> None:
        self.module._prepare_cache_for_generation = self.forward

    def remove(self) -> None:
        del self.module._prepare_cache_for_generation

    def forward(
        self, generation_config: Any, model_kwargs: Any, generation_mode: Any, batch_size: int, max_cache_length: int
    ) -> None:
        given = model_kwargs.get(CACHE)
        self.original(generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        cache = model_kwargs.get(CACHE)
        if (
            given is None
            and type(cache) in (DynamicCache, StaticCache)
            and not cache.offloading
            and generation_mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
            and not generation_config.is_assistant
            and generation_config.prefill_chunk_size is None
            and self.module.config._attn_implementation in PAGED
            and _padded_on_the_left(model_kwargs.get("attention_mask"))
        ):
            longest = None
            if type(cache) is StaticCache:
                # As long as that of the last call, at least: a compiled step then need not be compiled again.
                longest = max(max_cache_length, getattr(self.module, "_previous_max_cache_length", 0))
            model_kwargs[CACHE] = PagedCache(self.module.config, longest)


def _padded_on_the_left(mask: Any) -> bool:
    """Whether a mask [batch, length] is None, or its ones are the last of each row, and at least one."""
    if mask is None:
        return True
    return mask.ndim == 2 and bool((mask[:, 1:] >= mask[:, :-1]).all() & (mask[:, -1] == 1).all())
