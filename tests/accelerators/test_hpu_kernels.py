"""Gaudi's kernels over an imitated bridge: their adapters compute what torch does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from accelerators import OPERATIONS, AcceleratorError
from accelerators.backends.hpu.kernels import FUSED_SDPA
from rlhf.models.forward import model_inputs
from tests.accelerators import habana
from tests.families.table import BY_NAME, FAMILIES

MODES = {"lazy": True, "eager": False}


# kernels


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hpex", [(), ("optimizers",), ("normalization",), ("kernels",), habana.HPEX])
def test_fused_kernels_are_used_where_they_can_be_imported_and_torchs_elsewhere(machine, mode, hpex):
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
        "fused_layers": "",
    }
    assert set(used) == set(OPERATIONS)
    for operation in ("adamw", "clip_grad_norm", "attention"):
        for implementation, support in hpu.kernels.candidates(operation):
            if implementation.name == "habana-fused" and not support.ok:
                assert "cannot be imported (ModuleNotFoundError: No module named" in support.reason


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
    fused = stepped(machine().kernels.get("adamw"), groups_of)
    torch.testing.assert_close(fused, stepped(torch.optim.AdamW, groups_of))


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


def test_the_steps_of_the_fused_adamw_are_counted_in_its_state_as_in_torchs(machine):
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    optimizer = machine().kernels.get("adamw")([parameter], **OPTIONS)
    optimizer.step()
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == torch.tensor(2.0)
    optimizer.state[parameter]["step"].zero_()  # a set-up step of DeepSpeed's that is to be forgotten
    optimizer.step()
    assert optimizer.state[parameter]["step"] == 1


@pytest.mark.parametrize("max_norm", [1.0, 100.0])
def test_the_fused_clipping_gives_the_norm_and_gradients_of_torchs(machine, max_norm):
    results = []
    for clip in (machine().kernels.get("clip_grad_norm"), torch.nn.utils.clip_grad_norm_):
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
        hpu.kernels.get("clip_grad_norm")([parameter], 0.125)
    assert habana.FusedClipNorm.made == before + 1


@pytest.mark.parametrize("parameters", [[], [torch.nn.Parameter(torch.zeros(2))]], ids=["none", "without gradients"])
def test_nothing_to_clip_has_norm_zero(machine, parameters):
    assert machine().kernels.get("clip_grad_norm")(parameters, 1.0) == torch.tensor(0.0)


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
    fused, weights = attention(machine().kernels.get("attention"))(
        module, query, key, value, masks()[mask], scaling=scaling
    )
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
    attention(hpu.kernels.get("attention"))(module, query, key, key, None, is_causal=is_causal, dropout=0.0)
    assert seen[0][5] is causal


def test_dropout_reaches_the_kernel(machine):
    query = torch.randn(1, 2, 6, 8)
    attend = attention(machine().kernels.get("attention"))
    out, _ = attend(SimpleNamespace(is_causal=True), query, query, torch.ones_like(query), None, dropout=0.5)
    assert not torch.allclose(out, torch.ones_like(out))


@pytest.mark.parametrize("feature", ["softcap", "s_aux", "position_bias"])
def test_what_the_fused_attention_lacks_is_refused_not_left_out(machine, feature):
    query = torch.randn(1, 2, 6, 8)
    attend = attention(machine().kernels.get("attention"))
    with pytest.raises(AcceleratorError, match=f"FusedSDPA has no {feature}"):
        attend(SimpleNamespace(), query, query, query, None, **{feature: torch.ones(2)})


@pytest.mark.parametrize(
    ("family", "refusal"),
    [
        ("Llama", ""),
        ("Gemma3Text", ""),
        ("Gemma2", "FusedSDPA has no softcap"),
        ("GptOss", "FusedSDPA has no s_aux"),
        ("Mpt", "FusedSDPA has no position_bias"),
    ],
)
def test_a_model_that_needs_more_than_the_fused_attention_has_is_told_by_its_configuration(machine, family, refusal):
    import transformers

    hpu = machine()
    ((best, _), *_) = hpu.kernels.candidates("attention")
    assert best.name == "habana-fused"
    assert hpu.kernels.refusal(best, getattr(transformers, f"{family}Config")()) == refusal


@pytest.mark.parametrize("name", [family.name for family in FAMILIES if family.attention(FUSED_SDPA) == "fused"])
def test_a_family_computes_with_the_fused_attention_what_it_computes_eagerly(machine, name):
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    family, fused = BY_NAME[name], machine().kernels.get("attention")
    ids = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(1))
    padding = torch.ones_like(ids)
    padding[0, :7] = 0
    calls, found = [], []
    for name in (fused, "eager"):
        config = family.configuration()
        config._attn_implementation = name
        torch.manual_seed(0)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
        with torch.no_grad(), habana.watching(calls):
            found.append(model(**model_inputs(model, ids, padding)).logits[padding.bool()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert calls, "its own attention, in silence"


@pytest.mark.parametrize("heads", [4, 2])
def test_a_model_on_the_fused_attention_gives_the_logits_and_gradients_of_sdpa(machine, heads):
    from transformers import LlamaConfig, LlamaForCausalLM

    results = []
    ids = torch.arange(12).reshape(2, 6)
    padding = torch.tensor([[1] * 6, [0] * 2 + [1] * 4])
    for name in (machine().kernels.get("attention"), "sdpa"):
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
