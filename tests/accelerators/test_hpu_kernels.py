"""Gaudi's kernels over an imitated bridge: their adapters compute what torch does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import GptOssConfig

from accelerators import OPERATIONS, AcceleratorError
from accelerators.backends.hpu.kernels import FUSED_SDPA, find_lacking
from accelerators.testing.attention import check_attention
from accelerators.testing.optimizers import check_adamw, check_clip_grad_norm
from rlhf.models.forward import model_inputs
from tests.accelerators import habana
from tests.families.table import BY_NAME, FAMILIES

MODES = {"lazy": True, "eager": False}


# kernels


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hpex", [(), *((name,) for name in habana.HPEX), habana.HPEX])
def test_fused_kernels_are_used_if_they_can_be_imported(machine, mode, hpex):
    hpu = machine(lazy=MODES[mode], hpex=hpex)
    used = {operation: support.implementation for operation, support in hpu.kernels.capabilities().items()}
    assert used == {
        "adamw": "habana-fused" if "optimizers" in hpex else "torch-foreach",
        "adamw_cpu_offload": "torch-fused",
        "clip_grad_norm": "habana-fused" if "normalization" in hpex else "torch",
        "attention": "habana-fused" if "kernels" in hpex else "sdpa",
        "graph_capture": "hpu-graphs" if MODES[mode] else "torch-compile",
        "quantized_weights": "torch",
        "inference_weights": "",
        "fused_layers": "" if MODES[mode] else "torch-compile",
        "sampling": "",
        "batch_invariant": "",
    }
    assert set(used) == set(OPERATIONS)
    for operation in ("adamw", "clip_grad_norm", "attention"):
        for implementation, support in hpu.kernels.candidates(operation):
            if implementation.name == "habana-fused" and not support.ok:
                assert "cannot be imported (ModuleNotFoundError: No module named" in support.reason


@pytest.mark.parametrize("check", [check_adamw, check_clip_grad_norm, check_attention])
def test_fused_kernels_pass_the_kit(machine, check):
    check(machine())


OPTIONS = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}


def test_the_fused_adamw_takes_the_shards_of_zero_3_one_by_one(machine):
    results = []
    for adamw in (machine().kernels.get("adamw"), torch.optim.AdamW):
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


def test_fused_adamw_counts_steps_in_its_state_as_torch(machine):
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    optimizer = machine().kernels.get("adamw")([parameter], **OPTIONS)
    optimizer.step()
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == torch.tensor(2.0)
    optimizer.state[parameter]["step"].zero_()  # a set-up step of DeepSpeed's that is to be forgotten
    optimizer.step()
    assert optimizer.state[parameter]["step"] == 1


def test_the_clippings_limit_is_copied_to_the_card_once(machine):
    hpu = machine()
    before = habana.FusedClipNorm.made
    for _ in range(3):
        parameter = torch.nn.Parameter(torch.zeros(2))
        parameter.grad = torch.ones(2)
        hpu.kernels.get("clip_grad_norm")([parameter], 0.125)
    assert habana.FusedClipNorm.made == before + 1


@pytest.mark.parametrize("parameters", [[], [torch.nn.Parameter(torch.zeros(2))]], ids=["none", "without gradients"])
def test_nothing_to_clip_has_norm_zero(machine, parameters):
    assert machine().kernels.get("clip_grad_norm")(parameters, 1.0) == torch.tensor(0.0)


# attention


def attention(name: str):
    from transformers import AttentionInterface

    return AttentionInterface()[name]


LOWER = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
ADDED = torch.zeros(2, 1, 6, 6).masked_fill(~LOWER, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("mask", [None, LOWER, ADDED, ADDED.expand(2, 4, 6, 6)], ids=["none", "bool", "added", "heads"])
@pytest.mark.parametrize(("groups", "scaling"), [(4, None), (2, 0.3), (1, None)])
def test_fused_attention_computes_what_torchs_does(machine, groups, scaling, mask):
    """In float32, which shows what the kit's bf16 would hide."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 6, 8), torch.randn(2, groups, 6, 8), torch.randn(2, groups, 6, 8)
    module = SimpleNamespace(is_causal=True, num_key_value_groups=4 // groups)
    results = [
        attention(name)(module, query, key, value, mask, scaling=scaling)
        for name in (machine().kernels.get("attention"), "sdpa")
    ]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("length", "module_is_causal", "is_causal", "expected"),
    [(6, True, None, True), (6, False, None, False), (6, True, False, False), (1, True, None, False)],
)
def test_fused_attention_is_causal_without_a_mask(machine, length, module_is_causal, is_causal, expected):
    query, key = torch.randn(1, 2, length, 8), torch.randn(1, 2, 6, 8)
    attend, calls = attention(machine().kernels.get("attention")), []
    with habana.watching(calls):
        attend(SimpleNamespace(is_causal=module_is_causal), query, key, key, None, is_causal=is_causal)
    assert calls[0][5] is expected


