"""The benchmarks without a GPU: the chosen shapes, the rivals, and the reports of given times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

import pyops
from benchmarks import __main__ as main
from benchmarks import (
    accuracy,
    compile_time,
    decode,
    installed,
    kernel_time,
    numerics,
    overhead,
    report,
    rivals,
    shapes,
    timing,
)
from benchmarks import transformers as accelerated
from pyops import offline
from pyops.models import Config, Decoder
from tests import gpu

RMS_NORM = pyops.registry["rms_norm"]


def small(op: Any = RMS_NORM, dtype: str = "bfloat16") -> shapes.Case:
    (case,) = shapes.cases(op, {"num_tokens": [3], "hidden_size": [64], "vocab_size": [1000], "dtype": [dtype]})
    return case


def selection(*words: str) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    return main.select(main.parser().parse_args(words))


# Shapes


def test_sweep_is_every_pair_of_tokens_and_hidden_sizes() -> None:
    cases = shapes.cases(RMS_NORM, {"dtype": ["float16"]})
    assert len(cases) == 10
    assert str(cases[0]) == "rms_norm num_tokens=1 hidden_size=4096 float16"
    assert cases[-1].axes == {"num_tokens": 16384, "hidden_size": 14336, "dtype": "float16"}


def test_chosen_axes_replace_swept_ones() -> None:
    cases = shapes.cases(RMS_NORM, {"num_tokens": [2, 5], "hidden_size": [96]})
    assert [case.axes for case in cases] == [{"num_tokens": n, "hidden_size": 96} for n in (2, 5)]


class Declared:
    """An op that is needed for its example alone."""

    def __init__(self, example: Any) -> None:
        self.example, self.name = example, "declared"


def test_unknown_axes_are_dropped_and_words_restrict() -> None:
    def example(
        make: Any,
        *,
        num_tokens: int = 1,
        hidden_size: Literal[96] = 96,
        group_size: Literal[64, 128] = 64,
        layout: Literal["NHD", "HND"] = "NHD",
    ) -> tuple[Any, ...]:
        return ()

    op: Any = Declared(example)
    swept = shapes.cases(op, {"dtype": ["float16"]})
    assert [case.axes for case in swept] == [{"num_tokens": n} for n in shapes.SWEEP["num_tokens"]]
    chosen = shapes.cases(op, {"num_tokens": [1], "group_size": [128, 100], "layout": ["HND", "NDH"]})
    assert [case.axes for case in chosen] == [
        {"num_tokens": 1, "group_size": size, "layout": "HND"} for size in (128, 100)
    ]
    assert shapes.cases(op, {"layout": ["NDH"]}) == []


@pytest.mark.parametrize("command", [command for *_, command in gpu.owed(gpu.PERFORMANCE.read_text())])
def test_owed_commands_measure_every_op_that_they_name(command: str) -> None:
    for one in command.split(" && "):
        _, module, words = one.partition("python -m benchmarks ")
        if module:
            groups, chosen = selection(*words.split())
            assert all(shapes.cases(op, chosen) for ops in groups.values() for op in ops if "--family" not in words)


def test_values_are_parsed_as_ints_bools_or_strings() -> None:
    assert shapes.parse("hidden_size=4096,5120") == ("hidden_size", (4096, 5120))
    assert shapes.parse("is_neox=True") == ("is_neox", (True,))
    assert shapes.parse("quant_dtype=int8") == ("quant_dtype", ("int8",))


def test_bytes_of_a_case() -> None:
    case = small()
    assert case.nbytes == case.traffic == 2 * (3 * 64 + 3 * 64 + 64)
    assert case.family == "norm"


# The command line


def test_ops_and_axes_are_distinguished() -> None:
    groups, chosen = selection("rms_norm", "hidden_size=5120", "--dtype", "bf16,fp32")
    assert groups == {"rms_norm": [RMS_NORM]}
    assert chosen == {"hidden_size": (5120,), "dtype": ["bfloat16", "float32"]}


def test_all_groups_by_family() -> None:
    groups, _ = selection("--all")
    assert sorted(op.name for ops in groups.values() for op in ops) == sorted(pyops.registry)
    assert selection("--family", "norm")[0] == {"norm": groups["norm"]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rms_nrom"], "no op is called rms_nrom"),
        (["--family", "norms"], "no family is called norms"),
        (["rms_norm", "--against", "vlmm"], "no rival is called vlmm; there are compile, flashinfer"),
        (["rms_norm", "hiden_size=1"], "no axis is called hiden_size"),
        ([], "name an op"),
    ],
)
def test_unknown_names_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main.main(words)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_one_failing_case_does_not_stop_the_others() -> None:
    def measure(case: shapes.Case) -> Any:
        if case.axes["num_tokens"] == 2:
            raise RuntimeError("out of luck\nand more")
        return {**case.labels, "errors": {"pyops": 0.0}}, [{"rival": "vllm", "op": "rms_norm", "reason": "absent"}]

    section = main.measure_all(
        "numerics", shapes.cases(RMS_NORM, {"num_tokens": [1, 2, 3], "hidden_size": [8]}), measure
    )
    assert [row["shape"]["num_tokens"] for row in section["rows"]] == [1, 3]
    assert section["failures"] == [
        {"case": "rms_norm num_tokens=2 hidden_size=8", "error": "RuntimeError: out of luck"}
    ]
    assert len(section["skipped"]) == 2


# Timing


def test_sets_exceed_l2_three_times_within_bounds() -> None:
    l2 = 60 << 20
    assert timing.num_sets(24 << 10, l2, max_sets=64) == 64
    assert timing.num_sets(32 << 20, l2, max_sets=64) * (32 << 20) > 3 * l2
    assert timing.num_sets(1 << 30, l2, max_sets=64) == 1
    assert timing.num_sets(8 << 30, l2, max_sets=64) == 1


@pytest.mark.parametrize("sets", [1, 6, 7, 64])
def test_calls_visit_every_set_equally_often(sets: int) -> None:
    calls = timing.num_calls(sets, us=2.0)
    assert calls >= 40
    assert calls % sets == 0


def test_slow_calls_are_timed_for_forty_milliseconds() -> None:
    assert timing.num_calls(1, us=5000.0) == 8
    assert timing.num_calls(1, us=1e6) == 1


def test_spread() -> None:
    assert timing.spread([3.0, 1.0, 2.0, 10.0, 2.5]) == timing.Spread(2.5, 1.0, 10.0)


def test_host_time_counts_calls_and_not_the_wait() -> None:
    calls, waits = [], []
    found = timing.host_us(lambda: calls.append(0), calls=100, chunk=10, runs=3, synchronize=lambda: waits.append(0))
    assert len(calls) == 10 + 3 * 100
    assert len(waits) == 1 + 3 * 10
    assert 0 < found.low <= found.median <= found.high


# Rivals


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A `torch.ops._C` with an rms_norm of an older schema than ours: no epsilon."""
    monkeypatch.setattr(rivals, "load_vllm", lambda paths: "")
    seen = []

    def rms_norm(result: torch.Tensor, input: torch.Tensor, weight: torch.Tensor) -> None:
        seen.append((result, input, weight))
        RMS_NORM.reference(result, input, weight, 1e-6)

    with torch.library._scoped_library("_C", "FRAGMENT") as library:
        library.define("rms_norm(Tensor(a!) result, Tensor input, Tensor weight) -> ()")
        library.impl("rms_norm", rms_norm, "CPU")
        yield seen


