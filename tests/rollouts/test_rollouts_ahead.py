"""PPO whose servers draw the next rollout while this one trains: the same run after an interruption, on other ranks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.errors import RunError
from rlhf.reporting.step_records import read_steps
from rlhf.rollouts.protocol import DrawnRow
from rlhf.trainers.ppo.rollouts_ahead import RolloutsAhead
from tests.helpers import assert_same_weights, kill_at, sets, start, user_environment
from tests.rollouts.test_runs import Proxy, copy, steps, where

AHEAD = ["ppo.rollout.staleness=1", "ppo.rollout.correction=mis"]

SMALL_STEPS = ["learning_rate=1e-4", "eps=1e-3", "warmup=0", "schedule=constant"]
"""Rounding hardly changes such steps."""


class Servers:
    """Stand for servers: a completion is one token, the version of the weights, with its first random number."""

    def __init__(self) -> None:
        self.version = -1
        self.asked: list[tuple[int, list[float]]] = []

    def hand_over(self, version: tuple[int, str]) -> None:
        self.version = version[0]

    def request(self, prompts: Any, numbers: torch.Tensor) -> Callable[[], Sequence[DrawnRow]]:
        self.asked.append((self.version, numbers[0].tolist()))
        rows = [DrawnRow(ids=[self.version], log_probs=np.array([-n], np.float32)) for n in numbers[0].tolist()]
        return lambda: rows


class Draws:
    """Stands for a decoder, as far as its random numbers go."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(3)

    def draw_numbers(self, rows: int) -> torch.Tensor:
        return torch.rand(1, rows, generator=self.random)


def ahead(total_steps: int = 9) -> tuple[RolloutsAhead, Any, Any]:
    servers: Any = Servers()
    decoder: Any = Draws()
    return (
        RolloutsAhead(servers, decoder, lambda index: {"prompt_ids": torch.zeros(2, 1)}, total_steps),
        servers,
        decoder,
    )


def numbers(count: int) -> list[list[float]]:
    """The random numbers of the first rollouts."""
    decoder = Draws()
    return [decoder.draw_numbers(2)[0].tolist() for _ in range(count)]


def ids(rows: Sequence[DrawnRow]) -> list[int]:
    return [row.ids[0] for row in rows]


def test_each_rollout_comes_from_the_weights_of_the_step_before_and_has_its_own_numbers() -> None:
    taker, servers, _ = ahead(total_steps=4)
    assert [ids(taker.take(index, (index, "policy"))) for index in range(4)] == [
        [0, 0],
        [0, 0],
        [1, 1],
        [2, 2],
    ]
    assert servers.asked == list(zip([0, 0, 1, 2], numbers(4))), "and none after the last step"


def test_state_continues_with_the_rollout_that_was_drawn() -> None:
    taker, _, decoder = ahead()
    taker.take(0, (0, "policy"))
    state, random = taker.state_dict(), decoder.random.get_state()
    again, servers, other = ahead()
    again.load_state_dict(state)
    other.random.set_state(random)
    assert torch.equal(again.generator_state(1), taker.generator_state(1))
    rows, expected = (each.take(1, (1, "policy")) for each in (again, taker))
    assert ids(rows) == ids(expected) == [0, 0]
    assert [row.log_probs.tolist() for row in rows] == [row.log_probs.tolist() for row in expected]
    assert servers.asked == [(1, numbers(3)[2])]


def test_state_without_servers_continues_at_the_generator_of_the_rollout_that_is_missing() -> None:
    taker, servers, _ = ahead()
    taker.take(0, (0, "policy"))

    def fail() -> list[DrawnRow]:
        raise RunError("no server is left")

    taker._next = replace(taker._next, wait=fail)  # type: ignore[type-var]
    state = taker.state_dict()
    again, others, other = ahead()
    other.random.manual_seed(99)
    again.load_state_dict(state)
    again.take(1, (1, "policy"))
    assert others.asked == [(1, numbers(3)[1]), (1, numbers(3)[2])] and servers.asked[1] == (0, numbers(3)[1])
    with pytest.raises(RunError, match="no server is left"):
        taker.take(1, (1, "policy"))


def test_step_after_one_that_was_left_out_draws_again() -> None:
    """`alarms.skip_not_finite` restores the state before the step; the next step has other rows."""
    taker, _, decoder = ahead()
    taker.take(0, (0, "policy"))
    state, random = taker.state_dict(), decoder.random.get_state()
    taker.take(1, (1, "policy"))
    taker.load_state_dict(state)
    decoder.random.set_state(random)
    rows = taker.take(2, (1, "policy"))
    assert ids(rows) == [1, 1] and -rows[0].log_probs[0] == pytest.approx(numbers(3)[2][0])


def test_recorded_steps_move_the_generator_as_drawn_ones_do() -> None:
    drawn, _, decoder = ahead()
    recorded, servers, other = ahead()
    for index in range(3):
        assert torch.equal(drawn.generator_state(index), recorded.generator_state(index))
        drawn.take(index, (index, "policy"))
        recorded.take(index, None)
    assert torch.equal(decoder.random.get_state(), other.random.get_state()) and not servers.asked


