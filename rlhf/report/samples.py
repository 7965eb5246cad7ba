"""The samples of a report: the same prompts through a run, and rollouts token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from rlhf.diagnosis.records import RunRecords
from rlhf.utils.units import format_number

_COMPLETIONS_SHOWN, _CHARACTERS = 60, 700  # of a page, and of each text
_ROLLOUTS, _TOKENS = 12, 400

T = TypeVar("T")


class Samples(NamedTuple):
    """The samples of one run.

    Attributes:
        completions: the same held-out prompts at up to three evaluations of PPO; None if there are no two.
        rollouts: sequences of rollouts, with numbers for each token.
        texts: tables of completions through SFT and DPO.
    """

    completions: dict[str, Any] | None
    rollouts: list[dict[str, Any]]
    texts: list[dict[str, Any]]

    def __bool__(self) -> bool:
        return any(self)


def read_samples(run: RunRecords) -> Samples:
    """Return the samples of a run."""
    return Samples(_compare_completions(run), _select_rollouts(run), _list_texts(run))


def _pick(items: Sequence[T]) -> list[T]:
    """Return the first, a middle and the last item; fewer if there are fewer."""
    return [items[place] for place in sorted({0, len(items) // 2, len(items) - 1})]


def _compare_completions(run: RunRecords) -> dict[str, Any] | None:
    """Return the same held-out prompts at up to three evaluations of PPO, those whose score rose most first."""
    stage = run.stage("ppo")
    if not stage or len(stage.heldout) < 2:
        return None
    steps = _pick(sorted(stage.heldout))
    rows = []
    for number in range(min(len(stage.heldout[step]) for step in steps)):
        states = [stage.heldout[step][number] for step in steps]
        if not all(isinstance(state.get(key), int | float) for state in states for key in ("reward", "kl", "tokens")):
            continue  # a number was not finite
        rows.append(
            {
                "number": number,
                "prompt": _cut(states[0]["prompt"]),
                "completions": [_cut(state["completion"]) for state in states],
                "reward": [round(state["reward"], 2) for state in states],
                "change": round(states[-1]["reward"] - states[0]["reward"], 2),
                "kl": round(states[-1]["kl"], 2),
                "tokens": int(states[-1]["tokens"]),
                "approved": states[-1].get("approved"),
            }
        )
    by_change = sorted(rows, key=lambda row: -row["change"])
    few = _COMPLETIONS_SHOWN // 3
    chosen = {row["number"]: row for row in [*by_change[:few], *by_change[-few:], *rows[:few]]}
    if not chosen:
        return None
    shown = sorted(chosen.values(), key=lambda row: -row["change"])
    return {"steps": steps, "rows": shown, "total": len(rows), "judged": shown[0]["approved"] is not None}


def _list_texts(run: RunRecords) -> list[dict[str, Any]]:
    """Return completions of the same prompts through SFT and DPO, whose evaluations record no more."""
    tables = []
    for stage in run.stages:
        if stage.name == "ppo":
            continue
        by_tag: dict[str, list[tuple[int, str]]] = {}
        for text in stage.completions:
            by_tag.setdefault(text.tag, []).append((text.step, text.text))
        rows = []
        for entries in by_tag.values():
            chosen = _pick(entries)
            prompt, _, _ = chosen[0][1].partition("\n")
            rows.append(
                {"prompt": _cut(prompt), "texts": [(step, _cut(text.partition("\n")[2])) for step, text in chosen]}
            )
        if rows:
            tables.append({"title": stage.title, "rows": rows})
    return tables


def _select_rollouts(run: RunRecords) -> list[dict[str, Any]]:
    """Return sequences of rollouts with numbers for each token, evenly spaced over the run."""
    stage = run.stage("ppo")
    samples = [sample for sample in stage.samples if sample.get("pieces")] if stage else []
    count = min(_ROLLOUTS, len(samples))
    chosen = [samples[place * len(samples) // count] for place in range(count)]
    result = []
    for sample in chosen:
        numbers = {
            name: [0.0 if value is None else round(value, 3) for value in values[:_TOKENS]]
            for name, values in sample["by_token"].items()
            if any(values)
        }
        result.append(
            {
                **{key: sample[key] for key in ("step", "tokens")},
                "prompt": _cut(sample["prompt"]),
                "score": _format(sample["score"]),
                "kl": _format(sample["kl"]),
                "pieces": sample["pieces"][:_TOKENS],
                "numbers": numbers,
            }
        )
    return result


def _format(value: float | None) -> str:
    return "not finite" if value is None else format_number(value)


def _cut(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}…"
