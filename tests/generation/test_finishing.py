"""Rows that have ended are not computed on, and no more of the cache is attended to than a window beyond what is
written: the same tokens all the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from accelerators import ShapePolicy, Support
from accelerators.capture import Graph, checked
from accelerators.testing.stand_in import record
from rlhf.config.schema import SamplingConfig
from rlhf.generation import decode_state
from rlhf.generation.decode_state import plan_windows
from rlhf.generation.kv_cache import WindowedStaticCache
from tests.families.table import BY_NAME
from tests.families.table import build as tiny
from tests.generation.test_decoder import GREEDY, build
from tests.generation.test_decoder import decoder as any_decoder

FAMILIES = ("Llama 3", "GPT-2", "GPT-Neo", "OPT", "BLOOM", "Falcon RW", "Mistral", "Gemma 3", "Qwen3")
WHOLE_ROWS = ("Qwen3-Next", "LFM2")
"""Layers with another state, in which no row can be dropped."""
WHOLE = ("Falcon-H1",)
"""Layers with such a state next to keys and values, which are seen whole."""
LENGTH = 20


def decoder(accelerator, **options):
    """One whose rows may leave: no policy fixes its shapes."""
    return any_decoder(accelerator, **{"shapes": "dynamic"} | options)


def prompts(rows: int = 6, columns: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of different lengths, padded left with 0."""
    ids = torch.randint(3, 60, (rows, columns), generator=torch.Generator().manual_seed(7))
    mask = (torch.arange(columns) >= torch.arange(rows).unsqueeze(1) % 4).long()
    return ids * mask, mask


def family(name: str) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return tiny(BY_NAME[name].configuration(), MODEL_FOR_CAUSAL_LM_MAPPING)


