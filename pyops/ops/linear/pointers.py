"""The pointers of a kernel: tensors of the op, workspaces, and null for absent tensors."""

from __future__ import annotations

from typing import Any

from ..._core.launch.kernel import Kernel
from ..._core.launch.scratch import Scratch
from ..._core.tensors.tensor import TensorArg


def fed(kernel: Kernel, **pointers: TensorArg | Scratch | None) -> tuple[Kernel, dict[str, Any]]:
    """The kernel with these pointers fed by tensors of the op, and the arguments for those that no tensor feeds."""
    names = {name: one.name for name, one in pointers.items() if isinstance(one, TensorArg)}
    return kernel.renamed(**names), {name: one or 0 for name, one in pointers.items() if name not in names}
