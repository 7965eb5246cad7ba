"""PPO in the user's loop: steps, completions and scores of texts, checkpoints, and the trained policy.

`rlhf.api.session.Session.ppo` creates it. Its steps are those of `rlhf.trainers.ppo.trainer.PPOTrainer`; they are
timed, recorded and resumed as in the stage (`rlhf.trainers.loop`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

import torch
from torch import Tensor

from rlhf.config.schema import Config
from rlhf.data.batches import completion_ids, completion_texts
from rlhf.data.examples import Prompt
from rlhf.data.prompt_encoding import encode_conversation, encode_replies, make_conversation_row
from rlhf.data.records import Message, Row
from rlhf.engine.engine import Batch, Metrics
from rlhf.errors import DataError, RunError
from rlhf.losses.log_probs import masked
from rlhf.memory.advice import apply_settings
from rlhf.models.tokenizers import find_end_tokens
from rlhf.trainers import loop, pipeline
from rlhf.trainers.context import StageContext
from rlhf.trainers.evaluation_schedule import record_evaluation
from rlhf.trainers.oom import translate_stage_errors
from rlhf.trainers.ppo.experience import Rollout, Scores
from rlhf.trainers.ppo.rewards import RewardFunction
from rlhf.trainers.ppo.trainer import PPOTrainer
from rlhf.trainers.trainer import EvalResult
from rlhf.utils import signals

if TYPE_CHECKING:
    from accelerators import Accelerator
    from rlhf.runs.directory import RunDirectory


Conversation = str | Sequence[Mapping[str, str]]
"""A user's message, or the turns so far as `{"role": "user", "content": "..."}`."""

Reward = Callable[[str, str, dict[str, Any]], float]
"""(prompt, completion, row of the data) -> score, like a function of `ppo.reward_functions`, but in this process."""


@dataclass(frozen=True)
class Score:
    """The scores of one completion.

    `reward` is the score by the reward model and `ppo.reward_functions`. `log_prob` is the policy's log-probability in
    nats at the temperature of `ppo.sampling`, summed over the completion's `tokens`, which include its end token. `kl`
    is log p - log p_ref: how much likelier the completion is under the policy than under its reference.
    """

    reward: float
    kl: float
    log_prob: float
    tokens: int


