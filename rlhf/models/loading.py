"""Loading causal language models and scalar-head models from a folder, a hub name or a GGUF file.

A folder is checked before transformers reads it, so that a missing file is one clear line. Weights are
loaded in float32; the engine casts them to the compute precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlhf.config import Config, ModelConfig, Stage
from rlhf.errors import ModelError
from rlhf.models.folder import check_model_folder
from rlhf.models.reasons import reason, unreachable
from rlhf.models.support import check_support
from rlhf.models.tokenizers import load_tokenizer
from rlhf.settings import STARTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlhf.run import RunDirectory


def check_models(config: Config, stages: Sequence[Stage], run: RunDirectory, *, attention: str) -> None:
    """Find out now, and not when its stage begins, that a model which `stages` start from cannot serve them.

    Args:
        stages: those that are to be run; a model that one of them leaves for the next is what its base is.
        attention: transformers' name of the attention implementation.

    Raises:
        ModelError: a folder is incomplete, an architecture not supported, or has too few positions for the data.
    """
    values = config.model_dump(mode="json")
    for stage in stages:
        for start in STARTS[stage]:
            left = run.stage(start.earlier) if start.earlier else None
            path = start.named(values) or (str(left.model) if left and left.done else None)
            if path is None:
                continue
            check_model_folder(path)
            check_support(
                path,
                config.model,
                attention=attention,
                scalar_head=start.scalar_head or (stage == "sft" and "reward" in stages and not config.reward.model),
                max_length=config.data.max_length,
            )


def load_causal_lm(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    attention: str,
    path: str | None = None,
) -> PreTrainedModel:
    """The causal language model at `path` (default: the one of `config`), its vocabulary fit to the tokenizer.

    Raises:
        ModelError: the folder is incomplete, transformers cannot load it, or its architecture is not supported.
    """
    from transformers import AutoModelForCausalLM

    return _fit(_load(AutoModelForCausalLM, path or _required(config), config, attention), tokenizer, config)


def load_scalar_head(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    attention: str,
    path: str,
    seed: int | None = None,
) -> PreTrainedModel:
    """The sequence-classification model with one output at `path`.

    Args:
        seed: draws a new head where `path` holds a language model without one; None: `path` must hold a
            trained reward model.

    Raises:
        ModelError: as `load_causal_lm`; or there is no scalar head, in the architecture or in the weights.
    """
    from transformers import AutoModelForSequenceClassification

    if seed is not None:
        torch.manual_seed(seed)
    model = _load(
        AutoModelForSequenceClassification,
        path,
        config,
        attention,
        trained=seed is None,
        scalar_head=True,
        num_labels=1,
    )
    if not hasattr(model, "score"):  # an architecture of its own code
        raise ModelError(
            f"{path}: {type(model).__name__} scores whole sequences, not tokens; choose a decoder-only architecture"
        )
    return _fit(model, tokenizer, config)


def load_model_tokenizer(config: ModelConfig, path: str | None = None) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """The tokenizer that belongs to the model at `path`, or the one that `config` names; see `load_tokenizer`."""
    where = path or config.tokenizer or _required(config)
    if path is None and config.tokenizer is None:
        check_model_folder(where)
    return load_tokenizer(where, trust_remote_code=config.trust_remote_code)


def check_same_vocabulary(actor: PreTrainedTokenizerBase, reward: PreTrainedTokenizerBase, reward_path: str) -> None:
    """Raise `ModelError` unless both tokenizers map the same tokens to the same ids."""
    mine, theirs = actor.get_vocab(), reward.get_vocab()
    if mine == theirs:
        return
    example = next(token for token in (*mine, *theirs) if mine.get(token) != theirs.get(token))
    raise ModelError(
        f"{reward_path}: the reward model's vocabulary ({len(theirs)} tokens) is not the actor's ({len(mine)}); "
        f"they differ in {example!r} (id {theirs.get(example)} against {mine.get(example)}); "
        "train a reward model with the actor's tokenizer"
    )


def _required(config: ModelConfig) -> str:
    if config.path is None:
        raise ModelError("model.path: no model is named; set it to a folder or a hub name")
    return config.path


def _load(
    auto_class: Any,
    path: str,
    config: ModelConfig,
    attention: str,
    *,
    trained: bool = True,
    scalar_head: bool = False,
    **options: Any,
) -> Any:
    check_model_folder(path)
    check_support(path, config, attention=attention, scalar_head=scalar_head)
    if config.gguf_file and path == config.path:
        from transformers import GgufConfig

        # Left quantized, the weights could be neither trained nor saved.
        options |= {"gguf_file": config.gguf_file, "quantization_config": GgufConfig(dequantize=True)}
    try:
        model, found = auto_class.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation=attention,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are errors, but of ours: transformers' refers to a report
            **options,
        )
    except Exception as error:
        if not Path(path).exists():
            raise unreachable(path, error) from error
        raise ModelError(
            f"{path}: cannot be loaded as {auto_class.__name__} ({reason(error)}); check its files, or name another"
        ) from error
    if found["mismatched_keys"]:
        name, *shapes = min(found["mismatched_keys"])
        stored, expected = (" x ".join(map(str, shape)) for shape in shapes)
        raise ModelError(f"{path}: its weights do not fit: {name} is {stored}, expected {expected}; check config.json")
    if trained and found["missing_keys"]:
        missing = ", ".join(sorted(found["missing_keys"])[:3])
        raise ModelError(f"{path}: its weights lack {missing}; name a model that was saved as {auto_class.__name__}")
    return model


def _fit(model: Any, tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> Any:
    """Match the model to the tokenizer: embedding rows, pad and EOS ids; no cache while training."""
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        _grow(model, len(tokenizer))
    for part in (model.config, model.config.get_text_config(decoder=True)):  # of a composite model, both
        part.pad_token_id = tokenizer.pad_token_id
    model.config.use_cache = False
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        if model.generation_config.eos_token_id is None:
            model.generation_config.eos_token_id = tokenizer.eos_token_id
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _grow(model: Any, rows: int) -> None:
    """Add rows to the embeddings, each the mean of the old ones: the same on every rank and after a resume.

    The mean's logit is the mean of all logits, so a new token is never likelier than the average one. Rows drawn at
    random would have a logit near 0, which in a model whose logits are all far below (GPT-2) takes all probability.
    """
    before = model.get_input_embeddings().num_embeddings
    with torch.random.fork_rng(devices=[]):  # rows are drawn, then replaced
        model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            for tensor in (getattr(layer, "weight", None), getattr(layer, "bias", None)):
                if tensor is not None:
                    tensor[before:] = tensor[:before].mean(0)
