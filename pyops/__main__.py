"""The command line: ``python -m pyops list | show | source | warmup | bundle | doctor | generate | demo | coverage``.

The script ``pyops`` is the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import __version__, axes
from ._core import config
from ._core.errors import CompileError, MissingDependencyError, OpError, SwitchError
from .cli import progress
from .errors import ModelError


def _list(options: argparse.Namespace) -> bool:
    from .cli import table

    if options.stub:
        from .cli import stub

        print(stub.text())
    else:
        print(table.page() if options.markdown else table.text())
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
    from . import compile_ahead

    names = [word for word in options.words if "=" not in word]
    index, wanted = compile_ahead.plan(names, axes.parse(word for word in options.words if "=" in word))
    if index is None and not config.kernels_on_cpu():
        print("no device: ops run by their reference, and there is nothing to compile", file=sys.stderr)
        return True
    held = compile_ahead.load(wanted, index, lambda count: progress.show(count, len(wanted), f"{count}/{len(wanted)}"))
    for one in held:
        print(f"{one.milliseconds:6.0f} ms  {one.origin:8}  {one.registers:3} registers  {one.kernel} {one.constants}")
    return True


def _bundle(options: argparse.Namespace) -> bool:
    from .cli import bundle

    names = ("max_num_seqs", "max_model_len", "max_num_batched_tokens", "block_size", "dtype", "kv_cache_dtype")
    values = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    done = lambda count, total: progress.show(count, total, f"{count}/{total}")  # noqa: E731
    for arch, count in bundle.bundle(options.model, options.arch.split(","), options.out, done, **values).items():
        print(f"{arch}: {count} kernels in {options.out}")
    return True


def _doctor(options: argparse.Namespace) -> bool:
    from .cli import doctor

    report = doctor.doctor()
    print(json.dumps(dataclasses.asdict(report), indent=2) if options.json else report)
    return report.runs is not None


def _generate(options: argparse.Namespace) -> bool:
    from .cli import generate
    from .models import SamplingParams

    names = ("max_tokens", "temperature", "top_k", "top_p", "seed", "ignore_eos")
    params = SamplingParams(**{name: getattr(options, name) for name in names})
    where = options.dtype, options.device, options.kv_cache_dtype
    return generate.generate(options.model, options.prompt, params, *where)


def _demo(options: argparse.Namespace) -> bool:
    from .cli import demo

    return demo.demo()


def _coverage(options: argparse.Namespace) -> bool:
    from .cli import coverage

    if options.refusals:
        from .cli import refusals

        print(refusals.text())
    else:
        print(coverage.text(options.vllm))
    return True


def _axes_and_arch(words: Sequence[str]) -> tuple[dict[str, list[Any]], str]:
    values = axes.parse(words)
    archs = values.pop("arch", ["sm_90"])
    if len(archs) != 1:
        raise OpError("pyops", "arch", f"expected one, got {', '.join(map(str, archs))}")
    return values, str(archs[0])


# Families of models that `generate --help` names; importing them for that would double the time of every command.
_FAMILIES = (
    "Bamba, Cohere, Cohere2, DeepseekV2, DeepseekV3, DeepseekV32, DeepseekV4, Ernie4_5, Falcon, FalconH1, Gemma, "
    "Gemma2, Gemma3, Glm4Moe, GlmMoeDsa, GPTNeoX, GptOss, Granite, GraniteMoeHybrid, KimiLinear, Llama, Mamba, "
    "Mamba2, MiniMaxM2, Ministral, Ministral3, Mistral, Mistral3, Mistral4, Mixtral, NemotronH, Olmo2, Olmo3, Phi3, "
    "Qwen2, Qwen3, Qwen3_5, Qwen3_5Moe, Qwen3Moe, Qwen3Next, SeedOss, SmolLM3, StableLm, Starcoder2."
)


def parser() -> argparse.ArgumentParser:
    """Of the whole command line."""
    called = "pyops" if Path(sys.argv[0]).stem == "pyops" else "python -m pyops"
    main = argparse.ArgumentParser(called, description="GPU operators for LLM inference.")
    main.add_argument("--version", action="version", version=f"pyops {__version__}")
    commands = main.add_subparsers(required=True, metavar="command")

    def command(name: str, run: Callable[[argparse.Namespace], bool], help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help)
        added.set_defaults(run=run)
        return added

    listing = command("list", _list, "All ops: what each does and the element types it takes.")
    listing.add_argument("--markdown", action="store_true", help="as the page docs/ops.md")
    listing.add_argument("--stub", action="store_true", help="as the stub pyops/__init__.pyi")
    showing = command("show", _show, "One op: signature, torch schema, docstring, and what its example plans.")
    printing = command("source", _source, "The source text that is compiled for an op's example, or for a kernel file.")
    name, axis = "name of an op or a function that `list` prints", "an axis of the op's example, or arch=sm_90"
    for one, op, values in (
        (showing, name, axis),
        (printing, f"{name}, or a kernel file such as norm/rms_norm.cu", f"{axis}; a constant of the kernel file"),
    ):
        one.add_argument("op", help=op)
        # Without a default, argparse would say that an axis is required where the op is missing.
        one.add_argument("axes", nargs="*", default=[], metavar="key=value", help=values)
    warming = command("warmup", _warmup, "Compile and load kernels on the current device; all ops without a name.")
    warming.add_argument(
        "words", nargs="*", metavar="OP or key=value[,value...]", help="ops, and axes of their examples"
    )
    bundling = command("bundle", _bundle, "Compile a model's kernels into a folder, for machines without a compiler.")
    bundling.add_argument("--model", required=True, metavar="DIR", help="folder with config.json, or FILE.gguf")
    bundling.add_argument("--arch", required=True, metavar="ARCH[,ARCH...]", help="sm_90, or a GPU such as l40s")
    bundling.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="later the CUPY_CACHE_DIR")
    for name in ("max-num-seqs", "max-model-len", "max-num-batched-tokens", "block-size"):
        bundling.add_argument(f"--{name}", type=int, help="as of the Engine")
    for name in ("dtype", "kv-cache-dtype"):
        bundling.add_argument(f"--{name}", help="as of generate")
    doctor = command("doctor", _doctor, "What is installed, what is missing, and how this machine can run ops.")
    doctor.add_argument("--json", action="store_true")
    writing = command(
        "generate",
        _generate,
        "Text from a model in a Hugging Face folder or a GGUF file.",
    )
    writing.epilog = f"Families: {_FAMILIES} docs/models.md says what of each."
    writing.add_argument(
        "--model",
        required=True,
        metavar="DIR",
        help="folder with config.json, safetensors, tokenizer.json; FILE.gguf; or OWNER/NAME of the Hugging Face Hub",
    )
    writing.add_argument("--prompt", required=True, action="append", help="what the text begins with; may be repeated")
    writing.add_argument("--max-tokens", type=int, default=128, help="tokens to generate at most")
    writing.add_argument("--temperature", type=float, default=0.0, help="0, the default: always the likeliest token")
    writing.add_argument("--top-k", type=int, default=0, help="draw from so many of the likeliest tokens; 0: from all")
    writing.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest that reach this probability")
    writing.add_argument("--seed", type=int, default=0, help="of the draws")
    writing.add_argument("--ignore-eos", action="store_true", help="go on behind an end of text")
    writing.add_argument("--dtype", help="float32, float16 or bfloat16 instead of the checkpoint's")
    writing.add_argument("--kv-cache-dtype", default="auto", help="fp8, fp8_e4m3 or fp8_e5m2 for a quantized cache")
    writing.add_argument("--device", help="as torch names it; the GPU where there is one")
    command("demo", _demo, "Text from random weights by the kernels, on the GPU or the CPU, checked against PyTorch.")
    covering = command("coverage", _coverage, "The ops of vLLM: which of them this library serves, and as what.")
    covering.add_argument("--vllm", choices=("0.16", "0.22", "0.33"), default="0.16", help="version (default 0.16)")
    covering.add_argument("--refusals", action="store_true", help="what ops refuse that vLLM takes")
    return main


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 for success, 1 for a check that failed, 2 for a wrong or impossible request.

    130 for one that was interrupted, as shells have it.
    """
    try:
        options = parser().parse_args(arguments)
        return 0 if options.run(options) else 1
    except (OpError, MissingDependencyError, ModelError, CompileError, SwitchError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def script() -> int:
    """`main` as a program of its own: the script ``pyops`` and ``python -m pyops``."""
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as `head` may stop early
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # pyops/_at_start.py
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _open_missing_streams()
    try:
        status = main()
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError as error:
        if error.filename is not None:  # not of a stream
            raise
        with suppress(OSError):
            print(f"the output cannot be written: {error.strerror}", file=sys.stderr, flush=True)
        # What is left in the buffers cannot be written when the interpreter ends, either.
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 2
    return status


def _open_missing_streams() -> None:
    """Have the null device stand for each standard stream that the program was started without.

    In their order, so that each gets its own number back; otherwise the next file that is opened would get it, and what
    a library prints would go there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for as long as the program runs


if __name__ == "__main__":
    sys.exit(script())
