"""CustomOp: registry, replacement out of tree, configuration, dispatch."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch

from pyops.nn import (
    GeluAndMul,
    MMEncoderAttention,
    ReLUSquaredActivation,
    ReplicatedLinear,
    RMSNorm,
    RotaryEmbedding,
    SiluAndMul,
    custom_op,
)
from pyops.nn.custom_op import (
    CompilationConfig,
    CompilationMode,
    CustomOp,
    PluggableLayer,
    current_platform,
    get_compilation_config,
    op_registry,
    op_registry_oot,
    set_custom_ops,
)


@pytest.fixture(autouse=True)
def _registries_as_they_were() -> Iterator[None]:
    before, before_oot = dict(op_registry), dict(op_registry_oot)
    yield
    for registry, content in ((op_registry, before), (op_registry_oot, before_oot)):
        registry.clear()
        registry.update(content)


@pytest.fixture
def relu3() -> type[CustomOp]:
    @CustomOp.register("relu3")
    class Relu3(ReLUSquaredActivation):
        pass

    return Relu3


@pytest.fixture
def quiet() -> Iterator[None]:
    """Configurations may name ops without an instance."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="custom_ops: ")
        yield


INDUCTOR, EAGER = "inductor", "eager"
# (entries, mode, backend, whether ops are on by default, whether rms_norm, silu_and_mul, gelu_and_mul and relu3 are)
CASES = [
    *(("", mode, EAGER, True, [1, 1, 1, 1]) for mode in range(4)),
    ("", 0, INDUCTOR, True, [1, 1, 1, 1]),
    *(("", mode, INDUCTOR, False, [0, 0, 0, 0]) for mode in range(1, 4)),
    ("+rms_norm,-silu_and_mul", 0, INDUCTOR, True, [1, 0, 1, 1]),
    ("none,-rms_norm,+relu3", 1, INDUCTOR, False, [0, 0, 0, 1]),
    ("all,-silu_and_mul", 2, INDUCTOR, True, [1, 0, 1, 1]),
    ("-relu3,+relu2", 3, EAGER, True, [1, 1, 1, 0]),
    ("none,-relu3,+rms_norm,+silu_and_mul", 3, INDUCTOR, False, [1, 1, 0, 0]),
    ("-rms_norm", 3, EAGER, True, [0, 1, 1, 1]),
    ("none,+relu3", 3, EAGER, False, [0, 0, 0, 1]),
    ("all,-rms_norm", 3, INDUCTOR, True, [0, 1, 1, 1]),
]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("entries", "mode", "backend", "default_on", "on"), CASES)
def test_enabled_ops(
    entries: str, mode: int, backend: str, default_on: bool, on: list[int], relu3: type[CustomOp]
) -> None:
    assert len(CASES) == 16
    with set_custom_ops(entries, mode=mode, backend=backend, platform="cuda") as config:
        assert CustomOp.default_on() == config.default_on() == default_on
        made = [(RMSNorm, (16,)), (SiluAndMul, ()), (GeluAndMul, ()), (relu3, ())]
        for (cls, arguments), expected in zip(made, on, strict=True):
            instance = cls(*arguments)
            assert cls.enabled() == instance.enabled() == op_registry[cls.name].enabled() == bool(expected)
            assert config.is_custom_op_enabled(cls.name) == bool(expected)
            assert config.enabled_custom_ops[cls.name] == expected
            assert config.disabled_custom_ops[cls.name] == 1 - expected
            assert instance._forward_method.__name__ == ("forward_cuda" if expected else "forward_native")

        class Unregistered(relu3):
            pass

        assert Unregistered.enabled() == Unregistered().enabled() == bool(on[3])


@pytest.mark.parametrize("entries", ["all,none", "all,+rms_norm,all", ["none", "none"], "rms_norm", "+", "-", "*all"])
def test_bad_entries_are_refused(entries: str | list[str]) -> None:
    with pytest.raises(ValueError, match="custom_ops: expected"), set_custom_ops(entries):
        pass


@pytest.mark.usefixtures("quiet")
def test_op_both_on_and_off_is_refused_when_asked_for() -> None:
    with set_custom_ops("+rms_norm,-rms_norm"):
        assert SiluAndMul().enabled()
        with pytest.raises(ValueError, match="custom_ops: rms_norm is both"):
            RMSNorm(16)
        with pytest.raises(ValueError, match="custom_ops: rms_norm is both"):
            RMSNorm.enabled()


def test_elements_are_split_on_commas() -> None:
    assert CompilationConfig(["all,-op1", " +op2 "]).custom_ops == ["all", "-op1", "+op2"]
    assert CompilationConfig("none").custom_ops == ["none"]
    assert CompilationConfig().custom_ops == ["all"]
    assert CompilationConfig(mode=CompilationMode.VLLM_COMPILE).custom_ops == ["none"]


