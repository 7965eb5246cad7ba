"""Texts for PPO's models: conversations and replies become batches of the shapes that training has, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from rlhf.data.batches import completion_ids, completion_texts
from rlhf.data.examples import Prompt
from rlhf.data.prompt_encoding import encode_conversation, encode_replies, make_conversation_row
from rlhf.data.records import Message
from rlhf.engine.engine import Batch
from rlhf.errors import DataError
from rlhf.models.tokenizers import find_end_tokens
from rlhf.trainers.ppo.experience import Rollout
from rlhf.trainers.ppo.trainer import PPOTrainer

Conversation = str | Sequence[Mapping[str, str]]
"""A user's message, or the turns so far as `{"role": "user", "content": "..."}`."""


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
            DataError: they are more than `data.max_completion_length`.
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

    def tensors(self, rollout: Rollout) -> Batch:
        """Return the tensors of a rollout by name."""
        return {name: value for name, value in vars(rollout).items() if isinstance(value, torch.Tensor)}

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
    """Format a text for messages."""
    return repr(text if len(text) <= 60 else f"{text[:59]}…")
