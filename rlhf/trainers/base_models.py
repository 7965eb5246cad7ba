"""The tokenizers of the models that stages start from, and the cached examples made with them.

`rlhf.roles.lineage` says where each model comes from. No weights are loaded here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.config.schema import Config, Stage
from rlhf.errors import ConfigError
from rlhf.roles.lineage import MODEL, REWARD_MODEL, ResolvedBaseModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf.data.cache import StageCache


class Tokenizers:
    """The tokenizers of the models that the stages start from, each loaded once."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tokenizers: dict[tuple[str | None, str | None], PreTrainedTokenizerBase] = {}

    def tokenizer(self, base: ResolvedBaseModel) -> PreTrainedTokenizerBase:
        """Return the tokenizer that the stage will load with the model.

        Raises:
            ConfigError: `model.eos_token` is set for the embedded model.
            ModelError: the tokenizer cannot be loaded.
        """
        from rlhf.data.toy_world import build_world_tokenizer
        from rlhf.models.loading import load_model_tokenizer

        # `model.tokenizer` belongs to the model that fine-tuning starts from; SFT saves it next to its model.
        is_first_model = base.ref == MODEL or "sft" in base.through
        config, path = self._config.model, None if is_first_model else base.path
        if base.path is None and config.eos_token:
            raise ConfigError(
                "model.eos_token: the embedded model has its own; remove this key, or set model.path to another model"
            )
        if base.ref == REWARD_MODEL and not base.through:  # already trained: it cannot know a new token
            config = config.model_copy(update={"eos_token": None})
        key = path, config.eos_token
        if key not in self._tokenizers:
            self._tokenizers[key] = (
                build_world_tokenizer() if base.path is None else load_model_tokenizer(config, path)[0]
            )
        return self._tokenizers[key]

    def end_tokens(self, base: ResolvedBaseModel) -> list[int]:
        """Return the ids that end a reply of the model."""
        from rlhf.models.compatibility import load_generation_config
        from rlhf.models.tokenizers import find_end_tokens

        settings = load_generation_config(base.path, self._config.model) if base.path else None
        return find_end_tokens(self.tokenizer(base), settings)

    def cache(self, stage: Stage, base: ResolvedBaseModel) -> StageCache:
        """Return the cache of the stage's examples, as tokenized for that model."""
        from rlhf.data.cache import StageCache

        return StageCache.of(self._config, stage, self.tokenizer(base), self.end_tokens(base))
