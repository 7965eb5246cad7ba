"""Load finished models onto the selected accelerator: language models and reward models.

A loaded model is in the compute precision and has its tokenizer and the format of its prompts and replies. One
`EvaluationDevice` serves all models of a command, in sequence or together. torch is imported when the device is
created, because the backend must be selected first.
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

_UNLIMITED = 1_000_000  # maximum length of a model whose configuration names none


@dataclass(frozen=True)
class EvaluationDevice:
    """The accelerator that models are evaluated on, the compute precision, and the padding of batches."""

    accelerator: Accelerator
    precision: Precision
    shapes: ShapePolicy

    @classmethod
    def select(cls, config: Config, accelerator: str | None = None) -> EvaluationDevice:
        """Select the backend named by `accelerator`, the settings or the machine; bind and seed it.

        Raises:
            AcceleratorError: no backend can be selected, or it lacks the precision.
            ConfigError: the backend lacks a kernel that `engine.kernels` names.
        """
        from rlhf.engine.select import choose_kernels, select_accelerator
        from rlhf.reporting import verbosity

        selection = select_accelerator(config, accelerator)
        from accelerators import ShapePolicy, stdout_to_stderr

        with stdout_to_stderr():  # the device's software may print to stdout
            backend = selection.create()
            backend.bind(0)
            backend.seed(config.seed)
            choose_kernels(config, backend)
        verbosity.quiet_imported_libraries()
        kind = config.engine.shapes
        shapes = backend.shape_policy() if kind == "auto" else ShapePolicy(kind)
        return cls(backend, backend.precision(config.precision), shapes)

    def map_rows(
        self,
        rows: Sequence[Sequence[int]],
        compute: Callable[..., Tensor],
        *,
        pad: int,
        batch_size: int,
        extras: Mapping[str, Sequence[int]] = {},
        description: str = "",
    ) -> list[float]:
        """Return the result of `compute` for each row of token ids, in the order of the rows.

        Rows of similar length are padded on the right together, the longest first, so that a lack of memory shows at
        once. All batches have the same number of rows.

        Args:
            rows: token ids.
            compute: (input_ids [B, T], attention_mask [B, T], **extras [B]) -> [B].
            pad: token of the padding.
            batch_size: maximum number of rows of a batch.
            extras: further arguments of `compute`, one number per row.
            description: label of the progress bar; empty: no bar.

        Raises:
            OutOfMemory: the batch is too large.
        """
        import torch

        from rlhf.data.batches import pad_right

        order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
        size, longest = min(batch_size, len(rows)), max(map(len, rows), default=0)
        results = [0.0] * len(rows)
        with torch.no_grad(), progress(len(rows), description, enabled=bool(description)) as bar:
            for start in range(0, len(order), size or 1):
                indices = order[start : start + size]
                filled = [*indices, *[indices[0]] * (size - len(indices))]
                ids, mask = pad_right([rows[index] for index in filled], self.shapes, longest, pad)
                columns = {name: torch.tensor([values[index] for index in filled]) for name, values in extras.items()}
                batch = self.accelerator.to_device({"input_ids": ids, "attention_mask": mask, **columns})
                with self.forward_context(f"{size} rows of {ids.shape[1]:,} tokens"):
                    values = compute(**batch)
                    self.accelerator.step_boundary("evaluate")
                    numbers = values.tolist()
                for index, value in zip(indices, numbers):
                    results[index] = value
                bar.advance(len(indices))
        return results

    @contextmanager
    def forward_context(self, rows: str, remedy: str = "--batch-size") -> Iterator[None]:
        """Run forward passes in the precision; a lack of memory becomes an error with a remedy.

        Raises:
            OutOfMemory: there is too little memory for `rows` at a time.
        """
        from accelerators import find_out_of_memory

        try:
            with self.precision.autocast():
                yield
        except Exception as error:
            if find_out_of_memory(error):
                message = f"{self.accelerator.name}: too little memory for {rows} at a time; lower {remedy}"
                raise OutOfMemory(message) from error
            raise

    def free_memory(self) -> None:
        """Free the memory of models that are no longer referenced."""
        gc.collect()
        self.accelerator.empty_cache()


@dataclass(frozen=True)
class EvaluatedModel:
    """A loaded model.

    Attributes:
        name: the user's name for the model.
        folder: its folder or hub name.
        device: the device that it is on.
        module: a language model of transformers, or a `rlhf.models.forward.ScalarHead`.
        tokenizer: its tokenizer.
        prompt_format: format of its prompts.
        end_ids: tokens that end a reply.
        max_length: maximum length of a row in tokens.
    """

    name: str
    folder: str
    device: EvaluationDevice
    module: Any
    tokenizer: PreTrainedTokenizerBase
    prompt_format: PromptFormat
    end_ids: list[int]
    max_length: int


class LanguageModel(EvaluatedModel):
    """A causal language model."""


class RewardModel(EvaluatedModel):
    """A reward model; its scores are those that PPO's reward model gives to completions."""

    def encode(self, rows: Sequence[Row], replies: Sequence[str]) -> list[list[int] | None]:
        """Return the token ids of each row's prompt, reply and end token; None if the chat template refuses them."""
        from rlhf.data.prompt_encoding import encode_prompts, encode_replies

        templated = self.prompt_format == "template"
        prompts = encode_prompts(self.tokenizer, rows, chat_template=templated)
        encoded = encode_replies(self.tokenizer, rows, replies, prompts, chat_template=templated, end_ids=self.end_ids)
        return [
            None if prompt is None or reply is None else prompt + reply
            for prompt, reply in zip(prompts, encoded, strict=True)
        ]

    def scores(self, sequences: Sequence[Sequence[int]], *, batch_size: int = 8, description: str = "") -> list[float]:
        """Return the score at the last token of each sequence, of at most `max_length` token ids.

        Raises:
            ModelError: a score is not finite.
        """
        import math

        from rlhf.models.forward import sequence_scores

        def compute(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return sequence_scores(self.module, input_ids, attention_mask)

        pad: Any = self.tokenizer.pad_token_id
        scores = self.device.map_rows(sequences, compute, pad=pad, batch_size=batch_size, description=description)
        if invalid := next((score for score in scores if not math.isfinite(score)), None):
            raise ModelError(
                f"{self.name}: a score is {invalid} in {self.device.precision.name}; try --precision fp32, or check "
                "the model's weights"
            )
        return scores


def load_language_model(
    path: Path | str, config: Config, device: EvaluationDevice, *, name: str | None = None
) -> LanguageModel:
    """Load a causal language model.

    A lone adapter is merged into the model that it names.

    Args:
        path: a run (its last policy), a model's folder, or a hub name.
        config: decides if the model's code may run, and which tokenizer replaces the model's.
        device: the device to load it onto.
        name: name of the model in messages; None: `path`.

    Raises:
        RunError, ModelError: there is no such model, or it is not a language model.
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
            raise ModelError(f"{base}: is a reward model, which cannot generate text; name a language model")
    tokenizer, options = _loader_options(source, device, scalar_head=False)
    if base == folder:
        model = load_causal_lm(source, tokenizer, **options)
    else:
        model = merge_adapter(load_causal_lm(source, tokenizer, **options | {"put": None}), folder)
    ends = find_end_tokens(tokenizer, model.generation_config)
    placed, prompts = _place(model, device), find_prompt_format(folder, tokenizer, config)
    return LanguageModel(name or str(path), folder, device, placed, tokenizer, prompts, ends, _max_length(model))


def load_reward_model(
    path: Path | str, config: Config, device: EvaluationDevice, *, name: str | None = None
) -> RewardModel:
    """Load a reward model: a sequence classifier of transformers with one output, or one of DeepSpeed-Chat.

    Args:
        path: a run (its reward stage), a model's folder, or a hub name.
        config: decides if the model's code may run, and which tokenizer replaces the model's.
        device: the device to load it onto.
        name: name of the model in messages; None: `path`.

    Raises:
        RunError, ModelError: there is no such model, or it is not a reward model.
    """
    folder = str(reward_model_folder(path))
    check_model_folder(folder)
    from rlhf.models.compatibility import load_generation_config
    from rlhf.models.forward import ScalarHead
    from rlhf.models.loading import load_scalar_head
    from rlhf.models.tokenizers import find_end_tokens

    source = config.model.model_copy(update={"path": folder})
    tokenizer, options = _loader_options(source, device, scalar_head=True)
    model = load_scalar_head(source, tokenizer, path=folder, say=logger.warning, **options)
    placed, prompts = _place(model, device), find_prompt_format(folder, tokenizer, config)
    ends = read_end_ids(Path(folder)) or find_end_tokens(tokenizer, load_generation_config(folder, source))
    head = ScalarHead(placed).eval()
    return RewardModel(name or str(path), folder, device, head, tokenizer, prompts, ends, _max_length(model))


def _loader_options(
    source: ModelConfig, device: EvaluationDevice, *, scalar_head: bool
) -> tuple[PreTrainedTokenizerBase, dict[str, Any]]:
    """Return the tokenizer of a model, and the other arguments of its loader."""
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


def _place(model: Any, device: EvaluationDevice) -> Any:
    """Return the model on the device, in its precision and in evaluation mode."""
    from rlhf.models.loading import place_model

    return place_model(model, device.accelerator.device(), device.precision.dtype).requires_grad_(False).eval()


def find_prompt_format(folder: Path | str, tokenizer: PreTrainedTokenizerBase, config: Config) -> PromptFormat:
    """Return the format of a model's prompts: that of its training, if a stage wrote the model."""
    from rlhf.data.prompt_encoding import uses_chat_template

    template = uses_chat_template(tokenizer, config.data.chat_template)
    return read_prompt_format(Path(folder)) or ("template" if template else "plain")


def _max_length(model: Any) -> int:
    from rlhf.models.compatibility import get_max_positions

    return get_max_positions(model.config) or _UNLIMITED