def alone(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """Return the tokens that plain transformers generates for each prompt alone, none of which is an end."""
    completions = []
    for row, shown in zip(ids, mask.bool()):
        prompt = row[shown].unsqueeze(0)
        rest = {"max_new_tokens": LENGTH, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        made = model.generate(prompt, attention_mask=torch.ones_like(prompt), **rest)
        completions.append(made[0, prompt.shape[1] :].tolist())
    return completions


def cut(tokens: list[int], ends: list[int]) -> list[int]:
    """Return the tokens up to the first end, with it."""
    return tokens[: next((count for count, token in enumerate(tokens, 1) if token in ends), len(tokens))]


def different_ends(free: list[list[int]]) -> list[int]:
    """Two tokens at which rows end at as many different places as can be."""

    def places(ends: tuple[int, int]) -> set[int]:
        return {next((place for place, token in enumerate(row) if token in ends), LENGTH) for row in free}

    ends = max(itertools.combinations({token for row in free for token in row}, 2), key=lambda pair: len(places(pair)))
    assert len(places(ends)) > 2
    return list(ends)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Of every decoding step: rows, columns in sight, columns written."""
    steps: list[tuple[int, int, int]] = []
    whole = decode_state.DecodeState._step

    def step(self: Any, width: int) -> None:
        whole(self, width)
        steps.append((self.cache.window.rows, self.cache.window.columns, self.shape[1] + self.step_count))

    monkeypatch.setattr(decode_state.DecodeState, "_step", step)
    return steps


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> int:
    """Windows of few columns, so that tiny rollouts have several."""
    monkeypatch.setattr(decode_state, "WINDOW", 5)
    monkeypatch.setattr(decode_state, "ALIGNED", 1)
    return 5


@pytest.mark.parametrize(
    "name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in (*WHOLE_ROWS, *WHOLE))]
)
def test_tokens_are_those_of_generate_while_rows_leave(accelerator: Any, seen: Any, narrow: int, name: str) -> None:
    model, (ids, mask) = family(name), prompts()
    free = alone(model, ids, mask)
    ends = different_ends(free)
    expected = [cut(tokens, ends) for tokens in free]
    decode = decoder(accelerator, eos=ends, length=LENGTH)
    for _ in range(2):  # the second time in the first one's buffers
        completions = decode.generate(model, ids, mask, GREEDY)
        for row, tokens in enumerate(expected):
            padding = [0] * (LENGTH - len(tokens))
            assert completions.ids[row].tolist() == tokens + padding, f"row {row}"
            assert completions.mask[row].tolist() == [1] * len(tokens) + padding, f"row {row}"
    rows, widths = {step[0] for step in seen}, {step[1] for step in seen}
    assert (len(rows) > 1) == (name in FAMILIES)
    assert (len(widths) > 2) == (name not in WHOLE)


def test_steps_cover_active_rows_and_a_window_of_columns(accelerator: Any, seen: Any, narrow: int) -> None:
    """Every fourth step asks who has ended."""
    model, (ids, mask) = family("Llama 3"), prompts()
    free = alone(model, ids, mask)
    ends = different_ends(free)
    lengths = [len(cut(tokens, ends)) for tokens in free]
    decoder(accelerator, eos=ends, length=LENGTH).generate(model, ids, mask, GREEDY)
    for index, (rows, columns, written) in enumerate(seen):
        done = index + 1
        asked = done - done % 4
        assert rows == sum(length > asked for length in lengths) if asked else rows == 6
        assert written == 9 + done <= columns < written + narrow


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(temperature=0.8, top_k=30)])
def test_samples_are_those_of_a_rollout_whose_rows_all_stay(
    accelerator: Any, seen: Any, narrow: int, monkeypatch: pytest.MonkeyPatch, sampling: SamplingConfig
) -> None:
    """Each row keeps its random numbers when it moves."""
    model, (ids, mask) = build("llama"), prompts(rows=12)
    drawn = []
    for lazy in (False, True):
        monkeypatch.setattr(accelerator, "is_lazy", lambda: lazy)  # noqa: B023 (called in this turn)
        decode = decoder(accelerator, eos=range(1, 8), length=24)
        for _ in range(2):  # on a lazy device, the first takes all steps with all rows in any case
            seen.clear()
            decode.random.manual_seed(5)
            completions = decode.generate(model, ids, mask, sampling)
        drawn.append(completions)
        assert (min(rows for rows, *_ in seen) < 6) == (not lazy)
    leaving, stayed = drawn
    assert torch.equal(leaving.ids, stayed.ids) and torch.equal(leaving.mask, stayed.mask)
    assert len(set(leaving.mask.sum(-1).tolist())) > 4


@pytest.mark.parametrize(("rows", "counts"), [(12, range(1, 13)), (40, range(3, 43, 3))])
def test_rows_leave_in_sixteenths(
    accelerator: Any, seen: Any, monkeypatch: pytest.MonkeyPatch, rows: int, counts: range
) -> None:
    """Otherwise a library would have to prepare its products for every number of rows. Each row moves once at most."""
    moved: list[int] = []
    move = WindowedStaticCache.move
    monkeypatch.setattr(
        WindowedStaticCache, "move", lambda self, *rows: moved.append(len(rows[0])) or move(self, *rows)
    )
    model, (ids, mask) = build("llama"), prompts(rows=rows)
    decode = decoder(accelerator, eos=range(1, 4), length=40)
    decode.random.manual_seed(5)
    completions = decode.generate(model, ids, mask, SamplingConfig())
    assert {step[0] for step in seen} <= {min(count, rows) for count in counts}
    for index, (used, *_) in enumerate(seen):
        asked = index + 1 - (index + 1) % 4
        assert asked == 0 or 0 <= used - int((completions.mask.sum(-1) > asked).sum()) < counts.step
    assert 0 < sum(moved) < rows


@pytest.fixture
def recording(accelerator: Any, monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The accelerator records its steps; here are the recordings."""
    graphs: list[Graph] = []
    monkeypatch.setattr(accelerator.kernels, "capabilities", lambda: {"graph_capture": Support(True, "it does")})
    monkeypatch.setattr(accelerator, "capture", lambda fn, key: graphs.append(Graph(fn, key, record)) or graphs[-1])
    return graphs


def test_each_window_is_recorded_once_in_the_first_rollout(
    accelerator: Any, recording: list[Graph], narrow: int
) -> None:
    """Even if every row ends at once: nothing is recorded or compiled later."""
    model, (ids, mask) = family("Llama 3"), prompts()
    decode = any_decoder(accelerator, eos=range(64), length=LENGTH)
    assert decode.generate(model, ids, mask, GREEDY).mask.sum() == 6
    assert [graph.key for graph in recording] == [f"decode 6 x 9 up to {width}" for width in (13, 18, 23, 28)]
    assert all(graph._replay is not None for graph in recording)
    decode.eos_ids.fill_(-1)  # from here on nothing ends
    assert decode.generate(model, ids, mask, GREEDY).ids.tolist() == alone(model, ids, mask)
    assert len(recording) == 4


def test_a_recorded_rollout_stops_where_all_rows_have_ended(accelerator: Any, recording: list[Graph]) -> None:
    model, (ids, mask) = family("Llama 3"), prompts()
    decode = decoder(accelerator, eos=range(64), length=LENGTH, shapes="bucketed")
    decode.shapes = ShapePolicy("bucketed", first=4)
    assert [decode.generate(model, ids, mask, GREEDY).ids.shape[1] for _ in range(3)] == [20, 4, 4]


def test_recordings_share_the_buffers(accelerator: Any, recording: list[Graph], narrow: int) -> None:
    model, (ids, mask) = build("llama"), prompts()
    decode = decoder(accelerator, length=LENGTH)
    decode.generate(model, ids, mask, GREEDY)
    assert len(recording) == 4
    size = 2 * 2 * 6 * 2 * (9 + 19) * 8 * 4  # keys and values, layers, rows, heads, columns, head size, bytes
    assert size <= decode._states[0].cache.nbytes() < size + 64


@pytest.mark.parametrize("steps", [1, 2, 31, 32, 33, 64, 97, 255, 1000])
@pytest.mark.parametrize("most", [None, 4])
def test_windows_last_two_steps_or_more_and_hold_all(steps: int, most: int | None) -> None:
    """A recording takes a step to warm up and one to record."""
    widths = plan_windows(13, steps, most)
    lasting = [after - before for before, after in zip([13, *widths], [*widths[:-1], 13 + steps])]
    assert widths[-1] - 8 < 13 + steps <= widths[-1] and all(width % 8 == 0 for width in widths)
    assert min(lasting) >= min(steps, 2) and max(lasting) - min(lasting) < 16
    assert len(widths) == (-(-steps // 32) if most is None else min(4, -(-steps // 32)))


@pytest.mark.parametrize("name", ["Llama 3", "GPT-2", "OPT", "BLOOM"])
def test_prompts_are_read_without_a_wait_for_the_device(
    accelerator: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of models with sliding windows, transformers reads the mask."""
    start = decode_state.DecodeState.start
    monkeypatch.setattr(decode_state.DecodeState, "start", lambda self, prompts: checked(start, "start")(self, prompts))
    decoder(accelerator).generate(family(name), *prompts(), GREEDY)


def test_a_completion_of_one_token_takes_no_step(accelerator: Any, seen: Any) -> None:
    model, (ids, mask) = family("Llama 3"), prompts()
    completions = decoder(accelerator, length=1).generate(model, ids, mask, GREEDY)
    assert completions.ids.tolist() == [row[:1] for row in alone(model, ids, mask)] and not seen
