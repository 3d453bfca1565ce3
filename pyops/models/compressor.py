"""The compressor of DeepSeek-V4: a window of tokens becomes one key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.system.lazy import torch
from ..ops.cache import compress_kv
from .batch import Batch
from .compressed import Compression
from .config import Config
from .linear import Place
from .norm import Norm

if TYPE_CHECKING:
    from torch import Tensor


class Compressor:
    """The weights of `compress_kv`, and the states in slots that it reads and writes.

    Args:
        name: of the compressor in a checkpoint.
        compression: tokens of a window, and whether windows overlap.
        head_size: elements of a key.
        config: of the model.
        at: dtype and device of the weights.

    Attributes:
        projected: {name in a checkpoint: rows} of the projections of hidden states to its two inputs.
    """

    def __init__(self, name: str, compression: Compression, head_size: int, config: Config, at: Place) -> None:
        heads = 2 if compression.is_indexed else 1
        row = heads * head_size
        self.name, self.head_size = name, head_size
        self.projected = {f"{name}.wkv": row, f"{name}.wgate": row}
        self.position_bias = torch.empty(compression.ratio, row, dtype=torch.float32, device=at.device)
        self.norm = Norm(config.norms, config.rms_norm_eps, at, head_size)
        self._state_shape = heads * compression.ratio, 2 * row
        self.slot_bytes = self._state_shape[0] * self._state_shape[1] * at.dtype.itemsize

    def tensors(self) -> dict[str, Tensor]:
        """{name in a checkpoint: the weights}."""
        return {f"{self.name}.ape": self.position_bias, f"{self.name}.norm.weight": self.norm.weight}

    def new_states(self, num_slots: int) -> Tensor:
        """The last tokens of each sequence, in slots."""
        return self.norm.weight.new_empty(num_slots, *self._state_shape)

    def __call__(self, kv: Tensor, gate: Tensor, states: Tensor, batch: Batch, table: Tensor) -> Tensor:
        """[num_tokens, head_size], with the key of a window at its last token. Writes `states`."""
        keys = kv.new_empty(len(kv), self.head_size)
        parameters = self.position_bias, self.norm.weight, table
        sequences = batch.cu_seqlens_q, batch.seq_lens, batch.state_slots
        compress_kv(keys, states, kv, gate, *parameters, *sequences, self.norm.epsilon)
        return keys
