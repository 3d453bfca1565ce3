"""The tools that mutate kernels and plans. (`python -m tests.mutation` says whether the tests notice.)"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

import kernels_cu
from pyops._core.op.op import registry
from tests.mutation import choose, code, operators, plans, python
from tests.mutation.__main__ import score
from tests.mutation.mutant import Mutant, numbered, sample
from tests.mutation.semantic import SEMANTIC, Semantic, anchored, parse

ROOT = Path(__file__).parents[2]
THIS = "tests/mutation/test_mutation.py"


def _results(text: str, operator: str) -> list[str]:
    """`text` after each mutation of an operator."""
    return [one.apply(text) for one in operators.mutants_of("test.cu", text) if one.operator == operator]


@pytest.mark.parametrize(
    ("operator", "statement", "results"),
    [
        ("comparison", "x = a < b;", ["x = a <= b;"]),
        ("comparison", "Vec<T, 4> x = y<3>(a == b);", ["Vec<T, 4> x = y<3>(a != b);"]),
        ("bound", "x = a < b + 2 && c;", ["x = a < (b + 2) - 1 && c;"]),
        ("bound", "x = min(a, n - 1);", ["x = min(a, n );"]),
        ("constant", "x = y * 3;", ["x = y * 4;"]),
        ("constant", "x = y & 0x0fu;", ["x = y & 0xeu;"]),
        ("constant", "x = 0.5f;", ["x = 1.0f;"]),
        ("constant", "int t[2] = {17, 18};", ["int t[3] = {17, 18};"]),
        ("barrier", "a(); __syncthreads();", ["a(); ;"]),
        ("barrier", "if (a) __syncthreads();", ["if (a) ;"]),
        ("barrier", "a(); sync_cluster<CLUSTER>();", ["a(); ;"]),
        ("min-max", "x = min(a, fmaxf(b, c));", ["x = max(a, fmaxf(b, c));", "x = min(a, fminf(b, c));"]),
        ("min-max", "x = row_reduce<Max, 32>(x);", ["x = row_reduce<Min, 32>(x);"]),
        ("condition", "if (a) b();", ["if (!(a)) b();", "if (false) b();"]),
        ("condition", "x = a ? f(b, c) : d;", ["x = a ? d : f(b, c);"]),
        ("predicate", "if (a < n) vec.store(to);", ["if (true) vec.store(to);"]),
        ("cast", "x = int64_t(row) * stride;", ["x = (row) * stride;"]),
        ("cast", "int64_t x = int64_t(row) * stride;", ["int64_t x = (row) * stride;"]),
        (
            "cast",
            "const auto x = int64_t(row), y = int(z);",
            ["const auto x = (row), y = int(z);", "const auto x = int64_t(row), y = (z);"],
        ),
        ("cast", "const int w = 1, x = int(y);", []),
        ("index", "x = y[i];", ["x = y[i + 1];"]),
        ("index", "float x[N];", []),
        ("logic", "x = a && b;", ["x = a || b;"]),
        ("arithmetic", "x = a + b; y = -c;", ["x = a - b; y = -c;"]),
        ("arithmetic", "for (int i = 0; i < n; i += 2) x += y;", ["for (int i = 0; i < n; i += 2) x -= y;"]),
        ("exit", "if (a) return;", ["if (a) ;"]),
        ("exit", "if (a) return f(b);", ["if (a) ;"]),
        ("exit", "return a;", []),
    ],
)
def test_operator(operator: str, statement: str, results: Sequence[str]) -> None:
    text = "void f() { %s }"
    assert _results(text % statement, operator) == [text % result for result in results]


@pytest.mark.parametrize(
    "text",
    [
        "// if (a < b) return;\n/* x = y[1] + 2; */",
        "#define LAST(n) \\\n    ((n) - 1)\n",
        "static_assert(N + 1 < 4);",
        "#if PYOPS_CUDA\nint f() { return 1 + 2; }\n#endif",
        "#if !PYOPS_HOST && defined(X)\nint x = 1;\n#elif PYOPS_HIP > 0\nint x = 2;\n#endif",
        "template <typename T, int N = 8> struct Vec { T data; };",
        "void f(const float* x, int64_t n);",
    ],
)
def test_comments_and_strings_are_left_alone(text: str) -> None:
    assert operators.mutants_of("test.cu", text) == []


def test_host_only_code_is_mutated() -> None:
    text = "#if PYOPS_HIP\nint a = 1;\n#elif PYOPS_HOST\nint a = 2;\n#else\nint a = 3;\n#endif\nint b = 4;"
    assert [one.text for one in code.tokens(text) if one.kind == "number"] == ["2", "4"]


def test_names_survive_edits_that_change_no_code() -> None:
    """Comments, line breaks, and edits elsewhere in the file."""
    before = "void f() { if (a < b) x = 1; }"
    after = "void g(int n);\n// f\nvoid f() {\n    if (a <\n        b)  // always\n        x = 1;\n}"
    names = [[one.name for one in operators.mutants_of("f.cu", text)] for text in (before, after)]
    assert len(names[0]) == 6
    assert set(names[0]) <= set(names[1])


def test_names_are_unique_and_each_mutant_changes_its_file() -> None:
    mutants = [one for file in kernels_cu.names()[::9] for one in operators.mutants_of(file, kernels_cu.read(file))]
    mutants += plans.mutants()
    assert len({one.name for one in mutants}) == len(mutants)
    assert all(one.new.split() != _text(one)[one.start : one.end].split() for one in mutants)


def _text(mutant: Mutant) -> str:
    return python.read(mutant.file) if mutant.is_python else kernels_cu.read(mutant.file)


def test_every_kernel_has_mutants() -> None:
    """Except for kernels that only call one function of a header."""
    kernels = [file for file in kernels_cu.names() if file.endswith(".cu")]
    without = {file for file in kernels if not operators.mutants_of(file, kernels_cu.read(file))}
    of_fp4 = {"quantize/scaled_fp4_quant.cu", "quantize/silu_and_mul_nvfp4_quant.cu"}
    of_header = {"collective/expert_dispatch.cu", "collective/expert_combine.cu"}
    of_header |= {"cache/concat_and_cache_mla_rope_fused.cu"}
    assert without <= of_fp4 | of_header


def test_declarations() -> None:
    text = """
        using a_t = int;
        constexpr int B = f(2);
        template <int N> struct C { int x[N]; };
        template <typename T> DEVICE T d(T x) { return x; }
        DEVICE T operator+(T a, T b) { return a; }
        extern "C" __global__ void LAUNCH_BOUNDS(X, 1) e(float* out) { out[0] = B; }
    """
    assert [one.name for one in code.declarations(code.tokens(text))] == ["a_t", "B", "C", "d", "", "e"]


def test_kernels_that_use_a_declaration() -> None:
    """By its name, or through another declaration."""
    assert choose.kernels_with("sampling/softmax.cu", "softmax") == {"sampling/softmax.cu"}
    assert choose.kernels_with("sampling/philox.cuh", "philox") <= choose.kernels_with("sampling/philox.cuh", "")
    with_mask = choose.kernels_with("include/mma.cuh", "mma_m16n8k16")
    assert "attention/attention_decode.cu" in with_mask
    assert "norm/rms_norm.cu" not in with_mask


def test_semantic_mutants_occur_once() -> None:
    mutants, problems = anchored(SEMANTIC)
    assert not problems, "\n".join(problems)
    assert len({one.name for one in mutants}) == len(mutants)
    kernels, functions = ([one for one in mutants if one.is_python is kind] for kind in (False, True))
    assert min(len(kernels), len(functions)) >= 80
    assert {Path(one.file).parent.name for one in kernels} == {Path(file).parent.name for file in kernels_cu.names()}
    packages = {"models", "nn", "integrations", "host", "_core", "check.py", "tuning"}
    assert {one.file.split("/")[1] for one in functions} == packages


def test_missing_semantic_mutants_are_listed() -> None:
    written = [Semantic("include/row.cuh", "why", "no such = code;", ";"), Semantic("no/file.cu", "why", "x", "y")]
    mutants, problems = anchored(written)
    assert mutants == []
    assert ["is there 0 times" in problems[0], "does not exist" in problems[1]] == [True, True]


@pytest.mark.parametrize(
    ("old", "new", "tests", "problem"),
    [
        ("no such code", "pass", (THIS,), "is there 0 times"),
        ("self", "pass", (THIS,), "times, expected once"),
        (
            "class Replaced:",
            "class Other:",
            (THIS,),
            "is outside of the body of a function",
        ),
        ("self._pairs.clear()", "(", (THIS,), "does not compile"),
        ("self._pairs.clear()", "pass", ("tests/no_such_test.py",), "tests/no_such_test.py does not exist"),
        ("self._pairs.clear()", "pass", (), "names no file of tests"),
    ],
)
def test_invalid_python_mutants_are_listed(old: str, new: str, tests: tuple[str, ...], problem: str) -> None:
    mutants, problems = anchored([Semantic("pyops/integrations/vllm/parts/_replaced.py", "why", old, new, tests)])
    assert mutants == []
    assert problem in problems[0]


CHANGED = """
import subprocess, sys
from pathlib import Path
from tests.mutation import python
from tests.mutation.semantic import Semantic, anchored
from pyops._core import config; from pyops import tuning

