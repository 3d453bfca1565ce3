"""All kernels that serving a model needs, found by running the model's own code on meta tensors, without weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import tuning
from .._core.launch.kernel import Launch, Specialisation
from .._core.op import torch_library
from .._core.op.op import Op, registry
from .._core.system.device import Device
from .._core.system.lazy import torch
from .._core.tensors.tensor import TensorArg, dtype_of
from .batch import Batch
from .config import Config
from .decoder import Decoder
from .drawing import KINDS, TABLE_SIZE, choose
from .layers import Layer
from .quantization import GgufTypes
from .runner import blocks_for, decode_batch, decode_sizes, default_max_seq_len, row_size

_GROWTH = 1.1  # largest ratio of successive prefill sizes to plan for: close sizes mostly select the same kernels


def serving_kernels(
    model: str | Path | Config,
    device: Device,
    *,
    max_num_seqs: int = 64,
    max_model_len: int | None = None,
    max_num_batched_tokens: int = 8192,
    block_size: int = 16,
    dtype: str | None = None,
    kv_cache_dtype: str = "auto",
) -> list[tuple[Op, Specialisation]]:
    """All kernels that `load` and an `Engine` with these arguments may launch for the model.

    Args:
        model: a folder with ``config.json``, a GGUF file, or the config of either.
        device: the device that the kernels are planned for; it need not be present.
        max_model_len: `Engine`'s max_seq_len.
        max_num_seqs, max_num_batched_tokens, block_size, dtype, kv_cache_dtype: as `Engine` and `load` take them.

    Examples:
        >>> from pyops._core.system import device
        >>> small = {"max_num_seqs": 1, "max_model_len": 16, "max_num_batched_tokens": 16}  # as of the Engine
        >>> kernels = serving_kernels(config, device.model(), **small)
        >>> {"rms_norm", "skinny_linear", "paged_attention_v1"} <= {op.name for op, _ in kernels}
        True
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = model if isinstance(model, Config) else Config.read(Path(model))
    max_seq_len = max_model_len or default_max_seq_len(config)
    found: dict[tuple[str, Any, Any], tuple[Op, Specialisation]] = {}
    place = "cpu" if device.index < 0 else f"cuda:{device.index}"

    def collect(op: Op, launches: list[Launch]) -> None:
        for specialisation in (launch.specialisation for launch in launches):
            found.setdefault((op.name, specialisation.kernel, specialisation.key), (op, specialisation))

    with FakeTensorMode(), torch.no_grad(), planned(device, collect):
        decoder = Decoder(config, dtype, place)
        decoder.layers = _kinds(decoder)
        decoder.prepare(checked=False)
        max_blocks = blocks_for(config, max_seq_len, block_size)
        cache = decoder.new_cache(max_num_seqs * max_blocks, block_size, max_num_seqs, kv_cache_dtype)
        tables = decoder.new_tables(max_seq_len)
        rows = torch.empty(max_num_seqs, row_size(config, max_seq_len, block_size), dtype=torch.int64, device=place)
        starts = torch.empty(max_num_seqs + 1, dtype=torch.int64, device=place)
        batches = [
            decode_batch(rows[:size], starts, decoder.slot_bytes > 0, starts) for size in decode_sizes(max_num_seqs)
        ]
        batches += _prompts(max_num_seqs, max_blocks, max_num_batched_tokens, place)
        for batch in batches:
            logits = decoder.step(batch, cache, tables)
        for size in decode_sizes(max_num_seqs):
            for dtype in {logits.dtype, torch.float32}:  # logits that hooks have edited are float32
                _choose(logits[:1].expand(size, -1).to(dtype, copy=True))
    return list(found.values())


def _choose(logits: Any) -> None:
    """Choose tokens in all ways."""
    indices: dict[str, Any] = {"dtype": torch.int64, "device": logits.device}
    tokens, table = torch.empty(len(logits), **indices), torch.empty(TABLE_SIZE * len(logits), **indices)
    for kind in KINDS:
        choose(tokens, logits, table, kind)


def _kinds(decoder: Decoder) -> list[Layer]:
    """The indices of one layer of each kind, enough to plan all kernels. A kind is type, window, dtypes, GGUF types."""
    config, found = decoder.config, dict[Any, Layer]()
    types = config.quantization if isinstance(config.quantization, GgufTypes) else GgufTypes(())
    experts = (False,) * config.num_hidden_layers if config.mixture is None else config.mixture.layers
    for i, layer in enumerate(decoder.layers):
        at, weights = f"{config.names.layers}.{i}", layer.tensors(config.names)
        kinds = [(one.dtype, types.of(f"{at}.{name}".removesuffix(".weight"))) for name, one in weights.items()]
        options = config.layer_types[i], config.sliding_windows[i], config.rope_of(i), experts[i]
        found.setdefault((*options, *kinds), layer)
    return list(found.values())


def _prompts(max_num_seqs: int, max_blocks: int, max_num_batched_tokens: int, place: str) -> Iterator[Batch]:
    """Batches that prefill 1 to `max_num_batched_tokens` tokens, alone and together with decodes."""
    indices: dict[str, Any] = {"dtype": torch.int64, "device": place}
    for num_tokens in prefill_sizes(max_num_batched_tokens):
        num_prompts = min(num_tokens, max_num_seqs)
        for prompts, decodes in {(1, 0), (num_prompts, 0), (1, min(num_tokens, max_num_seqs - 1))}:
            tokens, positions, slots = (torch.empty(num_tokens + decodes, **indices) for _ in range(3))
            num_seqs = prompts + decodes
            yield Batch(
                tokens=tokens,
                positions=positions,
                slot_mapping=slots,
                block_tables=torch.empty(num_seqs, max_blocks, **indices),
                seq_lens=torch.empty(num_seqs, **indices),
                cu_seqlens_q=torch.empty(num_seqs + 1, **indices),
                state_slots=torch.empty(num_seqs, dtype=torch.int32, device=place),
                has_states=torch.empty(num_seqs, dtype=torch.bool, device=place),
                num_decodes=decodes,
            )


def prefill_sizes(most: int) -> Iterator[int]:
    """Numbers of tokens to plan for, up to `most`: among them one for every M that GEMMs are chosen by."""
    size = 1
    while size < most:
        yield size
        size = max(size + 1, min(int(size * _GROWTH), tuning.rounded_rows(size) + 1))
    yield most


@contextmanager
def planned(device: Device, observe: Callable[[Op, list[Launch]], None]) -> Iterator[None]:
    """Within this context, calls of ops on fake tensors are planned for `device`; `observe` gets their launches."""

    def plan(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        op = registry[name]
        values = [kwargs.get(p.name, args[i] if i < len(args) else p.default) for i, p in enumerate(op.parameters)]
        described = [
            _described(name, p.name, value, device) if p.is_tensor and value is not None else value
            for p, value in zip(op.parameters, values, strict=True)
        ]
        observe(op, op.launches(*described))

    torch_library.bind_torch()
    with torch_library.observed(plan, device):
        yield


def _described(op: str, name: str, value: Any, device: Device) -> TensorArg:
    """The descriptor of one of torch's fake tensors, as if its storage began at a multiple of 16 bytes on `device`."""
    dtype = dtype_of(op, name, value)
    offset = int(value.storage_offset()) * dtype.itemsize
    shape, strides = (tuple(map(int, sizes)) for sizes in (value.shape, value.stride()))
    return TensorArg(op, name, dtype, shape, strides, (offset | 16) & -(offset | 16), device)
