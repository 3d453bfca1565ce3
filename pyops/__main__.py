"""The command line: ``python -m pyops list | show | source | warmup | doctor | demo``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ._core import device
from ._core.errors import CompileError, MissingDependencyError, OpError
from ._core.lazy import cupy
from .cli import axes


def _list(options: argparse.Namespace) -> bool:
    from .cli import table

    print(table.render() if options.markdown else table.text())
    return True


def _show(options: argparse.Namespace) -> bool:
    from .cli import show

    print(show.show(options.op, *_axes_and_arch(options.axes)))
    return True


def _source(options: argparse.Namespace) -> bool:
    from .cli import show

    if options.op.endswith(".cu"):
        print(show.kernel_source(options.op, axes.pairs(options.axes)))
    else:
        print(show.source(options.op, *_axes_and_arch(options.axes)))
    return True


def _warmup(options: argparse.Namespace) -> bool:
    from .cli import warmup

    if device.count() == 0:
        print("no device: ops run by their reference, and there is nothing to compile", file=sys.stderr)
        return True
    names = [word for word in options.words if "=" not in word]
    values = axes.parse(word for word in options.words if "=" in word)
    index = cupy.cuda.runtime.getDevice()
    wanted = warmup.specialisations(names, values, device.get(index))
    held = warmup.load(wanted, index, _progress(len(wanted)))
    for one in held:
        print(f"{one.milliseconds:6.0f} ms  {one.origin:8}  {one.registers:3} registers  {one.kernel} {one.constants}")
    return True


def _progress(total: int) -> Callable[[int], None]:
    def show(count: int) -> None:
        bar = "#" * (40 * count // total)
        print(f"\r[{bar:40}] {count}/{total}", end="" if count < total else "\n", file=sys.stderr, flush=True)

    return show


def _doctor(options: argparse.Namespace) -> bool:
    from .cli import doctor

    report = doctor.doctor()
    print(json.dumps(dataclasses.asdict(report), indent=2) if options.json else report)
    return report.runs is not None


def _demo(options: argparse.Namespace) -> bool:
    from .cli import demo

    return demo.demo()


def _axes_and_arch(words: Sequence[str]) -> tuple[dict[str, list[Any]], str]:
    values = axes.parse(words)
    return values, *values.pop("arch", ["sm_90"])[:1]


def parser() -> argparse.ArgumentParser:
    """Of the whole command line."""
    main = argparse.ArgumentParser("python -m pyops", description="GPU operators for LLM inference.")
    commands = main.add_subparsers(required=True, metavar="command")

    def command(name: str, run: Callable[[argparse.Namespace], bool], help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help)
        added.set_defaults(run=run)
        return added

    listing = command("list", _list, "All ops: what each does and the element types it takes.")
    listing.add_argument("--markdown", action="store_true", help="as the table of the README")
    showing = command("show", _show, "One op: signature, torch schema, docstring, and what its example plans.")
    printing = command("source", _source, "The source text that is compiled for an op's example, or for a kernel file.")
    for one in (showing, printing):
        one.add_argument(
            "op", help="name of an op" + (", or a kernel file such as norm/rms_norm.cu" * (one is printing))
        )
        one.add_argument("axes", nargs="*", metavar="key=value", help="axes of the example, arch=sm_90; or constants")
    warming = command("warmup", _warmup, "Compile and load kernels on the current device; all ops without a name.")
    warming.add_argument(
        "words", nargs="*", metavar="OP or key=value[,value...]", help="ops, and axes of their examples"
    )
    doctor = command("doctor", _doctor, "What is installed, what is missing, and how this machine can run ops.")
    doctor.add_argument("--json", action="store_true")
    command("demo", _demo, "A transformer's MLP block, checked against float64 and timed.")
    return main


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 for success, 1 for a check that failed, 2 for a wrong or impossible request."""
    options = parser().parse_args(arguments)
    try:
        return 0 if options.run(options) else 1
    except (OpError, MissingDependencyError, CompileError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as `head` may stop early
    sys.exit(main())
