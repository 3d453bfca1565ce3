"""vLLM without its compiled libraries, on a machine that seems to have a GPU.

`.ci/run` installs a vLLM and removes its libraries. If vLLM has them, or is absent, nothing is tested.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pyops.integrations.vllm import parts, table

ROOT = Path(__file__).parents[3]
FOUND = find_spec("vllm")
VLLM = Path(next(iter(FOUND.submodule_search_locations or ()))) if FOUND else None
if VLLM is None or list(VLLM.glob("_C.*")):
    pytest.skip("needs vLLM without its compiled libraries", allow_module_level=True)
# Ops of vLLM's libraries for CPUs and XPUs, which its Python calls only on these platforms.
OTHER_PLATFORMS = re.compile(
    r".*_cpu|.*onednn.*|shm_.*|.*_shm_.*|.*_kernel_impl|cpu_.*|.*_xpu_.*|.*flash_mla.*|convert_.*packed.*|"
    r"activation_lut_bf16|weight_packed_linear|release_dnnl_matmul_handler|prepack_moe_weight|mla_decode_kvcache|"
    r"per_token_group_quant_mxfp4|int8_scaled_mm_with_quant|init_cpu_memory_env|get_scheduler_metadata|"
    r"dynamic_4bit_int_moe|causal_conv1d_weight_pack|cpu_fused_moe"
)


def run(site: Path, words: str) -> dict[str, Any]:
    """What tests/support/vllm_alone.py says in a process where vLLM finds the entry points of this checkout."""
    info = site / "pyops_kernels-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pyops-kernels\nVersion: 1\n")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    (info / "entry_points.txt").write_text(
        "".join(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in of.items()) for group, of in points.items())
    )
    assert VLLM is not None
    path = os.pathsep.join(map(str, (site, ROOT, VLLM.parent)))
    env = {**os.environ, "PYOPS_VLLM": words, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    words_of = [sys.executable, "-m", "tests.support.vllm_alone"]
    done = subprocess.run(words_of, cwd=ROOT, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"log": done.stdout + done.stderr}


@pytest.mark.slow
def test_vllm_imports_its_engine(tmp_path: Path) -> None:
    """All its layers, methods of quantization, four models and the worker, with ops and parts of this library."""
    found = run(tmp_path, "all")
    assert found["failed"] == {}
    assert found["quantizations"] == {}
    assert found["rotary"] == "vllm::flashinfer_rotary_embedding", "vLLM's Python has defined it"
    assert found["absent"] == ["_flashmla_C", "cumem_allocator"]
    assert found["attention"] == "CUSTOM", "the part `attention`"
    assert found["attention of vLLM's own"] == "TRITON_ATTN", "FlashAttention is absent"
    assert found["theirs"] >= 27, "fakes that vLLM's Python brings"
    assert len(re.findall(r"pyops defines \d+ ops", found["log"])) == 1
    assert len(re.findall(r"\d+ ops of vLLM run on pyops", found["log"])) == 1
    for name in parts.NAMES:  # vLLM 0.22 has neither a monitor of compiles nor a warm-up of kernels
        assert len(re.findall(rf"\] {name}: .", found["log"])) == (not name.startswith("jit_"))


def test_every_op_that_vllms_python_calls_is_served() -> None:
    """By name and namespace, except for those of other platforms."""
    assert VLLM is not None
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(VLLM.rglob("*.py")))
    called = set(re.findall(r"torch\.ops\.(_C|_C_cache_ops|_C_cuda_utils|_C_custom_ar|_moe_C|_rocm_C)\.(\w+)", text))
    served = {(entry.namespace, name.partition(".")[0]) for name, entry in table("0.22").items() if entry.kernel}
    assert len(called & served) > 100
    assert [name for _, name in sorted(called - served) if not OTHER_PLATFORMS.fullmatch(name)] == []
