"""`rlhf evaluate --metric` measures the completions that plain transformers generates, and counts by hand agree."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch

from rlhf.data.formats import ColumnMapping
from rlhf.data.records import Row, parse_record
from rlhf.errors import RLHFError
from rlhf.evaluation import metrics
from rlhf.evaluation.metrics import Metrics, compute_bleu, compute_rouge
from tests.evaluation.conftest import Evaluate, documented_keys, lines, printed_json
from tests.helpers import build_tokenizer, llama

PAIRS = [
    ("red cow", "moo moo"),
    ("please moo", "go"),
    ("blue owl go away", "no thanks"),
    ("no", "hoot"),
    ("dog", "woof"),
]
ROWS = [
    {"prompt": prompt, "chosen": good, "rejected": "red", "weight": place} for place, (prompt, good) in enumerate(PAIRS)
]
MOST = 6
T_4 = 2.776445  # Student's two-sided 95 % quantile for 4 degrees of freedom, of a table
FUNCTIONS = """
def words(prompt, completion, row):
    return 2 * len(completion.split())

def reference(prompt, completion, row):
    assert row["chosen"] == row["response"] and row["messages"][0]["content"] == row["prompt"] == prompt
    return 10 * row["weight"] + len(row["response"])

def broken(prompt, completion, row):
    return None
"""


def asked(prompt: str) -> Row:
    return parse_record({"prompt": prompt}, ColumnMapping(prompt="prompt"), "rows.jsonl:1")


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two language models that write differently."""
    folders, tokenizer = [], build_tokenizer()
    for seed in (1, 2):
        model = llama(len(tokenizer), seed=seed, tie_word_embeddings=False)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(6)
            model.lm_head.weight[tokenizer.eos_token_id] *= 3
        folders.append(tmp_path_factory.mktemp("writers") / f"writer-{seed}")
        model.save_pretrained(folders[-1])
        tokenizer.save_pretrained(folders[-1])
    return folders


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    (tmp_path / "grade.py").write_text(FUNCTIONS)
    return tmp_path / "grade.py"


def write_plainly(folder: Path, prompt: str) -> list[int]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    turns = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    output = model.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=MOST, pad_token_id=tokenizer.pad_token_id
    )
    completion: list[int] = output[0, len(ids) :].tolist()
    return completion


def test_metric_is_the_mean_over_completions_of_transformers(
    evaluate: Evaluate, writers: list[Path], functions: Path, tokenizer: Any, tmp_path: Path
) -> None:
    file = lines(tmp_path / "rows.jsonl", ROWS)
    names = [f"{functions}:words", f"{functions}:reference"]
    options = ["--prompts", file, "--max-tokens", MOST, "--batch-size", 2, "--json", "--rows"]
    document = printed_json(evaluate(*writers, "--metric", names[0], "--metric", names[1], *options))
    assert (document["kind"], document["source"]) == ("metrics", str(file))
    for folder, numbers in zip(writers, document["models"], strict=True):
        assert numbers.keys() == documented_keys("metrics")
        written = [write_plainly(folder, prompt) for prompt, _ in PAIRS]
        texts = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in written]
        counts = [2 * len(text.split()) for text in texts]
        assert [row["completion"] for row in numbers["each"]] == texts
        assert [row["metrics"][names[0]] for row in numbers["each"]] == counts
        words = numbers["metrics"][names[0]]
        assert words["value"] == pytest.approx(fmean(counts))
        reach = T_4 * stdev(counts) / math.sqrt(5)
        assert [words["low"], words["high"]] == pytest.approx([fmean(counts) - reach, fmean(counts) + reach])
        assert numbers["metrics"][names[1]]["value"] == pytest.approx(20 + fmean(len(good) for _, good in PAIRS))
        assert numbers["length"] == fmean(map(len, written)) and numbers["prompts"] == 5
        cut = fmean(ids[-1] != tokenizer.eos_token_id for ids in written)
        assert numbers["truncated_share"] == pytest.approx(cut)
    first, second = (model["metrics"][names[0]]["value"] for model in document["models"])
    assert first != second, "both models write alike"


