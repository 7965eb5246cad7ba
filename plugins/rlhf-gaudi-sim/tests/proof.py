"""What the proof runs, and the checks it makes: a recipe of very different lengths, and what its runs left behind.

Every check takes a finished run and raises AssertionError; `test_stages.py` shows that each of them can.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gaudi_sim.doctor import events_between, numeric_records

STAGES = ("sft", "reward", "ppo")
STEPS = 5
BATCH = 4
# The fifth batch of an epoch has two rows, in PPO two of the next epoch too; an evaluation ends with two.
ROWS, HELD_OUT = 18, 6
WORDS = 24
LONGEST = 24
EOS, PAD, WORD = 1, 0, 2  # ids: the first word is 2


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, and the simulation's report, where there is one."""

    folder: Path
    report: dict[str, Any]

    def records(self, stage: str) -> list[dict[str, Any]]:
        lines = (self.folder / stage / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def steps(self, stage: str) -> list[dict[str, Any]]:
        """The records of a stage's training steps."""
        return [record for record in self.records(stage) if "learning_rate" in record]

    def late(self, stage: str, warm_up: int, *, evaluation: bool = True) -> list[dict[str, Any]]:
        """Events of a stage after its first `warm_up` steps, with the evaluation at its end or without."""
        steps, records = self.steps(stage), numeric_records(self.records(stage))
        return events_between(self.report["events"], steps[warm_up - 1], (records if evaluation else steps)[-1])


def compiled_lines(run: Run, stage: str | None = None) -> list[str]:
    """The line of each graph that was compiled, by the end of the last step of a stage if one is named."""
    events = [event for event in run.report["events"] if event["kind"] == "compilation"]
    if stage:
        events = events_between(events, {"time": 0}, run.steps(stage)[-1])
    return [event["line"] for event in events]


def write_recipe(folder: Path) -> Path:
    """A model, data of very different lengths and a recipe; returns the recipe's file.

    The model continues the alphabet: after w0 it says w1, after w23 it ends. That is so much likelier than anything
    else that roundings do not change what it says, so that PPO's numbers can be compared; and a prompt's last word
    decides how long the completion is: after w23 it is empty.
    """
    _write_model(folder / "model")
    lengths = [1 + 7 * row % LONGEST for row in range(ROWS + HELD_OUT)]
    rows = []
    for row, length in enumerate(lengths):
        last = _last_word(row)
        rows.append(
            {
                "prompt": _words(last - length + 1, length),
                "response": _words(last + 1, lengths[row - 1]),
                "chosen": _words(last + 1, lengths[row - 2]),
                "rejected": _words(last + 5, lengths[row - 3]),
            }
        )
    for name, part in (("train", rows[:ROWS]), ("heldout", rows[ROWS:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    source = {"path": str(folder / "train.jsonl"), "heldout": str(folder / "heldout.jsonl")}
    # Small steps: at larger ones, the roundings of one step are large differences a few steps later.
    training = {"batch_size": BATCH, "eval_rows": HELD_OUT, "optimizer": {"learning_rate": 1e-5}}
    recipe = {
        "model": {"path": str(folder / "model")},
        "data": {
            "datasets": [source | {"stages": [stage]} for stage in STAGES],
            "max_prompt_length": LONGEST,
            "max_completion_length": LONGEST + 1,
        },
        "engine": {"zero_persistence_threshold": 0},
        "sft": training | {"max_steps": STEPS},
        "reward": training | {"max_steps": STEPS},
        "ppo": training | {"steps": STEPS, "sampling": {"top_k": 1}, "critic_optimizer": {"learning_rate": 1e-5}},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))  # JSON is YAML
    return path


def completion_lengths() -> list[int]:
    """Tokens that the model answers each training prompt with, the one that ends the completion included."""
    return [WORDS - _last_word(row) for row in range(ROWS)]


def _last_word(row: int) -> int:
    """The last word of a prompt; after the last of all, a completion is empty."""
    return WORDS - 1 if row % 4 == 0 else 7 * row % LONGEST


def _words(first: int, count: int) -> str:
    return " ".join(f"w{number % WORDS}" for number in range(first, first + count))


def _write_model(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", *(f"w{number}" for number in range(WORDS))]
    words = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(names), **sizes, num_key_value_heads=2, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        embeddings = torch.nn.init.normal_(model.get_input_embeddings().weight)
        projection = model.get_output_embeddings().weight.zero_()
        for word in range(WORD, WORD + WORDS):
            following = word + 1 if word + 1 < WORD + WORDS else EOS
            projection[following] = embeddings[word] / 16  # it is said with a probability of about 2/3
    model.save_pretrained(folder)


# The checks.


def assert_losses_are_those_of(run: Run, other: Run, stage: str, *, rel: float = 2e-3, absolute: float = 2e-3) -> None:
    """Losses of every step, within what bf16 rounds; norms of gradients within a tenth."""
    for own, expected in zip(run.steps(stage), other.steps(stage), strict=True):
        for key in sorted(key for key in expected if key.endswith(("loss", "grad_norm"))):
            within = {"rel": 0.1, "abs": 1e-2} if key.endswith("norm") else {"rel": rel, "abs": absolute}
            assert own[key] == pytest.approx(expected[key], **within), f"{stage}: {key} of step {own['step']}"


def assert_nothing_compiled_late(run: Run, stage: str, *, warm_up: int = 2, evaluation: bool = True) -> None:
    """No new graph after the first two steps, the evaluation at the end included."""
    first, *_, last = (record["compilations"] for record in run.steps(stage)[warm_up - 1 :])
    assert run.steps(stage)[0]["compilations"] > 0
    late = run.late(stage, warm_up, evaluation=evaluation)
    assert [event for event in late if event["kind"] == "compilation"] == []
    assert first == last


def assert_the_first_step_compiles_everything(run: Run, stage: str) -> None:
    """In eager mode: no new graph after the first step, the evaluation at the end included."""
    assert run.late(stage, warm_up=1) == []
    assert len({record["compilations"] for record in run.steps(stage)}) == 1


def assert_fallbacks(run: Run, stage: str, parts: list[str]) -> None:
    """These kinds of layers, and nothing else, run uncompiled, because of ZeRO 3; the run says so once."""
    assert {record["fallbacks"] for record in run.steps(stage)} == {len(parts)}
    lines = [line for path in run.folder.glob("*/console.log") for line in path.read_text().splitlines()]
    notes = [line for line in lines if "slower" in line]
    prefix = "rlhf: note: layers run uncompiled, and slower: "
    assert notes == [f"{prefix}{part}: DeepSpeed's hooks fetch their weights at ZeRO 3" for part in parts]


def assert_no_reads_inside_a_step(run: Run, stage: str, *, warm_up: int | None = None) -> None:
    """No value read on the host inside a step, from the first one on unless `warm_up` steps may."""
    events = run.report["events"] if warm_up is None else run.late(stage, warm_up)
    assert [event for event in events if event["kind"] == "break" and event["in_step"]] == []


def assert_no_mixed_devices(run: Run) -> None:
    """No operator had tensors of the host and of the device."""
    assert run.report["counts"]["mixed"] == 0
