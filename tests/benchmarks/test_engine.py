"""The benchmark of vLLM's engine: its random weights, processes and tables. No vLLM is needed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engine import __main__ as main
from benchmarks.engine import report, worker
from benchmarks.engine.models import MODELS, fill, small


def test_weights_depend_on_names_and_keep_activation_scale() -> None:
    first, again, other = (torch.empty(256, 512, dtype=torch.bfloat16) for _ in range(3))
    fill("layers.0.weight", first, 512)
    fill("layers.0.weight", again, 512)
    fill("layers.1.weight", other, 512)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    out = torch.randn(64, 512) @ first.float().T
    assert 0.9 < out.std().item() < 1.1


def test_packed_weights_keep_activation_scale() -> None:
    packed, scales = torch.empty(64, 512, dtype=torch.int32), torch.empty(4, 512, dtype=torch.bfloat16)
    fill("qweight", packed, 512)
    fill("scales", scales, 512)
    int4 = torch.stack([(packed >> 4 * i & 15) - 8 for i in range(8)], 1).reshape(512, 512).float()
    weight = int4 * scales.float().repeat_interleave(128, 0)
    assert 0.8 < (torch.randn(64, 512) @ weight).std().item() < 1.2


def test_mxfp4_weights_keep_activation_scale() -> None:
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    packed, scales = torch.empty(256, 1440, dtype=torch.uint8), torch.empty(256, 90, dtype=torch.uint8)
    fill("w13_weight", packed, 2880)
    fill("w13_weight_scale", scales, 2880)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()
    weight = values[codes & 7] * torch.where(codes > 7, -1, 1)
    weight *= torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
    assert 0.5 < (torch.randn(64, 2880) @ weight.T).std().item() < 1.5


@pytest.mark.parametrize("name", MODELS)
def test_transformers_knows_the_configurations(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    for model in (MODELS[name], small(MODELS[name])):
        config = dict(model.config)
        made = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
        assert made.num_hidden_layers == config["num_hidden_layers"]
        assert len(getattr(made, "layer_types", None) or [0] * made.num_hidden_layers) == made.num_hidden_layers


def test_worker_that_answers_and_worker_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the worker answers as it would, and then ends at a question."""
    text = """
import json, os, sys
print("log of vLLM")
print("@@ " + json.dumps({"switch": os.environ.get("PYOPS_VLLM")}), flush=True)
print("@@ " + json.dumps({"asked": json.loads(sys.stdin.readline())}), flush=True)
"""
    script = tmp_path / "stand_in.py"
    script.write_text(text)
    popen = main.subprocess.Popen
    monkeypatch.setattr(
        main.subprocess, "Popen", lambda command, **options: popen([sys.executable, str(script)], **options)
    )
    monkeypatch.delenv("PYOPS_VLLM", raising=False)
    plugin = main.Worker("plugin", {"model": "llama"}, tmp_path)
    assert plugin.answer() == {"switch": "all"}
    assert plugin.ask("time", "decode 1", 3) == {"asked": ["time", "decode 1", 3]}
    assert "ended" in plugin.ask("logprobs")["error"]
    own = main.Worker("own", {"model": "llama"}, tmp_path)
    assert own.answer() == {"switch": None}
    own.end(), plugin.end()
    assert "log of vLLM" in plugin.log.read_text()


def test_replaced_layers_are_read_from_the_log() -> None:
    log = """INFO 11-28 20:06:06 [plugin.py:81] 157 ops of vLLM run on pyops
INFO 11-28 20:06:26 [cuda.py:378] Using CUSTOM attention backend out of potential backends: ['CUSTOM'].
INFO 11-28 20:06:26 [cuda.py:378] Using CUSTOM attention backend out of potential backends: ['CUSTOM'].
INFO 11-28 20:06:26 [core.py:112] Initializing a V1 LLM engine
(MainProcess pid=17) INFO 11-28 20:06:27 [plugin.py:78] sampler: forward
(MainProcess pid=17) WARNING 11-28 20:06:27 [plugin.py:74] experts is left to vLLM
ERROR 11-28 20:06:26 [plugin.py:81] 157 ops"""
    assert main.took_over(log) == [
        "157 ops of vLLM run on pyops",
        "Using CUSTOM attention backend out of potential backends: ['CUSTOM'].",
        "sampler: forward",
    ]


def result() -> dict[str, Any]:
    def run(decode: float, **more: Any) -> dict[str, Any]:
        return {"ready": 10.0, "rows": {"decode 1": {"ms": [decode], "median": decode}}, **more}

    runs = {
        "own": run(2.0, logprobs=[-1.0, -2.0], tokens=[[1, 2]]),
        "plugin": run(
            1.5,
            logprobs=[-1.5, -2.0],
            tokens=[[1, 3]],
            kernels={"decode 1": [("a", 1, 3.0, True), ("b", 1, 1.0, False)]},
        ),
        "alone": {"error": "Traceback\nValueError: no"},
    }
    return {"environment": {"gpu": "Imagined GPU"}, "models": {"llama": {"words": "Llama", "runs": runs}}}


def test_tables_show_ratios_shares_and_failures() -> None:
    text = report.render(json.loads(json.dumps(result())))
    assert "geometric mean 0.750 of 1 rows, 0 above 1.00" in text
    assert "differ from vLLM's by 0.2500 on average, 0.500 at most; 1 of 2 greedy tokens are the same" in text
    assert "75% of the kernels' time is this library's: a 75% (1); others: b 25%" in text
    assert "alone: **failed**: ValueError: no" in text
    assert " 0.750 |" in text


def test_the_library_knows_its_kernels() -> None:
    assert {"rms_norm", "attention_decode", "gemm_sm90", "grouped_gemm_sm80"} <= worker.ours()


def test_int4_weights_have_mean_zero() -> None:
    packed = torch.empty(64, 512, dtype=torch.int32)
    fill("qweight", packed, 512)
    int4 = torch.stack([packed >> 4 * i & 15 for i in range(8)])
    assert int4.min() == 1
    assert abs(int4.float().mean().item() - 8) < 0.05
