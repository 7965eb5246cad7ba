"""`rlhf compare` reports what plain transformers, counted by hand, reports."""

import gc
import json
import math
import re
import weakref
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from rlhf.config.schema import load_config
from rlhf.reporting.console import console
from rlhf.utils.units import format_number
from tests.evaluation.conftest import printed_json
from tests.helpers import build_tokenizer, llama
from tests.in_process import scalar_llama
from tests.trainers.test_keys import table

KEYS = [key for _, key, _ in table("`rlhf compare`")]
PROMPTS = ["red cow", "please moo", "blue owl go away", "no", "dog woof woof thanks", "green"]
MOST = 8


def save(model: Any, tokenizer: Any, folder: Path, scale: float = 6) -> Path:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)  # likely tokens are likely enough for models to differ
        if hasattr(model, "lm_head"):
            model.lm_head.weight[tokenizer.eos_token_id] *= 3  # some completions end
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three policies, one of them of another vocabulary; and two reward models, one of that vocabulary too."""
    root, tokenizer = tmp_path_factory.mktemp("models"), build_tokenizer()
    other = build_tokenizer()
    other.add_tokens(["<moo moo>"])
    return {
        "a": save(llama(len(tokenizer), seed=1, tie_word_embeddings=False), tokenizer, root / "a"),
        "b": save(llama(len(tokenizer), seed=2, tie_word_embeddings=False), tokenizer, root / "b"),
        "c": save(llama(len(other), seed=3, tie_word_embeddings=False), other, root / "c"),
        "judge": save(scalar_llama(len(tokenizer), seed=4, pad_token_id=0), tokenizer, root / "judge"),
        "stranger": save(scalar_llama(len(other), seed=5, pad_token_id=0), other, root / "stranger"),
    }


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "questions.txt"
    path.write_text("\n".join(PROMPTS) + "\n\n")
    return path


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, questions: Path) -> Run:
    """The command, in this process, on the CPU in float32; four completions at a time."""
    from rlhf.cli.app import app

    monkeypatch.setenv("RLHF_ACCELERATOR", "cpu")

    def run(
        *arguments: object, prompts: object = questions, standard_input: str | None = None, most: int | None = MOST
    ) -> Result:
        more: list[object] = ["--precision", "fp32", "--batch-size", 4]
        more += ["--max-tokens", most] if most else []
        more += ["--prompts", prompts] if prompts else []
        return CliRunner().invoke(app, ["compare", *map(str, [*more, *arguments])], input=standard_input)

    return run


class Plain:
    """A model of plain transformers with its tokenizer, one row at a time."""

    def __init__(self, folder: Path, kind: Any = None) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = (kind or AutoModelForCausalLM).from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def prompt(self, text: str) -> list[int]:
        written = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        ids: list[int] = self.tokenizer(written)["input_ids"]
        return ids

    def greedy(self, text: str) -> list[int]:
        ids = self.prompt(text)
        output = self.model.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=MOST, pad_token_id=self.tokenizer.pad_token_id
        )
        completion: list[int] = output[0, len(ids) :].tolist()
        return completion

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip()

    @torch.no_grad()
    def log_prob(self, text: str, completion: list[int], temperature: float = 1) -> float:
        ids = self.prompt(text)
        logits = self.model(torch.tensor([ids + completion])).logits[0].double() / temperature
        return sum(logits[place].log_softmax(-1)[token].item() for place, token in enumerate(completion, len(ids) - 1))

    @torch.no_grad()
    def score(self, text: str, completion: list[int]) -> float:
        return float(self.model(torch.tensor([self.prompt(text) + completion])).logits[0, 0])


def plain_judge(folder: Path) -> Plain:
    from transformers import AutoModelForSequenceClassification

    return Plain(folder, AutoModelForSequenceClassification)


def test_greedy_numbers_are_those_of_plain_transformers(run: Run, models: dict[str, Path], tmp_path: Path) -> None:
    a, b, judge = Plain(models["a"]), Plain(models["b"]), plain_judge(models["judge"])
    document = printed_json(
        run(models["a"], models["b"], "-R", models["judge"], "--json", "--output", tmp_path / "deep/all.jsonl")
    )
    written = {name: [model.greedy(text) for text in PROMPTS] for name, model in (("a", a), ("b", b))}
    scores = {name: [judge.score(text, ids) for text, ids in zip(PROMPTS, rows)] for name, rows in written.items()}
    assert len({len(ids) for ids in written["a"]}) > 1, "none ends before the others"

    lines = [json.loads(line) for line in (tmp_path / "deep/all.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == PROMPTS
    for place, line in enumerate(lines):
        for name, model in (("a", a), ("b", b)):
            assert line["completions"][str(models[name])] == [model.text(written[name][place])]
            assert line["scores"][str(models[name])] == pytest.approx([scores[name][place]], abs=1e-4)
            cut = written[name][place][-1] != model.tokenizer.eos_token_id
            assert line["truncated"][str(models[name])] == [cut]

    first, second = document["models"]
    for name, numbers in (("a", first), ("b", second)):
        assert numbers["reward"]["mean"] == pytest.approx(fmean(scores[name]), abs=1e-4)
        assert numbers["reward"]["error"] == pytest.approx(stdev(scores[name]) / math.sqrt(6), abs=1e-4)
        assert numbers["length"] == fmean(map(len, written[name]))
        cut = sum(ids[-1] != a.tokenizer.eos_token_id for ids in written[name])
        assert numbers["truncated_share"] == pytest.approx(cut / 6)
        pairs = [pair for ids in written[name] for pair in pairwise(ids)]
        assert numbers["distinct_2"] == len(set(pairs)) / len(pairs)
    wins = sum((mine > theirs) + (mine == theirs) / 2 for mine, theirs in zip(scores["b"], scores["a"]))
    assert second["win_rate"]["mean"] == pytest.approx(wins / 6)
    differences = [mine - theirs for mine, theirs in zip(scores["b"], scores["a"])]
    assert second["reward_difference"]["mean"] == pytest.approx(fmean(differences), abs=1e-4)
    reach = 2.570582 * stdev(differences) / math.sqrt(6)  # Student's, of five degrees
    assert second["reward_difference"]["low"] == pytest.approx(fmean(differences) - reach, abs=1e-4)
    ratios = [b.log_prob(text, ids) - a.log_prob(text, ids) for text, ids in zip(PROMPTS, written["b"])]
    assert second["log_ratio"]["mean"] == pytest.approx(fmean(ratios), abs=1e-3)
    assert second["log_ratio"]["per_token"] == pytest.approx(sum(ratios) / sum(map(len, written["b"])), abs=1e-4)
    assert "kl" not in second and "log_ratio" not in first and "win_rate" not in first
    assert set(second) == set(KEYS) - {"kl", "no_log_ratio"}, "docs/metrics.md says otherwise"


def test_log_ratio_of_samples_at_their_temperature_is_the_kl(
    run: Run, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhf.evaluation import compare as comparing

    comparisons: list[Any] = []
    plainly = comparing.compare_models
    monkeypatch.setattr(
        comparing,
        "compare_models",
        lambda *given, **more: comparisons.append(plainly(*given, **more)) or comparisons[-1],
    )
    document = printed_json(run(models["a"], models["b"], "--temperature", 0.7, "--json"))
    a, b = Plain(models["a"]), Plain(models["b"])
    ratios = [
        b.log_prob(text, ids, 0.7) - a.log_prob(text, ids, 0.7)
        for text, ids in zip(PROMPTS, comparisons[0].columns[1].ids)
    ]
    assert document["models"][1]["kl"]["mean"] == pytest.approx(fmean(ratios), abs=1e-3)
    assert "reward" not in document["models"][1]
    cut = printed_json(run(models["a"], models["b"], "--temperature", 0.7, "--top-p", 0.9, "--json"))
    assert "kl" not in cut["models"][1], "tokens were not drawn from all of the distribution"


def test_best_of_n_is_the_mean_over_all_subsets_of_samples(run: Run, models: dict[str, Path], tmp_path: Path) -> None:
    output = tmp_path / "all.jsonl"
    document = printed_json(
        run(models["a"], models["b"], "-R", models["judge"], "--best-of", "3,1,5", "--json", "--output", output)
    )
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert document["temperature"] == 1 and document["samples"] == 5
    assert [row["best_of"] for row in document["best_of"]] == [1, 3, 5]
    scores = {name: [line["scores"][str(models[name])] for line in lines] for name in "ab"}
    assert len({score for prompt in scores["a"] for score in prompt}) > 20, "samples are the same"
    for row in document["best_of"]:
        assert row["kl_at_most"] == pytest.approx(math.log(row["best_of"]) - 1 + 1 / row["best_of"])
        for name in "ab":
            best = [fmean(map(max, combinations(prompt, row["best_of"]))) for prompt in scores[name]]
            assert row["reward"][str(models[name])]["mean"] == pytest.approx(fmean(best))
            assert row["reward"][str(models[name])]["error"] == pytest.approx(stdev(best) / math.sqrt(6))
    wins = [
        fmean((mine > theirs) + (mine == theirs) / 2 for mine in own for theirs in other)
        for own, other in zip(scores["b"], scores["a"])
    ]
    assert document["models"][1]["win_rate"]["mean"] == pytest.approx(fmean(wins))
    (same_kl,) = document["best_of_at_kl"]
    assert same_kl["kl"] == document["models"][1]["kl"]["mean"]
    number = same_kl["best_of"]
    assert math.log(number) - (number - 1) / number <= same_kl["kl"] < math.log(number + 1) - number / (number + 1)
    assert (same_kl["reward"] is None) == (number > 5)


def test_different_vocabularies_are_compared_by_text(run: Run, models: dict[str, Path], tmp_path: Path) -> None:
    output = tmp_path / "all.jsonl"
    done = run(models["a"], models["c"], "-R", models["stranger"], "--json", "--output", output)
    document, judge = printed_json(done), plain_judge(models["stranger"])
    second = document["models"][1]
    assert second["no_log_ratio"] == f"its vocabulary differs from that of {models['a']}"
    assert "log_ratio" not in second and len(document["notes"]) == 2
    for line in map(json.loads, output.read_text().splitlines()):
        for name, (text,) in line["completions"].items():
            written = judge.tokenizer.apply_chat_template(
                [{"role": "user", "content": line["prompt"]}, {"role": "assistant", "content": text}], tokenize=False
            )
            ids = judge.tokenizer(written)["input_ids"]
            assert ids[-1] == judge.tokenizer.eos_token_id
            (cut,) = line["truncated"][name]
            with torch.no_grad():
                score = float(judge.model(torch.tensor([ids[:-1] if cut else ids])).logits[0, 0])
            assert line["scores"][name] == pytest.approx([score], abs=1e-4)


def test_token_that_only_the_writer_has_is_read_by_no_other(run: Run, models: dict[str, Path], tmp_path: Path) -> None:
    """Embeddings are often longer than the tokenizer's vocabulary, and nothing keeps a model from those tokens."""
    tokenizer = build_tokenizer()
    padded = llama(len(tokenizer) + 2, seed=1, tie_word_embeddings=False)
    with torch.no_grad():
        padded.lm_head.weight[-2:] = torch.tensor([[100.0], [-100.0]]) * padded.lm_head.weight[:1]
    document = printed_json(
        run(models["a"], save(padded, tokenizer, tmp_path / "padded"), "-R", models["judge"], "--json")
    )
    _, second = document["models"]
    assert second["no_log_ratio"] == f"its vocabulary differs from that of {models['a']}"
    assert math.isfinite(second["reward"]["mean"]) and "scored by their text" in document["notes"][0]


