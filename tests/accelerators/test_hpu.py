"""The Gaudi backend over an imitated bridge: which calls it makes, and that its adapters compute what torch does."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from accelerators import OPERATIONS, AcceleratorError, CaptureError, ShapePolicy, gaudi
from accelerators.hpu import HPU
from tests.accelerators import habana
from tests.accelerators.habana import DRIVER, Bridge

MODES = {"lazy": True, "eager": False}


@pytest.fixture
def machine(monkeypatch):
    """A machine with these cards and this bridge; its backend, bound, with tensors that stay on the CPU."""

    def make(chip: str = "Gaudi2", count: int = 8, **bridge) -> HPU:
        monkeypatch.setattr(gaudi, "cards", lambda: gaudi.Cards(count, chip, DRIVER, "hl-smi"))
        hpu = HPU()
        hpu.bridge = Bridge(**bridge).install(monkeypatch)
        hpu._device = torch.device("cpu")
        return hpu

    return make


# placement


def test_a_rank_opens_its_own_card_and_gets_a_device_without_index(machine):
    hpu = machine()
    assert hpu.bind(7) == hpu.device() == torch.device("hpu")
    assert hpu.bridge.calls == ["initialize_distributed_hpu", "init"]  # the card is chosen before it is opened


def test_more_ranks_than_cards_are_an_error(machine):
    hpu = machine(count=2)
    with pytest.raises(AcceleratorError, match=r"no card for rank 2 .*2 x Gaudi2.*start at most 2 processes"):
        hpu.bind(2)
    assert hpu.bridge.calls == []


def test_a_card_that_is_taken_is_an_error_with_the_cause_and_the_remedy(machine):
    with pytest.raises(AcceleratorError, match=r"Device already acquired.*hl-smi shows.*HABANA_VISIBLE_MODULES"):
        machine(free=False).bind(0)


def test_a_bridge_that_cannot_be_imported_is_an_error_with_the_cause(machine, monkeypatch):
    hpu = machine()
    monkeypatch.delitem(sys.modules, "habana_frameworks.torch.distributed.hccl")
    with pytest.raises(AcceleratorError, match=r"cannot be imported \(ModuleNotFoundError.*install the one for torch"):
        hpu.bind(0)


def test_the_cards_are_named(machine):
    info = machine("Gaudi3", 4).info()
    assert (info.model, info.count) == ("Gaudi3", 4)
    assert DRIVER in info.software


# synchronization


@pytest.mark.parametrize(("mode", "marks"), [("lazy", ["mark_step", "mark_step"]), ("eager", [])])
def test_boundaries_flush_in_lazy_mode_and_do_nothing_in_eager_mode(machine, mode, marks):
    hpu = machine(lazy=MODES[mode])
    hpu.step_boundary("forward")
    hpu.step_boundary("backward")
    assert hpu.bridge.calls == marks
    assert hpu.is_lazy() is MODES[mode]


def test_synchronizing_waits_for_the_card(machine):
    hpu = machine()
    hpu.synchronize()
    assert hpu.bridge.calls == ["synchronize"]


@pytest.mark.parametrize(
    ("stats", "count"),
    [
        ([("TotalNumber", 3), ("TotalTime", 812), ("AvgTime", 270.7)], 3),
        ([("TotalNumber", 2), ("recipe", [("graph_1", 5), ("graph_2", 7)])], 2),
        ({"TotalNumber": 4}, 4),
        ([], None),
    ],
)
def test_compilations_are_the_runtimes_own_count(machine, stats, count):
    hpu = machine()
    hpu.bridge.stats = stats
    assert hpu.compilations() == count


def test_compilations_are_unknown_where_the_runtime_does_not_count_them(machine, monkeypatch):
    hpu = machine()
    monkeypatch.setattr(sys.modules["habana_frameworks.torch.hpu.metrics"], "metric_global", lambda name: None)
    assert hpu.compilations() is None


# recordings


class Counter:
    """A step that works on tensors which it holds, as a decoder's does."""

    def __init__(self) -> None:
        self.total = torch.zeros(2)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x)
        return self.total * 2


@pytest.mark.parametrize("runs_what_it_records", [True, False])
def test_a_captured_step_is_replayed_exactly_once_a_call(machine, runs_what_it_records):
    hpu = machine(lazy=True, runs_what_it_records=runs_what_it_records)
    step = Counter()
    captured = hpu.capture(step, key="count")
    for calls in range(1, 6):
        assert torch.equal(captured(torch.ones(2)), torch.full((2,), 2.0 * calls))
        assert torch.equal(step.total, torch.full((2,), float(calls)))


