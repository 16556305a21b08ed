"""Ops inside stock transformers models: the same logits, fewer launches, everything back after `undo`."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.bamba import BambaConfig
from transformers.models.bamba.modeling_bamba import BambaMixer, BambaRMSNorm, BambaRMSNormGated
from transformers.models.falcon_h1 import FalconH1Config
from transformers.models.granitemoehybrid import GraniteMoeHybridConfig
from transformers.models.kimi_linear import KimiLinearConfig, KimiLinearForCausalLM
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNorm
from transformers.models.mamba2 import Mamba2Config
from transformers.models.nemotron_h import NemotronHConfig
from transformers.models.qwen3_next import Qwen3NextConfig
from transformers.models.zamba2 import Zamba2Config

from xpu_ports.common import accuracy
from xpu_ports.common.dispatch import Op, explain, reset_explain, use_backend
from xpu_ports.common.stock import FUNCTIONS, METHODS
from xpu_ports.common.stock.source import fingerprint, fingerprints
from xpu_ports.common.tritonlib import INTERPRETED
from xpu_ports.models import kernel_mapping, patch, unpatch
from xpu_ports.models.kernels_library import LocalLayer
from xpu_ports.models.patching import plan_of, stock_class

VOCABULARY = 61
# Tokens before the decode steps: more than a chunk, and no multiple of one.
PROMPT, STEPS = 19, 3

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}

# Every expert of a mixture is chosen: which ones are is no matter of rounding then.
CONFIGS: dict[str, Callable[[], Any]] = {
    "mamba2": lambda: Mamba2Config(
        **SIZES, num_heads=4, head_dim=16, state_size=8, n_groups=2, num_hidden_layers=2, chunk_size=8
    ),
    "bamba": lambda: BambaConfig(
        **SIZES, **ATTENTION, **MAMBA, intermediate_size=48, num_hidden_layers=2, attn_layer_indices=[1]
    ),
    "falcon_h1": lambda: FalconH1Config(
        **SIZES,
        **ATTENTION,
        **MAMBA,
        intermediate_size=48,
        num_hidden_layers=2,
        head_dim=8,
        mamba_d_ssm=64,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
    ),
    # As published: the gate goes into the recurrence, and no gated norm.
    "falcon_h1-no_norm": lambda: FalconH1Config(
        **SIZES, **ATTENTION, **MAMBA, intermediate_size=48, num_hidden_layers=1, head_dim=8, mamba_d_ssm=64
    ),
    "granitemoehybrid": lambda: GraniteMoeHybridConfig(
        **SIZES,
        **ATTENTION,
        **MAMBA,
        intermediate_size=24,
        shared_intermediate_size=24,
        num_hidden_layers=2,
        layer_types=["mamba", "attention"],
        num_local_experts=2,
        num_experts_per_tok=2,
    ),
    "nemotron_h": lambda: NemotronHConfig(
        **SIZES,
        **ATTENTION,
        layers_block_type=["linear_attention", "moe", "full_attention"],
        head_dim=8,
        intermediate_size=48,
        ssm_state_size=8,
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=8,
        n_routed_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=24,
    ),
    "kimi_linear": lambda: KimiLinearConfig(
        **SIZES,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_experts=2,
        num_experts_per_token=2,
        linear_head_dim=16,
        linear_num_heads=2,
    ),
    "qwen3_next": lambda: Qwen3NextConfig(
        **SIZES,
        **ATTENTION,
        intermediate_size=48,
        num_hidden_layers=2,
        head_dim=8,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        layer_types=["linear_attention", "full_attention"],
    ),
    "zamba2": lambda: Zamba2Config(
        **SIZES,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=48,
        num_hidden_layers=2,
        layers_block_type=["mamba", "hybrid"],
        mamba_d_state=8,
        mamba_ngroups=2,
        n_mamba_heads=4,
        chunk_size=8,
        num_mem_blocks=1,
        adapter_rank=4,
        time_step_limit=(0.0, float("inf")),
    ),
}
# The ops that stand in, by model: all of them in a forward and its decode steps.
NORMS = {"rms_norm", "gated_rms_norm"}
SCANS = {"causal_conv1d", "causal_conv1d_update", "ssd_chunk_scan", "selective_state_update"}
OPS_OF = {
    "falcon_h1-no_norm": {"rms_norm", *SCANS},
    "kimi_linear": {*NORMS, "causal_conv1d", "causal_conv1d_update", "kda_gate", "chunk_kda", "recurrent_kda"},
    "qwen3_next": {*NORMS, "causal_conv1d", "causal_conv1d_update"},
}


def ops_of(name: str) -> set[str]:
    return OPS_OF.get(name, NORMS | SCANS)


def build(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny stock model of random weights, none of them at a value that hides a mistake."""
    # The experts of an fp64 model run one by one alone.
    # Not the auto class, which gives the ports once another test has registered them.
    config = CONFIGS[name]()
    cls = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type])
    model = cls._from_config(config, experts_implementation="eager").eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.dim() == 1 and "A_log" not in key:
                p += 0.3 * torch.randn_like(p)
            elif p.dim() > 1:
                p *= 2
    return model.to(dtype)


def tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (2, PROMPT + STEPS))


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor, steps: int = STEPS) -> Tensor:
    """Those of a forward and of decode steps with its cache."""
    out = model(ids[:, : ids.shape[1] - steps], use_cache=True)
    parts = [out.logits]
    takes = inspect.signature(model.forward).parameters
    for t in range(ids.shape[1] - steps, ids.shape[1]):
        cache = next(out[k] for k in ("cache", "past_key_values", "cache_params") if out.get(k) is not None)
        name = next(k for k in ("cache", "past_key_values") if k in takes)
        out = model(ids[:, t : t + 1], use_cache=True, **{name: cache})
        parts.append(out.logits)
    return torch.cat(parts, 1)


class Double(TorchDispatchMode):
    """Casts to fp32 become casts to fp64, so that a stock model in fp64 computes in fp64 throughout: the oracle."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") == torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def oracle_of(model: nn.Module, ids: Tensor, steps: int = STEPS) -> Tensor:
    """The logits that the model would give without rounding."""
    with Double():
        return logits(copy.deepcopy(model).double(), ids, steps)


def calls() -> dict[tuple[str, str], int]:
    """(op, back end) -> calls since `reset_explain`."""
    found: dict[tuple[str, str], int] = {}
    for d in explain(show=False):
        found[d.op, d.backend] = found.get((d.op, d.backend), 0) + d.calls
    return found


@pytest.fixture(autouse=True)
def _ledger() -> Iterator[None]:
    reset_explain()
    yield
    reset_explain()


# ------------------------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_within_the_budget_and_come_back(name: str, dtype: torch.dtype) -> None:
    model, ids = build(name, dtype), tokens()
    stock = logits(model, ids)
    oracle = oracle_of(model, ids)
    classes = {path: type(m) for path, m in model.named_modules()}
    before = {key: t.data_ptr() for key, t in model.state_dict().items()}

    done = patch(model)
    reset_explain()
    with use_backend("reference"):
        accuracy.assert_close(logits(model, ids), stock, oracle, name)
    assert set(calls()) == {(op, "reference") for op in ops_of(name)}, "every op ran, and nothing stayed"
    assert {c.op for c in done.patched} == ops_of(name)
    assert {key: t.data_ptr() for key, t in model.state_dict().items()} == before
    assert all(isinstance(m, classes[path]) for path, m in model.named_modules())

    done.undo()
    assert {path: type(m) for path, m in model.named_modules()} == classes
    assert not any("forward" in vars(m) for m in model.modules())
    assert torch.equal(logits(model, ids), stock)


@pytest.mark.skipif(not INTERPRETED, reason="Triton's interpreter is off in this process")
@pytest.mark.parametrize("name", ["bamba", "kimi_linear"])
def test_kernels_in_a_stock_model(name: str) -> None:
    model, ids = build(name), tokens()[:1, :6]
    stock, oracle = logits(model, ids, 1), oracle_of(model, ids, 1)
    patch(model)
    reset_explain()
    with use_backend("triton"):
        accuracy.assert_close(logits(model, ids, 1), stock, oracle, name)
    assert set(calls()) == {(op, "triton") for op in ops_of(name)}


class Launches(TorchDispatchMode):
    """Counts what a device would be asked to run: torch's operators but views, and each of our ops once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.count = 0
        self._inside = False
        original = Op.__call__

        def counted(op: Op, *args: Any, **kwargs: Any) -> Any:
            self.count += 1
            self._inside = True
            try:
                return original(op, *args, **kwargs)
            finally:
                self._inside = False

        monkeypatch.setattr(Op, "__call__", counted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (self._inside or func.is_view)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CONFIGS)