def test_part_of_each_rank_is_in_the_order_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf.engine import distributed

    taker, _, _ = ahead()
    taker.take(0, (0, "policy"))
    whole = taker.state_dict()
    for rank in range(2):
        monkeypatch.setattr(distributed, "world", lambda rank=rank: SimpleNamespace(rank=rank, size=2))
        part, _, _ = ahead()
        part.load_state_dict(whole)
        (row,) = part.take(1, None)
        assert row.log_probs.tolist() == whole["log_probs"][rank].tolist()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["ppo.rollout.staleness=1"], "has no effect without ppo.rollout.where"),
        (
            ["ppo.rollout.where=http://a:1", "ppo.rollout.staleness=1"],
            "which needs ppo.rollout.correction; set that to",
        ),
        (["ppo.rollout.where=http://a:1", "ppo.rollout.staleness=2"], "expected 0 or 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(rlhf: Any, begun: Path, keys: list[str], message: str) -> None:
    done = rlhf("ppo", "--output", begun, "--dry-run", *sets(*keys), check=False)
    assert done.returncode == 2 and message in done.stderr


@pytest.mark.slow
def test_evaluation_waits_for_the_rollout_that_is_being_drawn(
    rlhf: Any, begun: Path, serve: Any, tmp_path: Path
) -> None:
    """Its weights are newer, and servers have one set of weights at a time."""

    def delay(call: str, body: bytes, forward: Any) -> Any:
        if call == "draw":
            time.sleep(2)
        return forward(body)

    run, proxy = copy(begun, tmp_path / "run"), Proxy(serve(), delay)
    rlhf("ppo", "--output", run, *sets(*AHEAD, where(proxy), "ppo.eval_every=1"))
    proxy.close()
    assert all(record["rollout_servers"] == 1 for record in steps(run))


@pytest.mark.slow
def test_run_that_is_killed_continues_as_if_it_had_not_been(rlhf: Any, begun: Path, serve: Any, tmp_path: Path) -> None:
    keys = [*AHEAD, where(serve()), "ppo.checkpoint_every=1", "ppo.log_every=1", "ppo.steps=5"]
    expected, run = copy(begun, tmp_path / "whole"), copy(begun, tmp_path / "killed")
    rlhf("ppo", "--output", expected, *sets(*keys))
    kill_at(run / "ppo" / "checkpoints" / "step-00000002", rlhf, "ppo", "--output", run, *sets(*keys))
    rlhf("ppo", "--output", run, "--resume", *sets(*keys))
    assert_same_weights(run / "ppo" / "model", expected / "ppo" / "model", atol=0)
    frames = [list(read_steps(folder / "ppo" / "steps.bin")) for folder in (run, expected)]
    for frame, other in zip(*frames, strict=True):
        assert frame.ranks[0].digests == other.ranks[0].digests
        assert all(
            np.array_equal(values, other.ranks[0].arrays[name]) for name, values in frame.ranks[0].arrays.items()
        )
    # Older weights have drawn, which no alarm takes for a fault.
    assert all(record["draw_gap"] > 1e-4 for record in steps(run)[1:])
    checks = " ".join(rlhf("doctor", run, "--all", recipe=None).stdout.split())
    assert "of 5 steps, all rollouts but the first were drawn ahead, by weights one step older" in checks
    command = [sys.executable, "-m", "rlhf", "replay", str(run), "--stage", "ppo", "--step", "5"]
    subprocess.run(command, env=user_environment() | {"RLHF_ACCELERATOR": "cpu"}, check=True, timeout=300)


@pytest.mark.slow
def test_run_continues_on_other_ranks(rlhf: Any, begun: Path, serve: Any, tmp_path: Path) -> None:
    keys = [*AHEAD, where(serve()), "ppo.checkpoint_every=1", "ppo.log_every=1", "ppo.steps=4", "engine.zero_stage=2"]
    keys += [f"ppo.{name}.{key}" for name in ("optimizer", "critic_optimizer") for key in SMALL_STEPS]
    keys.append("ppo.minibatch_size=4")  # all rows: others are split by rank
    expected, run = copy(begun, tmp_path / "whole"), copy(begun, tmp_path / "moved")
    rlhf("ppo", "--output", expected, *sets(*keys))
    kill_at(run / "ppo" / "checkpoints" / "step-00000002", rlhf, "ppo", "--output", run, *sets(*keys), "--ranks", 2)
    rlhf("ppo", "--output", run, "--resume", *sets(*keys))
    for record, other in zip(steps(run), steps(expected), strict=True):
        assert record["tokens"] == other["tokens"] and record["reward"] == pytest.approx(other["reward"], abs=1e-4)
    assert_same_weights(run / "ppo" / "model", expected / "ppo" / "model", atol=1e-4)


@pytest.mark.slow
def test_failed_run_does_not_wait_for_a_server_that_hangs(rlhf: Any, begun: Path, serve: Any, tmp_path: Path) -> None:
    """The next rollout hangs, while the reward function of this one fails."""
    scored, hanging, functions = (tmp_path / name for name in ("scored", "hanging", "functions.py"))
    functions.write_text(
        "import pathlib, time\n"
        "def fails(prompt, completion, row):\n"
        f"    scored, hanging = pathlib.Path({str(scored)!r}), pathlib.Path({str(hanging)!r})\n"
        "    for _ in range(50 if not scored.exists() else 0):\n"  # until the next rollout is asked for
        "        if hanging.exists():\n"
        "            raise ValueError('it fails')\n"
        "        time.sleep(0.1)\n"
        "    scored.touch()\n"
        "    return 1.0\n"
    )
    scored.touch()

    def hang_ahead(call: str, body: bytes, forward: Any) -> Any:
        if call == "draw":
            if not scored.exists():  # asked before the last rollout was scored
                hanging.touch()
                time.sleep(200)
            scored.unlink()
        return forward(body)

    run, proxy = copy(begun, tmp_path / "run"), Proxy(serve(), hang_ahead)
    keys = sets(*AHEAD, where(proxy), f"ppo.reward_functions=[{functions}:fails]")
    process = start(rlhf, "ppo", "--output", run, *keys)
    output, errors = process.communicate(timeout=150)
    proxy.close()
    assert process.returncode == 2 and "it fails" in errors, output + errors
