"""A decoder on the ops of this library: layers of attention, of state-space mixers, or of both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from .._core.system.lazy import torch
from ..errors import ModelError
from ..ops.embedding import vocab_parallel_embedding
from . import one_token
from .batch import Batch
from .config import Config
from .experts import Experts
from .gguf_linear import BlockMatrix, GgufLinear
from .hyper_connections import HyperConnection, Streams
from .kv_cache import cache_dtype
from .layers import new_layer
from .linear import Linear, Place, gpu_of
from .norm import Norm
from .packed_format import PackedQuantization
from .packed_linear import check_written
from .quantization import GgufTypes, Quantization, has_mxfp4_experts
from .rope import Rope

if TYPE_CHECKING:
    from torch import Tensor

Cache = list[tuple["Tensor", ...]]  # the cache tensors of each layer
_RANDOM_CODE, _MAX_RANDOM_CODE = 32.0, 127.0  # standard deviation and bound of random 8-bit weights
_RANDOM_INPUT = 8.0  # the activation that the static scale of random weights maps to 127


class Decoder:
    """The decoder. Its weights are uninitialised: `tensors` lists them, `write` and `randomise` set them.

    Args:
        config: sizes and options.
        dtype: name of the dtype of weights and activations, and of a cache that is not fp8; None for config's.
        device: device of the weights; on "meta" they take no memory.

    Attributes:
        slot_bytes: bytes of a slot, which holds the states of one sequence: all of its cache that is not in blocks.

    Examples:
        >>> model = Decoder(config, dtype="bfloat16").randomise(seed=0)  # or load(folder)
    """

    adds_at_once = True  # outputs of projections are whole, so they may be added to the residual at once

    def __init__(self, config: Config, dtype: str | None = None, device: Any = "cpu") -> None:
        self.config = config
        self.device, self.dtype = torch.device(device), getattr(torch, dtype or config.dtype)
        if isinstance(config.quantization, Quantization | PackedQuantization) and self.dtype == torch.float32:
            raise ModelError("dtype", "expected float16 or bfloat16 with quantised weights, got float32")
        place = Place(self.dtype, self.device, config.quantization)
        sizes = config.vocab_size, config.hidden_size
        self.embedding = place.matrix(config.names.embedding, *sizes)
        self.layers = [new_layer(config, i, place) for i in range(config.num_hidden_layers)]
        self.norm = Norm(config.norms, config.rms_norm_eps, place, config.hidden_size)
        self.stream_head = None
        if config.streams is not None:
            self.stream_head = HyperConnection(config, "hc", config.streams.streams, 1, self.device)
        head = self.embedding if config.tie_word_embeddings else place.matrix("lm_head", *sizes)
        rows = {"lm_head": config.vocab_size}
        self.head = GgufLinear((head,), None, rows) if isinstance(head, BlockMatrix) else Linear(head, None, rows)
        multipliers = config.multipliers
        rounded_to = self.dtype if multipliers.embedding_is_rounded else torch.float64
        self._multiplier = torch.tensor(multipliers.embedding, dtype=rounded_to, device="cpu").item()
        self.slot_bytes = sum(layer.mixer.slot_bytes for layer in self.layers)
        self._tensors, self._prepared = self._named(), False

    def tensors(self) -> dict[str, Tensor]:
        """{name in a checkpoint: the weights, or a view of them}. `write` sets them.

        The entries ``A_log`` hold the decays ``A = -exp(A_log)``, except for the gated delta rule. Packed weights of
        experts are listed until `prepare`.
        """
        return self._tensors

    def _named(self) -> dict[str, Tensor]:
        names = self.config.names
        embedding = self.embedding.weight if isinstance(self.embedding, BlockMatrix) else self.embedding
        found = {f"{names.embedding}.weight": embedding}
        found |= {f"{names.norm}.{name}": tensor for name, tensor in self.norm.tensors().items()}
        if not self.config.tie_word_embeddings:
            found |= self.head.tensors()
        if self.stream_head is not None:
            found |= {f"model.hc_head.{name}": tensor for name, tensor in self.stream_head.tensors().items()}
        for i, layer in enumerate(self.layers):
            found |= {f"{names.layers}.{i}.{name}": tensor for name, tensor in layer.tensors(names).items()}
        return found

    def write(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor of a checkpoint to the weights with this `name`.

        Raises:
            ModelError: groups or zero points of a packed weight contradict ``config.json``.
        """
        weights, packed = self._tensors[name], self.config.quantization
        if isinstance(packed, PackedQuantization):
            check_written(packed, name, tensor)
        if name.endswith(".input_scale"):  # stacked projections share the largest scale, so that none saturates
            tensor = torch.maximum(weights, tensor.to(weights).reshape(weights.shape))
        config = self.config
        if config.qkv_by_head and name.rpartition(".")[0].endswith(config.names.qkv):
            kv_heads = config.num_key_value_heads
            heads = tensor.unflatten(0, (kv_heads, config.num_attention_heads // kv_heads + 2, config.head_dim))
            tensor = torch.cat([part.flatten(0, 2) for part in heads.split((heads.shape[1] - 2, 1, 1), 1)])
        for end, runs in config.row_factors:
            if name.endswith(end):
                tensor = _scaled(tensor, runs)
        weights.copy_(tensor)
        if name.endswith(".A_log") and config.state_space is not None and config.state_space.has_decays:
            weights.exp_().neg_()

    def prepare(self, checked: bool = True) -> None:
        """Convert packed weights of experts to the layout of the kernels, once the whole checkpoint is written.

        Args:
            checked: whether to check the data first; False for tensors without data.

        Raises:
            ModelError: the kernels cannot read such weights, or `prepare` was called before.
        """
        if self._prepared:
            raise ModelError("prepare", "expected one call: the weights of experts are those that are multiplied")
        experts = [layer.mlp.weights for layer in self.layers if isinstance(layer.mlp, Experts)]
        for weights in experts if checked else ():
            weights.check()
        self._prepared = True
        for weights in experts:
            weights.prepare()
        one_token.set_prefetches(self.layers, gpu_of(self.norm.weight))

    def randomise(self, seed: int, scale: float = 1.0) -> Decoder:
        """Set the weights of norms to 1, all others to normal noise with deviation ``scale / sqrt(columns)``.

        The weights of Gemma norms, to which 1 is added, and biases of norms are set to 0. 8-bit weights are the same
        noise, rounded and clamped at four standard deviations. ModelError if weights are packed.
        """
        for name, tensor in random_tensors(self, seed, scale, self.device):
            self.write(name, tensor)
        return self

    def token_bytes(self, kv_cache_dtype: str = "auto") -> int:
        """Bytes of a token in the blocks of a cache. ModelError for a `kv_cache_dtype` that is not supported."""
        itemsize: int = cache_dtype(self.config, self.dtype, kv_cache_dtype).itemsize
        return itemsize * sum(layer.mixer.token_size for layer in self.layers)

    def new_cache(self, num_blocks: int, block_size: int, num_slots: int, kv_cache_dtype: str = "auto") -> Cache:
        """The cache of each layer: keys and values in blocks of tokens, or states in slots."""
        dtype = cache_dtype(self.config, self.dtype, kv_cache_dtype)
        return [layer.mixer.new_cache(num_blocks, block_size, num_slots, dtype) for layer in self.layers]

    def new_tables(self, num_positions: int) -> dict[Rope, Tensor]:
        """The table of each rotary embedding for sequences of up to `num_positions` tokens: see `Rope.cos_sin`."""
        head_dim = self.config.head_dim
        dtype = self.dtype if self.config.compressed is None else torch.float32
        return {rope: rope.cos_sin(head_dim, num_positions, self.device).to(dtype) for rope in self.config.ropes}

    def naming_ranks(self) -> AbstractContextManager[None]:
        """The context of a step, in which errors of collectives name the ranks that have ended or hang."""
        return nullcontext()

    def agreed(self, blocks: int) -> int:
        """The number of cache blocks that fits on every process of a tensor-parallel model."""
        return blocks

    def forward(self, batch: Batch, cache: Cache, tables: dict[Rope, Tensor]) -> Tensor:
        """Hidden states of the tokens after the last norm: [num_tokens, hidden_size]. Writes `cache`."""
        if self.config.streams is not None:
            return self._through_streams(batch, cache, tables)
        if one_token.serves(self, batch):
            return self.norm.of(one_token.residual(self.layers, self._embedded(batch.tokens), batch, cache, tables))
        residual, first = self._embedded(batch.tokens), self.layers[0].input_norm
        hidden = residual.clone() if first is None else first.of(residual)
        residual = residual.float() if self.config.residual_in_float32 else residual
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for layer, kept, next_norm in zip(self.layers, cache, next_norms, strict=True):
            mixed = layer.mixer(hidden, batch, kept, tables)
            if layer.mlp is not None and self.config.parallel_residual:
                mixed += layer.mlp(hidden if layer.mlp_norm is None else layer.mlp_norm.of(residual))
            elif layer.mlp is not None:
                residual = self._add_norm(mixed, residual, layer.mixer_out_norm, layer.mlp_norm)
                mixed = layer.mlp(mixed)
            residual = self._add_norm(mixed, residual, layer.mlp_out_norm, next_norm)
            hidden = mixed
        return hidden

    def _through_streams(self, batch: Batch, cache: Cache, tables: dict[Rope, Tensor]) -> Tensor:
        """`forward` of a model with hyper-connections."""
        assert self.config.streams is not None
        assert self.stream_head is not None
        streams = Streams(self._embedded(batch.tokens), self.config.streams, self.config.rms_norm_eps)
        output = None
        for layer, kept in zip(self.layers, cache, strict=True):
            assert isinstance(layer.mlp, Experts)
            of_mixer, of_mlp = layer.connections
            output = layer.mixer(streams.input(of_mixer, layer.input_norm, output), batch, kept, tables)
            output = layer.mlp(streams.input(of_mlp, layer.mlp_norm, output), batch.tokens)
        assert output is not None
        hidden = streams.collapsed(output, self.stream_head)
        self.norm(hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits that these hidden states give: [num_tokens, vocab_size]."""
        return _multiplied(self.config, self.head(hidden))

    def step(self, batch: Batch, cache: Cache, tables: dict[Rope, Tensor]) -> Tensor:
        """The logits after each token, `logits` of `forward`: with fewer kernels for a decode of one token."""
        if one_token.serves(self, batch) and isinstance(self.head, Linear):
            residual = one_token.residual(self.layers, self._embedded(batch.tokens), batch, cache, tables)
            return _multiplied(self.config, self.head.of_norm(residual, *self.norm.terms))
        return self.logits(self.forward(batch, cache, tables))

    def _embedded(self, tokens: Tensor) -> Tensor:
        return _rows(self.embedding, tokens, self._multiplier)

    def _add_norm(self, hidden: Tensor, residual: Tensor, out_norm: Norm | None, norm: Norm | None) -> Tensor:
        """Add `out_norm` of `hidden` to `residual`, write the norm of the sum to `hidden`, and return the sum."""
        if out_norm is not None:
            out_norm(hidden)
        if self.config.multipliers.residual != 1:
            hidden *= self.config.multipliers.residual
        if norm is not None:
            return norm.add(hidden, residual)
        residual += hidden
        hidden.copy_(residual)
        return residual


def _scaled(tensor: Tensor, runs: tuple[tuple[float, int], ...]) -> Tensor:
    """`tensor` in float32, with each run of rows multiplied by its factor; `runs` are (factor, number of rows)."""
    factors = torch.tensor([factor for factor, _ in runs], dtype=torch.float32, device=tensor.device)
    counts = torch.tensor([count for _, count in runs], dtype=torch.int64, device=tensor.device)
    rows = factors.repeat_interleave(counts)
    return tensor.float() * rows.view(-1, *[1] * (tensor.ndim - 1))


def random_tensors(model: Decoder, seed: int, scale: float, device: Any) -> Iterator[tuple[str, Tensor]]:
    """Generate the tensors that `Decoder.randomise` writes: (name, tensor on `device`)."""
    config, places = model.config, model.tensors()
    if isinstance(config.quantization, PackedQuantization | GgufTypes) or has_mxfp4_experts(config.quantization):
        raise ModelError("randomise", "expected weights that are neither packed nor of mxfp4 nor of GGUF's types")
    generator = torch.Generator(device).manual_seed(seed)
    for name, place in places.items():
        tensor = torch.empty_like(place, device=device)
        if "norm" in name.rpartition(".")[0].rpartition(f"{config.names.layers}.")[2]:
            adds_one = config.norms.kind == "gemma" and f".{config.names.state_space}." not in name
            tensor.fill_(float(name.endswith(".weight") and not adds_one))
        elif name.endswith(".input_scale"):
            tensor.fill_(_RANDOM_INPUT / _MAX_RANDOM_CODE)
        elif name.endswith(".weight_scale"):
            columns = places[name.removesuffix("_scale")].shape[1]
            tensor.fill_(scale * columns**-0.5 / _RANDOM_CODE)
        elif tensor.itemsize == 1:
            codes = torch.empty(tensor.shape, dtype=torch.float32, device=device).normal_(
                0.0, _RANDOM_CODE, generator=generator
            )
            tensor.copy_(codes.round_().clamp_(-_MAX_RANDOM_CODE, _MAX_RANDOM_CODE))
        elif not tensor.is_floating_point():
            assert config.mixture is not None
            tensor.random_(0, config.mixture.num_experts, generator=generator)
        else:
            tensor.normal_(0.0, scale * tensor.shape[-1] ** -0.5, generator=generator)
        yield name, tensor


def _rows(embedding: Any, tokens: Tensor, multiplier: float) -> Tensor:
    if gpu_of(tokens) is not None and isinstance(embedding, torch.Tensor):  # a kernel that starts early
        found: Tensor = vocab_parallel_embedding.new(tokens, embedding, 0, len(embedding), 0, 0, 0)
    else:
        found = embedding[tokens]
    return found if multiplier == 1 else found * multiplier


def _multiplied(config: Config, logits: Tensor) -> Tensor:
    multipliers = config.multipliers
    if multipliers.logits != 1:
        logits = logits * multipliers.logits
    if cap := multipliers.logits_soft_cap:
        logits = cap * torch.tanh(logits / cap)
    return logits
