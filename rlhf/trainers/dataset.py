"""What a stage trains on, on every rank: tokenized once by one rank of each machine, opened by all of them.

A stage's surroundings and its tokenizer go in; examples come out, and lines on what became of each source's rows.
"""

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
    """The stage's examples; what ends a reply is what ends generation.

    Raises:
        DataError: a source cannot be read, has no usable row, or is another one on another machine.
        RunError: the rows are not those that the run was made with.
    """
    config, stage, show = context.config, context.directory.name, context.world.is_main
    ends = find_end_tokens(tokenizer, settings)
    cache = StageCache.of(config, stage, tokenizer, ends)
    if len(set(distributed.all_gather_objects(cache.key))) > 1:
        raise DataError(
            f"{stage}: ranks find different rows, tokenizers or versions of rlhf; give all machines the same files"
        )
    with distributed.on_each_machine("tokenizing the rows") as builds:
        hindrance = cache.build(show=show) if builds else None
    hindrances = [found for found in distributed.all_gather_objects(hindrance) if found]
    if hindrances:
        context.say(f"note: {stage}: tokenized rows are not kept, and every rank holds its own: {hindrances[0]}")
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
