"""Kernels of a model compiled into a folder, for machines with a GPU and without a compiler."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from .. import compile_ahead, gpus, offline
from .._core.errors import OpError
from .._core.launch.kernel import Specialisation
from .._core.system import folders
from .._core.text import modules


def bundle(
    model: str, archs: Iterable[str], out: Path, done: Callable[[int, int], None] | None = None, **values: Any
) -> dict[str, int]:
    """Compile every kernel that serving a model needs on these GPUs, several at a time. No GPU is needed.

    A file that `out` already has is not compiled again. A process with CUPY_CACHE_DIR set to the folder, or to one that
    holds a copy of its files, loads kernels from there instead of compiling them.

    Args:
        model: a folder with ``config.json``, or a GGUF file.
        archs: architectures, each for the GPU that `gpus.GPUS` lists first, or names of GPUs: ``"sm_90"``, ``"l40s"``.
        out: the folder; it is made.
        done: called with the number of kernels that are ready, and that of all.
        values: arguments of `pyops.models.serving_kernels`.

    Returns:
        {architecture or GPU: its kernels}.

    Raises:
        OpError: an unknown architecture. ModelError: a model that is not served. CompileError: a kernel.
    """
    from ..models import serving_kernels

    counts, wanted = {}, dict[str, tuple[Specialisation, str]]()
    for arch in archs:
        if arch not in gpus.GPUS and not arch.startswith("sm_"):
            raise OpError("bundle", "arch", f"expected sm_80, sm_90, ... or one of {', '.join(gpus.GPUS)}, got {arch}")
        try:
            device = gpus.model(arch)
        except KeyError:
            raise OpError("bundle", "arch", f"{arch} is no architecture that kernels are planned for") from None
        found = {
            _path(one, device.arch, out): (one, device.arch) for _, one in serving_kernels(model, device, **values)
        }
        counts[arch] = len(found)
        wanted |= found
    out.mkdir(parents=True, exist_ok=True)

    def compile(path: str, one: Specialisation, arch: str) -> None:
        if folders.read_sealed(path) is None:
            kernel = one.kernel
            binary = offline.compile(kernel.file, str(one), one.text, arch, kernel.options).binary
            with folders.worked_in(path + folders.SUFFIX) as scratch:
                folders.write_sealed(os.path.join(scratch, "built"), binary)
                os.replace(os.path.join(scratch, "built"), path)

    jobs = [partial(compile, path, *one) for path, one in wanted.items()]
    compile_ahead.open_nvrtc()
    compile_ahead.in_parallel(jobs, done and (lambda count: done(count, len(jobs))))
    return counts


def _path(one: Specialisation, arch: str, out: Path) -> str:
    return modules.path_of((one.text, arch, *one.kernel.options), folder=str(out))
