"""The CPU's attention computes what float64 and eager models do, whatever part of it works, and copies no cache."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, library
from torch.profiler import ProfilerActivity, profile
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import accelerators
from accelerators import AcceleratorError
from accelerators.backends.cpu import attention as cpu_attention
from accelerators.backends.cpu.kernels import invariant, softmax
from rlhf.config.schema import SamplingConfig
from rlhf.generation.decoder import Decoder
from rlhf.lockstep.operators import OperatorJudge
from rlhf.lockstep.places import Places
from rlhf.models.forward import model_inputs
from tests.families.table import BY_NAME

OWN = cpu_attention.ATTENTION
FAMILIES = ("Llama 3", "OPT", "GPT-2", "GPT-NeoX, Pythia", "Qwen2", "Mistral", "Gemma 3", "StableLM", "Phi, Phi-2")


COMPILERS = [name for name in ("cc", "gcc", "clang") if shutil.which(name)]
needs_compiler = pytest.mark.skipif(not COMPILERS, reason="no C compiler here")


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    assert accelerators.select("cpu", environ={}).create().kernels.get("attention") == OWN


@pytest.fixture
def delegated(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The queries that torch's attention was left with."""
    calls: list[Tensor] = []
    from transformers.integrations import sdpa_attention

    plain = sdpa_attention.sdpa_attention_forward
    monkeypatch.setattr(
        sdpa_attention,
        "sdpa_attention_forward",
        lambda *given, **options: calls.append(given[1]) or plain(*given, **options),
    )
    return calls


@pytest.fixture(params=[True, False], ids=["compiled", "torch's softmax"])
def softmaxes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with the compiled softmax, and as without a compiler."""
    if not request.param:
        monkeypatch.setattr(softmax, "why_not", lambda: "there is no C compiler")
    elif not COMPILERS:
        pytest.skip("no C compiler here")


@needs_compiler
def test_softmax_of_this_package_compiles_and_is_right():
    assert softmax.why_not() == ""


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[B, heads, T, D], as a view of what a projection gives."""
    rows, heads, tokens, width = shape
    return torch.randn(rows, tokens, heads, width).to(dtype).transpose(1, 2)


def exact(query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, scale: float) -> Tensor:
    """The definition, in float64."""
    heads = query.shape[1] // key.shape[1]
    key, value = (tensor.double().repeat_interleave(heads, 1) for tensor in (key, value))
    scores = scale * query.double() @ key.transpose(2, 3)
    scores = scores if added is None else scores + added.double()
    return (scores.softmax(-1) @ value).transpose(1, 2)


def masks(rows: int, heads: int, queries: int, keys: int) -> dict[str, Tensor | None]:
    seen = torch.ones(rows, 1, queries, keys, dtype=torch.bool).tril(keys - queries)
    seen[0, ..., : keys // 3] &= (
        queries == 1 or torch.arange(queries)[:, None] < keys // 3
    )  # nothing is seen of nothing
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return {
        "none": None,
        "boolean": seen,
        "added": added,
        "one for all": added[-1:],
        "per head": torch.randn(rows, heads, queries, keys),
    }


