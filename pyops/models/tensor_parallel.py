"""Tensor parallelism: a decoder with projections that are divided among the processes of a group.

Heads of attention and channels of MLPs and experts are divided; every process has the embedding, the norms, the routers
and the head. Each process computes a partial sum of a layer's output. `Decoder._add_norm` alone all-reduces the partial
sums, just before it adds the output to the residual.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .._core.errors import RankError
from .._core.system.lazy import torch
from ..ops.collective.process_group import CustomAllReduce, reach_each_other
from ..ops.linear.gemm_problem import SCALE_BLOCK
from .attention import Attention
from .config import Config
from .config_values import refuse
from .decoder import Decoder, random_tensors
from .kv_cache import KvScales
from .mixture import STACKED
from .norm import Norm
from .packed_format import PackedQuantization
from .packed_linear import check_written
from .quantization import GgufTypes

if TYPE_CHECKING:
    from torch import Tensor

TIMEOUT = timedelta(seconds=45)  # of a collective
_ALIVE_SECONDS = 3.0  # after a collective failed, live processes report within this time


class Group:
    """The processes among which a model is divided, and their collectives. Every process makes its own.

    Without `ranks`: all processes of `torch.distributed.init_process_group`, which are those that `torchrun` starts.

    Args:
        device: of this process's weights.
        ranks: numbers of the processes.
        timeout: how long a collective waits for a process before it raises.

    Examples:
        >>> store = torch.distributed.HashStore()  # under torchrun, init_process_group needs none
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> group = Group(device="cpu")  # then load(folder, group=group)
        >>> group.rank, group.world_size
        (0, 1)
        >>> torch.distributed.destroy_process_group()
    """

    def __init__(self, device: Any = "cpu", ranks: list[int] | None = None, timeout: timedelta = TIMEOUT) -> None:
        dist, self.device = torch.distributed, torch.device(device)
        self._host = dist.new_group(ranks, timeout=timeout, backend="gloo")
        on_gpu = self.device.type == "cuda"
        self._group = dist.new_group(ranks, timeout=timeout, backend="nccl") if on_gpu else self._host
        self.rank, self.world_size = dist.get_rank(self._host), dist.get_world_size(self._host)
        self._store = dist.distributed_c10d._get_default_store()
        self._name = f"pyops/{','.join(map(str, dist.get_process_group_ranks(self._host)))}"
        self.custom: CustomAllReduce | None = None
        if on_gpu and self.world_size > 1 and reach_each_other(self._host, self.device):
            self.custom = CustomAllReduce(self._host, self.device)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the processes, bitwise equal on all: added in float32 in rank order, except with NCCL."""
        if self.world_size == 1:
            return x
        if self.custom is not None and self.custom.serves(x):
            return self.custom.all_reduce(x)
        x = x.contiguous()
        with self._named("all_reduce"):
            if x.is_cuda:
                torch.distributed.all_reduce(x, group=self._group)
                return x
            # gloo's order of addition depends on the size. Adding in rank order gives the same bits as the kernels.
            parts = [torch.empty_like(x) for _ in range(self.world_size)]
            torch.distributed.all_gather(parts, x, group=self._host)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def least(self, value: int) -> int:
        """The minimum of the values of all processes."""
        found: list[Any] = [None] * self.world_size
        with self._named("least"):
            torch.distributed.all_gather_object(found, value, group=self._host)
        return int(min(found))

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Within this context, the error of a failed collective names the ranks that have ended or hang."""
        try:
            yield
        except RuntimeError as error:
            absent = self._absent()
            numbers = ", ".join(map(str, absent)) or "unknown"
            raise RankError(
                f"{what}: rank {self.rank} waits for ranks that have ended or hang: {numbers}", absent
            ) from error

    def _absent(self) -> list[int]:
        """The ranks that do not report within `_ALIVE_SECONDS` that the collective failed on them, too."""
        waited = time.monotonic() + _ALIVE_SECONDS
        missing = [rank for rank in range(self.world_size) if rank != self.rank]
        try:
            self._store.set(f"{self._name}/{self.rank}", "failed")
            while missing and time.monotonic() < waited:
                time.sleep(0.05)
                missing = [rank for rank in missing if not self._store.check([f"{self._name}/{rank}"])]
        except RuntimeError:
            return [0]  # the store is unreachable; rank 0 hosts it, unless torchrun does
        return missing


def divided(config: Config, world_size: int) -> Config:
    """The config of one shard of a model that is divided among `world_size` processes.

    Raises:
        ModelError: heads or channels cannot be divided by `world_size`, packed weights have act-order, quantised
            projections are fused in one tensor, or the model has state-space layers.
    """
    packed, mixture = config.quantization, config.mixture
    if isinstance(packed, PackedQuantization) and packed.has_order and world_size > 1:
        raise refuse("quantization_config", "groups of neighbours with tensor parallelism", "an order of columns")
    is_joined = len(config.names.qkv) == 1 or (len(config.names.gate_up) == 1 and config.has_gate)
    if packed is not None and not isinstance(packed, GgufTypes) and is_joined and world_size > 1:
        raise refuse("quantization_config", "None where projections are joined with tensor parallelism", packed)
    if config.state_space is not None:
        raise refuse("layer_types", "attention alone with tensor parallelism", config.layer_types)
    if config.compressed is not None and world_size > 1:
        raise refuse("layer_types", "attention to all tokens with tensor parallelism", "compressed attention")
    sizes = {
        name: getattr(config, name) for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    }
    channels = ("intermediate_size", "shared_intermediate_size") if mixture else ()
    of_experts = {name: getattr(mixture, name) for name in channels}
    for name, size in (*sizes.items(), *((f"experts' {name}", size) for name, size in of_experts.items())):
        if size % world_size:
            raise refuse(name, f"a multiple of {world_size} processes", size)
    if mixture is not None:
        mixture = replace(mixture, **{name: size // world_size for name, size in of_experts.items()})
    return replace(config, mixture=mixture, **{name: size // world_size for name, size in sizes.items()})


class DividedNorm(Norm):
    """An RMS norm of rows that are sharded over a group: the sums of squares are all-reduced.

    Args:
        norm: the norm of this process's shard.
        group: the processes.
    """

    def __init__(self, norm: Norm, group: Group) -> None:
        vars(self).update(vars(norm))
        self.group = group

    def _write(self, out: Tensor, x: Tensor) -> None:
        numbers = x.float()
        squares = self.group.all_reduce(numbers.square().sum(-1, keepdim=True))
        mean = squares / (numbers.shape[-1] * self.group.world_size)
        out.copy_(numbers * torch.rsqrt(mean + self.epsilon) * self.weight)


class DividedScales(KvScales):
    """Scales of a KV cache with its heads sharded over a group.

    Args:
        scales: of the heads of this process.
        group: the processes.
    """

    def __init__(self, scales: KvScales, group: Group) -> None:
        vars(self).update(vars(scales))
        self.group, self.num_heads = group, scales.num_heads * group.world_size

    def own(self, scale: Tensor) -> Tensor:
        return scale if len(scale) == 1 else scale.chunk(self.group.world_size)[self.group.rank]

    def whole(self, own: Tensor) -> Tensor:
        parts = own.new_zeros(self.group.world_size, len(own))
        parts[self.group.rank] = own
        return self.group.all_reduce(parts).flatten()


class ParallelDecoder(Decoder):
    """A `Decoder` sharded over the processes of `group`. `write` takes whole tensors and keeps this rank's shard.

    Every process calls `forward`, with the same batch, and gets the same hidden states.

    Raises:
        ModelError: the config cannot be divided (`divided`), or the blocks of quantised weights are not.

    Examples:
        >>> store = torch.distributed.HashStore()  # under torchrun, init_process_group needs none
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = ParallelDecoder(config, Group()).randomise(seed=0)
        >>> [tokens] = Engine(model).generate([[1, 2, 3]], SamplingParams(max_tokens=4))  # in every process
        >>> torch.distributed.destroy_process_group()
    """

    adds_at_once = False  # outputs are all-reduced before they are added

    def __init__(self, config: Config, group: Group, dtype: str | None = None, device: Any = None) -> None:
        self.group, self.whole = group, config
        super().__init__(divided(config, group.world_size), dtype, group.device if device is None else device)
        for layer in self.layers:
            if isinstance(layer.mixer, Attention):
                layer.mixer.scales = DividedScales(layer.mixer.scales, group)
        if config.qk_norm == "row" and group.world_size > 1:
            for layer in self.layers:
                mixer = layer.mixer
                if isinstance(mixer, Attention) and mixer.q_norm is not None and mixer.k_norm is not None:
                    mixer.q_norm, mixer.k_norm = DividedNorm(mixer.q_norm, group), DividedNorm(mixer.k_norm, group)
        self._check_blocks(Decoder(config, dtype, "meta").tensors())

    def _check_blocks(self, whole: dict[str, Tensor]) -> None:
        """ModelError unless sharding the tensors `whole` leaves all quantization blocks and scale blocks whole."""
        for name, own in self._tensors.items():
            elements = self._tensors.get(name.removesuffix("_scale"), own).shape  # elements under the block scales
            for size, own_size, count in zip(whole[name].shape, own.shape, elements, strict=False):
                is_cut = size != own_size and count > own_size and count % SCALE_BLOCK
                if size not in (own_size, own_size * self.group.world_size) or is_cut:
                    expected = f"whole blocks for each of {self.group.world_size} processes"
                    raise refuse(name, expected, tuple(whole[name].shape))

    def write(self, name: str, tensor: Tensor) -> None:
        if name not in self._tensors:  # the norm of a head on another rank
            return
        names, packed = self.config.names, self.whole.quantization
        parts, rank = self.group.world_size, self.group.rank
        # Biases of row-parallel projections: only rank 0 adds them, because the outputs are all-reduced.
        if name.endswith((f".{names.o}.bias", f".{names.down}.bias", f"{STACKED[1]}_bias")) and rank:
            tensor = torch.zeros_like(tensor)
        if isinstance(packed, PackedQuantization):
            check_written(packed, name, tensor)
        at, joined = self._joined_sizes(name)
        if joined:
            tensor = torch.cat([part.chunk(parts, at)[rank] for part in tensor.split(joined, at)], at)
        for dim, (whole, size) in enumerate(zip(tensor.shape, self._tensors[name].shape, strict=False)):
            if whole == size * parts and parts > 1:
                tensor = tensor.narrow(dim, rank * size, size)
        if name.endswith("g_idx"):
            tensor = tensor - tensor[0]
        super().write(name, tensor)

    def _named(self) -> dict[str, Tensor]:
        return {self._name_in_checkpoint(name): tensor for name, tensor in super()._named().items()}

    def _name_in_checkpoint(self, name: str) -> str:
        """Per-head norms have global head numbers in a checkpoint, and local ones in this process."""
        config, rank = self.config, self.group.rank
        counts = (config.names.q_norm, config.num_attention_heads), (config.names.k_norm, config.num_key_value_heads)
        for template, count in counts:
            before, is_by_head, after = template.partition("{}")
            found = re.fullmatch(rf"(.*\.{re.escape(before)})(\d+)({re.escape(after)}\.\w+)", name)
            if is_by_head and found:
                return f"{found[1]}{int(found[2]) + rank * count}{found[3]}"
        return name

    def _joined_sizes(self, name: str) -> tuple[int, list[int]]:
        """Rows of the projections that a checkpoint stacks in the tensor `name`, and the dimension of these rows.

        The rows are empty if the tensor is not stacked.
        """
        whole, module = self.whole, name.rpartition(".")[0].rpartition(".")[2]
        if whole.mixture is not None and whole.mixture.joined and name.endswith(whole.mixture.joined[0]):
            return 1, [whole.mixture.intermediate_size] * 2
        if (module,) == whole.names.qkv and not whole.qkv_by_head:
            heads = whole.num_attention_heads, whole.num_key_value_heads, whole.num_key_value_heads
            return 0, [count * whole.head_dim for count in heads]
        return 0, [whole.intermediate_size] * 2 if (module,) == whole.names.gate_up and whole.has_gate else []

    def randomise(self, seed: int, scale: float = 1.0) -> Decoder:
        """As `Decoder.randomise`: every rank generates the full weights on the CPU, in order, and keeps its shard."""
        whole = Decoder(self.whole, str(self.dtype).removeprefix("torch."), "meta")
        for name, tensor in random_tensors(whole, seed, scale, "cpu"):
            self.write(name, tensor)
        return self

    def naming_ranks(self) -> contextlib.AbstractContextManager[None]:
        custom = self.group.custom
        return contextlib.nullcontext() if custom is None else custom.naming("Engine.step")

    def agreed(self, blocks: int) -> int:
        return self.group.least(blocks)

    def _add_norm(self, hidden: Tensor, residual: Tensor, out_norm: Norm | None, norm: Norm | None) -> Tensor:
        custom, multiplier = self.group.custom, self.config.multipliers.residual
        if (
            custom is not None
            and out_norm is None
            and multiplier == 1
            and norm is not None
            and norm.kind == "rms"
            and residual.dtype == hidden.dtype
            and custom.serves(hidden)
            and custom.add_rms_norm(hidden, residual, norm.weight, norm.epsilon)
        ):
            return residual
        total = self.group.all_reduce(hidden)
        if total is not hidden:
            hidden.copy_(total)
        return super()._add_norm(hidden, residual, out_norm, norm)