def test_one_model_is_held_at_a_time(run: Run, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf.evaluation import compare as comparing

    alive: list[weakref.ref[Any]] = []

    def watched(load: Any) -> Any:
        def loading(*given: Any, **more: Any) -> Any:
            gc.collect()
            assert not any(model() for model in alive), "another model is still held"
            loaded = load(*given, **more)
            alive.append(weakref.ref(loaded.module))
            return loaded

        return loading

    for name in ("load_language_model", "load_reward_model"):
        monkeypatch.setattr(comparing, name, watched(getattr(comparing, name)))
    printed_json(run(models["a"], models["b"], "-R", models["judge"], "--limit", 1, "--json"))
    assert len(alive) == 3


def test_prompt_that_a_model_cannot_hold_is_left_out_for_all(run: Run, models: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text("moo\n" + "moo " * 60 + "\nwoof\n")  # 122 tokens
    done = run(models["a"], models["b"], "--json", prompts=path)
    assert printed_json(done)["prompts"] == 2
    reason = f"{models['a']}: the prompt and --max-tokens 8 exceed its 128 tokens"
    assert printed_json(done)["left_out"] == {reason: 1}
    assert f"note: 1 prompt left out: {reason} (first: {path}:2)" in done.stderr


def test_standard_input_has_prompts_and_tsv_has_all_numbers(run: Run, models: dict[str, Path]) -> None:
    arguments = (models["a"], models["b"], "-R", models["judge"], "--best-of", 2)
    done = run(*arguments, "--tsv", prompts="-", standard_input="moo\nwoof\n")
    assert done.exit_code == 0, done.exception
    columns, *lines = [line.split("\t") for line in done.stdout.splitlines()]
    first, second = (dict(zip(columns, line, strict=True)) for line in lines)
    assert [first["model"], second["model"]] == [str(models["a"]), str(models["b"])]
    assert {"reward.mean", "win_rate.low", "kl.per_token", "distinct_3", "best_of_2.mean"} <= set(columns)
    assert first["win_rate.mean"] == "" and 0 <= float(second["win_rate.mean"]) <= 1
    assert "reads what it wrote" in done.stderr


def test_pipe_gets_the_table_and_the_completions(run: Run, models: dict[str, Path]) -> None:
    shown = run(models["a"], models["b"], "-R", models["judge"], prompts="-", standard_input="moo\nwoof\n").stdout
    assert [line.split() for line in shown.splitlines() if line.startswith("prompt")] == [
        ["prompt", "moo"],
        ["prompt", "woof"],
    ]
    assert "win rate" in shown and "┃" in shown and "\t" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a"], "a: expected two or more models, got one"),
        (["a", "a"], "a: is the same model as {a}"),
        (["a", "b", "--best-of", "4"], "--best-of: no reward model"),
        (["a", "b", "-R", "judge", "--best-of", "4,x"], "--best-of 4,x: 'x'"),
        (["a", "b", "-R", "judge", "--best-of", "2", "--temperature", "0"], "--best-of: all samples are equal"),
        (["a", "judge"], "judge: is a reward model"),
        (["a", "b", "-R", "a"], "a: its weights lack score.weight"),
        (["a", "b", "--output", "b"], "b: is a folder"),
        (["a", "b", "--output", "/dev/null"], "/dev/null: is a device"),
        (["a", "b", "--max-tokens", "128"], "no prompt fits all models: {a}: "),
    ],
)
def test_mistake_is_one_line(run: Run, models: dict[str, Path], arguments: list[str], message: str) -> None:
    """A mistake about a model is an error before the first one writes."""
    from rlhf.errors import RLHFError

    places = {name: str(path) for name, path in models.items()}
    done = run(*(places.get(argument, argument) for argument in arguments))
    assert isinstance(done.exception, RLHFError) and done.exception.exit_code == 2
    assert message.format(**places) in str(done.exception) and "\n" not in str(done.exception)
    assert "writes" not in done.stderr


