"""A step's rollout as `steps.bin` keeps it, and the completions of a kept one."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rlhf.data.batches import Batch, digest_batches
from rlhf.generation.decoder import Completions
from rlhf.losses.log_probs import masked
from rlhf.reporting.step_records import RankStep, encode_log_probs
from rlhf.trainers.ppo.experience import Rollout, Scores

if TYPE_CHECKING:
    from accelerators import Accelerator

TEACHER = "teacher_log_probs"
"""The array with what a teacher's servers have said of the completions."""


@dataclass
class StepContents:
    """What a step has read and drawn so far; read from the device only by `describe`.

    Attributes:
        keeps_log_probs: keep drawn log-probabilities as they are: nobody can compute them again.
        teacher_log_probs: [B, A], what servers have said of the completions; None without servers.
    """

    rows: list[int]
    digests: dict[str, int]
    rollout: Rollout | None = None
    rewards: dict[str, Tensor] | None = None
    keeps_log_probs: bool = False
    teacher_log_probs: Tensor | None = None

    @classmethod
    def of(
        cls, rows: list[int], prompts: Batch, generator_state: Tensor, *, keeps_log_probs: bool = False
    ) -> StepContents:
        """Start with this rank's rows, their prompts on the host, and the generator before anything is drawn."""
        state = zlib.crc32(generator_state.numpy().tobytes())
        digests = {"rows": digest_batches([prompts]), "generator": state}
        return cls(rows, digests, keeps_log_probs=keeps_log_probs)

    def add(self, rollout: Rollout, scores: Scores, *, given: bool) -> None:
        """Add the rollout and its rewards; `given`: those of a program, not of the settings."""
        self.rollout = rollout
        self.rewards = {"given" if given else "reward": scores.reward}
        self.rewards |= {f"part/{name}": part for name, part in scores.reward_parts.items()}

    def describe(self) -> RankStep:
        """Return the rows, and the rollout if there is one."""
        rollout = self.rollout
        if rollout is None:
            return RankStep(self.rows, digests=self.digests)
        columns = rollout.completion_length
        mask, drawn = rollout.attention_mask[:, -columns:], rollout.drawn_log_probs
        lengths, tokens = list_tokens(rollout)
        arrays = {"lengths": np.array(lengths, np.uint32), "ids": np.array(tokens, np.uint32)}
        digests = dict(self.digests)
        if drawn is not None:
            exact = np.array(masked(drawn, mask).float().tolist(), np.float32)
            digests["log_probs"] = zlib.crc32(exact.tobytes())
            own = np.concatenate([row[:length] for row, length in zip(exact, lengths)])
            arrays["log_probs"] = encode_log_probs(own)
            if self.keeps_log_probs:
                arrays["drawn_log_probs"] = own
        if self.teacher_log_probs is not None:
            rows = np.array(self.teacher_log_probs.tolist(), np.float32)
            arrays[TEACHER] = np.concatenate([row[:length] for row, length in zip(rows, lengths)])
        for name, reward in (self.rewards or {}).items():
            arrays[name] = np.array(reward.tolist(), np.float32)
        return RankStep(self.rows, columns, digests, arrays)


def list_tokens(rollout: Rollout) -> tuple[list[int], list[int]]:
    """Return the lengths of a rollout's completions, and their tokens one after the other."""
    columns = rollout.completion_length
    lengths = rollout.attention_mask[:, -columns:].sum(1).tolist()
    ids = rollout.input_ids[:, -columns:].tolist()
    return lengths, [token for row, length in zip(ids, lengths) for token in row[:length]]


def restore_completions(step: RankStep, pad_token_id: int, accelerator: Accelerator) -> Completions:
    """Return the completions that a rank drew in a step, with log-probabilities if they were kept exactly."""
    lengths = step.arrays["lengths"]
    here = np.arange(step.columns) < lengths[:, None]
    ids = np.full(here.shape, pad_token_id, np.int64)
    ids[here] = step.arrays["ids"]
    moved: Batch = accelerator.to_device(
        {"ids": torch.from_numpy(ids), "mask": torch.from_numpy(here.astype(np.int64))}
    )
    is_kept = "drawn_log_probs" in step.arrays
    return Completions(**moved, log_probs=restore_numbers(step, "drawn_log_probs", accelerator) if is_kept else None)


def restore_numbers(step: RankStep, name: str, accelerator: Accelerator) -> Tensor:
    """Return an array of a step with a number for each token of its completions, as [B, A]; 0 after their ends."""
    here = np.arange(step.columns) < step.arrays["lengths"][:, None]
    numbers = np.zeros(here.shape, np.float32)
    numbers[here] = step.arrays[name]
    moved: Batch = accelerator.to_device({name: torch.from_numpy(numbers)})
    return moved[name]
