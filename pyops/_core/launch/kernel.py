"""Kernel, its specialisations, and Launch: what a plan returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..errors import CompileError
from ..tensors.tensor import TensorArg
from ..text import compiler, nvrtc, source
from ..text.compiler import Compiled
from ..text.source import Signature
from .scratch import Scratch
from .tensor_map import TensorMap


class Kernel:
    """An entry of a `.cu` file of `kernels_cu`. Nothing is read before the first use.

    Args:
        file: path inside `kernels_cu`.
        arch_feature: asks for the architecture's own instruction set (``sm_90a`` instead of ``sm_90``) on CUDA.
        text: the source itself, with one ``extern "C"`` kernel, for a kernel without a file there. `file` is then its
            name in messages; the text may include any header of `kernels_cu`.
        names: {parameter: the name that feeds it}, where the two differ.
        entry: the entry of the file, if it is not named as the file.
    """

    def __init__(
        self,
        file: str,
        arch_feature: str | None = None,
        *,
        text: str | None = None,
        names: Mapping[str, str] = MappingProxyType({}),
        entry: str | None = None,
    ) -> None:
        self.file, self.arch_feature, self.text, self.names, self.entry = file, arch_feature, text, names, entry
        self._loaded: dict[tuple[Any, ...], Compiled] = {}
        self._of_arch: dict[str, Kernel] = {}
        self._renamed: dict[tuple[tuple[str, str], ...], Kernel] = {}

    def for_arch(self, arch_feature: str) -> Kernel:
        """This kernel, compiled with an architecture's own instruction set.

        A plan asks for it on a device that has what the kernel needs: ``device.supports("wgmma")``, then
        ``kernel.for_arch(device.arch_feature)``.
        """
        if arch_feature not in self._of_arch:
            self._of_arch[arch_feature] = self._like(arch_feature, self.names)
        return self._of_arch[arch_feature]

    def renamed(self, **names: str) -> Kernel:
        """This kernel with some parameters fed by other names: {parameter: name of the op's tensor or scalar}.

        One kernel thus serves ops that have different names for the same argument.
        """
        key = tuple(names.items())
        if key not in self._renamed:
            self._renamed[key] = renamed = self._like(self.arch_feature, names)
            renamed._loaded = self._loaded
        return self._renamed[key]

    def _like(self, arch_feature: str | None, names: Mapping[str, str]) -> Kernel:
        return Kernel(self.file, arch_feature, text=self.text, names=names, entry=self.entry)

    def __call__(self, **constants: Any) -> Specialisation:
        return Specialisation(self, constants)

    @property
    def options(self) -> tuple[str, ...]:
        if source.is_tile(self.file, self.text):
            return nvrtc.TILE_OPTIONS
        return (f"--gpu-architecture={self.arch_feature}",) if self.arch_feature else ()

    @property
    def signature(self) -> Signature:
        """The kernel's C signature, with the names that feed its parameters."""
        found = source.signature(self.file, self.text, self.entry)
        if not self.names:
            return found
        parameters = tuple((fmt, self.names.get(name, name)) for fmt, name in found.parameters)
        return found._replace(parameters=parameters)

    def taken(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the `arguments` that feed a parameter of the kernel."""
        names = {name for _, name in self.signature.parameters}
        return {name: value for name, value in arguments.items() if name in names}


class Specialisation:
    """A kernel with values for its constants."""

    __slots__ = ("constants", "kernel", "key")

    def __init__(self, kernel: Kernel, constants: dict[str, Any]) -> None:
        self.kernel, self.constants = kernel, constants
        self.key = (*constants, *constants.values())

    @property
    def text(self) -> str:
        """The whole source that is compiled."""
        with self.needing_files():
            return source.flatten(self.kernel.file, self.constants, self.kernel.text, self.kernel.signature.entry)

    def __str__(self) -> str:
        entry = self.kernel.entry
        return f"entry={entry} " * bool(entry) + source.describe(self.constants)

    def loaded(self, device: int) -> Compiled | None:
        """The compiled kernel if this process already holds it for the device; for the CPU, that is -1."""
        return self.kernel._loaded.get((device, self.key))

    def load(self, device: int) -> Compiled:
        """The compiled kernel on the device, compiling it if need be."""
        found = self.loaded(device)
        if found is None:
            kernel = self.kernel
            with self.needing_files():
                found = compiler.load(device, self.text, kernel.signature.entry, kernel.file, str(self), kernel.options)
            self.keep(device, found)
        return found

    def keep(self, device: int, found: Compiled) -> None:
        """Have `loaded` return a kernel that was loaded for the device."""
        self.kernel._loaded[device, self.key] = found

    @contextmanager
    def needing_files(self) -> Iterator[None]:
        """What the system refuses meanwhile, such as a file above the limit of open ones, is a CompileError."""
        try:
            yield
        except OSError as error:
            raise CompileError(self.kernel.file, str(self), f"the system refuses what this needs: {error}") from error

    def launch(
        self,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        shared: int = 0,
        cluster: int | tuple[int, ...] = 1,
        **fixed: int | float | Scratch | TensorArg | TensorMap,
    ) -> Launch:
        """A launch of `grid` blocks of `block` threads, in clusters of `cluster` blocks.

        `shared`: bytes of dynamic shared memory. `fixed` feeds the kernel's other parameters by name; a TensorArg feeds
        a parameter that has another name than the op's argument. A kernel that declares its cluster size in its text
        (CLUSTER_OF) needs no `cluster`.
        """
        return Launch(self, _three(grid), _three(block), shared, fixed, _three(cluster))


def _three(sizes: int | tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*((sizes,) if isinstance(sizes, int) else sizes), 1, 1)[:3]
    return x, y, z


@dataclass(slots=True, eq=False)
class Launch:
    """A specialisation, its geometry and the arguments that are the same at every call of the plan."""

    specialisation: Specialisation
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    fixed: dict[str, int | float | Scratch | TensorArg | TensorMap]
    cluster: tuple[int, int, int] = (1, 1, 1)

    @property
    def empty(self) -> bool:
        """No block to run. (The driver refuses such a launch, and CuPy would run one block instead.)"""
        return 0 in self.grid

    def names(self, tensors: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The op's `tensors` by the names of the parameters that they feed, and the names of what else is `fixed`."""
        renamed = {value.name: name for name, value in self.fixed.items() if isinstance(value, TensorArg)}
        fixed = tuple(name for name in self.fixed if name not in renamed.values())
        return tuple(renamed.get(name, name) for name in tensors), fixed