def test_dropout_reaches_the_fused_attention(machine):
    query = torch.randn(1, 2, 6, 8)
    attend = attention(machine().kernels.get("attention"))
    output, _ = attend(SimpleNamespace(is_causal=True), query, query, torch.ones_like(query), None, dropout=0.5)
    assert not torch.allclose(output, torch.ones_like(output))


@pytest.mark.parametrize("feature", ["softcap", "s_aux", "position_bias"])
def test_what_the_fused_attention_lacks_is_refused_not_left_out(machine, feature):
    query = torch.randn(1, 2, 6, 8)
    attend = attention(machine().kernels.get("attention"))
    with pytest.raises(AcceleratorError, match=f"it does not support {feature}"):
        attend(SimpleNamespace(), query, query, query, None, **{feature: torch.ones(2)})


def test_sinks_are_passed_to_a_fused_attention_that_has_them(machine, monkeypatch):
    calls = []

    class WithSink:
        @staticmethod
        def forward(
            ctx, q, k, v, mask=None, dropout=0.0, causal=False, scale=None, mode="None", window=(-1, -1), sink=0
        ):
            raise AssertionError("an autograd function is applied")

        @staticmethod
        def apply(*arguments):
            calls.append(arguments)
            return arguments[0]

    monkeypatch.setattr(habana, "FusedSDPA", WithSink)
    query, sinks = torch.randn(1, 2, 6, 8), torch.randn(2)
    hpu = machine()
    attention(hpu.kernels.get("attention"))(SimpleNamespace(is_causal=True), query, query, query, None, s_aux=sinks)
    assert calls[0][7:] == ("None", (-1, -1), sinks)
    ((best, _), *_) = hpu.kernels.candidates("attention")
    assert hpu.kernels.refusal(best, GptOssConfig()) == ""


def test_sinks_that_would_learn_nothing_are_refused(machine, monkeypatch):
    class WithSink:
        @staticmethod
        def forward(ctx, q, k, v, scale=None, recompute_mode=None, sink=None):
            raise AssertionError("an autograd function is applied")

        apply = staticmethod(lambda *arguments: arguments[0])

    monkeypatch.setattr(habana, "FusedSDPA", WithSink)
    query, sinks = torch.randn(1, 2, 6, 8), torch.randn(2, requires_grad=True)
    attend = attention(machine().kernels.get("attention"))
    with pytest.raises(AcceleratorError, match="Gaudi's kernel gives sinks no gradient"):
        attend(SimpleNamespace(is_causal=True), query, query, query, None, s_aux=sinks)
    with torch.no_grad():
        attend(SimpleNamespace(is_causal=True), query, query, query, None, s_aux=sinks)


def test_kernel_with_an_argument_without_a_default_before_sinks_has_none(machine, monkeypatch):
    class Unknown:
        @staticmethod
        def forward(ctx, q, k, v, scale, needed, sink=None):
            raise AssertionError("an autograd function is applied")

    monkeypatch.setattr(habana, "FusedSDPA", Unknown)
    machine()
    assert "s_aux" in find_lacking()


@pytest.mark.parametrize(
    ("family", "refusal"),
    [
        ("Llama", ""),
        ("Gemma3Text", ""),
        ("Gemma2", "it does not support softcap"),
        ("GptOss", "it does not support s_aux"),
        ("Mpt", "it does not support position_bias"),
    ],
)
def test_models_beyond_the_fused_attention_are_refused(machine, family, refusal):
    import transformers

    hpu = machine()
    ((best, _), *_) = hpu.kernels.candidates("attention")
    assert best.name == "habana-fused"
    assert hpu.kernels.refusal(best, getattr(transformers, f"{family}Config")()) == refusal


@pytest.mark.parametrize("name", [family.name for family in FAMILIES if family.attention(FUSED_SDPA) == "fused"])
def test_fused_attention_gives_a_family_its_eager_logits(machine, name):
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    family, fused = BY_NAME[name], machine().kernels.get("attention")
    ids = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(1))
    padding = torch.ones_like(ids)
    padding[0, :7] = 0
    calls, logits = [], []
    for name in (fused, "eager"):
        config = family.configuration()
        config._attn_implementation = name
        torch.manual_seed(0)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
        with torch.no_grad(), habana.watching(calls):
            logits.append(model(**model_inputs(model, ids, padding)).logits[padding.bool()])
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert calls, "its own attention, in silence"