def test_launches_before_and_after(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build(name, torch.bfloat16), tokens()[:1]

    def launches() -> tuple[int, int]:
        """Of a forward, and of one decode step behind it."""
        with monkeypatch.context() as context:
            with Launches(context) as forward:
                logits(model, ids[:, :PROMPT], 0)
            with Launches(context) as both:
                logits(model, ids[:, : PROMPT + 1], 1)
        return forward.count, both.count - forward.count

    before = launches()
    with patch(model):
        after = launches()
    assert launches() == before
    print(f"{name}: {before[0]} launches in a forward, patched {after[0]}; {before[1]} in a step, patched {after[1]}")
    # Qwen3-Next keeps its recurrence.
    most = 0.9 if name == "qwen3_next" else 0.8
    assert after[0] < most * before[0]
    assert after[1] < most * before[1]


# --------------------------------------------------------------------------------------------------- what it reports


def test_the_report_names_what_was_left_and_why() -> None:
    done = patch(build("qwen3_next"))
    left = {c.function: c.why for c in done.left}
    assert left.keys() == {"torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"}
    assert all("one decay a head" in why for why in left.values())
    lines = {d.op: d for d in explain(show=False)}
    line = lines["patch Qwen3NextRMSNorm.forward"]
    # Two of a layer, the last, and those of queries and keys of one attention.
    assert (line.backend, line.calls) == ("rms_norm", 7)
    assert lines["patch Qwen3NextGatedDeltaNet.torch_chunk_gated_delta_rule"].backend == "stock"
    assert "Qwen3NextGatedDeltaNet: causal_conv1d_fn" in str(done)


def test_nothing_to_patch_is_said() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4))
    with pytest.warns(UserWarning, match="nothing to patch in Sequential: none of its 3 modules"):
        done = patch(model)
    assert "nothing to patch in Sequential" in str(done)
    assert "torch's own" in str(done)
    assert not done.patched
    done.undo()


def test_a_port_is_left_alone() -> None:
    from xpu_ports.models.zamba2 import Zamba2ForCausalLM as Port

    with pytest.warns(UserWarning, match="nothing to patch"):
        done = patch(Port(CONFIGS["zamba2"]()))
    assert {c.why for c in done.left} == {"it runs on this package's ops already"}


def test_twice_is_once() -> None:
    model, ids = build("bamba"), tokens()
    stock = logits(model, ids)
    with patch(model) as first:
        with patch(model) as second:
            assert not second.patched
            assert second.before == len(first.modules)
            assert f"{second.before} modules of BambaForCausalLM were patched before" in str(second)
        assert stock_class(type(model.model.final_layernorm)) is BambaRMSNorm
    assert type(model.model.final_layernorm) is BambaRMSNorm
    assert torch.equal(logits(model, ids), stock)


def test_another_model_of_the_class_is_not_touched() -> None:
    one, other = build("kimi_linear"), build("kimi_linear")
    patch(one)
    reset_explain()
    logits(other, tokens())
    assert not explain(show=False)
    assert unpatch(other) == 0


