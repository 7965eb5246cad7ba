"""Rollouts that a policy draws in its own process, in PPO and distillation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rlhf.config.schema import SamplingConfig
from rlhf.data.batches import Batch
from rlhf.engine.engine import TrainingEngine
from rlhf.generation.decoder import Completions, Decoder
from rlhf.generation.hybrid_engine import WeightLayout, choose_rank_group, count_step_bytes, generation_mode
from rlhf.models.tokenizers import find_end_tokens
from rlhf.reporting.step_records import RankStep
from rlhf.trainers.ppo.experience import MicroBatcher, Rollout
from rlhf.trainers.ppo.recorded_rollout import restore_completions

if TYPE_CHECKING:
    from rlhf.trainers.context import StageContext


class PolicyDecoder:
    """Draws completions by the policy's weights, and joins them with their prompts.

    Attributes:
        decoder: its random generator is that of the stage.
    """

    def __init__(
        self,
        context: StageContext,
        engine: TrainingEngine,
        tokenizer: Any,
        micro_batcher: MicroBatcher,
        sampling: SamplingConfig,
        *,
        batch_size: int | None,
        rows: int,
        layout: WeightLayout,
        is_local: bool = True,
    ) -> None:
        """Prepare to draw.

        Args:
            context: that of the stage.
            engine: trains the policy.
            tokenizer: the policy's.
            micro_batcher: cuts rollouts.
            sampling: how tokens are sampled.
            batch_size: maximum number of rows that a rank generates at a time; None: all.
            rows: number of rows that a rank generates at a time.
            layout: of the weights while they are read; unchanged: completions are drawn exactly as they are scored.
            is_local: False if servers draw: then only the random numbers are drawn here.
        """
        self._context, self._engine, self._tokenizer = context, engine, tokenizer
        self._micro_batcher, self._sampling, self._layout = micro_batcher, sampling, layout
        self.decoder = Decoder(
            context.accelerator,
            eos_ids=find_end_tokens(tokenizer, engine.module.generation_config),
            pad_id=tokenizer.pad_token_id,
            max_new_tokens=context.config.data.max_completion_length,
            shapes=context.shapes,
            batch_size=batch_size,
            rank_group=choose_rank_group(engine, context.config, say=context.say, rows=rows) if is_local else None,
            exact=layout == "unchanged",
        )
        self.decoder.random.manual_seed(context.config.seed * 100_003)
        # Of experts, a step reads only some; such a model has no known shape.
        is_known = context.model_flops is not None
        self._step_bytes = count_step_bytes(engine, self.decoder.rank_group) if is_known else None

    @torch.no_grad()
    def generate(self, prompts: Batch, copies: int = 1) -> Rollout:
        """Complete prompts, of which `copies` after each other are equal; see `rlhf.data.batches.collate_ppo`."""
        decoder = self.decoder
        with (
            self._context.phases.running("generation"),
            generation_mode(self._engine, decoder.rank_group, layout=self._layout) as model,
        ):
            ids, mask = prompts["prompt_ids"], prompts["prompt_mask"]
            completions = decoder.generate(model, ids, mask, self._sampling, copies)
            if self._engine.zero_stage == 3:  # the next gather may use other addresses, which a recorded step cannot
                decoder.release()
        decoder.release_if_large()
        self._context.accelerator.step_boundary("rollout/end")
        return self.join(prompts, completions)

    def restore(self, prompts: Batch, given: RankStep) -> Rollout:
        """Return the rollout of a recorded step."""
        padding, accelerator = self._tokenizer.pad_token_id, self._context.accelerator
        return self.join(prompts, restore_completions(given, padding, accelerator))

    def join(self, prompts: Batch, completions: Completions) -> Rollout:
        """Return the rollout of prompts and their completions."""
        return Rollout.join(
            prompts,
            completions.ids,
            completions.mask,
            end_ids=self.decoder.eos_ids,
            micro_batcher=self._micro_batcher,
            lengths=self._micro_batcher.lengths(prompts["prompt_mask"], completions.mask),
            log_probs=completions.log_probs,
        )

    def count_steps(self) -> None:
        """Count the steps of the latest `generate` as those of the phase `generation`."""
        if self.decoder.steps:
            phases = self._context.phases
            phases.count_decode_steps("generation", self.decoder.steps, step_bytes=self._step_bytes)
