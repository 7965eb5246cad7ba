"""Completions of the same prompts by several models, one model in memory at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlhf.config.schema import Config
from rlhf.data.batches import completion_texts
from rlhf.data.prompt_encoding import PromptFormat, encode_prompts, make_conversation_row
from rlhf.data.records import Row
from rlhf.data.report import DropCounts, add_drop
from rlhf.errors import ConfigError, DataError
from rlhf.evaluation.generate import GenerationSettings, Ids, generate_completions
from rlhf.evaluation.models import (
    EvaluationDevice,
    LanguageModel,
    check_reward_folder,
    find_base_model,
    find_prompt_format,
    load_language_model,
    model_folder,
    reward_model_folder,
)
from rlhf.models.compatibility import choose_attention, get_max_positions
from rlhf.models.loading import load_model_tokenizer, load_on_meta
from rlhf.reporting.progress import progress


@dataclass
class ModelOutputs:
    """The completions of one model: the samples of the first prompt, then those of the second, and so on.

    Attributes:
        truncated: True for completions that did not end within `max_tokens`.
        log_ratios: log p(completion) under this model minus that under the first one, in nats; None for the first
            model, or for the reason in `no_ratios`.
        no_ratios: the reason why there are no log-ratios.
        counted: token ids for distinct n-grams, in one vocabulary for all models.
        scores: scores of the reward model, or None.
    """

    name: str
    ids: list[Ids] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)
    log_ratios: list[float] | None = None
    no_ratios: str = ""
    counted: list[Ids] = field(default_factory=list)
    scores: list[float] | None = None


class ModelSummary(NamedTuple):
    """The properties of a model that are known without its weights; see `rlhf.evaluation.models.EvaluatedModel`.

    `rows` is the size of its embedding; some models have more rows than their tokenizer has tokens, and may draw them.
    """

    name: str
    tokenizer: Any
    prompt_format: PromptFormat
    max_length: int | None
    rows: int

    def prompts(self, rows: Sequence[Row]) -> list[Ids | None]:
        """Return the prompts in the format of the model's training; None if its chat template refuses one."""
        formatted = [make_conversation_row(row.prompt, self.prompt_format) for row in rows]
        return encode_prompts(self.tokenizer, formatted, chat_template=self.prompt_format == "template")


class Completions(NamedTuple):
    """The rows that all models completed, the outputs of each model, and the reasons for the other rows."""

    rows: list[Row]
    outputs: list[ModelOutputs]
    left_out: DropCounts


def complete_prompts(
    models: Sequence[str],
    rows: Sequence[Row],
    settings: GenerationSettings,
    config: Config,
    device: EvaluationDevice,
    *,
    samples: int = 1,
) -> Completions:
    """Generate `samples` completions of each prompt with each model.

    Raises:
        ConfigError: a model is named twice.
        DataError: no prompt fits all models.
        ModelError, RunError: a model cannot be loaded, or is of the wrong kind.
    """
    check_different_models(models)
    summaries = [summarize_model(name, config, device) for name in models]
    fitting, prompts, left_out = select_fitting(summaries, rows, settings.max_tokens)
    outputs = [ModelOutputs(name) for name in models]
    for name, column, output in zip(models, prompts, outputs):
        model = load_language_model(name, config, device)
        write_completions(model, [ids for ids in column for _ in range(samples)], output, settings)
        del model
        device.free_memory()
    return Completions(fitting, outputs, left_out)


def check_different_models(models: Sequence[str]) -> None:
    """Raise `ConfigError` if two names are of the same model."""
    places = [os.path.realpath(model_folder(name)) for name in models]
    if twice := [name for name, place in zip(models, places) if places.count(place) > 1]:
        raise ConfigError(f"{twice[-1]}: is the same model as {twice[0]}; name each model once")


def summarize_model(name: str, config: Config, device: EvaluationDevice, *, scalar_head: bool = False) -> ModelSummary:
    """Summarize a model without reading its weights; raise the errors of loading them."""
    folder = (reward_model_folder if scalar_head else model_folder)(name)
    if scalar_head:
        check_reward_folder(folder)
    base = str(folder) if scalar_head else find_base_model(folder)
    source = config.model.model_copy(update={"path": base})
    tokenizer, _ = load_model_tokenizer(source)
    attention = choose_attention(device.accelerator, base, source).name
    model = load_on_meta(base, source, attention=attention, scalar_head=scalar_head)
    rows = max(model.get_input_embeddings().weight.shape[0], len(tokenizer))
    return ModelSummary(
        name, tokenizer, find_prompt_format(folder, tokenizer, config), get_max_positions(model.config), rows
    )


def select_fitting(
    models: Sequence[ModelSummary], rows: Sequence[Row], max_tokens: int
) -> tuple[list[Row], list[Any], DropCounts]:
    """Return the rows that every model can complete, the prompts of each model, and the reasons for the other rows."""
    columns = [model.prompts(rows) for model in models]
    left_out: DropCounts = {}
    places: list[int] = []
    for place, row in enumerate(rows):
        reasons = (_find_obstacle(model, column[place], max_tokens) for model, column in zip(models, columns))
        if reason := next(filter(None, reasons), ""):
            add_drop(left_out, reason, row.source)
        else:
            places.append(place)
    if not places:
        reason, (_, where) = next(iter(left_out.items()))
        raise DataError(f"no prompt fits all models: {reason} ({where}); give shorter prompts, or lower --max-tokens")
    return [rows[place] for place in places], [[column[place] for place in places] for column in columns], left_out


def _find_obstacle(model: ModelSummary, prompt: Ids | None, max_tokens: int) -> str:
    """Return the reason why a model cannot complete a prompt, or ""."""
    if prompt is None:
        return f"{model.name}: its chat template refuses the turns"
    if not prompt:
        return f"{model.name}: the prompt has no tokens"
    if model.max_length and len(prompt) + max_tokens > model.max_length:
        return f"{model.name}: the prompt and --max-tokens {max_tokens} exceed its {model.max_length} tokens"
    return ""


def write_completions(
    writer: LanguageModel, prompts: Sequence[Ids], column: ModelOutputs, settings: GenerationSettings
) -> None:
    """Generate a model's completions of the prompts into its `column`; a bar shows the progress."""
    with progress(len(prompts), f"{writer.name} writes", unit="completions") as bar:
        column.ids = generate_completions(writer, prompts, settings, bar.advance)
    column.texts = completion_texts(writer.tokenizer, column.ids)
    column.truncated = [ids[-1] not in writer.end_ids for ids in column.ids]