SIZES = {
    "grouped": (3, 6, 2, 20, 20),
    "plain": (2, 4, 4, 7, 12),
    "one": (2, 4, 1, 9, 9),
    "token": (3, 6, 2, 1, 30),
    "blocks": (3, 6, 2, 150, 150),
    "blocks after a prefix": (2, 4, 4, 130, 190),
}
"""Rows, heads, heads of keys, queries, keys."""


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("mask", ["none", "boolean", "added", "one for all", "per head"])
@pytest.mark.parametrize(
    ("part", "limit"), [(2**21, 2), (2**21, 0), (3000, 0), (500, 2)], ids=["kept", "again", "rows", "heads"]
)
@pytest.mark.usefixtures("softmaxes")
def test_outputs_and_gradients_are_those_of_the_definition(monkeypatch, delegated, sizes, mask, part, limit):
    torch.manual_seed(0)
    monkeypatch.setattr(cpu_attention, "PART", part)
    monkeypatch.setattr(cpu_attention, "BLOCK", 64)
    monkeypatch.setattr(cpu_attention, "KEPT", limit)
    rows, heads, groups, queries, keys = SIZES[sizes]
    query, key = drawn(rows, heads, queries, 16).requires_grad_(), drawn(rows, groups, keys, 16).requires_grad_()
    value = drawn(rows, groups, keys, 12).requires_grad_()
    given = masks(rows, heads, queries, keys)[mask]
    added = given
    if given is not None and given.dtype == torch.bool:
        added = torch.zeros(given.shape).masked_fill(~given, torch.finfo(torch.float32).min)
    module = SimpleNamespace(is_causal=False, num_key_value_groups=heads // groups)
    output, weights = cpu_attention.attend(module, query, key, value, given, scaling=0.3)
    expected = exact(query, key, value, added, 0.3)
    assert weights is None and not delegated
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    wanted = torch.randn(output.shape)
    for own, truth in zip(
        torch.autograd.grad(output, (query, key, value), wanted),
        torch.autograd.grad(expected, (query, key, value), wanted.double()),
    ):
        torch.testing.assert_close(own, truth, atol=2e-5, rtol=1e-5)
    with torch.no_grad():
        again = cpu_attention.attend(module, query, key, value, given, scaling=0.3)[0]
    torch.testing.assert_close(again, output, atol=1e-6, rtol=0)


@pytest.mark.parametrize("causal", [None, True, False])
def test_without_a_mask_a_query_sees_what_it_may(causal):
    """As torch's attention of transformers: queries are the first of the keys."""
    torch.manual_seed(0)
    query, key, value = drawn(2, 4, 5, 8), drawn(2, 2, 7, 8), drawn(2, 2, 7, 8)
    module = SimpleNamespace(is_causal=True)
    output = cpu_attention.attend(module, query, key, value, None, is_causal=causal)[0]
    lowest = torch.full((5, 7), torch.finfo(torch.float32).min).triu(1) * (causal is not False)
    torch.testing.assert_close(output.double(), exact(query, key, value, lowest, 8**-0.5), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("limit", [2, 0], ids=["kept", "again"])
@pytest.mark.parametrize("queries", [1, 6])
@pytest.mark.usefixtures("softmaxes")
def test_minus_infinity_hides_keys_and_all_leave_their_mean(monkeypatch, kind, dtype, limit, queries):
    torch.manual_seed(0)
    monkeypatch.setattr(cpu_attention, "KEPT", limit)
    given = [drawn(2, heads, tokens, 8, dtype=dtype) for heads, tokens in ((4, queries), (2, 6), (2, 6))]
    given = [tensor.contiguous().requires_grad_() for tensor in given]
    mask = torch.zeros(2, 1, queries, 6, dtype=kind)
    mask[0], mask[1, ..., 3:] = -torch.inf, -torch.inf
    output = cpu_attention.attend(SimpleNamespace(), *given, mask)[0]
    expected = exact(*given, mask.double().clamp_min(-1e300), 8**-0.5)
    tolerance = {"atol": 1e-5 if dtype == torch.float32 else 2e-2, "rtol": 0.0}
    torch.testing.assert_close(output.double(), expected, **tolerance)
    torch.testing.assert_close(expected[0], given[2][0].double().mean(1).repeat_interleave(2, 0).expand(queries, 4, 8))
    with torch.no_grad():
        torch.testing.assert_close(cpu_attention.attend(SimpleNamespace(), *given, mask)[0], output, **tolerance)
    wanted = torch.randn(output.shape).to(dtype)
    gradients = (torch.autograd.grad(tensor, given, wanted.to(tensor.dtype)) for tensor in (output, expected))
    for own, truth in zip(*gradients):
        torch.testing.assert_close(own.double(), truth.double(), **tolerance | {"rtol": 1e-2})


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
def test_mask_of_another_dtype_hides_the_same_keys(kind):
    torch.manual_seed(0)
    query, key, value = drawn(2, 4, 6, 8), drawn(2, 2, 6, 8), drawn(2, 2, 6, 8)
    visible = torch.rand(2, 1, 6, 6) < 0.5
    visible[..., 0] = True
    added = torch.zeros(visible.shape, dtype=kind).masked_fill_(~visible, torch.finfo(kind).min)
    outputs = [cpu_attention.attend(SimpleNamespace(), query, key, value, mask)[0] for mask in (added, visible)]
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 6])
def test_query_that_sees_nothing_has_finite_gradients(dtype, queries):
    torch.manual_seed(0)
    inputs = [drawn(2, heads, tokens, 8, dtype=dtype) for heads, tokens in ((4, queries), (2, 6), (2, 6))]
    inputs = [tensor.contiguous().requires_grad_() for tensor in inputs]
    visible = torch.zeros(2, 1, queries, 6, dtype=torch.bool)
    visible[1] = True
    output = cpu_attention.attend(SimpleNamespace(), *inputs, visible)[0]
    output.sum().backward()
    assert all(torch.isfinite(tensor).all() for tensor in (output, *(tensor.grad for tensor in inputs)))
    mean = inputs[2][0].float().mean(1).repeat_interleave(2, 0).expand(queries, 4, 8)
    torch.testing.assert_close(output[0].float(), mean, atol=2e-2, rtol=0)


