"""The page: complete without scripts and network, small, and safe whatever models and data contain."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rlhf.diagnosis.checks import find_validated_scores
from rlhf.diagnosis.verdict import examine_run, to_document
from rlhf.report.contents import cost_tables, question_sections
from rlhf.report.origin import changed_settings
from rlhf.report.page import render_report
from tests.diagnosis.records import write_run
from tests.report.runs import bad_run


def test_page_of_a_long_run_is_below_1_megabyte(long_run: Any) -> None:
    page = render_report([long_run])
    assert 200_000 < len(page.encode()) < 1_000_000


def test_reward_against_kl_joins_numbers_of_the_same_step(tmp_path: Path) -> None:
    """The KL of step 1 was not finite, so it has no record."""
    numbers = {"heldout_kl": [0.0, 2.0, 3.0], "heldout_reward": [0.5, 7.0, 1.0, 2.0]}
    run = write_run(tmp_path / "run", {"ppo": numbers}, steps={"heldout_kl": [0, 2, 3]})
    (cheating,) = (section for section in question_sections([examine_run(run)]) if section.key == "cheating")
    (figure,) = (figure for figure in cheating.figures if figure["title"] == "reward against KL")
    titles = re.findall(r"<title>([^<]*step [^<]*)</title>", figure["svg"])
    assert [re.findall(r"[-\d.]+$", title)[0] for title in titles] == ["0.5", "1", "2"]


@pytest.mark.parametrize("functions", [False, True])
def test_scores_are_drawn_next_to_those_of_validation_if_both_are_of_one_model(tmp_path: Path, functions: bool) -> None:
    """Rewards are three times the scores, as `ppo.reward_weight` says; a function has another scale."""
    pairs = [{"chosen": 1.0, "rejected": -1.0, "prompt": "p"}] * 4
    rows = [{"prompt": "p", "completion": "c", "reward": 3.0}] * 4
    ppo: dict[str, Any] = {"reward_weight": 3.0} | ({"reward_functions": ["plugin:length"]} if functions else {})
    run = write_run(
        tmp_path / "run",
        {"reward": {"heldout_accuracy": [0.5, 1.0]}, "ppo": {"heldout_reward": [1.0, 3.0]}},
        heldout={"reward": {0: pairs, 1: pairs}, "ppo": {0: rows, 1: rows}},
        settings={"ppo": ppo},
    )
    assert find_validated_scores(run) == ([] if functions else [3.0, -3.0] * 4)
    figures = [figure["title"] for section in question_sections([examine_run(run)]) for figure in section.figures]
    assert ("scores" in figures) is not functions


def test_page_refers_to_nothing_outside_of_itself(long_run: Any) -> None:
    page = render_report([long_run])
    names = ("src", "href", "action", "srcset", "data")
    used = [attributes[name] or "" for _, attributes in Elements(page).tags for name in names if name in attributes]
    assert used and [target for target in used if not target.startswith(("#", "data:"))] == []
    assert "@import" not in page and "url(" not in page.partition("<body>")[0]
    assert "default-src 'none'" in page, "and the browser would refuse it"


class Elements(HTMLParser):
    """Collects a page's elements and the texts outside of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else ""

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.texts.append(data)


def test_texts_of_models_data_and_users_are_shown_and_never_run(tmp_path: Path) -> None:
    clean = Elements(render_report([examine_run(write_run(tmp_path / "clean", {"ppo": {"reward": [0.0, 1.0]}}))]))
    page = render_report([bad_run(tmp_path)])
    elements = Elements(page)
    assert {tag for tag, _ in elements.tags} & {"img", "iframe", "object"} == set()
    assert [tag for tag, _ in elements.tags].count("script") == [tag for tag, _ in clean.tags].count("script")
    assert not [name for _, attributes in elements.tags for name in attributes if name.startswith("on")]
    assert "{{ 7 * 7 }}" in "".join(elements.texts) and "".join(elements.texts).count("onerror=alert(1)") > 10
    island = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    assert island["charts"]


def test_data_of_the_page_cannot_end_its_script(tmp_path: Path) -> None:
    """Labels of curves have the names of runs."""
    numbers = {"ppo": {"reward": [0.0, 1.0]}}
    runs = [write_run(tmp_path / name, numbers) for name in ("<!--<script>", "plain")]
    page = render_report([examine_run(run, number) for number, run in enumerate(runs)])
    island = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert island and "<" not in island[1] and "<!--<script>" in json.dumps(json.loads(island[1]))


def test_page_says_all_without_scripts(long_run: Any) -> None:
    page = re.sub(r"<script.*?</script>", "", render_report([long_run]), flags=re.DOTALL)
    assert page.count("<svg") > 15 and "Is it cheating?" in page and "Question 0" in page
    charts = re.findall(r'data-chart="([^"]+)"', page)
    assert charts and all(f'data-chart="{key}"><svg' in page for key in charts)