def run(name):
    text = f"from pyops import tuning; print(tuning.{name}(5), [tuning.{name}(1)])"
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout.split()[0]

old = "return 1 << max(0, count - 1).bit_length()"
written = Semantic("pyops/tuning/__init__.py", "why", old, "return 77", ("tests/support/profiles.py",))
(mutant,), _ = anchored([written])
held = tuning.power_of_two
before = held(5), run("power_of_two")
python.apply(mutant)
python.apply_in_children(mutant, Path(sys.argv[1]))
print(mutant.within, mutant.is_plan, before, held(5), run("power_of_two"), tuning.beside(4, 1, 8))
"""


def test_python_mutant_reaches_child_processes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHANGED, str(tmp_path / "site")],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["power_of_two False (8, '8') 77 77 [2, 8]"], done.stdout + done.stderr


def test_fragments_are_found_in_any_layout() -> None:
    text = "a();\nif (x <  // less\n    n)\n    return;  // if (x < n) return;\nb();"
    (place,) = code.find(code.tokens(text), "if (x < n) return;")
    assert text[slice(*place)].startswith("if (x <")
    (one,) = parse("== f.cu\nIt is wrong.\n- if (x < n) return;\n+ ;\n")
    assert one == Semantic("f.cu", "It is wrong.", "if (x < n) return;", ";")
    (one,) = parse("== f.py tests/a.py tests/b.py\nIt is wrong.\n- return x\n+ return y\n")
    assert one == Semantic("f.py", "It is wrong.", "return x", "return y", ("tests/a.py", "tests/b.py"))
    assert python.find("if a:\n    b()\n", "if a: b()") == [(0, 13)]


def _some(count: int, file: str, operator: str) -> list[Mutant]:
    return numbered([Mutant(f"{file}:{operator}", file, operator, i, i, "", "f") for i in range(count)])


def test_sample() -> None:
    """The same for the same seed; operators and files alternate."""
    mutants = _some(50, "a.cu", "constant") + _some(2, "a.cu", "barrier") + _some(5, "b.cu", "index")
    chosen = sample(mutants, 4, seed=3)
    assert chosen == sample(mutants, 4, seed=3) != sample(mutants, 4, seed=4)
    assert Counter(one.file for one in chosen) == {"a.cu": 4, "b.cu": 4}
    assert {one.file for one in chosen[:2]} == {"a.cu", "b.cu"}
    assert Counter(one.operator for one in chosen)["barrier"] == 2


PLAN = '''
@example.plan
def _(x: Arg) -> Launch:
    """Planned."""
    check.floating(x)
    if x.size > 4 and x.ndim == 1:
        raise x.error("size")
    rows = x.size + 1
    return _kernel(HAS_X=x is not None, VEC_SIZE=rows, MIN_BLOCKS=rows).launch(
        grid=(rows, 2), block=64, a_stride=x.strides[0], b_stride=x.strides[1], rows=rows
    )
'''


def test_changes_of_a_plan() -> None:
    (function,) = ast.parse(PLAN).body
    assert isinstance(function, ast.FunctionDef)
    mutants = list(plans.changed("plan.py", PLAN, function))
    assert Counter(one.operator for one in mutants) == {
        "check dropped": 1,
        "condition": 2,
        "logic": 1,
        "comparison": 2,
        "specialisation": 2,
        "grid": 2,
        "block": 1,
        "stride swapped": 1,
        "argument dropped": 3,
    }
    for one in mutants:
        ast.parse(one.apply(PLAN))
        assert one.apply(PLAN) != PLAN
        assert one.within == "example.plan"


def test_changed_constant_differs() -> None:
    """True is not doubled, because a kernel would see no change."""
    (function,) = ast.parse(PLAN).body
    assert isinstance(function, ast.FunctionDef)
    (doubled,) = (one.new for one in plans.changed("plan.py", PLAN, function) if one.new.endswith("(rows)"))
    assert [eval(doubled, {"rows": value}) for value in (3, True, False)] == [6, False, True]


@pytest.mark.slow
def test_plans_of_every_op_have_mutants() -> None:
    assert {name for one in plans.mutants() for name in plans.ops_of(one)} == registry.keys()


def test_score_counts_killed_mutants() -> None:
    assert score(Counter(killed=19, survived=1, equivalent=7, invalid=3)) == 0.95
    assert score(Counter(killed=1, timeout=1)) == 0.5
    assert score(Counter(invalid=1)) == 1.0


OUTER = """
import sys, time
from tests.mutation.judge import Judge
from tests.mutation.mutant import Mutant
import kernels_cu

