"""Time vLLM's engine with its own kernels, with the plugin, and alone.

python -m benchmarks.engine --out FOLDER
python -m benchmarks.engine --models llama qwen3-moe --runs own plugin --rows "decode 1" "decode 16"
python -m benchmarks.engine --models llama --compile
python -m benchmarks.engine --render FOLDER/engine.json

All engines of a model run at the same time and measure each row in turn, so that their times come from one card in one
thermal state. This package must be installed, so that vLLM finds its plugin. "own" is vLLM as it is, "plugin" is
PYOPS_VLLM=all, "alone" is the same without vLLM's compiled libraries, and "floor" is vLLM with another attention
backend, which gives the noise floor of logprobs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from .models import MODELS
from .report import RUNS, render
from .worker import ROWS

_ANSWER_S = 150.0  # an engine that is silent for longer has failed
_LIBRARIES = shutil.ignore_patterns("*.so", "deep_gemm", "__pycache__")  # not in "alone"
_PROFILED = ("decode 16", "prefill 1 x 2048")


class Worker:
    """An engine's process."""

    def __init__(self, run: str, options: dict[str, Any], folder: Path) -> None:
        self.run, self.log = run, folder / f"{options['model']}-{run}.log"
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        environment.pop("PYOPS_VLLM", None)
        if run in ("plugin", "alone"):
            environment["PYOPS_VLLM"] = os.environ.get("PYOPS_VLLM") or "all"
        if run == "alone":
            paths = [str(without_libraries(folder / "alone")), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        given = json.dumps(options | {"with": run, "started": time.time()})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.engine.worker", str(folder / f"{options['model']}-{run}"), given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        self._answers: list[dict[str, Any]] = []
        self._came = threading.Condition()
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, printed: IO[str]) -> None:
        with self.log.open("w", encoding="utf-8") as log:
            for line in printed:
                log.write(line)
                log.flush()
                if line.startswith("@@ "):
                    with self._came:
                        self._answers.append(json.loads(line[3:]))
                        self._came.notify_all()
        with self._came:
            self._answers.append({"error": f"ended: see {self.log.name}"})
            self._came.notify_all()

    def answer(self) -> dict[str, Any]:
        """The engine's next answer; {"error": ...} if the process has ended or is silent for too long."""
        with self._came:
            if not self._came.wait_for(lambda: self._answers, _ANSWER_S):
                return {"error": f"no answer within {_ANSWER_S:.0f} s"}
            return self._answers.pop(0)

    def ask(self, *words: Any) -> dict[str, Any]:
        """Send a request and return the answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the process has ended; `answer` reports that
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()
        return self.answer()

    def took_over(self) -> list[str]:
        """The lines of the log about what the plugin replaced and vLLM chose."""
        return took_over(self.log.read_text(encoding="utf-8", errors="replace"))

    def end(self) -> None:
        """Kill the process. Its output stays in the log."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdout, self._process.stdin):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def took_over(log: str) -> list[str]:
    """The log lines of the plugin, and those in which vLLM names a backend of this library."""
    # vLLM 0.33 begins a line with the process.
    lines = [line for line in log.splitlines() if re.match(r"(\(\w+ pid=\d+\) )?INFO ", line) and "] " in line]
    chosen = [line for line in lines if re.search(r"\[(plugin|library)\.py:|Using (PYOPS|CUSTOM|Pyops)", line)]
    return list(dict.fromkeys(line.split("] ", 1)[1].strip() for line in chosen))


def without_libraries(folder: Path) -> Path:
    """Make a folder for PYTHONPATH with a copy of the installed ``vllm`` without its shared libraries."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("vLLM is not importable")
    if not folder.exists():
        source = Path(found.submodule_search_locations[0])
        shutil.copytree(source, folder / "vllm", ignore=_LIBRARIES, symlinks=True)
    return folder


def measure(model: str, runs: Sequence[str], options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the engines of a model: startup time, rows, logprobs and kernels of each."""
    given = {"model": model, "small": options.small, "full_graphs": not options.compile}
    workers, results = [], dict[str, dict[str, Any]]()
    for run in runs:
        workers.append(Worker(run, given, folder))
        if options.one_by_one:
            results[run] = workers[-1].answer()
    for worker in workers:
        if worker.run not in results:
            results[worker.run] = worker.answer()
        print(f"{model}, {worker.run}: {str(results[worker.run])[:300]}", flush=True)

    def ask(*words: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Send a request to each live engine in turn; yields (result of the run, answer)."""
        pairs = []
        for worker in workers:
            result = results[worker.run]
            if "error" not in result:
                answer = worker.ask(*words)
                if "error" in answer:
                    result["error"] = answer["error"]
                else:
                    pairs.append((result, answer))
        return pairs

    for result, answer in ask("logprobs"):
        result |= answer
    timed = [worker for worker in workers if worker.run != "floor"]
    for worker in set(workers) - set(timed):
        worker.end()
    workers = timed
    for row in options.rows:
        ask("time", row, 1)  # warm-up, for what is compiled or captured at first use
        for result, answer in ask("time", row, options.repeats):
            result.setdefault("rows", {})[row] = answer
    for row in _PROFILED if options.kernels else ():
        for result, answer in ask("kernels", row):
            result.setdefault("kernels", {})[row] = answer["kernels"]
    for worker in workers:
        results[worker.run]["took over"] = worker.took_over()
        worker.end()
    return {"words": MODELS[model].words, "runs": results}


def environment() -> dict[str, str]:
    """The GPU and versions of libraries."""
    import torch

    versions = {}
    for name in ("vllm", "cupy-cuda13x", "triton", "flashinfer-python"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {"gpu": gpu, "torch": torch.__version__, **versions}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=list(MODELS))
    add("--runs", nargs="+", choices=[*RUNS, "floor"], default=[*RUNS, "floor"])
    add("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    add("--repeats", type=int, default=3)
    add("--compile", action="store_true", help="vLLM's default compile mode, not full graphs of custom ops")
    add("--one-by-one", action="store_true", help="make an engine when the one before is ready: start-up alone")
    add("--small", action="store_true", help="two layers, to try the benchmark")
    add("--kernels", action="store_true", help="which kernels took how much of the GPU's time")
    add("--minutes", type=float, default=float("inf"), help="begin no model after so long")
    add("--out", type=Path, default=Path("engine"), help="folder for engine.json, engine.md and logs")
    add("--render", type=Path, help="print the tables of a saved result, and measure nothing")
    options = parser.parse_args(arguments)
    if options.render:
        print(render(json.loads(options.render.read_text())))
        return
    started = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"environment": environment(), "models": {}}
    with tempfile.TemporaryDirectory() as temporary:
        for model in options.models:
            if time.monotonic() - started > 60 * options.minutes:
                print(f"{model}: no time is left")
                continue
            result["models"][model] = measure(model, options.runs, options, Path(temporary))
            (options.out / "engine.json").write_text(json.dumps(result, indent=1) + "\n")
            (options.out / "engine.md").write_text(render(result))
        for log in Path(temporary).glob("*.log"):
            shutil.copy(log, options.out)
    print(render(result))


if __name__ == "__main__":
    main()
