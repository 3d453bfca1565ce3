"""The choice of the next token, on the device of the logits, so that a CUDA graph may hold it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from .._core.system.lazy import torch
from ..ops.sampling import top_k_top_p_sampling_from_logits
from .params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

# How the tokens of a step are chosen: none of them is drawn, some are drawn, some by a filter of likely tokens.
Kind = Literal["greedy", "drawn", "filtered"]
KINDS: tuple[Kind, ...] = get_args(Kind)
TABLE_SIZE = 4  # int64 elements of a row's parameters: its seed, its offset, and four numbers of 32 bits
_SEEDS = 1 << 64  # number of different seeds of Philox
_MAX_FLOAT = float.fromhex("0x1.fffffep127")  # the largest float32


class Draw(NamedTuple):
    """A token to choose.

    Attributes:
        params: of the request.
        number: how many tokens the request has drawn before; draws of one seed differ by it.
    """

    params: SamplingParams
    number: int


def kind_of(draws: Sequence[Draw]) -> Kind:
    """How the tokens of a step are chosen: one kernel for all rows, the fastest that serves them."""
    drawn = [one.params for one in draws if one.params.temperature > 0]
    if not drawn:
        return "greedy"
    return "filtered" if any(params.top_k or params.top_p < 1 or params.min_p for params in drawn) else "drawn"


def fill(table: Any, draws: Sequence[Draw]) -> None:
    """Write the parameters of rows to `table`, a numpy array of `TABLE_SIZE` times as many int64 as a step has rows."""
    count, rows = len(draws), len(table) // TABLE_SIZE
    numbers = table[2 * rows :]
    columns = table[:rows], table[rows : 2 * rows], *numbers.view("float32").reshape(4, rows)
    of_params = [one.params for one in draws]
    columns[0][:count] = [_signed(int(params.seed)) for params in of_params]
    columns[1][:count] = [one.number for one in draws]
    columns[2][:count] = [min(float(params.temperature), _MAX_FLOAT) for params in of_params]
    columns[3].view("int32")[:count] = [min(int(params.top_k), 2**31 - 1) for params in of_params]
    columns[4][:count] = [float(params.top_p) for params in of_params]
    columns[5][:count] = [float(params.min_p) for params in of_params]


def _signed(seed: int) -> int:
    """`seed` modulo 2^64, as an int64."""
    seed %= _SEEDS
    return seed - _SEEDS if seed >= _SEEDS // 2 else seed


def choose(tokens: Tensor, logits: Tensor, table: Tensor, kind: Kind) -> None:
    """Write the token of each row of `logits` to `tokens`.

    Args:
        tokens: [num_rows] int64, written; 0 for a row without a token that can be drawn.
        logits: [num_rows, vocab_size], any float dtype.
        table: as `fill` writes it, on the device of the logits; for `num_rows` rows or more.
        kind: as `kind_of` says; parameters that it does not need are not read.
    """
    if kind == "greedy":
        torch.argmax(logits, -1, out=tokens)
        return
    rows, count = len(table) // TABLE_SIZE, len(logits)
    temperature, top_k, top_p, min_p = table[2 * rows :].view(torch.float32).view(4, rows)[:, :count]
    filters = {} if kind == "drawn" else {"top_k": top_k.view(torch.int32), "top_p": top_p, "min_p": min_p}
    given = table[:count], table[rows : rows + count]
    samples = top_k_top_p_sampling_from_logits.new(logits, *given, **filters, temperature=temperature)
    tokens.copy_(samples).clamp_(min=0)


def chosen(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """The token of each row of `logits`."""
    table = torch.zeros(TABLE_SIZE * len(draws), dtype=torch.int64, device="cpu")
    fill(table.numpy(), draws)
    tokens = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
    choose(tokens, logits, table.to(logits.device), kind_of(draws))
    found: list[int] = tokens.tolist()
    return found