@needs_compiler
def test_without_the_compiled_softmax_it_says_why(monkeypatch):
    """No compiler, or code that computes something else."""
    assert "softmax" not in cpu_attention.COMPOSED.supported(None).reason
    monkeypatch.setattr(softmax, "why_not", lambda: "there is no C compiler")
    assert "softmax by torch's operators: there is no C compiler" in cpu_attention.COMPOSED.supported(None).reason
    monkeypatch.undo()
    monkeypatch.setattr(softmax, "softmax_", lambda scores, mask, scale: scores.zero_())
    assert softmax.why_not.__wrapped__() == "the compiled softmax is wrong here"


def lowest_above_diagonal(queries: int, keys: int) -> Tensor:
    return torch.full((1, 1, queries, keys), torch.finfo(torch.float32).min).triu(1 + keys - queries)


def test_keys_that_a_mask_hides_from_a_block_are_not_computed():
    causal = lowest_above_diagonal(150, 150)
    blocks = [slice(0, 64), slice(64, 128), slice(128, 150)]
    assert cpu_attention._blocks(causal, 150, 150, 64) == list(zip(blocks, (64, 128, 150)))
    assert cpu_attention._blocks(causal, 150, 150, 150) == [(slice(0, 150), 150)]
    assert cpu_attention._blocks(None, 150, 150, 64) == list(zip(blocks, (150, 150, 150)))
    later = lowest_above_diagonal(150, 190)
    assert cpu_attention._blocks(later, 150, 190, 64) == list(zip(blocks, (104, 168, 190)))
    of_several = causal.repeat(2, 3, 1, 1)
    of_several[1, 2, 70, 130] = 0  # one head of one row sees a later key
    assert cpu_attention._blocks(of_several, 150, 150, 64) == list(zip(blocks, (64, 150, 150)))
    of_several = causal.repeat(2, 1, 1, 1)
    of_several[1, :, 3] = -torch.inf  # this query sees nothing, and gets the mean of all values
    assert cpu_attention._blocks(of_several, 150, 150, 64) == list(zip(blocks, (150, 128, 150)))


def test_blocks_of_queries_cost_no_precision(monkeypatch):
    """A key's gradient is a sum over blocks. In bfloat16, 16 additions would double its error."""
    torch.manual_seed(0)
    given = [drawn(1, heads, 1024, 64, dtype=torch.bfloat16).requires_grad_() for heads in (3, 1, 1)]
    wanted, mask = torch.randn(1, 1024, 3, 64).bfloat16(), lowest_above_diagonal(1024, 1024)
    truth = torch.autograd.grad(exact(*given, mask, 0.125), given, wanted.double())
    errors = {}
    for block in (64, 4096):
        monkeypatch.setattr(cpu_attention, "BLOCK", block)
        output = cpu_attention.attend(SimpleNamespace(), *given, mask.bfloat16())[0]
        own = torch.autograd.grad(output, given, wanted)
        errors[block] = [(((a.double() - b) ** 2).mean() / (b**2).mean()).sqrt() for a, b in zip(own, truth)]
    assert all(a <= 1.2 * b for a, b in zip(errors[64], errors[4096])), errors