def mutant(old, new):
    start = kernels_cu.read("include/elementwise.cuh").index(old)
    return Mutant(new, "include/elementwise.cuh", "test", start, start + len(old), new, "Chunk")

mutants = [
    mutant("row < num_rows", "row < num_rows)"),
    mutant("column < row_size", "column < row_size && row_size < 0"),
    mutant("column < row_size", "row_size > column"),
]
told = []
judge = Judge(mutants, 1, 120.0, time.monotonic() + 300, lambda one, verdict: told.append(verdict.outcome))
judge.run(sys.argv[1:])
print(told)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks are ended as Linux ends them")
@pytest.mark.slow
def test_verdicts() -> None:
    """A text that no compiler takes is no mutant; a wrong kernel is killed; the same machine code is equivalent."""
    tests = "tests/ops/activation/test_activation.py::test_plain_against_float64[relu2-dtype2-host]"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OUTER, tests],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["['invalid', 'killed', 'equivalent']"], done.stdout + done.stderr


UNFINISHED = """
import sys, time
from tests.mutation.judge import Judge
from tests.mutation.mutant import Mutant

told = []
mutants = [Mutant("", "include/elementwise.cuh", "test", 0, 0, "", "Chunk")]
for file in sys.argv[1:]:
    judge = Judge(mutants, 1, 120.0, time.monotonic() - 1, lambda *one: told.append(one))
    try:
        judge.run([file])
    except RuntimeError as error:
        told.append(str(error))
print(told)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks are ended as Linux ends them")
def test_no_time_and_missing_tests(tmp_path: Path) -> None:
    """A run out of time ends normally; a run without all tests judges nothing, and says why."""
    (tmp_path / "test_right.py").write_text("def test() -> None:\n    pass\n")
    (tmp_path / "test_wrong.py").write_text("import no_such_module\n")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", UNFINISHED, *map(str, sorted(tmp_path.iterdir()))],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    (told,) = ast.literal_eval(done.stdout.splitlines()[-1])
    assert told.startswith("no mutant is judged without all tests")
    assert "No module named 'no_such_module'" in told