def test_all_are_on_without_a_configuration() -> None:
    before = get_compilation_config()
    assert before.custom_ops == ["all"]
    assert RMSNorm.enabled()
    with contextlib.suppress(RuntimeError), set_custom_ops("none"):
        assert not RMSNorm.enabled()
        raise RuntimeError
    assert get_compilation_config() is before


def test_entries_without_effect_warn_once() -> None:
    with pytest.warns(UserWarning, match="custom_ops") as caught, set_custom_ops("+nothing,-gelu_new,-rms_norm"):
        RMSNorm(16)
    assert [str(warning.message) for warning in caught] == [
        "custom_ops: gelu_new is not present in the model, its entry has no effect",
        "custom_ops: nothing does not exist or was not imported, its entry has no effect",
    ]
    with set_custom_ops("+nothing"):  # no layer was made
        pass


def test_class_without_a_name_warns_once() -> None:
    class Nameless(CustomOp):
        def forward_native(self) -> str:
            return "native"

    with set_custom_ops("none") as config:
        with pytest.warns(UserWarning, match="Nameless is not registered"):
            made = Nameless()
        assert made() == "native"
        assert not Nameless.enabled()  # and warns no more
    assert config.disabled_custom_ops == {"Nameless": 1}


def test_enforce_enable() -> None:
    class Enforced(RMSNorm):
        def __init__(self) -> None:
            CustomOp.__init__(self, enforce_enable=True)

    with set_custom_ops("none", platform="cuda") as config:
        assert Enforced()._forward_method.__name__ == "forward_cuda"
        assert RMSNorm(4)._forward_method.__name__ == "forward_native"
        assert config.enabled_custom_ops == config.disabled_custom_ops == {"rms_norm": 1}
        assert MMEncoderAttention.enabled()


METHODS = {"cuda": "cuda", "rocm": "hip", "cpu": "cpu", "tpu": "tpu", "xpu": "xpu", "oot": "oot"}


@pytest.mark.parametrize("platform", METHODS)
def test_dispatch(platform: Any) -> None:
    """To the method of the platform; a missing method falls back as it should."""

    @CustomOp.register("each_has_its_own")
    class Each(CustomOp):
        pass

    def says(name: str) -> Callable[..., tuple[Any, ...]]:
        return lambda self, *args, **kwargs: (name, args, kwargs)

    for name in (*METHODS.values(), "native"):
        setattr(Each, f"forward_{name}", says(name))

    @CustomOp.register("two")
    class Two(CustomOp):
        forward_native = staticmethod(lambda: "native")

        def forward_cuda(self) -> str:
            return "cuda"

    @CustomOp.register("native_alone")
    class NativeAlone(CustomOp):
        @staticmethod
        def forward_native() -> str:
            return "native"

    @CustomOp.register("cuda_alone")
    class CudaAlone(CustomOp):
        def forward_cuda(self) -> str:
            return "cuda"

    @CustomOp.register("nothing")
    class Nothing(CustomOp):
        pass

    with set_custom_ops("all", platform=platform):
        assert Each()(1, a=2) == (METHODS[platform], (1,), {"a": 2})
        assert Two()() == ("cuda" if platform in ("cuda", "rocm") else "native")
        assert NativeAlone()() == "native"
        with pytest.raises(NotImplementedError, match="Nothing has no forward_native"):
            Nothing()()
        if platform in ("cuda", "rocm"):
            assert CudaAlone()() == "cuda"
    with set_custom_ops("none", platform=platform):
        assert Each()(1) == ("native", (1,), {})
        assert Two()() == "native"
    with pytest.raises(ValueError, match="platform: expected"), set_custom_ops(platform="gpu"):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize(
    ("available", "kind", "hip", "expected"),
    [
        (False, "cuda", None, "cpu"),
        (True, "cuda", None, "cuda"),
        (True, "cuda", "6.0", "rocm"),
        (True, "xpu", None, "xpu"),
        (True, "npu", None, "oot"),
        (True, "mps", None, "oot"),
    ],
)
def test_current_platform(
    monkeypatch: pytest.MonkeyPatch, available: bool, kind: str, hip: str | None, expected: str
) -> None:
    class Device:
        type = kind

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: available)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", Device)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert current_platform() == expected
    monkeypatch.setattr(custom_op, "loaded", lambda name: name == "torch_xla")
    assert current_platform() == ("tpu" if expected == "cpu" else expected)


def test_register() -> None:
    @CustomOp.register("new")
    class New(CustomOp):
        pass

    assert New.name == "new"
    assert CustomOp.op_registry is PluggableLayer.op_registry is op_registry
    assert CustomOp.op_registry_oot is op_registry_oot
    assert op_registry["new"] is New
    for base in (CustomOp, PluggableLayer):
        with pytest.raises(ValueError, match="duplicate op name: new"):
            base.register("new")(New)