def test_pending_work_is_flushed_before_a_recording_begins(machine, monkeypatch):
    hpu = machine(lazy=True)
    begin = habana.HPUGraph.capture_begin
    monkeypatch.setattr(
        habana.HPUGraph, "capture_begin", lambda self: (hpu.bridge.calls.append("capture_begin"), begin(self))
    )
    captured = hpu.capture(Counter(), key="count")
    captured(torch.ones(2))
    captured(torch.ones(2))
    assert hpu.bridge.calls[:2] == ["mark_step", "capture_begin"]


@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_reads_values_is_refused_in_both_modes(machine, mode):
    captured = machine(lazy=MODES[mode]).capture(lambda x: x * x.sum().item(), key="step")
    with pytest.raises(CaptureError, match="step reads values of the device on the host"):
        captured(torch.ones(2))


def test_in_eager_mode_a_step_is_compiled_by_gaudis_backend_with_fixed_shapes(machine):
    captured = machine().capture(lambda x: x * 2 + 1, key="step")
    before = len(habana.COMPILED)
    for _ in range(3):
        assert torch.equal(captured(torch.ones(3)), torch.full((3,), 3.0))
    captured(torch.ones(5))
    three, five = habana.COMPILED[before:]
    assert (three.shape, three.runs) == ((3,), 2)  # the first call runs as written, under the check
    assert (five.shape, five.runs) == ((5,), 1)


def test_a_bridge_without_a_compiler_records_nothing_and_says_why(machine, monkeypatch):
    hpu = machine()
    monkeypatch.setattr(torch.compiler, "list_backends", lambda exclude_tags: ["inductor"])
    assert "has not registered hpu_backend" in hpu.capabilities()["graph_capture"].reason
    assert hpu.capture(torch.neg, key="step")(torch.ones(1)) == -1


@pytest.mark.parametrize(
    ("mode", "used", "other", "reason"),
    [
        ("lazy", "hpu-graphs", "torch-compile", "exists in eager mode only"),
        ("eager", "torch-compile", "hpu-graphs", "exist in lazy mode only"),
    ],
)
def test_each_mode_has_its_recordings_and_says_why_not_the_others(machine, mode, used, other, reason):
    (best, support), (second, refusal) = machine(lazy=MODES[mode]).candidates("graph_capture")
    assert (best.name, support.ok) == (used, True)
    assert (second.name, refusal.ok) == (other, False)
    assert reason in refusal.reason


# precision


@pytest.mark.parametrize("chip", ["Gaudi", "Gaudi2", "Gaudi3"])
@pytest.mark.parametrize(
    ("wish", "dtype"), [("auto", torch.bfloat16), ("bf16", torch.bfloat16), ("fp32", torch.float32)]
)
def test_bf16_is_native_and_fp32_possible_on_every_gaudi(machine, chip, wish, dtype):
    precision = machine(chip, fp16=chip != "Gaudi").precision(wish)
    assert (precision.dtype, precision.loss_scaling) == (dtype, False)
    assert precision.reason


@pytest.mark.parametrize("chip", ["Gaudi2", "Gaudi3"])
def test_fp16_with_loss_scaling_where_the_runtime_has_it(machine, chip):
    precision = machine(chip).precision("fp16")
    assert (precision.dtype, precision.loss_scaling) == (torch.float16, True)
    assert precision.deepspeed_config() == {"fp16": {"enabled": True, "loss_scale": 0}}


def test_fp16_on_the_first_gaudi_is_an_error_with_reason_and_remedy(machine):
    with pytest.raises(AcceleratorError, match="the runtime says that Gaudi does not compute in it; use auto, bf16"):
        machine("Gaudi", fp16=False).precision("fp16")


def test_fp16_is_refused_where_the_runtime_does_not_tell(machine, monkeypatch):
    hpu = machine()
    monkeypatch.delattr(sys.modules["habana_frameworks.torch.utils.experimental"], "_is_fp16_supported")
    with pytest.raises(AcceleratorError, match=r"does not tell whether it has fp16 \(AttributeError"):
        hpu.precision("fp16")


def test_an_unknown_precision_is_an_error_with_those_that_are_known(machine):
    with pytest.raises(AcceleratorError, match="'fp8': not known; use auto, bf16, fp16 or fp32"):
        machine().precision("fp8")


# kernels


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hpex", [(), ("optimizers",), ("normalization",), ("kernels",), habana.HPEX])
def test_fused_kernels_are_used_where_they_can_be_imported_and_torchs_elsewhere(machine, mode, hpex):
    hpu = machine(lazy=MODES[mode], hpex=hpex)
    used = {operation: support.implementation for operation, support in hpu.capabilities().items()}
    assert used == {
        "adamw": "habana-fused" if "optimizers" in hpex else "torch-foreach",
        "adamw_cpu_offload": "torch-fused",
        "clip_grad_norm": "habana-fused" if "normalization" in hpex else "torch",
        "attention": "habana-fused" if "kernels" in hpex else "sdpa",
        "graph_capture": "hpu-graphs" if MODES[mode] else "torch-compile",
        "quantized_weights": "",
    }
    assert set(used) == set(OPERATIONS)
    for operation in ("adamw", "clip_grad_norm", "attention"):
        for implementation, support in hpu.candidates(operation):
            if implementation.name == "habana-fused" and not support.ok:
                assert "cannot be imported (ModuleNotFoundError: No module named" in support.reason