def test_the_example_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "patching.md").read_text(encoding="utf-8")
    example, report = re.findall(r"^```(?:python)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[:2]
    exec(compile(example, "docs/patching.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith(report)
    assert "patch BambaRMSNormGated.forward" in printed


# --------------------------------------------------------------------------------------------------- what keeps working


def test_a_patched_model_is_saved_as_it_was(tmp_path: Path) -> None:
    model = build("kimi_linear")
    model.save_pretrained(tmp_path / "stock")
    patch(model)
    model.save_pretrained(tmp_path / "patched")
    files = sorted(p.name for p in (tmp_path / "stock").iterdir())
    assert files == sorted(p.name for p in (tmp_path / "patched").iterdir())
    for name in files:
        assert (tmp_path / "stock" / name).read_bytes() == (tmp_path / "patched" / name).read_bytes(), name
    assert type(KimiLinearForCausalLM.from_pretrained(tmp_path / "patched").model.norm) is KimiLinearRMSNorm


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_patched_and_unpatched_by_themselves(how: Callable[[nn.Module], nn.Module]) -> None:
    model, ids = build("kimi_linear"), tokens()
    stock = logits(model, ids)
    count = len(patch(model).modules)
    expected = logits(model, ids)
    copied = how(model)
    reset_explain()
    assert torch.equal(logits(copied, ids), expected)
    assert {op for op, _ in calls()} == ops_of("kimi_linear")
    assert unpatch(copied) == count
    assert torch.equal(logits(copied, ids), stock)
    assert torch.equal(logits(model, ids), expected)


def test_gradients() -> None:
    model, ids = build("bamba").train(), tokens()
    gradients = []
    for _ in range(2):
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append({key: p.grad.clone() for key, p in model.named_parameters()})
        patch(model) if len(gradients) == 1 else None
    for key, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], expected, rtol=1e-4, atol=1e-5, msg=key)
    ran = calls()
    assert ("causal_conv1d", "stock") in ran
    assert ("ssd_chunk_scan", "stock") in ran
    assert ("rms_norm", "reference") in ran


@pytest.mark.skipif(not INTERPRETED, reason="Triton's interpreter is off in this process")
def test_a_gradient_through_the_kernel_of_a_norm() -> None:
    norm = BambaRMSNorm(24)
    x = torch.randn(3, 24, requires_grad=True)
    norm(x).square().sum().backward()
    expected, x.grad = x.grad, None
    patch(norm)
    with use_backend("triton"):
        norm(x).square().sum().backward()
    assert ("rms_norm_backward", "triton") in calls()
    torch.testing.assert_close(x.grad, expected)


def test_hooks_are_called() -> None:
    norm, seen = BambaRMSNorm(8), []
    norm.register_forward_hook(lambda module, args, output: seen.append(output))
    patch(norm)
    y = norm(torch.randn(2, 8))
    assert seen[0] is y


def test_a_replaced_forward_is_left_alone() -> None:
    norm = BambaRMSNorm(8)
    norm.forward = lambda x: x
    with pytest.warns(UserWarning, match="nothing to patch"):
        done = patch(norm)
    assert "was replaced in the instance" in done.left[0].why
    assert type(norm) is BambaRMSNorm


def test_a_forward_replaced_later_is_no_silent_undo() -> None:
    model = nn.Sequential(BambaRMSNorm(8), BambaRMSNorm(8))
    done = patch(model)
    model[1].forward = model[1].forward
    for undo in (done.undo, lambda: unpatch(model)):
        with pytest.raises(RuntimeError, match="1 modules were changed after they were patched, the first '1'"):
            undo()
        assert stock_class(type(model[0])) is BambaRMSNorm
    del model[1].forward
    done.undo()
    assert {type(m) for m in model} == {BambaRMSNorm}


def test_the_compiler_sees_the_ops() -> None:
    model = build("bamba")
    mixer = next(m for m in model.modules() if isinstance(m, BambaMixer))
    x = torch.randn(2, PROMPT, 32)
    with torch.no_grad():
        patch(model)
        expected = mixer(x)
        reset_explain()
        compiled = torch.compile(mixer, backend="eager")(x)
    assert {op for op, _ in calls()} == {"causal_conv1d", "ssd_chunk_scan", "gated_rms_norm"}
    torch.testing.assert_close(compiled, expected)


# ------------------------------------------------------------------------------------------------- what is not the same


class Inherits(BambaRMSNorm):
    pass


class Overrides(BambaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) * 2


def test_subclasses() -> None:
    model = nn.Sequential(Inherits(8), Overrides(8))
    done = patch(model)
    assert [c.path for c in done.patched] == ["0"]
    assert [(c.path, c.why) for c in done.left] == [("1", "its source is not one that was compared with rms_norm")]


STOCK_NORM = inspect.getsource(BambaRMSNorm).replace("@use_kernel_forward_from_hub", "# @use_kernel_forward_from_hub")
CHANGES = {
    "eps outside the root": ("torch.rsqrt(variance + self.variance_epsilon)", "1 / (variance.sqrt() + 1e-6)"),
    "1 + weight": ("self.weight * ", "(1 + self.weight) * "),
    "no fp32": ("hidden_states.to(torch.float32)", "hidden_states.to(torch.float16)"),
    "the weight in fp32": ("self.weight * hidden_states.to(input_dtype)", "(self.weight * hidden_states)"),
}


@pytest.mark.parametrize("change", ["", *CHANGES])
def test_a_norm_that_computes_something_else_is_left_alone(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source decides, in whatever file it is."""
    old, new = CHANGES.get(change, ("", ""))
    assert old in STOCK_NORM
    name = f"modeling_{abs(hash(change))}"
    (tmp_path / f"{name}.py").write_text(
        "import torch\nfrom torch import nn\n" + (STOCK_NORM.replace(old, new) if change else STOCK_NORM)
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    plan = plan_of(module.BambaRMSNorm)
    assert list(plan.contracts) == ([] if change else ["forward"])
    assert len(plan.left) == (1 if change else 0)


def test_a_function_replaced_by_others_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    modeling = sys.modules[BambaMixer.__module__]
    monkeypatch.setattr(modeling, "causal_conv1d_fn", lambda *args, **kwargs: None)
    plan = plan_of(BambaMixer)
    assert ("causal_conv1d_fn", "it was replaced by another function") in plan.left
    assert "causal_conv1d_update" in plan.contracts
    mixer = next(m for m in build("bamba").modules() if isinstance(m, BambaMixer))
    assert {c.function for c in patch(mixer).patched} == {"forward", *plan.contracts}
    monkeypatch.undo()
    assert "causal_conv1d_fn" in plan_of(BambaMixer).contracts


def stays(call: Callable[[], Any], op: str) -> str:
    """Why a call stayed with the stock function."""
    reset_explain()
    call()
    (line,) = [d for d in explain(show=False) if d.op == op]
    assert line.backend == "stock"
    return line.reason


def test_calls_that_an_op_does_not_cover_stay() -> None:
    wide, narrow = torch.randn(2, 3, 16), torch.randn(2, 3, 16, dtype=torch.bfloat16)
    norm, gated = BambaRMSNorm(16), BambaRMSNormGated(16, group_size=8)
    patch(nn.ModuleList([norm, gated]))
    assert "the output is torch.float32" in stays(lambda: norm(narrow), "rms_norm")
    assert norm(narrow).dtype == torch.float32
    assert stays(lambda: gated(wide), "gated_rms_norm") == "no gate of the input's shape"

    mixer = next(m for m in build("bamba").modules() if isinstance(m, BambaMixer))
    x = torch.randn(2, PROMPT, 32)
    stock = mixer(x)
    patch(mixer)
    with torch.no_grad():
        mixer.time_step_limit = (0.0, 0.5)
        assert stays(lambda: mixer(x), "ssd_chunk_scan") == "steps of at most 0.5"
        mixer.time_step_limit = (0.0, float("inf"))
        with pytest.raises(ValueError, match="can't keep packed sequences apart"):
            mixer(x, seq_idx=torch.zeros(2, PROMPT, dtype=torch.int32))
        mixer.activation = "gelu"
        assert stays(lambda: mixer(x), "causal_conv1d") == "the activation is 'gelu'"
        mixer.activation = "silu"
    assert "no backward" in stays(lambda: torch.testing.assert_close(mixer(x), stock), "ssd_chunk_scan")


def test_the_least_step_is_the_configurations() -> None:
    model, ids = build("zamba2"), tokens()
    unbounded = logits(model, ids, 0)
    for m in model.modules():
        if hasattr(m, "time_step_limit"):
            m.time_step_limit = (1.5, float("inf"))
    stock, oracle = logits(model, ids, 0), oracle_of(model, ids, 0)
    assert (stock - unbounded).abs().max() > 1e-3  # far outside the budget of fp32
    patch(model)
    reset_explain()
    accuracy.assert_close(logits(model, ids, 0), stock, oracle)
    assert {backend for _, backend in calls()} == {"reference"}


# ------------------------------------------------------------------------------------------------- the kernels library


def test_without_the_library_the_mapping_says_what_to_install() -> None:
    if hasattr(BambaRMSNorm, "kernel_layer_name"):
        pytest.skip("transformers registers its layers here")
    with pytest.raises(ValueError, match="registered no layer of BambaForCausalLM with the kernels library"):
        kernel_mapping(build("bamba"))


def stock_functions() -> dict[str, Any]:
    """Fingerprint -> a stock function of it, from the models of this file."""
    found = {}
    for name in CONFIGS:
        modeling = importlib.import_module(f"transformers.models.{(m := name.partition('-')[0])}.modeling_{m}")
        for qualified, known in fingerprints(modeling.__name__).items():
            function = modeling
            for part in qualified.split("."):
                function = getattr(function, part)
            found[known] = inspect.unwrap(function)
    return found


def test_all_that_is_known_is_in_this_version_of_transformers() -> None:
    """A version that changed one of these functions makes it unknown: compare it with the op again."""
    modeling = importlib.import_module("transformers.models.gpt_oss.modeling_gpt_oss")
    here = {*stock_functions(), fingerprint(modeling.GptOssRMSNorm.forward)}
    assert set(METHODS) <= here
    assert set(FUNCTIONS) <= here


def test_layers_are_what_the_library_takes() -> None:
    """What `kernels` checks when it loads a layer: no state, no members of its own, the stock parameters."""
    functions = stock_functions()
    for known in {*METHODS, *FUNCTIONS} & functions.keys():
        layer = LocalLayer("Layer", known).load()
        assert layer.__init__ is nn.Module.__init__
        assert {n for n, _ in inspect.getmembers(layer)} - {n for n, _ in inspect.getmembers(nn.Module)} == {
            "can_torch_compile",
            "has_backward",
        }
        ours = list(inspect.signature(layer.forward).parameters.values())
        stock = list(inspect.signature(functions[known]).parameters.values())
        if known in FUNCTIONS:
            stock.insert(0, inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD))
        assert [p.kind for p in ours] == [p.kind for p in stock], functions[known].__qualname__


def test_a_mapping_where_layers_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes marked as transformers marks them with the library, and forwards put in as `kernelize` does."""
    monkeypatch.setattr(BambaRMSNorm, "kernel_layer_name", "RMSNorm", raising=False)
    model, ids = build("bamba"), tokens()
    stock, oracle = logits(model, ids), oracle_of(model, ids)
    mapping = kernel_mapping(model)
    assert {name: set(layers) for name, layers in mapping.items()} == {"RMSNorm": {"cuda", "xpu"}}
    layer = mapping["RMSNorm"]["xpu"].load()
    for m in model.modules():
        if type(m) is BambaRMSNorm:
            m.forward = types.MethodType(layer.forward, m)
    accuracy.assert_close(logits(model, ids), stock, oracle)
    assert {op for op, _ in calls()} == {"rms_norm"}

    monkeypatch.setattr(BambaRMSNormGated, "kernel_layer_name", "RMSNorm", raising=False)
    assert kernel_mapping(model) == {}, "one name for two contracts"


def test_the_library_takes_the_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("kernels")
    monkeypatch.setattr(BambaRMSNorm, "kernel_layer_name", "RMSNorm", raising=False)
    model, ids = build("bamba"), tokens()
    stock, oracle = logits(model, ids), oracle_of(model, ids)
    mapping = kernel_mapping(model, devices=["cpu"])
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu")
    accuracy.assert_close(logits(model, ids), stock, oracle)
    assert "rms_norm" in {op for op, _ in calls()}