def test_vllm_is_given_the_arguments_its_schema_has(fake_vllm: list[Any]) -> None:
    found, skips = rivals.builders(RMS_NORM, ["vllm"])
    assert skips == []
    args = small().arguments(device="cpu")
    found["vllm"](*args)()
    assert [tensor.data_ptr() for tensor in fake_vllm[0]] == [tensor.data_ptr() for tensor in args[:3]]
    assert accuracy.Check(small(), "cpu")(found["vllm"]) == 0


def test_vllm_gets_none_for_arguments_of_its_own_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "load_vllm", lambda paths: "")
    seen: list[Any] = []
    with torch.library._scoped_library("_C", "FRAGMENT") as library:
        rest = "Tensor input, Tensor? weight, float epsilon, Tensor? more, int last=3"
        library.define(f"rms_norm(Tensor(a!) result, {rest}) -> ()")
        library.impl("rms_norm", lambda *args: seen.extend(args[4:]), "CPU")
        rivals.builders(RMS_NORM, ["vllm"])[0]["vllm"](*small().arguments(device="cpu"))()
    assert seen[:1] == [None]
    assert seen[1:] in ([], [3])


def test_op_that_vllm_lacks_is_named(fake_vllm: list[Any]) -> None:
    op: Any = Declared(None)
    _, skips = rivals.builders(op, ["vllm"])
    assert skips == [{"rival": "vllm", "op": "declared", "reason": "has no such op"}]


