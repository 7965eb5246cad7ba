"""`rlhf.session`: steps that are the stage's, texts that are transformers', and a program that continues afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import rlhf as package
from rlhf.errors import ConfigError, RunError
from rlhf.reporting.recorder import read_heldout
from rlhf.reporting.timers import is_machine_dependent
from tests.cells import ROOT, run_cells
from tests.forks import Forks
from tests.helpers import assert_same_weights, user_environment

START = """
import json, logging, os, signal, sys
import rlhf
os.environ.pop("DS_ACCELERATOR", None)  # of the process that this one is forked from
before = dict(os.environ), signal.getsignal(signal.SIGINT), logging.getLogger().level
settings = json.loads(PLACES)
session = rlhf.session(settings["recipe"], output="mine")
"""
LOOP = """
import torch
torch.use_deterministic_algorithms(True, warn_only=True)
ppo = session.ppo()
numbers = [ppo.step(step) for step in range(2)]
ppo.checkpoint()
ppo = session.ppo()
print(json.dumps([ppo.done, *numbers, ppo.step(2)]))
"""
TEXTS = """
prompts = ["red cow", [{"role": "user", "content": "dog dog owl moo please"}], "no"]
completions = ["moo moo", "woof", ""]
scores = [vars(score) for score in ppo.score(prompts, completions)]
print(json.dumps([scores, ppo.evaluate() == ppo.evaluate(), str(session.save())]))
"""
GREEDY = """
with rlhf.session({**settings["recipe"], "ppo.sampling.top_k": 1, "ppo.actor": settings["actor"],
                   "ppo.reward_model": settings["reward"]}) as other:
    folder = other.output
    existed = folder.is_dir()
    drawn = other.ppo().generate(prompts)
print(json.dumps([drawn, existed, folder.exists()]))
"""
REWARDS = """
asked = []
def reward(prompt, completion, row):
    asked.append((prompt, completion, row["chosen"], row["rejected"]))
    return len(asked)
third = rlhf.session({**settings["recipe"], "ppo.completions_per_prompt": 2, "ppo.sampling.temperature": 1.0,
                      "ppo.actor": settings["actor"], "ppo.reward_model": settings["reward"]}, output="third")
ppo = third.ppo()
numbers = ppo.step(reward=reward)
print(json.dumps([asked, numbers["reward"]]))
"""
INTERRUPTED = """
asked.clear()
def stops(prompt, completion, row):
    if not asked:
        asked.append(prompt)
        os.kill(os.getpid(), signal.SIGINT)
    return 1.0
try:
    ppo.step(reward=stops)
    outcome = "went on"
except KeyboardInterrupt:
    outcome = "stopped"
done = ppo.done
ppo.step()
print(json.dumps([outcome, done, ppo.done]))
"""
ERRORS = """
def message_of(task):
    try:
        task()
    except rlhf.RLHFError as error:
        return str(error)
lines = [
    message_of(lambda: ppo.step(7)),
    message_of(lambda: ppo.step()),
    message_of(lambda: ppo.generate(["red " * 60])),
    message_of(lambda: ppo.score(["red"], ["blue " * 60])),
    message_of(lambda: ppo.score(["red"], [])),
]
again = third.ppo()
lines += [message_of(lambda: ppo.step()), message_of(lambda: again.step(reward=lambda *given: None))]
lines += [message_of(lambda: again.step(reward=lambda *given: float("nan")))]
third.save()
lines += [message_of(lambda: again.step()), message_of(third.ppo), message_of(session.save)]
third.close()
lines += [message_of(lambda: third.run("sft")), message_of(lambda: rlhf.session(["ppo.steps=1"]).save())]
print(json.dumps(lines))
"""
AFTERWARDS = """
session.close()
session.close()
after = dict(os.environ), signal.getsignal(signal.SIGINT), logging.getLogger().level
same = [left == right for left, right in zip(before, after)]
import torch
print(json.dumps([same[0] or [name for name in {*before[0], *after[0]} if before[0].get(name) != after[0].get(name)],
                  *same[1:], torch.distributed.is_initialized(), os.path.exists("mine/.lock"),
                  torch.are_deterministic_algorithms_enabled()]))
