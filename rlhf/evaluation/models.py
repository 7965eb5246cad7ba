"""Find finished models by name, and load them onto the selected accelerator: language models and reward models.

A name is a run, one of its stages, a model's folder or a hub name; finding its folder needs no torch. A loaded model
is in the compute precision and has its tokenizer and the format of its prompts and replies. One `EvaluationDevice`
serves all models of a command, in sequence or together. torch is imported when the device is created, because the
backend must be selected first.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhf.config.paths import is_path
from rlhf.config.schema import Config, ModelConfig, Stage
from rlhf.errors import ModelError, OutOfMemory, RunError
from rlhf.models import hub
from rlhf.models.compatibility import (
    check_model_folder,
    get_max_positions,
    load_generation_config,
    load_model_config,
)
from rlhf.reporting.progress import progress
from rlhf.roles.base_sharing import ADAPTER
from rlhf.roles.model_identity import ADAPTER_CONFIG, check_model_files, read_adapter_base
from rlhf.runs import description
from rlhf.runs.directory import RunDirectory
from rlhf.runs.stage_directory import AVERAGE, CRITIC, StageDirectory

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from accelerators import Accelerator, Precision, ShapePolicy
    from rlhf.data.prompt_encoding import PromptFormat
    from rlhf.data.records import Message, Row

logger = logging.getLogger(__name__)

_UNLIMITED = 1_000_000  # maximum length of a model whose configuration names none
_NAMES = {f"{name}{suffix}" for name in ("model", ADAPTER) for suffix in ("", AVERAGE)} | {CRITIC}
Policy = Literal["sft", "dpo", "ppo", "distill"]
"""A stage that writes a language model."""


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
        from rlhf.engine.select import choose_kernels, choose_shapes, select_accelerator
        from rlhf.reporting import verbosity

        selection = select_accelerator(config, accelerator)
        from accelerators import stdout_to_stderr

        with stdout_to_stderr():  # the device's software may print to stdout
            backend = selection.create()
            backend.bind(0)
            from rlhf.losses.log_probs import use_chunks  # it imports torch, which must follow the selection

            use_chunks(backend.chunk_elements)
            backend.seed(config.seed)
            choose_kernels(config, backend)
        verbosity.quiet_imported_libraries()
        return cls(backend, backend.precision(config.precision), choose_shapes(config, backend))

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
        module: a language model of transformers, or a `rlhf.models.forward.ScalarHead`.
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

    def invalid_number(self, what: str) -> ModelError:
        """Return the error of a result that is not finite; `what` says so, as "a score is nan"."""
        precision = self.device.precision.name
        return ModelError(f"{self.name}: {what} in {precision}; try --precision fp32, or check the model's weights")


class LanguageModel(EvaluatedModel):
    """A causal language model."""

    @property
    def converses(self) -> bool:
        """True if the model was trained on conversations rather than on single texts."""
        return self.prompt_format in ("template", "transcript")


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

    def encode_completions(
        self, prompts: Sequence[Sequence[Message]], texts: Sequence[str], truncated: Sequence[bool]
    ) -> list[list[int]]:
        """Return the token ids of conversations with their completions, as PPO scores them.

        A truncated completion has no end token.

        Raises:
            ModelError: the chat template refuses a completion.
        """
        from rlhf.data.prompt_encoding import make_conversation_row

        rows = [make_conversation_row(prompt, self.prompt_format) for prompt in prompts]
        sequences = []
        for text, cut, ids in zip(texts, truncated, self.encode(rows, texts), strict=True):
            if ids is None:
                raise ModelError(f"{self.name}: its chat template refuses the reply {text[:60]!r}; name another model")
            sequences.append(ids[:-1] if cut else ids)
        return sequences

    def scores(self, sequences: Sequence[Sequence[int]], *, batch_size: int = 8, description: str = "") -> list[float]:
        """Return the score at the last token of each sequence, of at most `max_length` token ids.

        Raises:
            ModelError: a score is not finite.
        """
        from rlhf.models.forward import sequence_scores

        def compute(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return sequence_scores(self.module, input_ids, attention_mask)

        pad: Any = self.tokenizer.pad_token_id
        scores = self.device.map_rows(sequences, compute, pad=pad, batch_size=batch_size, description=description)
        if invalid := next((score for score in scores if not math.isfinite(score)), None):
            raise self.invalid_number(f"a score is {invalid}")
        return scores


def load_language_model(path: Path | str, config: Config, device: EvaluationDevice) -> LanguageModel:
    """Load the causal language model of a run (its last policy), a model's folder, or a hub name.

    A lone adapter is merged into the model that it names. The settings of `config.model` decide if the model's code may
    run, and which tokenizer replaces the model's.

    Raises:
        RunError, ModelError: there is no such model, or it is not a language model.
    """
    folder = str(model_folder(path))
    base = find_base_model(folder)
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
    prompts, length = find_prompt_format(folder, tokenizer, config), get_max_positions(model.config) or _UNLIMITED
    return LanguageModel(str(path), folder, device, _place(model, device), tokenizer, prompts, ends, length)


def load_reward_model(path: Path | str, config: Config, device: EvaluationDevice) -> RewardModel:
    """Load a reward model: a sequence classifier of transformers with one output, or one of DeepSpeed-Chat.

    It is that of a run (its reward stage), of a model's folder, or of a hub name; `config` as in `load_language_model`.

    Raises:
        RunError, ModelError: there is no such model, or it is not a reward model.
    """
    folder = str(reward_model_folder(path))
    check_reward_folder(folder)
    from rlhf.models.forward import ScalarHead
    from rlhf.models.loading import load_scalar_head
    from rlhf.models.tokenizers import find_end_tokens

    source = config.model.model_copy(update={"path": folder})
    tokenizer, options = _loader_options(source, device, scalar_head=True)
    model = load_scalar_head(source, tokenizer, path=folder, say=logger.warning, **options)
    # A stage, unless an old version's, has recorded which tokens ended a reply.
    ends = read_summary(folder).get("end_ids") or find_end_tokens(tokenizer, load_generation_config(folder, source))
    prompts, length = find_prompt_format(folder, tokenizer, config), get_max_positions(model.config) or _UNLIMITED
    head = ScalarHead(_place(model, device)).eval()
    return RewardModel(str(path), folder, device, head, tokenizer, prompts, ends, length)


def _loader_options(
    source: ModelConfig, device: EvaluationDevice, *, scalar_head: bool
) -> tuple[PreTrainedTokenizerBase, dict[str, Any]]:
    """Return the tokenizer of a model, and the other arguments of its loader."""
    from rlhf.models.compatibility import choose_attention
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
    return read_summary(folder).get("prompt_format") or ("template" if template else "plain")


def model_folder(path: Path | str, stage: Policy | None = None, *, ema: bool = False) -> Path:
    """Return the folder of a language model: in a run that of `stage` or of its last finished stage, else `path`.

    Args:
        path: a run, a stage's folder, a model's folder or a hub name.
        stage: the stage of the run; None: the last finished one.
        ema: return the moving average of PPO's policy.

    Raises:
        RunError: the run has no such model.
        ModelError: `path` is a path, but neither a run nor a folder.
    """
    path = _recover_path(path)
    if ema:
        return _average(path, stage)
    if RunDirectory(path).description.is_file():
        return _of_run(RunDirectory(path), [stage] if stage else ["distill", "ppo", "dpo", "sft"])
    if (path / "stage.json").is_file():
        return _model_or_adapter(path, "model")  # the folder of a run's stage
    if stage:
        raise RunError(f"{path}: --stage selects a model of a run, but there is no run.json here; remove --stage")
    return path


def reward_model_folder(path: Path | str) -> Path:
    """Return the folder of a reward model: in a run that of its reward stage, else `path`.

    Raises:
        RunError: the run has no finished reward stage.
        ModelError: as `model_folder`.
    """
    path = _recover_path(path)
    if RunDirectory(path).description.is_file():
        return _of_run(RunDirectory(path), ["reward"])
    return path / "model" if (path / "stage.json").is_file() else path


def read_summary(folder: Path | str) -> dict[str, Any]:
    """Return the `stage.json` of the stage that wrote the model in `folder`, else {}."""
    folder = Path(folder)
    summary = folder.parent / "stage.json"
    return description.read_summary(summary) if folder.name in _NAMES and summary.is_file() else {}


def _recover_path(path: Path | str) -> Path:
    """Return a name as a path; restore the backup of a killed run."""
    if not is_path(str(path)):
        return Path(path)  # a hub name; loading reports errors
    path = Path(path)
    for folder in (path, *path.parents[:2]):  # of a run, of its stage, of the stage's model
        with suppress(RunError):  # another process writes there; complete models can be used
            RunDirectory(folder).recover()
    if path.is_file():
        raise ModelError(f"{path}: is a file; name the folder of a run or of a model")
    if not path.is_dir():
        raise ModelError(f"{path}: no such folder; name a run (it holds run.json) or a model (it holds config.json)")
    return path


def _of_run(run: RunDirectory, stages: Sequence[Stage]) -> Path:
    """Return the model of the first of `stages` that is finished."""
    for candidate in map(run.stage, stages):
        if candidate.done:
            return _model_or_adapter(candidate.path, candidate.model.name)
    *others, last = stages
    names = f"{', '.join(others)} or {last}" if others else last
    raise RunError(f"{run.path}: has no finished {names} stage; finish it with --resume, or name a model folder")


def _model_or_adapter(stage: Path, name: str) -> Path:
    """Return the model of that name in a stage's folder, or its adapter if `lora.save` kept only that."""
    adapter = stage / name.replace("model", ADAPTER)
    return adapter if adapter.is_dir() and not (stage / name).exists() else stage / name