def test_table_of_metrics_as_tsv(evaluate: Evaluate, writers: list[Path], functions: Path, tmp_path: Path) -> None:
    file, name = lines(tmp_path / "rows.jsonl", ROWS[:3]), f"{functions}:reference"
    done = evaluate(writers[0], "--metric", name, "--prompts", file, "--max-tokens", 3, "--tsv")
    assert done.exit_code == 0, done.exception
    table = [line.split("\t") for line in done.stdout.splitlines()]
    lengths = [7, 12, 29]
    reach = 4.302653 * stdev(lengths) / math.sqrt(3)
    assert table[:2] == [["metrics", str(writers[0])], ["prompts", "3"]]
    assert table[2] == [name, "16"] and table[3][0] == "95% interval"
    assert table[3][1] == f"{16 - reach:.4f} to {16 + reach:.4f}"


@pytest.mark.parametrize(("right", "low", "high"), [(13, 0.7719, 1.0), (2, 0.0433, 0.4224), (0, 0.0, 0.2281)])
def test_interval_of_a_share_is_wilsons(right: int, low: float, high: float) -> None:
    """Bounds for 13 trials, of a table."""
    result = metrics._average([1.0] * right + [0.0] * (13 - right))
    assert (result.value, result.low, result.high) == pytest.approx((right / 13, low, high), abs=1e-4)


def test_heldout_prompts_are_those_of_the_runs_recipe(
    evaluate: Evaluate, finished_run: Path, functions: Path, data_file: Path
) -> None:
    """A row brings the columns of its source."""
    functions.write_text("def number(prompt, completion, row):\n    return int(row['prompt'].split()[-1])\n")
    done = evaluate(finished_run / "sft", "--metric", f"{functions}:number", "--limit", 7, "--json", "--rows")
    (numbers,) = printed_json(done)["models"]
    rows = [json.loads(line) for line in data_file.read_text().splitlines()]
    assert numbers["prompts"] == 7 == len({row["source"] for row in numbers["each"]})
    for row in numbers["each"]:
        number = int(row["source"].rpartition(":")[2]) - 1
        assert row["metrics"][f"{functions}:number"] == number and row["prompt"] == rows[number]["prompt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--metric", "rougeX"], r"--metric: expected module:function, .*, got 'rougeX'; write one of these, or bleu"),
        (["--metric", "absent.py:f"], r"--metric: .*absent\.py: no such file; check its path"),
        (["--metric", "no_such:f"], r"--metric: no_such:f: no module no_such; install it"),
        (["--metric", "GRADE:absent"], r"has no absent; check the name"),
        (["--metric", "GRADE:words", "--metric", "GRADE:words"], r"grade.py:words: is given twice; give it once"),
        (["--metric", "plugin:absent"], r"--metric: plugin:absent: no plugin offers absent; use one of \(none\)"),
        (["--metric", "GRADE:broken"], r"metric .*grade.py:broken: must return a finite number, got None .*for the "
         r"prompt 'red cow' with the completion .*rows.jsonl:1\); fix the function, then repeat this command$"),
        (["--limit", "3"], "--limit: needs --metric; give one, or remove --limit"),
        (["--metric", "GRADE:words", "--text", "ROWS"], "--text and --metric: one thing is measured at a time"),
    ],
)  # fmt: skip
def test_mistake_in_a_metric_is_one_line(
    evaluate: Evaluate, writers: list[Path], functions: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    file = lines(tmp_path / "rows.jsonl", ROWS)
    given = [word.replace("GRADE", str(functions)).replace("ROWS", str(file)) for word in arguments]
    if "--metric" in given and "--text" not in given:
        given += ["--prompts", str(file), "--max-tokens", "2"]
    done = evaluate(writers[0], *given)
    assert isinstance(done.exception, RLHFError) and "\n" not in str(done.exception)
    with pytest.raises(RLHFError, match=message):
        raise done.exception


def test_metric_that_hangs_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef wait(prompt, completion, row):\n    time.sleep(60)\n")
    metrics = Metrics([f"{tmp_path}/slow.py:wait"], 2.0)
    with pytest.raises(RLHFError, match=r"wait: took more than 2 s \(--metric-timeout\); for the prompt 'p'"):
        metrics.measure([asked("p")], ["c"], batch_size=8, done=lambda rows: None)


def test_plugin_offers_metrics_in_its_own_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name among a plugin's reward functions is not a metric."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "measures.py").write_text(
        "from rlhf.rewards.hookspecs import hookimpl\n"
        "@hookimpl\ndef rlhf_metrics():\n    return {'size': 'measures:size'}\n"
        "@hookimpl\ndef rlhf_reward_functions():\n    return {'reward': 'measures:size'}\n"
        "def size(prompt, completion, row):\n    return len(completion)\n"
    )
    about = tmp_path / "measures-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: measures\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[rlhf.metrics]\nmeasures = measures\n")
    rows, completions = [asked("p"), asked("q")], ["abc", "abcde"]
    result = Metrics(["plugin:size"], 20).measure(rows, completions, batch_size=1, done=lambda rows: None)
    assert result["plugin:size"].values == [3, 5]
    with pytest.raises(RLHFError, match="plugin:reward: no plugin offers reward; use one of size"):
        Metrics(["plugin:reward"], 20)