def test_peak_within_what_the_runtime_may_take_is_as_planned(tmp_path: Path) -> None:
    """Libraries keep workspaces: on an H200, 96 MiB that no model explains."""
    for number, (peak, reserve, expected) in enumerate(
        [
            (224, 512, "126 MiB, plus 512 MiB for the device's runtime"),
            (100, 512, "126 MiB, plus 512 MiB for the device's runtime (-21%)"),
            (957, 512, "126 MiB, plus 512 MiB for the device's runtime (+50%)"),
            (189, 0, "126 MiB (+50%)"),
        ]
    ):
        summary = {"stage": "ppo", "title": "PPO", "peak_memory": peak << 20, "planned_memory": 126 << 20}
        summary |= {"planned_reserve": reserve << 20} if reserve else {}
        run = write_run(tmp_path / str(number), {"ppo": {"reward": [0.0]}}, summaries={"ppo": summary})
        (cost,) = cost_tables([examine_run(run)])
        assert ("planned", expected) in cost.rows


def test_several_runs_are_compared_with_what_differs(tmp_path: Path) -> None:
    runs = [
        write_run(
            tmp_path / name,
            {"ppo": {"reward": [0.0, reward], "heldout_reward": [0.0, reward]}},
            settings={"ppo": {"kl_coef": kl_coef}},
        )
        for name, reward, kl_coef in (("careful", 1.25, 0.2), ("bold", 3.75, 0.05))
    ]
    page = render_report([examine_run(run, number) for number, run in enumerate(runs)])
    table = re.search(r"Settings that differ</h3>.*?</table>", page, re.DOTALL)
    assert table and "ppo.kl_coef" in table[0] and ">0.2<" in table[0] and ">0.05<" in table[0]
    assert table[0].count("<code>") == 1, "only that one differs; the folder does not count"
    assert ">1.25<" in page and ">3.75<" in page
    kept = write_run(
        tmp_path / "kept",
        {"ppo": {"heldout_reward": [0.0, 8.5, 2.0]}},
        summaries={"ppo": {"stage": "ppo", "title": "PPO", "kept": {"step": 1}}},
    )
    page_of_kept = render_report([examine_run(run, number) for number, run in enumerate([*runs, kept])])
    assert ">8.5<" in page_of_kept, "of the model that the run keeps"


def test_parts_of_the_reward_are_drawn_by_their_names(tmp_path: Path) -> None:
    numbers = {"reward_model": [0.0, 1.0], "reward/length": [2.0, 3.0], "heldout_reward/length": [0.0, 1.0, 4.0]}
    page = render_report([examine_run(write_run(tmp_path / "run", {"ppo": numbers}))])
    island = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    labels = [series["label"] for series in island["charts"]["ppo-reward-parts"]["series"]]
    assert labels == ["reward model", "reward/length", "held-out reward/length"]


@pytest.mark.parametrize(
    ("heldout", "labels"),
    [
        ([0.0, 1.0, 3.0], {"a, held-out": [0, 1, 3], "b, held-out": [0, 1, 3]}),
        ([0.0, 3.0], {"a": [None, 0, 9], "b": [None, 0, 9]}),
    ],
    ids=["evaluated in training", "one of them before and after training only"],
)
def test_several_runs_have_one_curve_each(tmp_path: Path, heldout: list[float], labels: dict[str, Any]) -> None:
    curves = {"reward": [0.0, 9.0], "heldout_reward": [0.0, 1.0, 3.0]}
    runs = [
        write_run(tmp_path / "a", {"ppo": curves}),
        write_run(tmp_path / "b", {"ppo": curves | {"heldout_reward": heldout}}),
    ]
    page = render_report([examine_run(run, number) for number, run in enumerate(runs)])
    island = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    series = island["charts"]["ppo-reward"]["series"]
    assert {one["label"]: one["values"] for one in series} == {
        label: [value for value in values if value is not None] for label, values in labels.items()
    }


def test_only_settings_of_the_stages_that_ran_are_listed(tmp_path: Path) -> None:
    settings = {"sft": {"epochs": 3}, "ppo": {"kl_coef": 0.3}, "seed": 4}
    run = write_run(tmp_path / "run", {"ppo": {"reward": [0.0, 1.0]}}, settings=settings)
    changed = {key: (value, default) for key, value, default in changed_settings(run.config, ["ppo"])}
    assert changed == {"seed": ("4", "0"), "ppo.kl_coef": ("0.3", "0.1")}


def test_document_has_the_verdict_and_each_finding(tmp_path: Path) -> None:
    numbers = {"learning_rate": [0.0, 0.0], "grad_norm": [1.0, 1.0]}
    document = to_document(examine_run(write_run(tmp_path / "run", {"sft": numbers})))
    assert document["state"] == document["stages"][0]["state"] == "look here"
    found = {finding["name"]: finding for finding in document["stages"][0]["findings"]}
    assert found["learning rate"]["state"] == "look here" and "sft.optimizer" in found["learning rate"]["remedy"]
    assert found["no gradient"]["state"] == "fine"
    json.dumps(document, allow_nan=False)
