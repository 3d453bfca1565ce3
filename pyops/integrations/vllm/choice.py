"""What runs on this library in vLLM: what the switch ``PYOPS_VLLM`` asks for, and what was measured to be faster."""

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
    """What the words of ``PYOPS_VLLM`` ask for.

    Attributes:
        every_op: whether all ops are meant that can be served.
        ops: those that are named, where not every op is meant.
        without: ops that are left to vLLM.
        parts: names of modules in `parts`.
    """

    every_op: bool
    ops: tuple[str, ...]
    without: frozenset[str]
    parts: tuple[str, ...]

    @classmethod
    def read(cls, words: Sequence[str], ops: Collection[str], parts: Sequence[str]) -> Choice:
        """The choice that `words` make among the names `ops` and `parts`.

        ``all`` is every op and every part, ``ops`` every op, any other word an op or a part. A word after ``-`` is
        left out, wherever it stands.

        Raises:
            SwitchError: a word that names nothing, or no word but such as leave something out.
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
    """Whether a part of vLLM is to be taken over in a case, on the first device that vLLM sees.

    It is unless ``pyops/tuning/vllm.json`` says that the part was measured to be slower there than what it replaces::

        {"nvidia-h200": {"attention": {"decode head_size=64": 1.08}}}

    is: the part takes 1.08 times as long.

    Args:
        part: the name of its module in `parts`.
        case: as the file has it, the whole string.
    """
    of_device = _measured().get(_device_name(), {})
    return of_device.get(part, {}).get(case, 1.0) <= 1.0


@cache
def _device_name() -> str:
    """The name by which tables of measurements go, as ``"nvidia-h200"``; empty without a GPU.

    vLLM is asked, because it asks NVML. The driver must not be initialised yet: vLLM may fork its workers later.
    """
    platform = importlib.import_module("vllm.platforms").current_platform
    try:
        return device.table_name(platform.get_device_name()) if platform.is_cuda_alike() else ""
    except NotImplementedError:
        return ""


@cache
def _measured() -> dict[str, dict[str, dict[str, float]]]:
    """{device: {part: {case: the time of the part, in units of the time of what it replaces}}}."""
    found: dict[str, dict[str, dict[str, float]]] = json.loads(
        (tuning.TABLES / "vllm.json").read_text(encoding="utf-8")
    )
    return found
