"""Time the indexer of sparse attention against DeepGEMM's logits and vLLM's top-k; contenders alternate in one process.

python -m benchmarks.indexer
python -m benchmarks.indexer --seed 7 decode:64x32768:64 decode:64x1-32768:32:2 prompt:1024x32768:64

A row is one of these, with heads of 128 elements:

decode:SEQUENCESxTOKENS:HEADS[:NEW]    the last NEW tokens (default 1) of each sequence, and a paged cache; TOKENS of
                                       1-32768 means lengths drawn by the seed, each doubling equally likely
prompt:TOKENSxKEYS:HEADS               the last TOKENS of a prompt of KEYS tokens

Three stages are timed: the logits, the top 2048 of pyops' logits, and both. Rivals are timed only if their logits are
close to pyops', and if the tokens that they choose have logits as large as those that pyops chooses. DeepGEMM needs
nvcc; a rival that cannot be used is named on stderr.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import pyops

from . import attention_calls, drawn
from .installed import deep_gemm, vllm_op
from .products import in_turn, num_sets
from .timing import Call

Arguments = dict[str, Any]

ROWS = (
    *(
        f"decode:{one}:{heads}:{new}"
        for one in ("64x32768", "1x131072", "16x8192")
        for heads in (64, 32)
        for new in (1, 2)
    ),
    *(f"decode:64x1-32768:{heads}:{new}" for heads in (64, 32) for new in (1, 2)),
    *("prompt:1024x32768:64", "prompt:4096x4096:64", "prompt:1024x32768:32"),
)
TOP_K = 2048
_PAGE = 64  # slots of a page in DeepGEMM
_WORKSPACE = 1 << 20  # bytes that vLLM's persistent kernel asks for
_MEMORY = 4.1e6  # measured DRAM bandwidth, bytes per microsecond
# Largest difference of DeepGEMM's logits in the 2-norm: fp8 MMAs of an H200 truncate their accumulators to 14 bits. The
# logits of the chosen tokens differ less, because only those near the smallest chosen one are exchanged.
_ALLOWED = {"logits": 0.01, "top-k": 1e-6, "both": 0.001}


def operands(row: str, seed: int) -> tuple[str, Arguments]:
    """(kind, arguments of the ops by name, on torch's default device)."""
    kind, sizes, heads, *new = row.split(":")
    count, tokens = sizes.split("x")
    if kind == "prompt":
        call = attention_calls.indexer_rows(int(count), int(tokens), int(heads))
    else:
        least, _, most = tokens.rpartition("-")
        drawing, tokens_of = random.Random(f"{seed} {row}"), int(most)
        lengths = [drawn.log_uniform(drawing, tokens_of, int(least or most)) for _ in range(int(count))]
        call = attention_calls.indexer_pages(lengths, int(heads), int(new[0]) if new else 1, _PAGE)
    return kind, call | {"indices": torch.full((len(call["logits"]), TOP_K), -1, dtype=torch.int32)}


def num_bytes(call: Arguments) -> int:
    """Bytes that the logits kernel must move at least: keys once, scales, and logits."""
    lengths = call["context_lens"] if "context_lens" in call else call["cu_seqlen_ke"][:, None]
    keys = int(lengths.amax(1).sum()) if "context_lens" in call else int(lengths.max())
    return keys * (attention_calls.INDEXER_HEAD + 4) + 4 * int(lengths.clamp(min=0).sum())


def _ends(call: Arguments) -> Any:
    """[rows, 1]: the column after the last logit of each row."""
    return call["context_lens"].reshape(-1, 1) if "context_lens" in call else call["cu_seqlen_ke"][:, None]


# Logits: functions from the arguments to a call that returns logits.


def _ours(call: Arguments) -> Call:
    op = pyops.fp8_paged_mqa_logits if "context_lens" in call else pyops.fp8_mqa_logits
    compute = partial(op, **{name: value for name, value in call.items() if name != "indices"})

    def logits() -> Any:
        compute()
        return call["logits"]

    return logits


def _deep_gemm(call: Arguments) -> Call:
    """DeepGEMM as vLLM calls it. The schedule of a batch, which all layers share, is made before."""
    library, q, weights, columns = deep_gemm(), call["q"], call["weights"], call["logits"].shape[1]
    if "context_lens" not in call:
        keys, bounds = (call["k"], call["k_scales"]), (call["cu_seqlen_ks"], call["cu_seqlen_ke"])
        return partial(library.fp8_mqa_logits, q, keys, weights, *bounds, clean_logits=False)
    lengths, tables = call["context_lens"], call["block_tables"]
    schedule = library.get_paged_mqa_logits_metadata(lengths, _PAGE, library.get_num_sms())
    cache = call["kv_cache"][:, :, None]
    return partial(library.fp8_paged_mqa_logits, q, cache, weights, lengths, tables, schedule, columns, False)


# Top-k: functions from the arguments to a function of logits that returns indices.


def _top_k(op: Callable[[str], Any], call: Arguments) -> Callable[[Any], Any]:
    """The op of this name, with arguments that pyops and vLLM have in common."""
    indices, rows = call["indices"], len(call["indices"])
    if "context_lens" in call:
        choose, bounds = op("top_k_per_row_decode"), (call["context_lens"].shape[1], call["context_lens"])
    else:
        choose, bounds = op("top_k_per_row_prefill"), (call["cu_seqlen_ks"], call["cu_seqlen_ke"])

    def chosen(logits: Any) -> Any:
        choose(logits, *bounds, indices, rows, *logits.stride(), TOP_K)
        return indices

    return chosen


def _persistent(call: Arguments) -> Callable[[Any], Any]:
    """The kernel that vLLM takes for decode."""
    choose, indices, lengths = vllm_op("_C", "persistent_topk"), call["indices"], call["context_lens"]
    workspace, longest = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=indices.device), int(lengths.max())

    def chosen(logits: Any) -> Any:
        choose(logits, lengths, indices, workspace, TOP_K, longest)
        return indices

    return chosen


