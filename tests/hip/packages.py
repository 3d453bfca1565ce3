"""hiprtc from Debian's packages, unpacked into a folder: no root, no changes to the system, no GPU.

hiprtc 7 is in Debian's experimental suite, its dependencies in sid. They are newer than those of a stable system,
including the C library: `Folder.command` therefore starts this Python under the C library of the folder.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_LOCK = "lock.txt"
_SECONDS = 60  # timeout of a silent server
# Debian's main version of hiprtc, and the suites in the order of the search.
_SUITES = {7: ("experimental", "sid"), 6: ("sid",)}
_OF_ROCM = re.compile(r"libhip|libamd")


class Unavailable(RuntimeError):
    """The packages cannot be had on this machine."""


@dataclass(frozen=True)
class Package:
    """An entry of a suite's list."""

    name: str
    version: str
    depends: tuple[str, ...]
    filename: str
    sha256: str


@dataclass(frozen=True)
class Folder:
    """Unpacked packages."""

    path: Path

    @property
    def include(self) -> Path:
        return self.path / "usr" / "include"

    @property
    def library(self) -> Path:
        """libhiprtc of any version."""
        return next(iter(sorted((self.path / "usr" / "lib" / "x86_64-linux-gnu").glob("libhiprtc.so.?"))))

    def command(self, *arguments: str) -> list[str]:
        """A command line of this Python, with the folder's libraries."""
        loader = next(
            path for part in ("usr/lib64", "lib64") if (path := self.path / part / "ld-linux-x86-64.so.2").exists()
        )
        libraries = f"{self.path}/usr/lib/x86_64-linux-gnu:{sys.base_prefix}/lib"
        return [str(loader), "--library-path", libraries, os.path.realpath(sys.executable), *arguments]


def get(path: Path, version: int = 7) -> Folder:
    """Fetch, check and unpack the packages, unless `path` holds them. Raises Unavailable."""
    if (path / _LOCK).exists():
        return Folder(path)
    try:
        mirror = _mirror()
        wanted = list(_needed(mirror, version))
        (path / "debs").mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(4) as pool:
            files = list(pool.map(lambda package: _fetched(mirror, package, path / "debs"), wanted))
        for file in files:
            subprocess.run(["dpkg-deb", "-x", str(file), str(path)], check=True, capture_output=True)
    except (OSError, subprocess.SubprocessError, KeyError) as error:
        raise Unavailable(f"hiprtc cannot be fetched from Debian's packages: {error!r}") from error
    (path / _LOCK).write_text("".join(f"{one.name} {one.version} {one.sha256}\n" for one in wanted))
    return Folder(path)


def _mirror() -> str:
    """The address from which this machine's apt takes Debian's packages."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    addresses = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    found = [address for address in addresses if address.rstrip("/").endswith("/debian")]
    if not found:
        raise Unavailable("apt has no address of Debian's packages")
    return found[0]


def _needed(mirror: str, version: int) -> Iterator[Package]:
    """hiprtc, the headers of element types, and all dependencies of hiprtc."""
    suites = [_list(mirror, suite) for suite in _SUITES[version]]
    yield _find(suites, "libamdhip64-dev")  # for its headers only
    waiting, seen = [f"libhiprtc{version}", f"libhiprtc-builtins{version}", "libamd-comgr3", "libnuma1"], set()
    while waiting:
        if (name := waiting.pop()) not in seen:
            seen.add(name)
            yield (package := _find(suites, name))
            waiting += package.depends


def _find(suites: list[dict[str, Package]], name: str) -> Package:
    """The package, from the first suite that has it; from experimental only ROCm's own packages."""
    *own, last = suites
    return next((suite[name] for suite in own if name in suite and _OF_ROCM.match(name)), None) or last[name]


def _list(mirror: str, suite: str) -> dict[str, Package]:
    text = lzma.decompress(_read(f"{mirror}dists/{suite}/main/binary-amd64/Packages.xz")).decode()
    fields = (dict(re.findall(r"^(\S+?): (.*)$", entry, re.MULTILINE)) for entry in text.strip().split("\n\n"))
    return {one["Package"]: _package(one) for one in fields}


def _package(fields: dict[str, str]) -> Package:
    # Of alternatives, the first. A package that others can replace ("libc6-dev | libc-dev") is in the list itself.
    depends = [re.split(r"[\s(:|]", one.strip())[0] for one in fields.get("Depends", "").split(",") if one.strip()]
    return Package(fields["Package"], fields["Version"], tuple(depends), fields["Filename"], fields["SHA256"])


def _fetched(mirror: str, package: Package, folder: Path) -> Path:
    file = folder / Path(package.filename).name
    if not file.exists():
        content = _read(mirror + package.filename)
        if hashlib.sha256(content).hexdigest() != package.sha256:
            raise OSError(f"{package.name} is damaged")
        file.write_bytes(content)
    return file


def _read(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=_SECONDS) as answer:
        return bytes(answer.read())