"""
PARTS = {
    "loop": LOOP,
    "texts": TEXTS,
    "greedy": GREEDY,
    "rewards": REWARDS,
    "interrupted": INTERRUPTED,
    "errors": ERRORS,
    "afterwards": AFTERWARDS,
}


@pytest.fixture(scope="module")
def places(recipe: dict[str, Any], finished_run: Path) -> dict[str, Any]:
    values = {**recipe, "ppo": {**recipe["ppo"], "checkpoint_every": 0}}
    return {"recipe": values, "actor": str(finished_run / "sft/model"), "reward": str(finished_run / "reward/model")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, finished_run: Path) -> Path:
    """Where the cells run: a run is in it whose PPO is still to come."""
    import shutil

    folder = tmp_path_factory.mktemp("session")
    shutil.copytree(finished_run, folder / "mine", ignore=shutil.ignore_patterns("ppo", ".lock"))
    return folder


@pytest.fixture(scope="module")
def outputs(places: dict[str, Any], folder: Path, forks: Forks) -> dict[str, Any]:
    """Return the output of each part; one process runs them all, one after the other."""
    first = f"PLACES = {json.dumps(places)!r}\n{START}"
    cells = run_cells([first, *PARTS.values()], folder, timeout=600, forks=forks)
    errors = [error for _, error in cells if error]
    assert not errors, f"{errors}\n{cells[-1][0][-3000:]}"
    return {name: json.loads(printed.splitlines()[-1]) for name, (printed, _) in zip(PARTS, cells[1:])}


def test_steps_by_hand_are_those_of_the_stage(outputs: dict[str, Any], folder: Path, finished_run: Path) -> None:
    """With a checkpoint in between, from which it resumes; every number but the speed is recorded as the stage's."""
    done, *steps = outputs["loop"]
    assert done == 2
    assert_same_weights(folder / "mine/ppo/model", finished_run / "ppo/model")

    def records(run: Path) -> list[dict[str, Any]]:
        lines = (run / "ppo/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        steps = [row for row in rows if "kl_coef" in row]
        unlike = {"time", "reward_ema"}
        return [{k: v for k, v in row.items() if k not in unlike and not is_machine_dependent(k)} for row in steps]

    assert records(folder / "mine") == records(finished_run)
    assert [row["policy_loss"] for row in records(folder / "mine")] == [step["policy_loss"] for step in steps]


def _ids(tokenizer: Any, *turns: str) -> list[int]:
    """Return a prompt, or a prompt and a reply with its end, in the tokenizer's chat template."""
    messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turns)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=len(turns) == 1)
    return tokenizer(text.rstrip() if len(turns) > 1 else text, add_special_tokens=False)["input_ids"]


def test_session_leaves_a_report_and_its_held_out_rows(outputs: dict[str, Any], folder: Path) -> None:
    run = folder / "mine"
    assert (run / "report.html").stat().st_mtime >= (run / "ppo/metrics.jsonl").stat().st_mtime, "not that of the copy"
    rows = read_heldout(run / "ppo/heldout.jsonl", 99)
    assert rows and all(row["prompt"] and "kl" in row for evaluation in rows.values() for row in evaluation)