def test_out_of_tree_rotary_embedding() -> None:
    """Registered as a plugin does it."""

    @RotaryEmbedding.register_oot
    class DummyRotaryEmbedding(RotaryEmbedding):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.addition_config = True

    made = RotaryEmbedding(16, 16, 16, 16, True, torch.float16)
    assert type(made) is DummyRotaryEmbedding
    assert made.addition_config
    assert op_registry_oot == {"RotaryEmbedding": DummyRotaryEmbedding}
    # The configuration still uses the name of the op.
    assert DummyRotaryEmbedding.name == "rotary_embedding"
    with set_custom_ops("all,-rotary_embedding"):
        assert not RotaryEmbedding(16, 16, 16, 16, True, torch.float16).enabled()
    assert type(copy.deepcopy(made)) is DummyRotaryEmbedding


@pytest.mark.parametrize("form", ["bare", "called", "named", "positional", "function"])
def test_forms_of_register_oot(form: str) -> None:
    class Mine(RMSNorm):
        pass

    if form == "bare":
        returned = RMSNorm.register_oot(Mine)
    elif form == "called":
        returned = RMSNorm.register_oot()(Mine)
    elif form == "named":
        returned = CustomOp.register_oot(name="RMSNorm")(Mine)
    elif form == "positional":
        returned = CustomOp.register_oot("RMSNorm")(Mine)
    else:
        returned = CustomOp.register_oot(_decorated_op_cls=Mine, name="RMSNorm")
    assert returned is Mine
    assert type(RMSNorm(4)) is Mine

    class Other(RMSNorm):
        pass

    assert type(Other(4)) is Other  # only the class of that name is replaced
    with pytest.raises(ValueError, match="duplicate op name: RMSNorm is replaced by Mine"):
        RMSNorm.register_oot(Other)


def test_bad_replacements_are_refused() -> None:
    with pytest.raises(TypeError, match="register_oot: expected a class, got 3"):
        RMSNorm.register_oot(3)
    with pytest.raises(TypeError, match="expected a class"):
        CustomOp.register_oot("RMSNorm")("Mine")

    class Stranger(CustomOp):
        pass

    CustomOp.register_oot(_decorated_op_cls=Stranger, name="RMSNorm")
    assert Stranger.name == "RMSNorm"
    with pytest.raises(TypeError, match="Stranger is to replace RMSNorm and is no subclass"):
        RMSNorm(4)


def test_pluggable_layers_are_replaced_too() -> None:
    @ReplicatedLinear.register_oot
    class Mine(ReplicatedLinear):
        made: ClassVar[int] = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    layer = ReplicatedLinear(2, 2)
    assert type(layer) is Mine
    assert torch.equal(layer(torch.zeros(2)), torch.ones(2))
    assert not hasattr(layer, "enabled")


@pytest.mark.parametrize(
    ("mode", "backend", "enable", "compiled"),
    [
        (0, "aot_eager", True, False),
        (2, "eager", True, False),
        (2, "aot_eager", False, False),
        (2, "aot_eager", True, True),
    ],
)
def test_native_method_of_a_disabled_op_is_compiled(mode: int, backend: str, enable: bool, compiled: bool) -> None:
    @CustomOp.register("native")
    class Native(CustomOp):
        def __init__(self) -> None:
            super().__init__(compile_native=enable)

        @staticmethod
        def forward_native(x: torch.Tensor) -> torch.Tensor:
            return x + torch.compiler.is_compiling()

    torch._dynamo.reset()
    with set_custom_ops("none", mode=mode, backend=backend):
        layer = Native()
    for rows in (2, 3, 5):
        assert torch.equal(layer(torch.zeros(rows)), torch.full((rows,), float(compiled)))
    with set_custom_ops("all", mode=mode, backend=backend):
        assert not Native()(torch.zeros(2)).any()  # it is on


def test_inductor_gets_no_partition_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(torch, "compile", lambda fn, **options: seen.update(options) or fn)
    with set_custom_ops("none", mode=CompilationMode.STOCK_TORCH_COMPILE):
        SiluAndMul()
    assert seen.pop("options") in ({"graph_partition": False}, None)
    assert seen == {"dynamic": True, "backend": "inductor"}


def test_subclass_may_choose_another_method() -> None:
    class Reversed(SiluAndMul):
        def __init__(self) -> None:
            super().__init__()
            self._forward_method = lambda x: "mine"

    assert Reversed()(torch.zeros(2)) == "mine"


def test_weight_that_requires_grad_gets_a_gradient() -> None:
    """Also if no argument requires grad."""
    with set_custom_ops("all", platform="cuda"):
        layer = RMSNorm(8)
    x = torch.arange(16.0).view(2, 8)
    layer(x).sum().backward()
    normalised = torch.nn.functional.rms_norm(x, (8,), None, 1e-6)
    torch.testing.assert_close(layer.weight.grad, normalised.sum(0))
