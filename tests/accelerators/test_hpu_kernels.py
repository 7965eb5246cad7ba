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
@pytest.mark.parametrize("hpex", [(), habana.HPEX])
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
@pytest.mark.parametrize(("length", "scaling"), [(6, None), (6, 0.3), (1, None)])
def test_the_fused_attention_computes_what_torchs_does(machine, groups, mask, length, scaling):
    """All queries, or the last one alone, as in a step of decoding."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, length, 8), torch.randn(2, groups, 6, 8), torch.randn(2, groups, 6, 8)
    mask = None if masks()[mask] is None else masks()[mask][:, :, -length:]
    module = SimpleNamespace(is_causal=True, num_key_value_groups=4 // groups)
    arguments = (module, query, key, value, mask)
    fused, weights = attention(machine().kernels.get("attention"))(*arguments, scaling=scaling)
    expected, _ = attention("sdpa")(*arguments, scaling=scaling)
    assert weights is None
    assert fused.shape == (2, length, 4, 8)
    torch.testing.assert_close(fused[0], expected[0])
    torch.testing.assert_close(fused[1, 2:], expected[1, 2:])
    assert fused.isfinite().all()


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
