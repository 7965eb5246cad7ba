"""Two ranks that share the weights of a model generate what one does that has them whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.generation.decoder import Completions
from rlhf.models.quantized import ALIGNED, count_quantized, find_quantized_layers
from tests.forks import Forks
from tests.generation import two_ranks
from tests.generation.two_ranks import GREEDY, MODELS, PACKED, SAMPLED, SHARDED
from tests.helpers import mark_slow

OFTEN = {"OPT", SHARDED, PACKED, MODELS[-1]}
"""Models that the default suite runs; tests/families/test_split.py has the parts of every family in one process."""
EACH = mark_slow({name: name for name in MODELS}, except_for=OFTEN)


def run(forks: Forks, function: str, count: int, folder: Path, names: Sequence[str]) -> list[Any]:
    """Run a function of `two_ranks` on `count` ranks with these models, and return the result of each."""
    forks.ranks(count, f"from tests.generation import two_ranks; two_ranks.{function}({str(folder)!r}, {names!r})")
    return [torch.load(folder / f"rank {rank}", weights_only=False) for rank in range(count)]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The results of the models whose tests were selected, and of those that all tests need."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    selected = OFTEN | {item.callspec.params.get("name") for item in items}
    names = [name for name in MODELS if name in selected]
    return run(forks, "main", 2, tmp_path_factory.mktemp("two-ranks"), names)


@pytest.fixture(scope="module")
def alone(accelerator: Any) -> Any:
    """(model, rank, sampling, ranks) -> what one device draws for the rank's rows in a rollout of all ranks' rows."""
    known: dict[Any, Any] = {}

    def draw(name: str, rank: int, sampling: Any, ranks: int = 2) -> Any:
        key = name, sampling.temperature, ranks
        if key not in known:
            rows = two_ranks.all_prompts(ranks)
            known[key] = two_ranks.draw(accelerator, two_ranks.model(name), rows, sampling)
        own = slice(rank * two_ranks.ROWS, (rank + 1) * two_ranks.ROWS)
        return Completions(*(tensor[own] for tensor in known[key]))

    return draw


def assert_same(actual: Completions, expected: Completions) -> None:
    """The same tokens; the longest row, which may be another rank's, decides the number of columns."""
    length = min(actual.ids.shape[1], expected.ids.shape[1])
    assert torch.equal(actual.mask.sum(-1), expected.mask.sum(-1))
    assert torch.equal(actual.mask[:, :length], expected.mask[:, :length])
    assert torch.equal(actual.ids[:, :length], expected.ids[:, :length])


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(
            pytest.param(*case.values, "tensor_parallel", marks=case.marks, id=f"{case.id}-tensor_parallel")
            for case in EACH
        ),
        (SHARDED, "whole"),
        (SHARDED, "layerwise"),
        (PACKED, "whole"),
        (PACKED, "layerwise"),
    ],
)
def test_tokens_are_those_of_one_device(results, alone, name, mode):
    for rank in range(2):
        for sampling in (GREEDY, SAMPLED):
            assert_same(results[rank][name, mode, sampling.temperature], alone(name, rank, sampling))


def test_rows_end_early_so_that_the_ranks_differ(alone):
    lengths = [alone(name, rank, SAMPLED).mask.sum(-1).tolist() for name in sorted(OFTEN) for rank in range(2)]
    assert any(max(first) != max(other) for first, other in zip(lengths[::2], lengths[1::2]))


def test_finished_rank_gathers_layers_for_the_other(results):
    assert results[0]["early"].mask.sum(-1).tolist() == [two_ranks.LENGTH] * 3
    assert results[1]["early"].mask.sum(-1).tolist() == [1] * 3


def test_rank_of_a_group_holds_its_part_and_releases_it(results):
    model = two_ranks.model(MODELS[-1])
    whole = sum(parameter.numel() for parameter in model.parameters())
    layers = [sum(parameter.numel() for parameter in layer.parameters(recurse=False)) for layer in model.modules()]
    for result in results:
        assert result["gathered"] == max(layers), "one layer at a time"
        assert result["held"] < whole * 0.52, "norms and a row that fills up the vocabulary are whole"
        assert result["freed"], "and not only when Python looks for circles"
        assert result["sharded"], "the model in training is as it was"


def test_quantized_weights_are_split_unpacked(results):
    model = two_ranks.model(PACKED)
    others = 4 * sum(parameter.numel() for parameter in model.parameters())
    stored = [dict(layer.named_buffers(recurse=False)) for layer in find_quantized_layers(model).values()]
    packed = sum(-(-tensor.nbytes // ALIGNED) * ALIGNED for tensors in stored for tensor in tensors.values())
    for result in results:
        memory = result["estimated"]
        assert memory.weights == others + packed
        assert memory.unpacked == others + 4 * count_quantized(model)
    tight = memory._replace(cache=0, logits=0, used=0, total=2 * memory.weights)
    assert tight.fits() and not tight._replace(unpacked=4 * memory.weights).fits(2)


@pytest.mark.parametrize(
    ("case", "rank_group", "words"),
    [(case, *expected) for case, expected in two_ranks.CASES.items()],
)
def test_first_rank_group_that_fits_on_all_ranks_is_chosen(results, case, rank_group, words):
    (kind, lines), (other, _) = (result["chosen"][case] for result in results)
    assert kind == other == rank_group
    assert len(lines) == bool(words) and words in "".join(lines)


@pytest.mark.slow
def test_four_ranks_are_two_groups(alone, forks, tmp_path):
    for rank, actual in enumerate(run(forks, "groups_of_two", 4, tmp_path, [SHARDED])):
        assert_same(actual, alone(SHARDED, rank, SAMPLED, ranks=4))