def test_scores_are_what_transformers_makes_of_the_texts(outputs: dict[str, Any], folder: Path, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    scores, evaluations_agree, saved = outputs["texts"]
    assert evaluations_agree and saved == "mine/ppo/model"
    texts = [("red cow", "moo moo"), ("dog dog owl moo please", "woof")]
    policy = AutoModelForCausalLM.from_pretrained(folder / saved).eval()
    reference = AutoModelForCausalLM.from_pretrained(folder / "mine/sft/model").eval()
    reward = AutoModelForSequenceClassification.from_pretrained(folder / "mine/reward/model").eval()
    for (prompt, completion), score in zip(texts, scores):
        ids, begin = _ids(tokenizer, prompt, completion), len(_ids(tokenizer, prompt))
        assert ids[-1] == tokenizer.eos_token_id
        row, targets = torch.tensor([ids]), torch.tensor(ids[begin:])
        with torch.no_grad():
            sums = [
                torch.log_softmax(model(row).logits[0, begin - 1 : -1].float(), -1).gather(1, targets[:, None]).sum()
                for model in (policy, reference)
            ]
            expected = reward(row).logits[0, 0]
        assert score["tokens"] == len(ids) - begin
        assert score["log_prob"] == pytest.approx(sums[0].item(), abs=1e-3)
        assert score["kl"] == pytest.approx((sums[0] - sums[1]).item(), abs=1e-3)
        assert score["reward"] == pytest.approx(expected.item(), abs=1e-4)


def test_texts_are_what_transformers_generates(outputs: dict[str, Any], folder: Path, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    drawn, existed, still_exists = outputs["greedy"]
    assert existed and not still_exists, "a session without an output has a folder of its own, until it is closed"
    model = AutoModelForCausalLM.from_pretrained(folder / "mine/sft/model").eval()
    for prompt, text in zip(("red cow", "dog dog owl moo please", "no"), drawn, strict=True):
        ids = torch.tensor([_ids(tokenizer, prompt)])
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        whole = model.generate(ids, max_new_tokens=16, do_sample=False, **ends)
        assert text == tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True).strip()


def test_custom_reward_takes_the_models_place(outputs: dict[str, Any], data_file: Path) -> None:
    """It is asked once for each completion, with the row of its prompt; the step's reward is its mean."""
    asked, reward = outputs["rewards"]
    assert reward == pytest.approx(sum(range(1, len(asked) + 1)) / len(asked))
    prompts = [prompt for prompt, *_ in asked]
    assert len(asked) == 4 and prompts[0] == prompts[1] != prompts[2] == prompts[3], "two completions of each prompt"
    known = {(row["prompt"], row["chosen"], row["rejected"]) for row in map(json.loads, data_file.open())}
    assert {(prompt, chosen, rejected) for prompt, _, chosen, rejected in asked} <= known


def test_interrupted_step_is_finished_and_the_next_follows(outputs: dict[str, Any]) -> None:
    assert outputs["interrupted"] == ["stopped", 2, 3]


def test_every_mistake_is_one_line_that_says_what_to_do(outputs: dict[str, Any]) -> None:
    parts = [
        "step 7: 3 steps are done",
        "step 3: PPO has 3 steps",
        "data.max_prompt_length is 24",
        "data.max_completion_length is 16",
        "1 prompts and 0 completions",
        "this PPO is over",
        "reward: gave None",
        "reward: gave nan",
        "session.ppo(overwrite=True)",
        "third: ppo is complete",
        "there is no policy yet",
        "the session is closed",
        "there is no policy yet",
    ]
    for line, part in zip(outputs["errors"], parts, strict=True):
        assert part in line and "\n" not in line, (line, part)


def test_program_is_unchanged_after_a_session(outputs: dict[str, Any]) -> None:
    """Environment, signals, logging and what the program asked of torch are as before; there is no process group."""
    assert outputs["afterwards"] == [True, True, True, False, False, True]


@pytest.mark.slow
def test_new_interpreter_is_unchanged_after_a_session(places: dict[str, Any], tmp_path: Path) -> None:
    """Not even by what torch, DeepSpeed and transformers do when they are imported for the first time."""
    first = f"PLACES = {json.dumps(places)!r}\n{START}"
    *_, (output, error) = run_cells([first, 'session.run("sft")', AFTERWARDS], tmp_path, timeout=300)
    assert not error and json.loads(output.splitlines()[-1]) == [True, True, True, False, False, False]


@pytest.mark.parametrize("settings", [["ppo.steps=7"], {"ppo.steps": 7}, {"ppo": {"steps": 7}}, "ppo.steps=7"])
def test_settings_in_every_form(settings: Any, tmp_path: Path) -> None:
    session = package.session(settings, output=tmp_path / "a")
    assert session.config.ppo.steps == 7 and session.output == tmp_path / "a"
    assert session.config.data.datasets[0].path == "world", "the embedded example"
    session.close()


def test_values_of_settings_arrive_unchanged(tmp_path: Path) -> None:
    values = {"output": tmp_path, "model": {"path": None}, "lora": {"target_modules": ["a", "b"]}, "precision": "fp32"}
    with package.session({**values, "ppo.kl_coef": 1e-7, "seed": 3}) as session:
        config = session.config
    assert (config.output, config.model.path, list(config.lora.target_modules)) == (tmp_path, None, ["a", "b"])
    assert (config.ppo.kl_coef, config.seed, config.precision) == (1e-7, 3, "fp32")


def test_several_processes_need_a_folder_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match="name one"):
        package.session(["ppo.steps=1"])


def test_wrong_setting_is_an_error_at_once() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        package.session(["ppo.stepz=1"])


def test_ending_early_is_no_setting_of_a_python_loop(tmp_path: Path) -> None:
    ppo = {"judge": "j", "eval_every": 1, "keep": "best(judge_reward)", "stop": "over_optimized"}
    session = package.session({"ppo": ppo}, output=tmp_path / "run")
    with session, pytest.raises(ConfigError, match="over_optimized applies to `rlhf ppo`"):
        session.ppo()
    assert not (tmp_path / "run").exists()


def test_a_session_begins_without_a_heavy_library() -> None:
    code = "import rlhf, sys; rlhf.session(['ppo.steps=3']).close(); print({'torch', 'deepspeed'} & set(sys.modules))"
    environment = user_environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