class PPOLearner:
    """PPO, one step at a time.

    With several ranks, all call the same methods in the same order, and pass the same number of texts to `generate` and
    `score`.

    Attributes:
        trainer: the algorithm, with its tensors and engines (`rlhf.trainers.ppo.trainer.PPOTrainer`).
        done: steps that were taken, including those before the checkpoint.
        steps: length of the learning-rate schedules: `ppo.steps`, or the steps of `ppo.epochs`.
    """

    def __init__(self, context: StageContext, trainer: PPOTrainer, plan: dict[str, Any]) -> None:
        self._context, self._plan = context, plan
        self.trainer = trainer
        self.steps = trainer.total_steps
        self._texts = Texts(trainer)
        self._evaluations: list[EvalResult] = []
        self._ended, self._saved = "", False
        context.directory.check_steps(self.steps)
        self.done = loop.resume_or_seed(trainer, context)

    @classmethod
    @contextmanager
    def of(cls, config: Config, accelerator: Accelerator, directory: RunDirectory) -> Iterator[PPOLearner]:
        """Yield the PPO of a run whose folder is open (`rlhf.trainers.run.open_run`), for the duration of the block."""
        config = apply_settings(config, {"ppo.samples_every": 0})  # the user's loop shows its own progress
        with pipeline.stage_context("ppo", config, accelerator, directory) as context:
            plan = pipeline.log_plan(context)
            with translate_stage_errors(context):
                learner = cls(context, cast(PPOTrainer, pipeline.build_trainer(context)), plan)
            try:
                yield learner
            finally:
                learner._ended = "the session has ended or started another PPO; call session.ppo() to continue"
                del learner.trainer, learner._texts  # free the engines' memory
                pipeline.release_models(context)

    def step(self, index: int | None = None, *, reward: Reward | None = None) -> Metrics:
        """Take one step, a rollout of `ppo.batch_size` completions and its updates, and record its numbers.

        Args:
            index: the number of the step from 0, which is checked; default: the next step.
            reward: scores this rollout's completions in place of the reward model and `ppo.reward_functions`:
                (prompt, completion, row of the data) -> number.

        Returns:
            The step's numbers (`reward`, `kl`, `policy_loss`, ...), the same on all ranks; docs/metrics.md defines
            them. Empty if `alarms.skip_not_finite` left the step out.

        Raises:
            RLHFError: `index` is not the next step, no step is left, `reward` returns no finite number, or a number of
                the step is not finite.
            KeyboardInterrupt: Ctrl-C, a notebook's stop button, or the file STOP in the run's folder. The step was
                finished first, so the next one may follow. A second interrupt does not wait for the step; then start
                again with `session.ppo()`.
        """
        self._check(index)
        trainer, context = self.trainer, self._context
        reward_fn = self._reward_function(reward) if reward else None
        with self._translate_errors(), signals.collect_signals() as signals_seen:
            metrics = loop.take_step(trainer, context, self.done, partial(trainer.step, reward_fn=reward_fn))
            self.done += 1
            if metrics:
                context.recorder.log(self.done, metrics)
                context.commit()
            if loop.must_stop(signals_seen, context):
                raise KeyboardInterrupt
        return metrics

    @overload
    def generate(self, prompts: Sequence[Conversation]) -> list[str]: ...
    @overload
    def generate(self, prompts: Batch) -> Batch: ...
    def generate(self, prompts: Sequence[Conversation] | Batch) -> list[str] | Batch:
        """Return the policy's completion of each prompt, sampled as `ppo.sampling` says.

        Args:
            prompts: user messages or conversations of `{"role": ..., "content": ...}`, formatted like the training data
                (chat template, transcript or plain text); or the tensors that `PPOTrainer.generate` takes.

        Returns:
            Texts without control tokens; for tensors, the tensors of a `Rollout`.

        Raises:
            RLHFError: a prompt is longer than `data.max_prompt_length`, or the chat template refuses it.
        """
        self._check_open()
        with self._translate_errors():
            if isinstance(prompts, dict):
                return _tensors(self.trainer.generate(prompts))
            examples = [self._texts.prompt(prompt) for prompt in prompts]
            replies: list[str] = []
            for place, batch in self._texts.batches(examples):
                replies += self._texts.completions(self.trainer.generate(batch))[: len(examples[place])]
            return replies

    @overload
    def score(self, prompts: Sequence[Conversation], completions: Sequence[str]) -> list[Score]: ...
    @overload
    def score(self, prompts: Batch) -> Batch: ...
    def score(self, prompts: Sequence[Conversation] | Batch, completions: Sequence[str] = ()) -> list[Score] | Batch:
        """Score completions with the reward model and functions, the policy and its reference.

        Args:
            prompts: as for `generate`; or the tensors that `generate` returns.
            completions: a text for each prompt; its end-of-sequence token is added.

        Returns:
            A `Score` for each pair; for tensors, the tensors of `Scores`.

        Raises:
            RLHFError: the numbers of prompts and completions differ, or a text is too long.
        """
        self._check_open()
        with self._translate_errors():
            if isinstance(prompts, dict):
                scored = self.trainer.score(self._texts.rollout(prompts))
                tensors = _tensors(scored)
                return {**tensors, "scores": tensors.pop("reward"), **scored.reward_parts}
            if len(prompts) != len(completions):
                raise DataError(f"score: {len(prompts)} prompts and {len(completions)} completions; give one for each")
            examples = [self._texts.prompt(prompt) for prompt in prompts]
            replies = [self._texts.reply(*pair) for pair in zip(examples, completions)]
            scores: list[Score] = []
            for place, batch in self._texts.batches(examples):
                scores += self._score_replies(batch, examples[place], replies[place])
            return scores

    def evaluate(self) -> Metrics:
        """Evaluate the policy on held-out prompts, with the same random numbers each time, and record the result.

        Returns:
            Means of `reward`, `kl`, `entropy`, `response_length`, `distinct_2`, ... (docs/metrics.md).
        """
        self._check_open()
        with self._translate_errors():
            when = f"after {self.done:,} steps" if self.done else "before"
            result = self.trainer.evaluate(when)
            self._context.recorder.heldout(self.done, result.rows)
            record_evaluation(self._context, self.done, result)
        self._evaluations.append(result._replace(rows=()))
        return result.numbers

    def checkpoint(self) -> None:
        """Save a checkpoint, from which a later `session.ppo()` resumes as if it had not stopped."""
        self._check_open()
        with self._translate_errors():
            loop.save_checkpoint(self.trainer, self._context, self.done)

    def save(self) -> Path:
        """Save the policy as `lora.save` says and complete the stage; `rlhf chat` finds it in the run's folder."""
        self._check_open()
        context, trainer = self._context, self.trainer
        summary: dict[str, Any] = {"steps": self.done}
        if self._evaluations:
            summary |= {"before": self._evaluations[0].numbers, "after": self._evaluations[-1].numbers}
        with self._translate_errors():
            trainer.save(context.directory.path)
            pipeline.finish(context, summary | trainer.summarize() | self._plan)
            context.commit()
        self._saved = True
        return context.directory.model

    def _check_open(self) -> None:
        if self._ended:
            raise RunError(f"this PPO is over: {self._ended}")

    def _check(self, index: int | None) -> None:
        """Raise `RunError` if step `index` cannot be taken now."""
        self._check_open()
        if self._saved:
            raise RunError("the policy is saved, and PPO is complete; start again with session.ppo(overwrite=True)")
        if index not in (None, self.done):
            raise RunError(
                f"step {index}: {self.done} steps are done, so the next is {self.done}; "
                "start again with session.ppo(), or omit the number"
            )
        if self.done >= self.steps:
            raise RunError(f"step {self.done}: PPO has {self.steps} steps, as have its schedules; set ppo.steps")

    def _translate_errors(self) -> AbstractContextManager[None]:
        """Turn a lack of memory, disk space or permissions in this block into an error of one line."""
        return translate_stage_errors(self._context, self._context.run.path)

    def _score_replies(
        self, prompts: Batch, examples: Sequence[Prompt], replies: Sequence[list[int]]
    ) -> Iterator[Score]:
        """Yield the scores of replies to the real rows of a batch."""
        rollout = self._texts.reply_rollout(prompts, replies)
        scores, mask = self.trainer.score(rollout, examples), rollout.action_mask
        log_probs = masked(scores.log_probs, mask)
        kl = log_probs - masked(scores.ref_log_probs, mask)
        columns = scores.reward.tolist(), kl.sum(1).tolist(), log_probs.sum(1).tolist(), map(len, replies)
        return (Score(*values) for values in zip(*columns))

    def _reward_function(self, reward: Reward) -> RewardFunction:
        """Return a user's function in the form that the trainer calls."""

        def score_rollout(
            rollout: Rollout, model_scores: Tensor | None, examples: Sequence[Prompt]
        ) -> tuple[Tensor, dict[str, Tensor]]:
            texts = self._texts.completions(rollout)
            values = [_call_reward(reward, example.row, text) for example, text in zip(examples, texts, strict=True)]
            return torch.tensor(values, dtype=torch.float32, device=rollout.input_ids.device), {}

        return score_rollout


