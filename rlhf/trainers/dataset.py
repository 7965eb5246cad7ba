"""Loads a stage's examples on every rank: one rank of each machine tokenizes them, all ranks open the result."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.data.cache import StageCache
from rlhf.data.load_sources import read_sources
from rlhf.data.report import format_reports
from rlhf.data.stage_dataset import StageData, load_stage
from rlhf.engine import distributed
from rlhf.errors import DataError
from rlhf.models.tokenizers import find_end_tokens

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

    from rlhf.trainers.context import StageContext


def stage_rows(
    context: StageContext, tokenizer: PreTrainedTokenizerBase, settings: GenerationConfig | None
) -> StageData:
    """Return the stage's examples, and log how many rows of each source are used; replies end as generation does.

    Raises:
        DataError: a source cannot be read, has no usable row, or differs between machines.
        RunError: the rows differ from those that the run started with.
    """
    config, stage, show = context.config, context.directory.name, context.world.is_main
    ends = find_end_tokens(tokenizer, settings)
    cache = StageCache.of(config, stage, tokenizer, ends)
    if len(set(distributed.all_gather_objects(cache.key))) > 1:
        raise DataError(
            f"{stage}: rows, tokenizers or versions of rlhf differ between ranks; give all machines the same files"
        )
    with distributed.on_each_machine("tokenizing the rows") as builds:
        obstacle = cache.build(show=show) if builds else None
    obstacles = [reason for reason in distributed.all_gather_objects(obstacle) if reason]
    if obstacles:
        context.say(f"note: {stage}: tokenized rows are not cached, and every rank tokenizes them: {obstacles[0]}")
        sources = read_sources(config.data, [stage], seed=config.seed, show=show, records=cache.records)
        data = load_stage(config.data, stage, tokenizer, seed=config.seed, end_ids=ends, sources=sources)
        data = replace(data, fingerprints=sources.fingerprints())
    else:
        data = cache.load()
    with distributed.on_main("comparing the rows") as main:
        if main:  # an earlier stage may have taken days
            context.run.check_rows(config, data.fingerprints)
    for line in format_reports(data.reports):
        context.say(line)
    return data
