"""What a user can get wrong, each mistake made in a run of its own: arguments flow out, and words of the line to come.

Nearly all of them would stop the second or the third stage only. Those in batches, folders and disks stand here.
"""

from __future__ import annotations

from tests.preflight import (  # noqa: F401  # importing them enters their mistakes
    mistakes_in_data,
    mistakes_in_holding,
    mistakes_in_models,
    mistakes_in_pretraining,
    mistakes_in_rewards,
    mistakes_in_rollouts,
)
from tests.preflight.bench import MISTAKES, Bench, mistake, settings

__all__ = ["MISTAKES", "Bench", "settings"]


@mistake
def a_batch_that_cannot_be_divided(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(reward__batch_size=6, reward__micro_batch_size=4), ["reward.batch_size: 6 is not a multiple"]


@mistake
def a_batch_that_ranks_cannot_share(bench: Bench) -> tuple[list[str], list[str]]:
    return [*settings(ppo__minibatch_size=1), "--ranks", "2"], ["ppo.minibatch_size: 1 rows cannot be divided among 2"]


@mistake
def minibatches_that_do_not_fit(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(ppo__minibatch_size=3), ["ppo.batch_size: 4 is not a multiple of ppo.minibatch_size 3"]


@mistake
def the_best_by_a_judge_that_is_not_there(bench: Bench) -> tuple[list[str], list[str]]:
    found = settings(ppo__eval_every=1, ppo__keep="best(approved_share)")
    return found, ["ppo.keep: best(approved_share) needs a judge", "use best(reward), or last"]


@mistake
def a_kernel_that_is_not_there(bench: Bench) -> tuple[list[str], list[str]]:
    found = settings(engine__kernels="{adamw: torch-foreach, clip_grad_norm: quick}")
    return found, ["engine.kernels.clip_grad_norm: cpu has no implementation quick; there is: torch"]


@mistake
def a_kernel_of_another_device(bench: Bench) -> tuple[list[str], list[str]]:
    found = settings(engine__kernels="{graph_capture: recorded}")
    return found, ["engine.kernels.graph_capture: cpu has no implementation recorded; there is: none"]


@mistake
def resuming_nothing(bench: Bench) -> tuple[list[str], list[str]]:
    return ["--resume"], ["run: holds no run to resume"]


@mistake
def two_wishes(bench: Bench) -> tuple[list[str], list[str]]:
    return ["--resume", "--overwrite"], ["--resume and --overwrite"]


@mistake
def no_earlier_stage(bench: Bench) -> tuple[list[str], list[str]]:
    return ["ppo"], ["holds no finished sft stage to start from", "rlhf sft", "ppo.actor"]


@mistake
def a_folder_of_other_files(bench: Bench) -> tuple[list[str], list[str]]:
    (bench.folder / "other").mkdir()
    (bench.folder / "other" / "letter.txt").write_text("x")
    return ["--output", str(bench.folder / "other")], ["other: is not empty and holds no run"]


@mistake
def a_file_as_folder(bench: Bench) -> tuple[list[str], list[str]]:
    return ["--output", str(bench.file("file", "x"))], ["file: is a file; choose a folder with --output"]


@mistake
def a_folder_that_cannot_be_made(bench: Bench) -> tuple[list[str], list[str]]:
    return ["--output", str(bench.file("file", "x") / "run")], ["cannot be written", "choose another --output"]
