"""`steps.bin` gives back what steps read and drew, survives a kill and a resume, and is small."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf.reporting.step_records import RankStep, StepRecorder, decode_log_probs, encode_log_probs, read_steps
from rlhf.runs.stage_directory import StageDirectory

SESSION = {"config": {"seed": 1}, "ranks": 2}


@pytest.fixture
def stage(tmp_path: Path) -> StageDirectory:
    return StageDirectory(tmp_path, "ppo")


def rank_step(seed: int, rows: int = 3, *, vocabulary: int = 300, longest: int = 9) -> RankStep:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, longest, rows)
    # Words as they are in texts: their frequency falls with their rank (Zipf), and so does their probability.
    weights = 1 / np.arange(1, vocabulary + 1)
    ids = random.choice(vocabulary, lengths.sum(), p=weights / weights.sum())
    log_probs = np.log(weights / weights.sum())[ids] * random.random(lengths.sum())
    arrays = {
        "lengths": lengths.astype(np.uint32),
        "ids": ids.astype(np.uint32),
        "log_probs": encode_log_probs(log_probs),
        "reward": random.standard_normal(rows).astype(np.float32),
    }
    return RankStep(random.integers(0, 50_000, rows).tolist(), longest, {"rows": zlib.crc32(ids)}, arrays)


def write(stage: StageDirectory, steps: range, resume_step: int | None = None) -> None:
    recorder = StepRecorder(stage, enabled=True, resume_step=resume_step)
    recorder.begin(SESSION)
    for step in steps:
        recorder.write(step, {"loss": step / 7}, [rank_step(step), rank_step(-step + 1000)])
    recorder.close()


def test_steps_are_read_as_they_were_written(stage: StageDirectory) -> None:
    write(stage, range(1, 4))
    steps = list(read_steps(stage.steps))
    assert [step.step for step in steps] == [1, 2, 3]
    for step in steps:
        assert step.session == SESSION and step.metrics == {"loss": step.step / 7}
        for read, expected in zip(step.ranks, [rank_step(step.step), rank_step(1000 - step.step)], strict=True):
            assert (read.rows, read.columns, read.digests) == (expected.rows, expected.columns, expected.digests)
            assert read.arrays.keys() == expected.arrays.keys()
            for name, array in expected.arrays.items():
                assert read.arrays[name].dtype == array.dtype and np.array_equal(read.arrays[name], array), name


def test_a_frame_that_a_kill_cut_short_does_not_count(stage: StageDirectory) -> None:
    write(stage, range(1, 3))
    whole = stage.steps.read_bytes()
    write(stage, range(1, 2))
    one = stage.steps.stat().st_size
    for size in (one + 1, one + 9, len(whole) - 1):
        stage.steps.write_bytes(whole[:size])
        assert [step.step for step in read_steps(stage.steps)] == [1]
    stage.steps.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert [step.step for step in read_steps(stage.steps)] == [1]


def test_a_resumed_stage_drops_later_steps_and_continues(stage: StageDirectory) -> None:
    write(stage, range(1, 5))
    stage.steps.write_bytes(stage.steps.read_bytes()[:-3])
    write(stage, range(3, 6), resume_step=2)
    assert [step.step for step in read_steps(stage.steps)] == [1, 2, 3, 4, 5]
    write(stage, range(1, 3))  # from the beginning
    assert [step.step for step in read_steps(stage.steps)] == [1, 2]


def test_nothing_is_dropped_before_the_first_new_step(stage: StageDirectory) -> None:
    write(stage, range(1, 5))
    write(stage, range(0), resume_step=2)
    assert [step.step for step in read_steps(stage.steps)] == [1, 2, 3, 4]


def test_codes_of_log_probabilities_are_near_them() -> None:
    log_probs = -np.concatenate([[0.0], np.logspace(-6, 1.5, 400)])
    read = decode_log_probs(encode_log_probs(log_probs))
    assert (np.abs(read - log_probs) <= 0.016 * np.abs(log_probs) + 2.5e-4).all()
    assert decode_log_probs(encode_log_probs(np.array([-np.inf, np.nan]))).tolist() == [pytest.approx(-34, abs=0.5), 0]


@pytest.mark.parametrize("vocabulary", [32_000, 128_256])
def test_1000_steps_of_64_completions_of_256_tokens_take_less_than_50_mb(stage: Any, vocabulary: int) -> None:
    """Each completion has all 256 tokens, which is the worst case."""
    recorder = StepRecorder(stage, enabled=True, resume_step=None)
    recorder.begin(SESSION)
    step = rank_step(0, 64, vocabulary=vocabulary, longest=257)
    full = np.full(64, 256, np.uint32)
    many = rank_step(1, 200, vocabulary=vocabulary, longest=257)
    arrays = {"lengths": full, "reward": step.arrays["reward"]}
    arrays |= {name: many.arrays[name][: 64 * 256] for name in ("ids", "log_probs")}
    metrics = {f"metric_{number}": number / 7 for number in range(40)}
    for index in range(1, 4):
        recorder.write(index, metrics, [RankStep(step.rows, 256, step.digests, arrays)])
    recorder.close()
    bytes_a_step = stage.steps.stat().st_size / 3
    print(f"{vocabulary}: {bytes_a_step / 1000:.1f} MB for 1,000 steps")
    assert len(arrays["ids"]) == 64 * 256 and 1000 * bytes_a_step < 50e6