def test_unimportable_rival_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "vllm._C", "flashinfer", "flashinfer.norm"):
        monkeypatch.setitem(sys.modules, name, None)
    installed._import.cache_clear()
    rivals.load_vllm.cache_clear()
    monkeypatch.setenv("PYOPS_VLLM_LIBRARIES", "/nowhere/_C.abi3.so")
    try:
        found, skips = rivals.builders(RMS_NORM, ["torch", "vllm", "flashinfer"])
    finally:
        installed._import.cache_clear()
        rivals.load_vllm.cache_clear()
    assert list(found) == ["torch"]
    assert [one["rival"] for one in skips] == ["vllm", "flashinfer"]
    assert "import vllm._C: ModuleNotFoundError" in skips[0]["reason"]
    assert "PYOPS_VLLM_LIBRARIES: OSError" in skips[0]["reason"]
    assert skips[1]["reason"].startswith("import flashinfer.norm: ModuleNotFoundError")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", sorted(set(rivals._TORCH) & set(pyops.registry)))
def test_torch_computes_the_same(name: str, dtype: str) -> None:
    op = pyops.registry[name]
    accuracy.Check(small(op, dtype), "cpu")(rivals.builders(op, ["torch"])[0]["torch"])


def test_reference_compiles_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    found, skips = rivals.builders(RMS_NORM, ["compile", "reference"])
    assert skips == []
    assert accuracy.Check(small(), "cpu")(found["compile"]) == 0


# Accuracy


def test_contender_with_wrong_results_is_refused() -> None:
    check = accuracy.Check(small(), "cpu")
    with pytest.raises(installed.Unavailable, match="disagrees with the reference: out by inf"):
        check(lambda *args: lambda: None)
    with pytest.raises(installed.Unavailable, match="disagrees"):
        check(lambda out, input, *rest: lambda: out.copy_(input))
    assert check(rivals.ours(RMS_NORM)) == 0


