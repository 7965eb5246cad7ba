"""Where a stage's models come from, in a run whose stages may still be to come; and the tokenizers that they will have.

Settings and a run's folder go in; paths, tokenizers and where their examples are kept come out. No weights are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.config.schema import Config, Stage
from rlhf.errors import ConfigError
from rlhf.roles.lineage import REWARD_MODEL, Start, starts
from rlhf.runs.directory import RunDirectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf.data.cache import StageCache


class Origin(NamedTuple):
    """Where the weights come from that a stage starts from: `path`, or the embedded model where that is None.

    `through` are stages of this run that train them first, the earliest one first.
    """

    start: Start
    path: str | None
    through: tuple[Stage, ...] = ()


def origin(directory: RunDirectory, start: Start, values: dict[str, Any], pending: Sequence[Stage]) -> Origin:
    """Where the weights come from that `start` names, in a run whose `pending` stages are still to come."""
    named = start.named(values)
    if named or start.earlier is None:
        return Origin(start, named)
    if start.earlier not in pending:
        return Origin(start, directory.finished_model(start.earlier, start.key))
    before = origin(directory, starts(values, start.earlier)[0], values, pending)
    return Origin(start, before.path, (*before.through, start.earlier))


class Tokenizers:
    """The tokenizers of the models that the stages start from, each loaded once."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tokenizers: dict[tuple[str | None, str | None], PreTrainedTokenizerBase] = {}

    def tokenizer(self, found: Origin) -> PreTrainedTokenizerBase:
        """The tokenizer that the stage will load with the model."""
        from rlhf.data.toy_tokenizer import world_tokenizer
        from rlhf.models.loading import load_model_tokenizer

        # `model.tokenizer` is for the model that fine-tuning starts from; what SFT leaves has it beside it.
        first = found.start.key == "model.path" or "sft" in found.through
        config, path = self._config.model, None if first else found.path
        if found.path is None and config.eos_token:
            raise ConfigError("model.eos_token: the embedded model has one of its own; leave it out, or set model.path")
        if found.start == REWARD_MODEL and not found.through:  # it is trained, and cannot know a new token
            config = config.model_copy(update={"eos_token": None})
        key = path, config.eos_token
        if key not in self._tokenizers:
            self._tokenizers[key] = world_tokenizer() if found.path is None else load_model_tokenizer(config, path)[0]
        return self._tokenizers[key]

    def end_tokens(self, found: Origin) -> list[int]:
        """Ids that end a reply of the model."""
        from rlhf.models.compatibility import generation_settings
        from rlhf.models.tokenizers import end_tokens

        settings = generation_settings(found.path, self._config.model) if found.path else None
        return end_tokens(self.tokenizer(found), settings)

    def cache(self, stage: Stage, found: Origin) -> StageCache:
        """Where the stage's examples are kept, or will be, made with the tokenizer of that model."""
        from rlhf.data.cache import StageCache

        return StageCache.of(self._config, stage, self.tokenizer(found), self.end_tokens(found))
