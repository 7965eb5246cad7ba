"""Finished models on the chosen accelerator: language models that write, reward models that judge.

The name of a model flows in; out comes the model in the compute precision, with its tokenizer and what its prompts and
replies look like. One `Device` serves all models of a command, one after the other or side by side. torch is imported
when one is made: the backend's choice comes first.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config.schema import Config, ModelConfig
from rlhf.errors import ModelError, OutOfMemory
from rlhf.evaluation.resolve import (
    find_base_model,
    merge_adapter,
    model_folder,
    read_end_ids,
    read_prompt_format,
    reward_model_folder,
)
from rlhf.models import hub
from rlhf.models.compatibility import check_model_folder
from rlhf.reporting.progress import progress

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from accelerators import Accelerator, Precision, ShapePolicy
    from rlhf.data.prompt_encoding import PromptFormat
    from rlhf.data.records import Row

logger = logging.getLogger(__name__)

_ENDLESS = 1_000_000  # tokens that a model takes whose configuration names no limit


@dataclass(frozen=True)
class EvaluationDevice:
    """The accelerator that models are evaluated on, the numbers they compute in, and how batches are padded."""

    accelerator: Accelerator
    precision: Precision
    shapes: ShapePolicy

    @classmethod
    def chosen(cls, config: Config, accelerator: str | None = None) -> EvaluationDevice:
        """The backend that `accelerator`, the settings or the machine name; bound and seeded.

        Raises:
            AcceleratorError: no backend can be chosen, or it lacks the precision.
            ConfigError: it lacks an implementation that `engine.kernels` names.
        """
        from rlhf.engine.select import choose_kernels, select_accelerator
        from rlhf.reporting import verbosity

        selection = select_accelerator(config, accelerator)
        from accelerators import ShapePolicy, stdout_to_stderr

        with stdout_to_stderr():  # a device's software may print as it likes
            made = selection.create()
            made.bind(0)
            made.seed(config.seed)
            choose_kernels(config, made)
        verbosity.quiet_imported_libraries()
        named = config.engine.shapes
        shapes = made.shape_policy() if named == "auto" else ShapePolicy(named)
        return cls(made, made.precision(config.precision), shapes)

    def each(
        self,
        rows: Sequence[Sequence[int]],
        compute: Callable[..., Tensor],
        *,
        pad: int,
        batch_size: int,
        numbers: Mapping[str, Sequence[int]] = {},
        description: str = "",
    ) -> list[float]:
        """What `compute` makes of each row of token ids, in the order of the rows.

        Rows are padded on the right, together with others of about their length; the longest come first, so that a lack
        of memory shows at once. All batches have the same number of rows.

        Args:
            compute: (input_ids [B, T], attention_mask [B, T], **numbers [B]) -> [B].
            numbers: of each row, for `compute`.
            description: shown with the progress; empty: none is shown.

        Raises:
            OutOfMemory: so many rows at a time are too many.
        """
        import torch

        from rlhf.data.batches import pad_right

        order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
        size, longest = min(batch_size, len(rows)), max(map(len, rows), default=0)
        found = [0.0] * len(rows)
        with torch.no_grad(), progress(len(rows), description, enabled=bool(description)) as bar:
            for start in range(0, len(order), size or 1):
                places = order[start : start + size]
                filled = [*places, *[places[0]] * (size - len(places))]
                ids, mask = pad_right([rows[index] for index in filled], self.shapes, longest, pad)
                more = {name: torch.tensor([values[index] for index in filled]) for name, values in numbers.items()}
                batch = self.accelerator.to_device({"input_ids": ids, "attention_mask": mask, **more})
                with self.computing(f"{size} rows of {ids.shape[1]:,} tokens"):
                    values = compute(**batch)
                    self.accelerator.step_boundary("evaluate")
                    numbers_of_rows = values.tolist()
                for index, value in zip(places, numbers_of_rows):
                    found[index] = value
                bar.advance(len(places))
        return found

    @contextmanager
    def computing(self, rows: str, remedy: str = "--batch-size") -> Iterator[None]:
        """A model's forward passes, in the precision; where there is no memory for them, what would help.

        Raises:
            OutOfMemory: there is too little for `rows` at a time.
        """
        from accelerators import find_out_of_memory

        try:
            with self.precision.autocast():
                yield
        except Exception as error:
            if find_out_of_memory(error):
                said = f"{self.accelerator.name}: too little memory for {rows} at a time; lower {remedy}"
                raise OutOfMemory(said) from error
            raise

    def free(self) -> None:
        """Give back what models held that nobody refers to any more: the next needs it."""
        gc.collect()
        self.accelerator.empty_cache()


@dataclass(frozen=True)
class EvaluatedModel:
    """A model in evaluation: `name` is the user's for it, `room` the most tokens that a row may have.

    `module` is a language model of transformers, or a `rlhf.models.forward.ScalarHead`.
    """

    name: str
    folder: str
    device: EvaluationDevice
    module: Any
    tokenizer: PreTrainedTokenizerBase
    prompt_format: PromptFormat
    end_ids: list[int]
    room: int


class LanguageModel(EvaluatedModel):
    """A causal language model."""


class RewardModel(EvaluatedModel):
    """A reward model: scores as PPO's reward model gives them to completions."""

    def encode(self, rows: Sequence[Row], replies: Sequence[str]) -> list[list[int] | None]:
        """The token ids of each row's prompt with a reply and its end; None where the chat template refuses them."""
        from rlhf.data.prompt_encoding import encode_prompts, encode_replies

        templated = self.prompt_format == "template"
        prompts = encode_prompts(self.tokenizer, rows, chat_template=templated)
        found = encode_replies(self.tokenizer, rows, replies, prompts, chat_template=templated, end_ids=self.end_ids)
        return [
            None if prompt is None or reply is None else prompt + reply
            for prompt, reply in zip(prompts, found, strict=True)
        ]

    def scores(self, sequences: Sequence[Sequence[int]], *, batch_size: int = 8, description: str = "") -> list[float]:
        """The score of each sequence of token ids, which has `room` tokens at most: that of its last token.

        Raises:
            ModelError: a score is no finite number.
        """
        import math

        from rlhf.models.forward import sequence_scores

        def compute(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return sequence_scores(self.module, input_ids, attention_mask)

        pad: Any = self.tokenizer.pad_token_id
        found = self.device.each(sequences, compute, pad=pad, batch_size=batch_size, description=description)
        if wrong := next((score for score in found if not math.isfinite(score)), None):
            raise ModelError(
                f"{self.name}: a score is {wrong} in {self.device.precision.name}; try --precision fp32, or check "
                "the model's weights"
            )
        return found


def load_language_model(
    path: Path | str, config: Config, device: EvaluationDevice, *, name: str | None = None
) -> LanguageModel:
    """The causal language model at `path`: of a run its last policy's, a model's folder, or a hub name.

    An adapter alone is put into the model that it names.

    Args:
        config: whether code of the model's own may run, and with which tokenizer instead of the model's.
        name: how messages call it; default: `path`.

    Raises:
        RunError, ModelError: there is no such model, or it is none that writes.
    """
    folder = str(model_folder(path))
    base = find_base_model(folder)
    from rlhf.models.compatibility import load_model_config
    from rlhf.models.loading import load_causal_lm
    from rlhf.models.scalar_head import CLASS_SUFFIX
    from rlhf.models.tokenizers import find_end_tokens

    source = config.model.model_copy(update={"path": base})
    hub.check_available(base, "model")
    for architecture in load_model_config(base, source).architectures or ():
        if architecture.endswith(("ForSequenceClassification", CLASS_SUFFIX)):
            raise ModelError(f"{base}: is a reward model, which scores texts and writes none; name another model")
    tokenizer, options = _prepared(source, device, scalar_head=False)
    if base == folder:
        model = load_causal_lm(source, tokenizer, **options)
    else:
        model = merge_adapter(load_causal_lm(source, tokenizer, **options | {"put": None}), folder)
    ends = find_end_tokens(tokenizer, model.generation_config)
    placed, prompts = _placed(model, device), find_prompt_format(folder, tokenizer, config)
    return LanguageModel(name or str(path), folder, device, placed, tokenizer, prompts, ends, _room(model))


def load_reward_model(
    path: Path | str, config: Config, device: EvaluationDevice, *, name: str | None = None
) -> RewardModel:
    """The reward model at `path`: of a run its reward stage's, a model's folder, or a hub name.

    Any sequence classifier of transformers with one output, what `rlhf reward` leaves, and DeepSpeed-Chat's.

    Args:
        config, name: as of `load_writer`.

    Raises:
        RunError, ModelError: there is no such model, or it is none that scores.
    """
    folder = str(reward_model_folder(path))
    check_model_folder(folder)
    from rlhf.models.compatibility import load_generation_config
    from rlhf.models.forward import ScalarHead
    from rlhf.models.loading import load_scalar_head
    from rlhf.models.tokenizers import find_end_tokens

    source = config.model.model_copy(update={"path": folder})
    tokenizer, options = _prepared(source, device, scalar_head=True)
    model = load_scalar_head(source, tokenizer, path=folder, say=logger.warning, **options)
    placed, prompts = _placed(model, device), find_prompt_format(folder, tokenizer, config)
    ends = read_end_ids(Path(folder)) or find_end_tokens(tokenizer, load_generation_config(folder, source))
    head = ScalarHead(placed).eval()
    return RewardModel(name or str(path), folder, device, head, tokenizer, prompts, ends, _room(model))


def _prepared(
    source: ModelConfig, device: EvaluationDevice, *, scalar_head: bool
) -> tuple[PreTrainedTokenizerBase, dict[str, Any]]:
    """What loaders of a model are given: its tokenizer; its attention, and what makes its parameters."""
    from rlhf.models.attention import choose_attention
    from rlhf.models.loading import check_tokenizer_fits, load_model_tokenizer, load_on_meta
    from rlhf.models.weight_loading import place_in_memory

    folder = str(source.path)
    attention = choose_attention(device.accelerator, folder, source).name
    tokenizer, notes = load_model_tokenizer(source)
    for note in notes:
        logger.info("%s", note)
    if source.tokenizer:
        check_tokenizer_fits(
            tokenizer, load_on_meta(folder, source, attention=attention, scalar_head=scalar_head), folder
        )
    return tokenizer, {
        "attention": attention,
        "put": place_in_memory(device.precision.dtype, device.accelerator.device()),
    }


def _placed(model: Any, device: EvaluationDevice) -> Any:
    """The model on the device and in its precision, ready to be asked."""
    from rlhf.models.loading import place_model

    return place_model(model, device.accelerator.device(), device.precision.dtype).requires_grad_(False).eval()


def find_prompt_format(folder: Path | str, tokenizer: PreTrainedTokenizerBase, config: Config) -> PromptFormat:
    """How a model's prompts are written: as in its training, where a stage left it."""
    from rlhf.data.prompt_encoding import uses_chat_template

    template = uses_chat_template(tokenizer, config.data.chat_template)
    return read_prompt_format(Path(folder)) or ("template" if template else "plain")


def _room(model: Any) -> int:
    from rlhf.models.compatibility import get_max_positions

    return get_max_positions(model.config) or _ENDLESS