def test_only_rivals_may_order_outputs_differently() -> None:
    op = pyops.registry["shuffle_rows"]
    case = shapes.cases(op, {"dtype": ["float32"], "num_tokens": [16], "hidden_size": [64]})[0]
    check = accuracy.Check(case, "cpu")

    def turned(input_tensor: Any, dst2src_map: Any, output: Any) -> Any:
        return lambda: output.copy_(input_tensor[dst2src_map].flip(0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accuracy, "_ANY_ORDER", {"shuffle_rows": {"output_tensor": 0}})
        assert check(turned, any_order=True) == 0
        with pytest.raises(installed.Unavailable, match="disagrees"):
            check(turned)
        with pytest.raises(installed.Unavailable, match="disagrees"):
            check(lambda *args: lambda: args[2].zero_(), any_order=True)


def test_returned_tensor_replaces_the_first_output() -> None:
    assert accuracy.Check(small(), "cpu")(lambda out, *rest: lambda: _into_new(out, *rest)) == 0


def _into_new(out: torch.Tensor, *rest: Any) -> torch.Tensor:
    result = torch.empty_like(out)
    RMS_NORM.reference(result, *rest)
    return result


def test_difference() -> None:
    inf, nan = torch.inf, torch.nan
    assert accuracy.difference(torch.tensor([inf, nan, 1.0]), torch.tensor([inf, nan, 1.0])) == (0.0, 0.0)
    assert accuracy.difference(torch.tensor([nan]), torch.tensor([1.0])) == (inf, inf)
    assert accuracy.difference(torch.tensor([inf]), torch.tensor([-inf])) == (inf, inf)
    assert accuracy.difference(torch.tensor([3, 9]), torch.tensor([3, 4])) == (5.0, 1.0)
    assert accuracy.difference(torch.empty(0), torch.empty(0)) == (0.0, 0.0)


def test_float64_evaluation_rounds_nothing() -> None:
    _, x, weight, epsilon = (arg.double() if torch.is_tensor(arg) else arg for arg in small().arguments(device="cpu"))
    expected = x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight
    out = numerics.exact(small(), "cpu")["out"]
    assert out.dtype is torch.float64
    torch.testing.assert_close(out, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", sorted(pyops.registry))
def test_every_op_has_an_error_or_a_reason(name: str) -> None:
    cases = shapes.cases(pyops.registry[name], {"dtype": ["bfloat16"]}, {"num_tokens": [3]})
    row, skips = numerics.measure(cases[0], [], "cpu")
    if row["errors"]:
        largest = max(float(value.abs().nan_to_num().max()) for value in numerics.exact(cases[0], "cpu").values())
        assert 0 <= row["errors"]["pyops"] < 0.1 * max(1.0, largest)
    else:
        assert [one["rival"] for one in skips] == ["float64"]


# The first call


def test_the_child_reports_its_last_error_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_time, "_CHILD", "raise RuntimeError('no device')")
    with pytest.raises(RuntimeError, match="RuntimeError: no device"):
        compile_time.measure(small())


def test_the_child_gets_its_own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    child = "import json, os, sys; print('noise'); print(json.dumps([os.environ['CUPY_CACHE_DIR'], *sys.argv[1:]]))"
    monkeypatch.setattr(compile_time, "_CHILD", child)
    row, _ = compile_time.measure(small())
    assert row["cold"] == row["disk"]
    folder, name, axes = row["cold"]
    assert not Path(folder).exists()
    assert (name, json.loads(axes)) == ("rms_norm", small().axes)


# The report


def synthetic(ops: int = 4) -> dict[str, Any]:
    rows = []
    for i in range(ops):
        for tokens in (1, 256, 16384):
            for hidden_size in (4096, 14336):
                nbytes = 4 * tokens * hidden_size
                us = 1.5 + nbytes / 4e6
                times = {"pyops": {"us": [us, us - 0.1, us + 0.1], "error": 0.0}}
                if i:
                    times["vllm"] = {"us": [us * (0.7 + 0.2 * i)] * 3, "error": 0.0}
                    times["torch"] = {"us": [us * 2] * 3, "error": 0.0}
                shape = {"num_tokens": tokens, "hidden_size": hidden_size}
                labels = {"op": f"op_number_{i}", "family": "norm", "dtype": "bfloat16", "shape": shape}
                rows.append({**labels, "bytes": nbytes, "sets": 2, "cold": tokens > 1, "times": times})
    gpu = {
        "streaming_gbs": 4000.0,
        "launch_floor_us": 0.65,
        "rows": rows,
        "skipped": [{"rival": "vllm", "op": "op_number_0", "reason": "has no such op"}] * 6,
        "failures": [{"case": "op_number_9 num_tokens=1", "error": "RuntimeError: broken"}],
    }
    first = {"cold": {"import_s": 3.0, "first_call_s": 0.4, "origin": ["compiled"]}}
    first["disk"] = {"import_s": 3.0, "first_call_s": 0.03, "origin": ["disk"]}
    labels = {"op": "op_number_1", "family": "norm", "dtype": "bfloat16", "shape": {"num_tokens": 16}}
    host = {**labels, "times": {"pyops": [6.0] * 3, "vllm": [7.5] * 3}, "plan_miss_us": 31.0, "recompiled": 0}
    none: dict[str, Any] = {"skipped": [], "failures": []}
    return {
        "environment": {"gpu": "Imagined GPU", "driver": "1.2"},
        "method": "imagined",
        "gpu": gpu,
        "host": {"rows": [host], **none},
        "numerics": {"rows": [{**labels, "errors": {"pyops": 0.5, "vllm": 0.25}}], **none},
        "compile": {"rows": [{**labels, **first}], **none},
    }


def row(us: float, rival: float | None, tokens: int, op: str = "rms_norm", fraction: float = 0.9) -> dict[str, Any]:
    times = {"pyops": {"us": [us, us - 0.1, us + 0.1]}}
    if rival:
        times["vllm"] = {"us": [rival] * 3}
    labels = {"op": op, "family": "norm", "dtype": "bfloat16", "shape": {"num_tokens": tokens}}
    return {**labels, "bytes": us * 4e6 * fraction, "times": times}


@pytest.mark.parametrize(
    ("case", "faster", "streams", "holds"),
    [
        (row(1.0, 1.2, 1), True, None, True),
        (row(1.0, 1.0, 16), True, None, True),
        (row(1.0, 0.95, 16), "tie", None, True),
        (row(1.0, 0.85, 16), False, None, False),
        (row(1.0, None, 16), None, None, True),
        (row(9.0, 10.0, 4096, fraction=0.901), True, True, True),
        (row(9.0, 10.0, 4096, fraction=0.89), True, False, False),
        (row(9.0, 10.0, 4096, "rms_norm_static_fp8_quant", 0.86), True, True, True),
    ],
)
def test_verdict(case: dict[str, Any], faster: Any, streams: Any, holds: bool) -> None:
    found = report.verdict(case, 4000.0)
    assert (found["faster"], found["streams"], found["holds"]) == (faster, streams, holds)


def test_tables_name_every_skip_and_failure_once() -> None:
    text = report.render(synthetic())
    assert text.count("skipped vllm: has no such op (op_number_0)") == 1
    assert "**failed** op_number_9 num_tokens=1: RuntimeError: broken" in text
    assert "Streaming bandwidth 4000 GB/s" in text
    assert "launch floor 0.65 us" in text
    assert _cells(text, "## Host time")[-3:] == ["0.80", "31.0", "0"]
    assert _cells(text, "## Error")[-3:] == ["0.5", "0.25", "2.00"]
    assert _cells(text, "## First call")[:4] == ["median", "", "400", "30"]


def _cells(text: str, section: str) -> list[str]:
    """The last line of a section's table."""
    lines = [line for line in text.split(section)[1].split("\n## ")[0].splitlines() if line.startswith("|")]
    return [cell.strip() for cell in lines[-1].strip("|").split("|")]


def test_table_columns_line_up() -> None:
    lines = report.table(["op", "us"], [["a_long_name", "1.00"], ["b", "100.0"]]).splitlines()
    assert lines == [
        "| op          |    us |",
        "| ----------- | ----: |",
        "| a_long_name |  1.00 |",
        "| b           | 100.0 |",
    ]


def test_results_are_written_and_rendered_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "imagined" / "norm.json"
    result = synthetic()
    report.save(result, path)
    for suffix in (".md", ".png"):
        path.with_suffix(suffix).rename(tmp_path / f"first{suffix}")
    assert main.main(["--render", str(path.parent)]) == 0
    assert path.with_suffix(".md").read_text() == (tmp_path / "first.md").read_text()
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(path.read_text())["gpu"] == result["gpu"]


def test_sections_are_kept_only_in_the_same_environment(tmp_path: Path) -> None:
    path, result = tmp_path / "norm.json", synthetic()
    for name in ("gpu", "compile"):
        del result[name]
    report.save(result, path)
    again = {**result, "host": {"rows": [], "skipped": [], "failures": []}}
    numerics = again.pop("numerics")
    report.save(again, path)
    assert json.loads(path.read_text()) == {**again, "numerics": numerics}
    report.save({**again, "environment": {"gpu": "another"}}, path)
    assert "numerics" not in json.loads(path.read_text())
    report.save(result, path)
    report.save({**again, "method": "quick"}, path)
    assert "numerics" not in json.loads(path.read_text())


@pytest.mark.slow
def test_command_without_a_gpu_says_so() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks", "rms_norm"]
    done = subprocess.run(
        command, cwd=Path(main.__file__).parents[1], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "torch sees none" in done.stderr


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with the CPU as its GPU, on which every GPU time is 2 us. Returns the folder of results."""
    arguments = shapes.Case.arguments
    monkeypatch.setattr(shapes.Case, "arguments", lambda case, seed=0, device="": arguments(case, seed, "cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Imagined GPU 2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(L2_cache_size=1 << 20))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "streaming_gbs", lambda effort: 4000.0)
    monkeypatch.setattr(timing, "launch_floor_us", lambda effort: 0.5)
    monkeypatch.setattr(kernel_time, "gpu_us", lambda calls, effort, renew: timing.Spread(2.0, 1.9, 2.1))
    monkeypatch.setattr(overhead, "host_us", partial(timing.host_us, chunk=2, runs=1, synchronize=lambda: None))
    monkeypatch.setattr(timing, "QUICK", timing.Effort(2, 4, eager_calls=4))
    child = 'print(\'{"import_s": 2.0, "first_call_s": 0.5, "origin": ["disk"]}\')'
    monkeypatch.setattr(compile_time, "_CHILD", child)
    monkeypatch.setattr(main, "RESULTS", tmp_path)
    return tmp_path / "imagined-gpu-2"


def test_all_but_the_gpu_runs(pretended_gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    words = "rms_norm num_tokens=1,5000 hidden_size=64 --against torch,reference,flashinfer --quick --save"
    assert main.main([*words.split(), "--gpu", "--host", "--numerics", "--compile"]) == 0
    result = json.loads((pretended_gpu / "rms_norm.json").read_text())
    assert [len(result[name]["rows"]) for name in main.MEASURES] == [2, 2, 2, 2]
    first, second = result["gpu"]["rows"]
    assert list(first["times"]) == ["pyops", "torch", "reference"]
    assert (first["sets"], first["cold"]) == (4, False)
    assert (second["sets"], second["cold"]) == (3, True)
    assert {one["rival"] for one in result["host"]["skipped"]} == {"flashinfer", "cupy"}
    assert list(result["host"]["rows"][0]["times"]) == ["pyops", "torch.ops", "torch", "reference"]
    assert result["host"]["rows"][0]["recompiled"] == 0
    text = capsys.readouterr().out
    assert "Targets: 1 of 2 hold" in text  # 5000 rows of 64 in 2 us are far from 4000 GB/s
    assert (pretended_gpu / "rms_norm.md").read_text().startswith("# Imagined GPU 2")
    assert (pretended_gpu / "rms_norm.png").exists()


def test_no_case_begins_after_the_time_is_up(pretended_gpu: Path) -> None:
    words = "rms_norm silu_and_mul num_tokens=1 hidden_size=64 --against torch --gpu --numerics --minutes 0 --save"
    assert main.main([*words.split(), "--results", str(pretended_gpu.parent / "elsewhere")]) == 0
    (path,) = (pretended_gpu.parent / "elsewhere").rglob("*.json")
    result = json.loads(path.read_text())
    for name in ("gpu", "numerics"):
        assert result[name]["rows"] == []
        assert [one["reason"] for one in result[name]["skipped"]] == ["no time left"] * 2
    assert "skipped pyops: no time left (rms_norm, silu_and_mul)" in path.with_suffix(".md").read_text()


def test_wrong_kernel_has_no_time(pretended_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_time, "ours", lambda op: lambda *args: lambda: None)
    assert main.main(["rms_norm", "num_tokens=1", "hidden_size=64", "--against", "torch", "--save"]) == 1
    gpu = json.loads((pretended_gpu / "rms_norm.json").read_text())["gpu"]
    assert gpu["rows"] == []
    assert gpu["failures"][0]["error"].startswith("disagrees with the reference: out by inf")


def test_bytes_of_a_decode_step() -> None:
    """For a billion weights: the untied embedding is not read, but the keys and values of every token are."""
    model = Decoder(Config(**decode.SIZES), "bfloat16", "meta")
    layer = 2048 * (2048 + 2 * 512 + 2048 + 3 * 8192 + 2)
    weights = 16 * layer + 32000 * 2048 + 2048
    assert decode.step_bytes(model, 3, 100) == 2 * (weights + 3 * 2048 + 3 * 101 * 2 * 16 * 512)


@pytest.mark.slow
def test_transformers_decode_step_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    accelerated.main(["--device", "cpu", "--batch", "2", "--context", "128"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    assert rows[0] == ["family", "batch", "run", "before", "after", "ratio"]
    assert [row[:3] for row in rows[1:]] == [["Llama", "2", run] for run in ("eager", "compiled")]
    for *_, before, after, ratio in rows[1:]:
        assert float(before) > 0 < float(after)
        assert float(ratio) == pytest.approx(float(before) / float(after), abs=0.01)


def test_transformers_step_needs_a_context(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        accelerated.main(["--device", "cpu", "--context", "127"])
    assert "128 or more" in capsys.readouterr().err


def test_kernels_of_the_floor_compile() -> None:
    assert offline.compile("floor.cu", "", timing.FLOOR_SOURCE, "sm_90").registers > 0