def _call_reward(reward: Reward, row: Row, completion: str) -> float:
    value = reward(row.text, completion, row.as_dict())
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(
            f"reward: gave {value!r} for the completion {shown(completion)} of {shown(row.text)}; "
            "it must give a finite number"
        )
    return number


def _tensors(fields: Rollout | Scores) -> Batch:
    """Return the tensors among the fields by name."""
    return {name: value for name, value in vars(fields).items() if isinstance(value, Tensor)}


class Texts:
    """Encodes and decodes for a `PPOTrainer`; prompts are written in the form of its data."""

    def __init__(self, trainer: PPOTrainer) -> None:
        self._trainer, self._tokenizer, self._form = trainer, trainer.tokenizer, trainer.data.prompt_format
        self._lengths = trainer.context.config.data
        self._ends = find_end_tokens(trainer.tokenizer, trainer.actor.module.generation_config)

    def prompt(self, conversation: Conversation) -> Prompt:
        """Tokenize a conversation up to the policy's reply.

        Raises:
            DataError: it is longer than `data.max_prompt_length`, or the chat template refuses it.
        """
        turns = [{"role": "user", "content": conversation}] if isinstance(conversation, str) else conversation
        messages = [Message(turn["role"], turn["content"]) for turn in turns]
        ids, most = encode_conversation(self._tokenizer, messages, self._form), self._lengths.max_prompt_length
        if len(ids) > most:
            raise DataError(
                f"{shown(messages[-1].content)}: a prompt of {len(ids)} tokens, and data.max_prompt_length is {most}; "
                "shorten it, or begin a session with more"
            )
        return Prompt(ids, make_conversation_row(messages, self._form))

    def reply(self, prompt: Prompt, text: str) -> list[int]:
        """Return the tokens of a reply to `prompt`, including its end.

        Raises:
            DataError: the reply has more tokens than `data.max_completion_length`.
        """
        (ids,) = encode_replies(
            self._tokenizer,
            [prompt.row],
            [text],
            [prompt.prompt_ids],
            chat_template=self._form == "template",
            end_ids=self._ends,
        )
        most = self._lengths.max_completion_length
        if ids is None or len(ids) > most:
            what = "the chat template refuses it" if ids is None else f"{len(ids)} tokens with its end"
            raise DataError(
                f"{shown(text)}: {what}, and data.max_completion_length is {most}; "
                "shorten it, or begin a session with more"
            )
        return ids

    def batches(self, prompts: Sequence[Prompt]) -> Iterator[tuple[slice, Batch]]:
        """Yield slices of `prompts` and the batch of each for `PPOTrainer.generate`; the last is filled up."""
        rows = self._trainer.batch_rows
        for start in range(0, len(prompts), rows):
            part = prompts[start : start + rows]
            filled = [*part, *[part[0]] * (rows - len(part))]
            batch = self._trainer.collate(filled, len(part))
            yield slice(start, start + len(part)), self._trainer.accelerator.to_device(batch)

    def reply_rollout(self, prompts: Batch, replies: Sequence[list[int]]) -> Rollout:
        """Return the rollout as if the policy had drawn `replies` to the first rows of `prompts`."""
        filled = [*replies, *[replies[0]] * (len(prompts["prompt_ids"]) - len(replies))]
        width = self._trainer.context.shapes.length(max(map(len, filled)), self._lengths.max_completion_length)
        pad = self._tokenizer.pad_token_id
        ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in filled])
        mask = (torch.arange(width) < torch.tensor([len(row) for row in filled])[:, None]).long()
        ids, mask = self._trainer.accelerator.to_device((ids, mask))
        return Rollout.join(prompts, ids, mask, end_ids=None, micro_batcher=self._trainer.micro_batcher)

    def rollout(self, tensors: Batch) -> Rollout:
        """Return the rollout that consists of these `tensors`."""
        rows, completion = tensors["action_mask"].shape
        prompt, lengths = tensors["input_ids"].shape[1] - completion, tensors.get("lengths")
        cut = self._trainer.micro_batcher.cut(lengths, rows=rows, prompt=prompt, completion=completion)
        row_mask = tensors["action_mask"].any(1)
        return Rollout(**{"row_mask": row_mask, **tensors}, micro_batches=cut)

    def completions(self, rollout: Rollout) -> list[str]:
        """Return the completion of each row."""
        return completion_texts(self._tokenizer, completion_ids(rollout.input_ids, rollout.action_mask))


def shown(text: str) -> str:
    """Return a text in quotes for messages, shortened."""
    return repr(text if len(text) <= 60 else f"{text[:59]}…")
