"""The queries, keys and values of a token, without tensor cores (GEMV), up to their insert into a paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ... import check, tuning
from ..._core.launch.kernel import Kernel, Launch
from ..._core.op.decorator import op
from ..._core.op.planner import Result
from ..._core.tensors.tensor import TensorArg
from .._shared.heads import known_positions, rotated
from .._shared.norms import rms
from .skinny_linear import SkinnyConfig, check_normalised, config_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..._core.system.device import Device

__all__ = ["skinny_qkv_rope_cache"]

_gemv_qkv = Kernel("linear/gemv_qkv.cu")
HEAD_SIZES = 64, 128, 256
_MAX_TOKENS = 65535  # most tokens: blockIdx.z counts them
_BLOCK_SIZE, _MAX_POSITION = 16, 64  # of examples


@dataclass(frozen=True)
class QkvRows:
    """A projection of gemv_qkv.cu.

    Attributes:
        input: [num_tokens, K].
        weight: [heads * head_size, K].
        norm_weight: [K].
        head_size: elements of a head.
    """

    input: TensorArg
    weight: TensorArg
    norm_weight: TensorArg
    head_size: int

    @property
    def heads(self) -> int:
        return self.weight.shape[0] // self.head_size

    def parts(self, config: SkinnyConfig, device: Device) -> int:
        """Blocks that share a head: as many as run at once, in equal numbers of rounds."""
        groups = self.head_size // 2 // (config.num_threads // device.warp_size // config.split)
        most = max(1, min(groups, device.num_sms * config.min_blocks // self.heads))
        return -(-groups // -(-groups // most))

    def bucket(self) -> str:
        rows, hidden_size = self.weight.shape
        tokens = tuning.power_of_two(self.input.shape[0])
        return f"tokens={tokens} weight={rows}x{hidden_size} head_size={self.head_size}"


def choose(problem: QkvRows, device: Device) -> SkinnyConfig:
    hidden_size = problem.input.shape[1]
    vec_size = check.vector_width(hidden_size, problem.input, problem.weight, problem.norm_weight)
    return config_of(hidden_size, vec_size, several=False, warp_size=device.warp_size)


@op(out="query", inout=("key_cache", "value_cache"), atol=2.0**-18)
def skinny_qkv_rope_cache(
    query: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor,
    epsilon: float,
    cos_sin_cache: Tensor,
    is_neox: bool,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
) -> None:
    """Queries, keys and values for small M: a norm, the QKV projection, RoPE, and the insert into a paged cache.

    `skinny_linear` with a norm and `fused_qk_rope_cache` in one launch, for the decode step of one sequence: each token
    reads the weight. ``norm(input) @ weight.T + bias`` has the heads of queries, of keys and of values, where the norm
    is that of `rms_norm`. The first ``rotary_dim`` elements of a head of queries or keys rotate in pairs: (j, j +
    rotary_dim / 2) if `is_neox`, else (2j, 2j + 1) (Su et al. 2021, arXiv:2104.09864). All after the norm is float32,
    rounded once. Keys and values
    are written to ``b, o = divmod(slot_mapping[t], block_size)`` of the caches. A token with a position outside the
    table is not rotated, and nothing of it is inserted; nor is a token with a slot that is negative or after the last.
    The kernel reads `weight` while the previous kernel runs: that kernel must not write it, as is so for the weights of
    a model.

    Args:
        query: [num_tokens, num_heads * head_size], written.
        input: [num_tokens, hidden_size], float32, float16 or bfloat16; any row stride. Rows have at most 32 KB.
        weight: [(num_heads + 2 * num_kv_heads) * head_size, hidden_size] of the same dtype; constant row stride. Rows
            of queries, then of keys, then of values.
        bias: of the same dtype, contiguous, an element for each row of weight; or None.
        norm_weight: [hidden_size] of the same dtype, contiguous.
        epsilon: of the norm of `input`.
        cos_sin_cache: [max_position, rotary_dim], float32, float16 or bfloat16, of one row at least, any row stride:
            cosines, then sines; rotary_dim even, at most head_size.
        is_neox: which elements form a pair.
        positions, slot_mapping: [num_tokens] int64 or int32, contiguous.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_size] of the dtype of `input`, written where
            slots say; any strides but the last. head_size is 64, 128 or 256.
    """
    num_kv_heads, head_size = key_cache.shape[2:]
    x = rms(input.float(), norm_weight, epsilon, input.dtype).float() @ weight.float().T
    heads = (x if bias is None else x + bias.float()).unflatten(-1, (-1, head_size))
    q, k, v = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), 1)
    pairs = cos_sin_cache.shape[1] // 2
    rotation = positions, cos_sin_cache[:, :pairs], cos_sin_cache[:, pairs:], pairs, is_neox
    query.copy_(rotated(q, *rotation).flatten(1))
    num_blocks, block_size = key_cache.shape[:2]
    inserted = (
        known_positions(positions, cos_sin_cache) & (slot_mapping >= 0) & (slot_mapping < num_blocks * block_size)
    )
    slots = slot_mapping[inserted].long()
    for cache, x in ((key_cache, rotated(k, *rotation)), (value_cache, v)):
        cache[slots // block_size, slots % block_size] = x[inserted].to(cache.dtype)


@skinny_qkv_rope_cache.result
def result_skinny_qkv_rope_cache(input: TensorArg, weight: TensorArg, key_cache: TensorArg) -> Result:
    check.sizes(weight, rows=None, hidden_size=check.row_size(input))
    check.sizes(key_cache, num_blocks=None, block_size=None, num_kv_heads=None, head_size=None)
    return Result((input.shape[0], weight.shape[0] - 2 * key_cache.shape[2] * key_cache.shape[3]), input.dtype)


@skinny_qkv_rope_cache.plan
def plan_skinny_qkv_rope_cache(
    query: TensorArg,
    input: TensorArg,
    weight: TensorArg,
    bias: TensorArg | None,
    norm_weight: TensorArg,
    epsilon: float,
    cos_sin_cache: TensorArg,
    is_neox: bool,
    positions: TensorArg,
    slot_mapping: TensorArg,
    key_cache: TensorArg,
    value_cache: TensorArg,
) -> Launch:
    check.floating(input)
    check.sizes(input, num_tokens=None, hidden_size=None)
    num_tokens, hidden_size, device = input.shape[0], check.row_size(input), input.device
    if num_tokens > _MAX_TOKENS:
        raise input.error(f"expected at most {_MAX_TOKENS} tokens, got shape {input.shape}")
    check_normalised(input)
    _check_cache(input, key_cache, value_cache)
    num_blocks, block_size, num_kv_heads, head_size = key_cache.shape
    check.sizes(weight, rows=None, hidden_size=hidden_size)
    check.dtype(weight, input.dtype)
    check.row_size(weight)
    rows = weight.shape[0]
    num_q = rows // head_size - 2 * num_kv_heads
    if rows % head_size or num_q < 0 or not rows:
        of_heads = f"heads of {head_size} elements, {num_kv_heads} of keys and of values each"
        raise weight.error(f"expected rows of {of_heads}, got shape {weight.shape}")
    check.shape(query, input.dtype, num_tokens=num_tokens, **{"heads * head_size": num_q * head_size})
    check.shape(norm_weight, input.dtype, hidden_size=hidden_size)
    check.shape(bias, input.dtype, rows=rows)
    for numbers in (positions, slot_mapping):
        check.index(numbers, num_tokens=num_tokens)
        check.contiguous(numbers)
    pairs = _check_rotation(cos_sin_cache, head_size)
    problem = QkvRows(input, weight, norm_weight, head_size)
    config = tuning.config(input.op, problem, device, choose)
    parts = problem.parts(config, device)
    return _gemv_qkv.renamed(cos_sin="cos_sin_cache")(
        scalar_t=input.dtype,
        input_t=input.dtype,
        angle_t=cos_sin_cache.dtype,
        position_t=positions.dtype,
        slot_t=slot_mapping.dtype,
        HIDDEN_SIZE=hidden_size,
        **config.constants,
        HEAD_SIZE=head_size,
        NUM_Q=num_q,
        NUM_KV=num_kv_heads,
        HALF=pairs,
        IS_NEOX=is_neox,
        HAS_BIAS=bias is not None,
        BLOCK_SIZE=max(1, block_size),
        PARTS=parts,
    ).launch(
        grid=(problem.heads, parts, num_tokens),
        block=config.num_threads,
        num_blocks=num_blocks if block_size else 0,
        max_position=cos_sin_cache.shape[0],
        input_stride=input.strides[0],
        weight_stride=weight.strides[0],
        angle_stride=cos_sin_cache.strides[0],
        **_strides("key", key_cache),
        **_strides("value", value_cache),
        **({"bias": 0} if bias is None else {}),
    )


def _check_cache(input: TensorArg, key_cache: TensorArg, value_cache: TensorArg) -> None:
    check.sizes(key_cache, num_blocks=None, block_size=None, num_kv_heads=None, head_size=None)
    if key_cache.shape[3] not in HEAD_SIZES:
        raise key_cache.error(f"expected heads of {' or '.join(map(str, HEAD_SIZES))} elements, got {key_cache.shape}")
    check.same_shape(value_cache, key_cache)
    for cache in (key_cache, value_cache):
        check.dtype(cache, input.dtype)
        check.row_size(cache)


def _check_rotation(cos_sin_cache: TensorArg, head_size: int) -> int:
    """Check the table of angles; returns the number of rotated pairs."""
    check.floating(cos_sin_cache)
    check.sizes(cos_sin_cache, max_position=None, rotary_dim=None)
    max_position, rotary_dim = cos_sin_cache.shape[0], check.row_size(cos_sin_cache)
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_size or not max_position:
        raise cos_sin_cache.error(
            f"expected at least one row, of an even rotary_dim from 2 to {head_size}, got shape {cos_sin_cache.shape}"
        )
    return rotary_dim // 2


def _strides(name: str, cache: TensorArg) -> dict[str, int]:
    block, slot, head, _ = cache.strides
    return {f"{name}_block_stride": block, f"{name}_slot_stride": slot, f"{name}_head_stride": head}


@skinny_qkv_rope_cache.bad_indices
def bad_indices_skinny_qkv_rope_cache(
    cos_sin_cache: Tensor, positions: Tensor, slot_mapping: Tensor, key_cache: Tensor
) -> dict[str, Tensor]:
    num_blocks, block_size = key_cache.shape[:2]
    return {
        "positions": ~known_positions(positions, cos_sin_cache),
        "slot_mapping": slot_mapping >= num_blocks * block_size,
    }


@skinny_qkv_rope_cache.traffic
def traffic_skinny_qkv_rope_cache(input: TensorArg, weight: TensorArg) -> int:
    return input.shape[0] * weight.nbytes


@skinny_qkv_rope_cache.example
def example_skinny_qkv_rope_cache(
    make: Any,
    *,
    num_tokens: int = 1,
    input_size: Literal[160, 51] = 160,
    head_size: Literal[64, 128, 256] = 64,
    dtype: str = "bfloat16",
    is_neox: bool = True,
    with_bias: bool = False,
) -> tuple[Any, ...]:
    num_heads, num_kv_heads = 2, 1
    rows = (num_heads + 2 * num_kv_heads) * head_size
    num_blocks = num_tokens // _BLOCK_SIZE + 2
    cache = num_blocks, _BLOCK_SIZE, num_kv_heads, head_size
    return (
        make.empty(num_tokens, num_heads * head_size, dtype=dtype),
        make.randn(num_tokens, input_size, dtype=dtype),
        make.randn(rows, input_size, dtype=dtype, scale=input_size**-0.5),
        make.randn(rows, dtype=dtype) if with_bias else None,
        make.randn(input_size, dtype=dtype),
        1e-6,
        make.randn(_MAX_POSITION, head_size, dtype=dtype),
        is_neox,
        make.randint(0, _MAX_POSITION, num_tokens),
        make.permutation(num_blocks * _BLOCK_SIZE, num_tokens),
        *(make.randn(*cache, dtype=dtype) for _ in range(2)),
    )