def _average(path: Path, stage: Policy | None) -> Path:
    """Return the moving average of the PPO stage in the run or stage folder `path`."""
    if stage not in (None, "ppo"):
        raise RunError("--ema: only PPO's policy has a moving average; remove --stage")
    ppo = StageDirectory(path / "ppo" if (path / "run.json").is_file() else path, "ppo")
    average = _model_or_adapter(ppo.path, ppo.average.name)
    if not ppo.done or not average.is_dir():
        raise RunError(f"{path}: has no moving average of a finished ppo stage; train with ppo.ema, or remove --ema")
    return average


def find_base_model(folder: Path | str) -> str:
    """Return the model to load for `folder`: the base of the adapter in it, or `folder` if it has no adapter.

    Raises:
        ModelError: the adapter names no base model, or the folder of one of them is incomplete or damaged.
    """
    check_model_files(folder)
    base = read_adapter_base(folder) or str(folder)
    check_model_folder(base)
    check_model_files(base)
    return base


def check_reward_folder(folder: Path | str) -> None:
    """Raise `ModelError` if the folder of a reward model is incomplete or damaged; hub names pass."""
    check_model_folder(str(folder))
    check_model_files(folder)


def merge_adapter(model: Any, folder: str) -> Any:
    """Merge the adapter in `folder` into `model`, in float32, as a stage writes a merged model.

    Raises:
        ModelError: the adapter belongs to another model, or cannot be read.
    """
    from peft import PeftModel

    from accelerators import find_out_of_memory
    from rlhf.models.hub import summarize_error

    try:
        return PeftModel.from_pretrained(model, folder).merge_and_unload()
    except Exception as error:
        if find_out_of_memory(error):
            raise
        raise ModelError(
            f"{folder}: this adapter cannot be merged into {model.name_or_path} "
            f"({summarize_error(error).rstrip(':')}); check its files, and base_model_name_or_path in {ADAPTER_CONFIG}"
        ) from error