@pytest.mark.parametrize(("name", "package"), [("bleu", "sacrebleu"), ("rougeL", "rouge_score")])
def test_missing_package_says_how_to_install_it(
    evaluate: Evaluate, writers: list[Path], monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    assert str(evaluate(writers[0], "--metric", name).exception) == (
        f"--metric {name}: needs the package {package.replace('_', '-')}, which is not installed; run "
        "python -m pip install sacrebleu rouge-score (the extra `metrics`)"
    )


TEXTS = ["the cat sat on the mat", "a dog", "", "she reads the book in the garden today", "no", "it rains a lot here"]
REFERENCES = ["the cat sat on a mat", "the dog", "nothing", "she reads a book in the garden", "no", "it rained here"]


def test_bleu_is_that_of_sacrebleu() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    result = compute_bleu(TEXTS, REFERENCES)
    corpus = sacrebleu.metrics.BLEU().corpus_score(TEXTS, [REFERENCES], n_bootstrap=1000)
    assert result.value == pytest.approx(corpus.score) and 10 < result.value < 90
    assert result.values == [
        pytest.approx(sacrebleu.sentence_bleu(text, [reference]).score) for text, reference in zip(TEXTS, REFERENCES)
    ]
    assert result.low is not None and result.high is not None
    assert result.low < result.value < result.high
    assert (result.high - result.low) / 2 == pytest.approx(corpus._ci, rel=0.1)
    assert compute_bleu(TEXTS[:1], REFERENCES[:1])[1:3] == (None, None)


@pytest.mark.parametrize("name", ["rouge1", "rouge2", "rougeL", "rougeLsum"])
def test_rouge_is_that_of_rouge_score(name: str) -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer([name])
    result = compute_rouge(name, TEXTS, REFERENCES)
    expected = [scorer.score(reference, text)[name].fmeasure for text, reference in zip(TEXTS, REFERENCES)]
    assert result.values == expected and result.value == pytest.approx(fmean(expected)) and 0 < result.value < 1


def test_rouge_l_of_a_sentence_is_the_one_by_hand() -> None:
    pytest.importorskip("rouge_score")
    # The longest common subsequence has 5 of 6 words of both: precision = recall = F = 5 / 6.
    assert compute_rouge("rougeL", TEXTS[:1], REFERENCES[:1]).value == pytest.approx(5 / 6)


def test_rows_without_a_reply_are_left_out_of_bleu(evaluate: Evaluate, writers: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu")
    file = lines(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "owl"}])
    options = ["--metric", "bleu", "--max-tokens", 4, "--json"]
    (numbers,) = printed_json(evaluate(writers[0], "--prompts", file, *options))["models"]
    assert numbers["prompts"] == 5 and numbers["left_out"] == {"no reply to compare with": 1}
    (tmp_path / "prompts.txt").write_text("owl\ncow\n")
    done = evaluate(writers[0], "--prompts", tmp_path / "prompts.txt", *options)
    assert "--metric bleu: compares with the replies of the data, and " in str(done.exception)