def contenders(kind: str, stage: str) -> drawn.Contenders:
    """{name: a function from the arguments to a call}; pyops first."""
    logits = {"pyops": _ours, "DeepGEMM": _deep_gemm}
    choosers: dict[str, Callable[[Arguments], Callable[[Any], Any]]] = {
        "pyops": partial(_top_k, partial(getattr, pyops)),
        "vLLM": partial(_top_k, partial(vllm_op, "_C")),
    }
    if kind == "decode":
        choosers["vLLM, persistent"] = _persistent
    if stage == "logits":
        return dict(logits)
    if stage == "top-k":
        return {name: partial(_of_logits, choose) for name, choose in choosers.items()}
    pairs = {"pyops": (_ours, choosers.pop("pyops"))}
    pairs |= {f"DeepGEMM + {name}": (_deep_gemm, choose) for name, choose in choosers.items()}
    return {name: partial(_both, *pair) for name, pair in pairs.items()}


def _of_logits(choose: Any, call: Arguments) -> Call:
    return partial(choose(call), call["logits"])


def _both(compute: Any, choose: Any, call: Arguments) -> Call:
    logits, chosen = compute(call), choose(call)
    return lambda: chosen(logits())


def compared(call: Arguments, stage: str) -> Callable[[Any], Any]:
    """What is compared: the logits that a row has, or those of the chosen tokens by size."""
    positions = torch.arange(call["logits"].shape[1], device=call["logits"].device)
    exact = call["logits"].where(positions < _ends(call), 0.0)
    if stage == "logits":
        return lambda logits: logits.where(positions < _ends(call), 0.0)
    return lambda indices: exact.gather(1, indices.long().clamp(min=0)).where(indices >= 0, 0.0).sort(1)[0]


def agreeing(row: str, kind: str, stage: str, call: Arguments) -> drawn.Contenders:
    """pyops and the rivals that compute the same; `call` has pyops' logits."""
    out = "logits" if stage == "logits" else "indices"
    allowed = _ALLOWED[stage]
    return drawn.agreeing(f"{row} {stage}", contenders(kind, stage), call, out, allowed, compared(call, stage))


def measure(row: str, seed: int) -> dict[str, dict[str, float]]:
    """{stage: {contender: median time in microseconds}}."""
    with torch.device("cuda"):
        kind, first = operands(row, seed)
        sets = [first, *(operands(row, seed)[1] for _ in range(num_sets(num_bytes(first)) - 1))]
    for call in sets:
        _ours(call)()
    found = {}
    for stage in _ALLOWED:
        found[stage] = in_turn(f"{row} {stage}", agreeing(row, kind, stage, first), [(call,) for call in sets])
    print(f"{row}: {num_bytes(first) / _MEMORY:.1f} us of memory traffic", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.indexer", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", default=ROWS)
    parser.add_argument("--seed", type=int, default=0, help="of lengths and of operands")
    asked = parser.parse_args(arguments)
    for row in asked.rows:
        torch.manual_seed(asked.seed)
        for stage, times in measure(row, asked.seed).items():
            print(f"  {stage}: " + ", ".join(f"{name} {us:.1f} us" for name, us in times.items()), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.no_grad():
        main(sys.argv[1:])