def test_quantized_weights_are_refused_with_the_reason(machine):
    assert machine().capabilities()["quantized_weights"].reason == "DeepSpeed's quantizer kernels have no HPU build"


OPTIONS = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}


def stepped(adamw, groups_of) -> list[torch.Tensor]:
    """Parameters after five steps; `groups_of(parameters)` are the groups that the optimizer is made of."""
    parameters = [torch.nn.Parameter(torch.linspace(-1, 1, size)) for size in (3, 4, 5)]
    optimizer = adamw(groups_of(parameters), **OPTIONS)
    for step in range(5):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.1 * (step + 1))
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize(
    "groups_of",
    [
        lambda p: p,
        lambda p: [{"params": p[:2], "weight_decay": 0.1}, {"params": p[2:], "weight_decay": 0.0}],
        lambda p: [{"params": p, "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0}],
    ],
    ids=["one group", "two groups", "an empty group"],
)
def test_the_fused_adamw_takes_the_steps_of_torchs(machine, groups_of):
    fused = stepped(machine().kernel("adamw"), groups_of)
    torch.testing.assert_close(fused, stepped(torch.optim.AdamW, groups_of))


def test_the_fused_adamw_takes_the_shards_of_zero_3_one_by_one(machine):
    results = []
    for adamw in (machine().kernel("adamw"), torch.optim.AdamW):
        shards = [torch.nn.Parameter(torch.linspace(-1, 1, size)) for size in (3, 4)]
        groups = [{"params": shards, "weight_decay": 0.1}, {"params": [torch.nn.Parameter(torch.zeros(2))]}]
        optimizer = adamw(groups, **OPTIONS)
        for step in range(5):
            for shard in shards:  # as DeepSpeed does: one shard in its group, nothing in the others
                optimizer.param_groups[0]["params"], optimizer.param_groups[1]["params"] = [shard], []
                shard.grad = torch.full_like(shard, 0.1 * (step + 1))
                optimizer.step()
        results.append([shard.detach() for shard in shards])
        assert len(optimizer.param_groups) == 2
    torch.testing.assert_close(*results)


def test_the_steps_of_the_fused_adamw_are_counted_in_its_state_as_in_torchs(machine):
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    optimizer = machine().kernel("adamw")([parameter], **OPTIONS)
    optimizer.step()
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == torch.tensor(2.0)
    optimizer.state[parameter]["step"].zero_()  # a set-up step of DeepSpeed's that is to be forgotten
    optimizer.step()
    assert optimizer.state[parameter]["step"] == 1


@pytest.mark.parametrize("max_norm", [1.0, 100.0])
def test_the_fused_clipping_gives_the_norm_and_gradients_of_torchs(machine, max_norm):
    results = []
    for clip in (machine().kernel("clip_grad_norm"), torch.nn.utils.clip_grad_norm_):
        parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 3.0)
        norm = clip(iter(parameters), max_norm)
        results.append([norm, *(parameter.grad for parameter in parameters)])
    torch.testing.assert_close(*results)


def test_the_clippings_limit_is_copied_to_the_card_once(machine):
    hpu = machine()
    before = habana.FusedClipNorm.made
    for _ in range(3):
        parameter = torch.nn.Parameter(torch.zeros(2))
        parameter.grad = torch.ones(2)
        hpu.kernel("clip_grad_norm")([parameter], 0.125)
    assert habana.FusedClipNorm.made == before + 1


@pytest.mark.parametrize("parameters", [[], [torch.nn.Parameter(torch.zeros(2))]], ids=["none", "without gradients"])
def test_nothing_to_clip_has_norm_zero(machine, parameters):
    assert machine().kernel("clip_grad_norm")(parameters, 1.0) == torch.tensor(0.0)


# attention


def attention(name: str):
    from transformers import AttentionInterface

    return AttentionInterface()[name]


def masks() -> dict[str, torch.Tensor | None]:
    """Masks for rows of 6 tokens; the second begins with two of padding, whose own rows are not compared."""
    allowed = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    allowed[1, ..., :2] = False
    added = torch.zeros(2, 1, 6, 6).masked_fill(~allowed, torch.finfo(torch.float32).min)
    return {"none": None, "boolean": allowed, "added": added, "per head": added.expand(2, 4, 6, 6)}


@pytest.mark.parametrize("groups", [4, 2, 1], ids=["as many", "grouped", "one"])
@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_the_fused_attention_computes_what_torchs_does(machine, groups, mask, scaling):
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 6, 8), torch.randn(2, groups, 6, 8), torch.randn(2, groups, 6, 8)
    module = SimpleNamespace(is_causal=True, num_key_value_groups=4 // groups)
    fused, weights = attention(machine().kernel("attention"))(module, query, key, value, masks()[mask], scaling=scaling)
    expected, _ = attention("sdpa")(module, query, key, value, masks()[mask], scaling=scaling)
    assert weights is None
    assert fused.shape == (2, 6, 4, 8)
    torch.testing.assert_close(fused[0], expected[0])
    torch.testing.assert_close(fused[1, 2:], expected[1, 2:])
    assert fused.isfinite().all()


@pytest.mark.parametrize(
    ("length", "module_is_causal", "is_causal", "causal"),
    [(6, True, None, True), (6, False, None, False), (6, True, False, False), (1, True, None, False)],
)
def test_the_fused_attention_is_causal_by_itself_only_without_a_mask_and_past_one_token(
    machine, monkeypatch, length, module_is_causal, is_causal, causal
):
    hpu = machine()
    seen = []
    apply = habana.FusedSDPA.apply
    monkeypatch.setattr(habana.FusedSDPA, "apply", staticmethod(lambda *args: (seen.append(args), apply(*args))[1]))
    query, key = torch.randn(1, 2, length, 8), torch.randn(1, 2, 6, 8)
    module = SimpleNamespace(is_causal=module_is_causal)
    attention(hpu.kernel("attention"))(module, query, key, key, None, is_causal=is_causal, dropout=0.0)
    assert seen[0][5] is causal


def test_dropout_reaches_the_kernel(machine):
    query = torch.randn(1, 2, 6, 8)
    attend = attention(machine().kernel("attention"))
    out, _ = attend(SimpleNamespace(is_causal=True), query, query, torch.ones_like(query), None, dropout=0.5)
    assert not torch.allclose(out, torch.ones_like(out))


@pytest.mark.parametrize("feature", ["softcap", "s_aux", "position_bias"])
def test_what_the_fused_attention_lacks_is_refused_not_left_out(machine, feature):
    query = torch.randn(1, 2, 6, 8)
    attend = attention(machine().kernel("attention"))
    with pytest.raises(AcceleratorError, match=f"FusedSDPA has no {feature}"):
        attend(SimpleNamespace(), query, query, query, None, **{feature: torch.ones(2)})


@pytest.mark.parametrize("heads", [4, 2])
def test_a_model_on_the_fused_attention_gives_the_logits_and_gradients_of_sdpa(machine, heads):
    from transformers import LlamaConfig, LlamaForCausalLM

    results = []
    ids = torch.arange(12).reshape(2, 6)
    padding = torch.tensor([[1] * 6, [0] * 2 + [1] * 4])
    for name in (machine().kernel("attention"), "sdpa"):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=16,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=heads,
            attn_implementation=name,
        )
        model = LlamaForCausalLM(config)
        logits = model(input_ids=ids, attention_mask=padding).logits[padding.bool()]
        logits.square().sum().backward()
        results.append([logits.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


# memory and random numbers


def test_memory_is_the_runtimes(machine):
    hpu = machine()
    memory = hpu.memory()
    assert (memory.allocated, memory.peak, memory.total) == (5, 7, 96 << 30)
    hpu.reset_peak()
    assert hpu.bridge.calls == ["reset_peak_memory_stats"]


def test_the_cards_generator_is_seeded_and_survives_a_checkpoint(machine, tmp_path: Path):
    hpu = machine()
    hpu.seed(7)
    first = torch.rand(3, generator=hpu.bridge.generator)
    torch.save(hpu.rng_state(), tmp_path / "rng.pt")
    expected = torch.rand(3, generator=hpu.bridge.generator), torch.rand(3)
    hpu.seed(7)
    assert torch.equal(first, torch.rand(3, generator=hpu.bridge.generator))
    hpu.set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert torch.equal(expected[0], torch.rand(3, generator=hpu.bridge.generator))
    assert torch.equal(expected[1], torch.rand(3))


# the rest of the interface


def test_shapes_are_static_and_processes_talk_over_hccl(machine):
    hpu = machine()
    assert hpu.shape_policy() == ShapePolicy("static")
    assert hpu.dist_backend() == "hccl"


def test_deepspeed_uses_its_own_hpu_accelerator(run_python):
    code = (
        "from tests.accelerators.habana import Bridge; Bridge().install()\n"
        "from accelerators.hpu import HPU; view = HPU().prepare_deepspeed()\n"
        "print(view.device, view.communication, *view.dtypes)"
    )
    done = run_python("-c", code, env={"PYTHONPATH": str(Path(__file__).parents[2])})
    assert done.stdout.splitlines()[-1] == "hpu hccl float32 bfloat16 float16", done.stderr