@needs_compiler
def test_softmax_refuses_what_it_would_read_wrongly():
    given = [drawn(2, 2, tokens, 8) for tokens in (1, 9, 9)]
    with pytest.raises(ValueError, match="does not fit"):
        cpu_attention.attend(SimpleNamespace(), *given, torch.zeros(2, 1, 1, 5))
    scores, mask = torch.zeros(2, 3, 9), torch.zeros(1, 1, 2, 3, 9)
    for wrong in ((scores.double(), None), (scores[:, :, ::2], None), (scores, mask.bfloat16())):
        with pytest.raises(ValueError, match="gaps or another dtype, or the mask has another dtype"):
            softmax.softmax_(*wrong, 1.0)


def test_backward_pass_outside_of_batch_invariant_mode_takes_any_dtype(monkeypatch):
    """Attention has them all while the mode is active."""
    monkeypatch.setattr(cpu_attention, "KEPT", 0)
    given = [drawn(2, heads, 9, 8).double().requires_grad_() for heads in (4, 2, 2)]
    with invariant.batch_invariant():
        output = cpu_attention.attend(SimpleNamespace(), *given, None, is_causal=True)[0]
    expected = exact(*given, lowest_above_diagonal(9, 9), 8**-0.5)
    wanted = torch.randn_like(output)
    torch.testing.assert_close(
        torch.autograd.grad(output, given, wanted), torch.autograd.grad(expected, given, wanted), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_judge_of_operators_sees_no_memory_change_between_them(dtype):
    given = [drawn(2, heads, 20, 64, dtype=dtype).requires_grad_() for heads in (6, 2, 2)]
    judge = OperatorJudge(Places(), lambda: None)
    with judge:
        output = cpu_attention.attend(SimpleNamespace(), *given, lowest_above_diagonal(20, 20).to(dtype))[0]
        torch.autograd.grad(output, given, torch.ones_like(output))
    assert judge.number and not judge.faults


@needs_compiler
def test_operator_of_the_softmax_does_what_its_schema_says():
    """It writes to the scores alone, and has the same shapes without numbers."""
    arguments = torch.randn(2, 6, 9), torch.randn(1, 2, 3, 2, 9), 0.5
    library.opcheck(torch.ops.rlhf_cpu.softmax_.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_attention_of_a_model_without_weights_has_its_shapes():
    """Ranks that share a model's layers run it on the meta device before they do."""
    given = [drawn(2, heads, 20, 64).to("meta") for heads in (6, 2, 2)]
    output = cpu_attention.attend(SimpleNamespace(), *given, torch.zeros(2, 1, 20, 20, device="meta"))[0]
    assert output.is_meta and output.shape == (2, 20, 6, 64)


@pytest.mark.parametrize("limit", [3, 0], ids=["kept", "again"])
def test_only_needed_queries_are_computed(monkeypatch, limit):
    monkeypatch.setattr(cpu_attention, "KEPT", limit)
    given = [drawn(4, heads, 130, 64).requires_grad_() for heads in (6, 2, 2)]
    needed = torch.zeros(4, 130, dtype=torch.bool)
    needed[0], needed[1:, 128:] = True, True
    needed[3] = False
    mask, wanted = lowest_above_diagonal(130, 130), drawn(4, 130, 6, 64) * needed[..., None, None]
    output = cpu_attention.attend(SimpleNamespace(), *given, mask, scaling=0.125, needed=needed)[0]
    truth = exact(*given, mask, 0.125)
    torch.testing.assert_close(output[needed].double(), truth[needed], atol=1e-5, rtol=1e-5)
    own = torch.autograd.grad(output, given, wanted)
    torch.testing.assert_close(own, torch.autograd.grad(truth, given, wanted.double()), atol=1e-4, rtol=1e-4)
    grouped = cpu_attention._grouped(given[0], 2)
    parts = cpu_attention._parts(grouped, given[1], mask, needed, whole=limit > 0)
    computed = [(part.rows, part.queries) for part in parts]
    if limit:
        assert computed == [(slice(0, 3), slice(0, 130))]
    else:
        assert computed == [(slice(0, 1), slice(0, 128)), (slice(0, 3), slice(128, 130))]


def test_torchs_attention_takes_other_dtypes_and_dropout(delegated):
    module = SimpleNamespace(is_causal=True, num_key_value_groups=2)
    given = [drawn(2, heads, 9, 8) for heads in (4, 2, 2)]
    output = cpu_attention.attend(module, *(tensor.double() for tensor in given), None, scaling=0.3)[0]
    assert len(delegated) == 1
    expected = exact(*given, lowest_above_diagonal(9, 9), 0.3)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(
        cpu_attention.attend(module, *given, None, scaling=0.3)[0].double(), expected, atol=1e-5, rtol=1e-5
    )
    assert len(delegated) == 1
    cpu_attention.attend(module, *given, None, dropout=0.5)
    assert len(delegated) == 2


@pytest.mark.parametrize("feature", ["s_aux", "sinks", "softcap", "indices", "block_indices"])
def test_what_it_lacks_is_refused_not_left_out(feature):
    attend = ALL_ATTENTION_FUNCTIONS[cpu_attention.composed(None)]
    given = [drawn(1, 2, 3, 8) for _ in range(3)]
    with pytest.raises(
        AcceleratorError, match=f"attention {OWN}: it does not support {feature}; use a model without it"
    ):
        attend(SimpleNamespace(), *given, None, **{feature: torch.ones(2)})
    attend(SimpleNamespace(), *given, None, **{feature: None}, sliding_window=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("held", ["whole", "fewer rows", "narrowed"])
def test_a_decoding_step_copies_no_cache(dtype, held):
    if held == "narrowed" and dtype == torch.bfloat16 and transformers.__version__.startswith("5.17."):
        pytest.skip("torch's attention computes this, and transformers 5.17 repeats keys for it")
    cache = torch.randn(2, 8, 2, 64, 32).to(dtype)
    key, value = {"whole": cache, "fewer rows": cache[:, :5], "narrowed": cache[:, :, :, :48]}[held]
    query = torch.randn(len(key), 4, 1, 32).to(dtype)
    module, mask = SimpleNamespace(num_key_value_groups=2), torch.zeros(len(key), 1, 1, key.shape[2], dtype=dtype)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
        output = cpu_attention.attend(module, query, key, value, mask)[0]
    copied = [event for event in record.events() if event.name in ("aten::copy_", "aten::clone", "aten::contiguous")]
    assert key.numel() > 4 * query.numel()
    sizes = [torch.Size(event.input_shapes[0]).numel() for event in copied]
    assert max(sizes, default=0) < key.numel() / 2, sizes
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(output.double(), exact(query, key, value, mask, 32**-0.5), atol=tolerance, rtol=0)


# models


def built(name: str, attention: str) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = BY_NAME[name].configuration()
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return model


def rows() -> tuple[Tensor, Tensor]:
    """Two rows of 20 tokens, the first with 7 of padding on the left."""
    ids = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(1))
    ids[0, :7] = 0
    return ids, (ids != 0).long()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_computes_what_it_computes_eagerly(name, monkeypatch):
    calls: list[int] = []
    apply = cpu_attention._Composed.apply
    monkeypatch.setattr(cpu_attention._Composed, "apply", lambda *given: calls.append(1) or apply(*given))
    results = []
    for attention in (OWN, "eager"):
        model = built(name, attention)
        ids, mask = rows()
        logits = model(**model_inputs(model, ids, mask)).logits[mask.bool()]
        logits.logsumexp(-1).sum().backward()
        results.append((logits.detach(), {key: value.grad for key, value in model.named_parameters()}))
    assert len(calls) == 2, "a layer each"
    torch.testing.assert_close(*results, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_draws_what_generate_draws_eagerly(accelerator: Any, name):
    own, eager = built(name, OWN), built(name, "eager")
    ids, mask = rows()
    drawn = Decoder(accelerator, eos_ids=[], pad_id=0, max_new_tokens=6).generate(
        own, ids[:, :14], mask[:, :14], SamplingConfig(temperature=0)
    )
    for row, start in ((0, 7), (1, 0)):
        alone = ids[row : row + 1, start:14]
        options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = eager.generate(alone, attention_mask=torch.ones_like(alone), **options)
        assert drawn.ids[row].tolist() == expected[0, alone.shape[1] :].tolist(), f"row {row}"