def test_numbers_are_shown_even_if_the_file_cannot_be_written(
    run: Run, models: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / ("x" * 250)  # no room is left for what an unfinished file has behind its name
    done = run(models["a"], models["b"], "--limit", 1, "--json", "--output", path)
    assert str(done.exception).endswith("x: cannot be written (File name too long); choose another --output")
    assert json.loads(done.stdout)["prompts"] == 1 and not list(tmp_path.iterdir())


def test_ctrl_c_is_one_line(run: Run, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf.evaluation import completions
    from rlhf.launchers.exit_status import Interrupted

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(completions, "generate_completions", interrupted)
    assert isinstance(run(models["a"], models["b"]).exception, Interrupted)


def test_without_a_run_prompts_must_be_named(run: Run, models: dict[str, Path]) -> None:
    done = run(models["a"], models["b"], prompts=None)
    assert "--prompts: missing, and none of the models is of a run" in str(done.exception)


def test_run_and_its_stages_are_compared_on_held_out_prompts(finished_run: Path, run: Run) -> None:
    held_out = [sample["prompt"] for sample in json.loads((finished_run / "ppo" / "stage.json").read_text())["samples"]]
    output = finished_run.parent / "all.jsonl"
    document = printed_json(
        run(finished_run / "sft", finished_run, "-R", finished_run, "--json", "--output", output, prompts=None)
    )
    assert [model["model"] for model in document["models"]] == [str(finished_run / "sft"), str(finished_run)]
    asked = [json.loads(line)["prompt"] for line in output.read_text().splitlines()]
    assert asked[: len(held_out)] == held_out and len(asked) == document["prompts"] > len(held_out)
    judge, policy = plain_judge(finished_run / "reward/model"), Plain(finished_run / "ppo/model")
    scores = [judge.score(text, policy.greedy(text)) for text in asked]
    assert document["models"][1]["reward"]["mean"] == pytest.approx(fmean(scores), abs=1e-4)
    assert run(finished_run / "sft", finished_run, "--limit", 3, "--json", prompts="heldout").exit_code == 0


def test_completions_are_as_long_as_in_the_recipe_of_the_run(
    finished_run: Path, models: dict[str, Path], run: Run
) -> None:
    longest = load_config(finished_run / "recipe.yaml").data.max_completion_length
    small = printed_json(run(models["a"], finished_run, "--limit", 1, "--json", most=None))
    assert small["max_tokens"] == longest != 256
    unfit = str(run(models["a"], models["b"], most=None).exception)
    assert "the prompt and --max-tokens 256 exceed its" in unfit  # of no run: a recipe's default


def test_terminal_shows_completions_side_by_side_and_tables(
    run: Run, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models["a"].parent)
    for name, value in {"FORCE_COLOR": "1", "TERM": "dumb", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(console, "_force_terminal", console._force_terminal)  # rich 13 keeps FORCE_COLOR there
    done = run("a", "b", "-R", "judge", "--best-of", "1,2", "--show", 2, "--output", models["a"].parent / "all.jsonl")
    assert done.exit_code == 0, done.exception
    shown = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    lines = [json.loads(line) for line in (models["a"].parent / "all.jsonl").read_text().splitlines()]
    for place, line in enumerate(lines):
        scores = [rf"{name} +{re.escape(format_number(line['scores'][name][0]))} " for name in "ab"]
        block = rf"prompt +{line['prompt']} *\n{scores[0]}.*\n{scores[1]}"
        assert bool(re.search(block, shown)) == (place < 2)
    assert "6 prompts, temperature 1, 2 samples of each, at most 8 tokens." in shown
    for label in ("against a", "win rate", "KL, nats", "KL per token", "distinct 3", "repeated", "KL at most"):
        assert f"┃ {label} " in shown or f"│ {label} " in shown or f" {label} ┃" in shown, label
    assert re.search(r"win rate +│ +│ [0-9.]+% \[[0-9.]+%, [0-9.]+%\]", shown)
    assert re.search(r"│ 2 │ 0\.1931 +│ \S+ ± \S+ +│ \S+ ± \S+ +│", shown)
    assert re.search(r"^b scores .* nats; the best of \S+ samples of a, at a KL of at most .* nats, ", shown, re.M)
