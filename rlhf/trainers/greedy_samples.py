"""Greedy completions of the first held-out prompts, which show what a model writes after SFT or DPO."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from rlhf.config.schema import SamplingConfig
from rlhf.data.batches import collate_ppo
from rlhf.data.examples import Prompt
from rlhf.engine.engine import Metrics, TrainingEngine
from rlhf.generation.decoder import Decoder
from rlhf.generation.hybrid_engine import choose_rank_group, generation_mode
from rlhf.memory.stage import GREEDY_SAMPLES
from rlhf.models.tokenizers import find_end_tokens
from rlhf.trainers.context import StageContext


class GreedySamples:
    """Generates as PPO's rollouts do; every rank takes part, with the same prompts."""

    def __init__(self, engine: TrainingEngine, context: StageContext, tokenizer: Any, examples: Sequence[Any]) -> None:
        """Choose the prompts: of `examples`, the first that are not empty and not longer than PPO's."""
        self._engine, self._context, self._tokenizer = engine, context, tokenizer
        longest = context.config.data.max_prompt_length
        usable = (example for example in examples if 0 < len(example.prompt_ids) <= longest)
        self._prompts = [Prompt(example.prompt_ids, example.row) for example, _ in zip(usable, range(GREEDY_SAMPLES))]

    @cached_property
    def _decoder(self) -> Decoder:
        context = self._context
        return Decoder(
            context.accelerator,
            eos_ids=find_end_tokens(self._tokenizer, self._engine.module.generation_config),
            pad_id=self._tokenizer.pad_token_id,
            max_new_tokens=context.config.data.max_completion_length,
            shapes=context.shapes,
            rank_group=choose_rank_group(self._engine, context.config, say=lambda line: None),
        )

    @torch.no_grad()
    def complete(self) -> tuple[Metrics, list[dict[str, str]]]:
        """Return the share of completions that are cut off, and the texts; nothing if there are no prompts."""
        if not self._prompts:
            return {}, []
        context, decoder = self._context, self._decoder
        batch = collate_ppo(
            self._prompts,
            policy=context.shapes,
            maximum=context.config.data.max_prompt_length,
            pad_token_id=self._tokenizer.pad_token_id,
        )
        with (
            context.phases.running("evaluation"),
            # To merge and convert the weights for so few prompts would take longer than it saves.
            generation_mode(self._engine, decoder.rank_group, layout="unchanged") as model,
        ):
            prompts = context.accelerator.to_device(batch)
            drawn = decoder.generate(
                model, prompts["prompt_ids"], prompts["prompt_mask"], SamplingConfig(temperature=0)
            )
            decoder.release()  # training needs the memory
        context.accelerator.step_boundary(f"{context.directory.name}/samples")
        ids, lengths = drawn.ids.tolist(), drawn.mask.sum(1).tolist()
        completions = [row[:length] for row, length in zip(ids, lengths)]
        ends = set(decoder.eos_ids.tolist())
        cut_off = sum(not row or row[-1] not in ends for row in completions)
        samples = [
            {"prompt": prompt.row.text, "completion": self._tokenizer.decode(row, skip_special_tokens=True).strip()}
            for prompt, row in zip(self._prompts, completions)
        ]
        return {"truncated_share": cut_off / len(completions)}, samples
