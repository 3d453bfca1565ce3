"""Which ops and parts of vLLM run on this library: the switch ``PYOPS_VLLM``, and measurements of what is faster."""

from __future__ import annotations

import importlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache

from ... import tuning
from ..._core.errors import SwitchError
from ..._core.system import device


@dataclass(frozen=True)
class Choice:
    """The ops and parts that ``PYOPS_VLLM`` selects.

    Attributes:
        every_op: whether all ops are selected that this library serves.
        ops: the selected ops, if not all are.
        without: ops that are left to vLLM.
        parts: names of modules in `parts`.
    """

    every_op: bool
    ops: tuple[str, ...]
    without: frozenset[str]
    parts: tuple[str, ...]

    @classmethod
    def read(cls, words: Sequence[str], ops: Collection[str], parts: Sequence[str]) -> Choice:
        """Parse the words of the switch, given the names of all `ops` and `parts`.

        ``all`` selects every op and every part, ``ops`` every op, any other word that op or part. A word with the
        prefix ``-`` is excluded, in any position.

        Raises:
            SwitchError: a word is unknown, or all words are exclusions.
        """
        taken = [word for word in words if not word.startswith("-")]
        left = [word[1:] for word in words if word.startswith("-")]
        for word in (*taken, *left):
            if word not in ("all", "ops", *parts, *ops):
                raise SwitchError(f"PYOPS_VLLM: {word} is no op of vLLM and no part; there are {_names(ops, parts)}")
        if left and not taken:
            raise SwitchError(
                'PYOPS_VLLM: nothing is chosen of which to leave something out: begin with "all" or "ops"'
            )
        every_op = bool({"all", "ops"} & set(taken)) and not {"all", "ops"} & set(left)
        named = () if every_op else tuple(word for word in taken if word in ops and word not in left)
        chosen = tuple(one for one in parts if (one in taken or "all" in taken) and not {one, "all"} & set(left))
        return cls(every_op, named, frozenset(word for word in left if word in ops), chosen)


def _names(ops: Collection[str], parts: Sequence[str]) -> str:
    return f"all; ops; the parts {', '.join(parts) or '(none)'}; the ops {', '.join(sorted(ops))}"


def keeps(part: str, case: str) -> bool:
    """Whether a part of vLLM is replaced in a case, on the first device that vLLM sees.

    A part is replaced unless ``pyops/tuning/vllm.json`` records that it is slower than vLLM's own code::

        {"nvidia-h200": {"attention": {"decode head_size=64": 1.08}}}

    means that the part takes 1.08 times as long as vLLM.

    Args:
        part: the name of its module in `parts`.
        case: a key of the file.
    """
    of_device = _measured().get(_device_name(), {})
    return of_device.get(part, {}).get(case, 1.0) <= 1.0


@cache
def _device_name() -> str:
    """The name of the device in tables of measurements, such as ``"nvidia-h200"``; "" without a GPU.

    vLLM gets it from NVML. The driver must not be initialised here, because vLLM may fork its workers later.
    """
    platform = importlib.import_module("vllm.platforms").current_platform
    try:
        return device.table_name(platform.get_device_name()) if platform.is_cuda_alike() else ""
    except NotImplementedError:
        return ""


@cache
def _measured() -> dict[str, dict[str, dict[str, float]]]:
    """{device: {part: {case: time of the part / time of vLLM's own code}}}."""
    found: dict[str, dict[str, dict[str, float]]] = json.loads(
        (tuning.TABLES / "vllm.json").read_text(encoding="utf-8")
    )
    return found
