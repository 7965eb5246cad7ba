"""Loading causal language models and scalar-head models from a folder, a hub name or a GGUF file.

A folder is checked before transformers reads it, so that a missing file is one clear line. transformers builds the
model without its weights and says what the checkpoint lacks; the weights are then read one by one (`weights`), into
whatever is asked for: the compute precision on the device, a shard. What transformers alone can read (GGUF files,
quantized checkpoints) it loads whole and in float32 first.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import nn

from accelerators import find_out_of_memory
from rlhf.config.schema import ModelConfig
from rlhf.errors import ModelError
from rlhf.models import deepspeed_chat, hub, lazy_tensors
from rlhf.models.compatibility import check_model_folder, check_support
from rlhf.models.hf_errors import hub_load_error, summarize_error
from rlhf.models.tokenizers import find_end_tokens, load_tokenizer
from rlhf.models.transformers_patches import forget_key_mapping
from rlhf.models.weight_loading import (
    CheckpointTensors,
    PlaceParameter,
    extend_embeddings,
    fill_parameters,
    place_in_memory,
    prepare_parameters,
    read_parameters,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)


def load_on_meta(
    path: str, config: ModelConfig, *, attention: str, scalar_head: bool = False, trained: bool = True
) -> PreTrainedModel:
    """The model at `path` without its weights, on torch's meta device; what its loading would raise is raised now.

    Args:
        scalar_head: as a sequence-classification model with one output.
        trained: the head too must be in the weights.

    Raises:
        ModelError: as `load_causal_lm` and `load_scalar_head`.
    """
    return _load(path, config, attention, trained=trained, weights=False, scalar_head=scalar_head)[0]


def load_causal_lm(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    attention: str,
    path: str | None = None,
    put: PlaceParameter | None = None,
) -> PreTrainedModel:
    """The causal language model at `path` (default: the one of `config`), its vocabulary fit to the tokenizer.

    Args:
        put: makes its parameters; None: in memory, in float32.

    Raises:
        ModelError: the folder is incomplete, transformers cannot load it, or its architecture is not supported.
    """
    model = _fit(_load(path or _required(config), config, attention)[0], tokenizer)
    return fill_parameters(model, put or place_in_memory(torch.float32))


def load_scalar_head(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    attention: str,
    path: str,
    seed: int | None = None,
    reset_norm: Literal["auto", True, False] = False,
    say: Callable[[str], None] = lambda line: None,
    put: PlaceParameter | None = None,
) -> PreTrainedModel:
    """The sequence-classification model with one output at `path`.

    Args:
        seed: draws a new head where `path` holds a language model without one, or one with several outputs; None:
            `path` must hold a trained reward model.
        reset_norm: whether the norm before a new head is reset; `auto`: where its gains are very unequal.
        say: is given a line about each thing that is not as it was saved.
        put: as in `load_causal_lm`.

    Raises:
        ModelError: as `load_causal_lm`; or there is no scalar head, in the architecture or in the weights.
        ConfigError: `reset_norm` is true, and there is no norm before the head.
    """
    from rlhf.models.scalar_head import find_final_norm, reset_final_norm

    if seed is not None:
        torch.manual_seed(seed)
    model, report = _load(path, config, attention, trained=seed is None, scalar_head=True)
    for _, there, _ in report["mismatched_keys"]:  # of the head alone: others are errors
        say(f"note: {path}: its head has {there[0]} outputs, a reward model has one; a new head is drawn from the seed")
    if report["missing_keys"] or report["mismatched_keys"]:
        if norm := find_final_norm(model):
            read_parameters(norm[1])
        if line := reset_final_norm(model, reset_norm):
            say(f"note: {path}: {line}")
    unread = (
        deepspeed_chat.find_unread_token(model.config, tokenizer.eos_token_id) if report["deepspeed_chat"] else None
    )
    if seed is None and unread is not None:
        model.config.unread_token = unread
        say(f"note: {path}: is a reward model of DeepSpeed-Chat; replies are scored at the token before their end")
    return fill_parameters(_fit(model, tokenizer), put or place_in_memory(torch.float32))


def build_on_meta(found: Any, config: ModelConfig, *, attention: str, scalar_head: bool) -> PreTrainedModel:
    """A model of the configuration `found`, of a model that was loaded, on torch's meta device and without weights.

    Args:
        scalar_head: as a sequence-classification model with one output.
    """
    found, model_class = copy.deepcopy(found), _class(found, config, scalar_head=scalar_head)
    if scalar_head:
        found.num_labels = 1
    code = {"trust_remote_code": True} if config.trust_remote_code and getattr(found, "auto_map", None) else {}
    with torch.device("meta"):
        return model_class.from_config(found, attn_implementation=attention, **code)


def load_model_tokenizer(config: ModelConfig, path: str | None = None) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """The tokenizer that belongs to the model at `path`, or the one that `config` names; see `load_tokenizer`."""
    where = path or config.tokenizer or _required(config)
    if path is None and config.tokenizer is None:
        check_model_folder(where)
    hub.check_available(where, "model")
    return load_tokenizer(where, trust_remote_code=config.trust_remote_code, eos_token=config.eos_token)


def check_same_vocabulary(actor: PreTrainedTokenizerBase, reward: PreTrainedTokenizerBase, reward_path: str) -> None:
    """Raise `ModelError` unless both tokenizers map the same tokens to the same ids."""
    mine, theirs = actor.get_vocab(), reward.get_vocab()
    if mine == theirs:
        return
    example = next(token for token in (*mine, *theirs) if mine.get(token) != theirs.get(token))
    raise ModelError(
        f"{reward_path}: this model's vocabulary ({len(theirs)} tokens) is not the actor's ({len(mine)}); "
        f"they differ in {example!r} (id {theirs.get(example)} against {mine.get(example)}); "
        "name one that was trained with the actor's tokenizer, or call this one in a function of ppo.reward_functions"
    )


def check_tokenizer_fits(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, path: str) -> None:
    """Raise `ModelError` where the tokenizer is of another model than the one at `path`.

    A model may gain a few rows for tokens that were added to its tokenizer, but not for others.
    """
    rows, added = model.get_input_embeddings().num_embeddings, tokenizer.get_added_vocab()
    beyond = [token for token, number in tokenizer.get_vocab().items() if number >= rows and token not in added]
    if beyond:
        raise ModelError(
            f"{tokenizer.name_or_path}: this tokenizer has {len(tokenizer)} tokens, and the model {path} knows {rows}; "
            "name the model's own tokenizer in model.tokenizer"
        )


def place_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers alone: DeepSpeed (0.19) does not, of a model whose parameters are sharded already."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def place_model(model: Model, device: torch.device, dtype: torch.dtype) -> Model:
    """Move a model to `device`, its parameters in `dtype`; in place, and returned.

    Buffers keep their type, as they do under DeepSpeed: rotary frequencies rounded to bf16 turn the angle of position
    1,000 by several degrees, and two copies of one model, one trained and one frozen, would compute different numbers.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    return model.to(device)


def _required(config: ModelConfig) -> str:
    if config.path is None:
        raise ModelError("model.path: no model is named; set it to a folder or a hub name")
    return config.path


def _load(
    path: str,
    config: ModelConfig,
    attention: str,
    *,
    trained: bool = True,
    scalar_head: bool = False,
    weights: bool = True,
) -> tuple[Any, dict[str, Any]]:
    """The model, its parameters to be filled, and transformers' report of what it found among the weights.

    Without `weights`, all of it is on the meta device. The report also says whether DeepSpeed-Chat saved the weights.
    """
    check_model_folder(path)
    hub.check_available(path, "model")
    found = check_support(path, config, attention=attention, scalar_head=scalar_head)
    model_class = _class(found, config, scalar_head=scalar_head)
    options: dict[str, Any] = {"num_labels": 1} if scalar_head else {}
    gguf = bool(config.gguf_file) and path == config.path
    if gguf and not weights:  # reading the names of its tensors would read them all
        with torch.device("meta"):
            return model_class.from_config(found, attn_implementation=attention), {"deepspeed_chat": False}
    if gguf:
        from transformers import GgufConfig

        # Left quantized, the weights could be neither trained nor saved.
        options |= {"gguf_file": config.gguf_file, "quantization_config": GgufConfig(dequantize=True)}
    load = partial(
        model_class.from_pretrained,
        path,
        dtype=torch.float32,
        attn_implementation=attention,
        trust_remote_code=config.trust_remote_code,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are errors, but of ours: transformers' refers to a report
        **options,
    )
    try:
        tensors = None if gguf or hasattr(found, "quantization_config") else lazy_tensors.open_checkpoint(path)
        chats = deepspeed_chat.is_deepspeed_chat(tensors or ())
        keys = deepspeed_chat.KEY_MAPPING if chats and scalar_head else None
        load = partial(load, key_mapping=keys) if keys else load
        if tensors or not weights:
            model, report = load(device_map="meta")
        checkpoint = CheckpointTensors(model, tensors, keys) if weights and tensors else None
        if weights and not (checkpoint and checkpoint.covers(model)):
            if checkpoint:  # neither GGUF nor quantized: nobody expects it
                logger.warning(
                    "%s: its weights cannot be read one by one: each rank loads all, in float32, first", path
                )
            checkpoint = None
            model, report = load()
    except Exception as error:
        if find_out_of_memory(error):  # its files may be in order
            raise
        if not Path(path).exists():
            raise hub_load_error(path, error) from error
        raise ModelError(
            f"{path}: cannot be loaded as {model_class.__name__} ({summarize_error(error)}); "
            "check its files, or name another"
        ) from error
    report |= {"deepspeed_chat": chats}
    _check_whole(path, report, model_class.__name__, model.base_model_prefix, trained=trained)
    if scalar_head and not hasattr(model, "score"):  # an architecture of its own code
        raise ModelError(
            f"{path}: {type(model).__name__} scores whole sequences, not tokens; choose a decoder-only architecture"
        )
    if checkpoint:
        prepare_parameters(model, checkpoint)
    if keys:  # or the model would be saved under DeepSpeed-Chat's names
        forget_key_mapping(model)
    return model, report


def _class(found: Any, config: ModelConfig, *, scalar_head: bool) -> Any:
    """The class that loads a model of the configuration `found`."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from rlhf.models.scalar_head import build_scalar_head_class

    if not scalar_head:
        return AutoModelForCausalLM
    code = config.trust_remote_code and getattr(found, "auto_map", None)  # it names the classes
    return (None if code else build_scalar_head_class(found)) or AutoModelForSequenceClassification


def _check_whole(path: str, report: dict[str, Any], kind: str, prefix: str, *, trained: bool) -> None:
    """Raise `ModelError` where weights are missing, or not of the shapes that the configuration says."""
    for name, there, expected in sorted(report["mismatched_keys"]):
        if name == "score.weight":
            if not trained:
                continue  # drawn anew
            raise ModelError(
                f"{path}: its head has {there[0]} outputs, a reward model has one; name one that `rlhf reward` trained"
                ", or call this one in a function of ppo.reward_functions"
            )
        stored, wanted = (" x ".join(map(str, shape)) for shape in (there, expected))
        raise ModelError(f"{path}: its weights do not fit: {name} is {stored}, expected {wanted}; check config.json")
    if "CausalLM" in kind and (report["deepspeed_chat"] or "score.weight" in report["unexpected_keys"]):
        raise ModelError(f"{path}: is a reward model (its weights have a scalar head); name a language model")
    missing = sorted(name for name in report["missing_keys"] if trained or not name.startswith("score."))
    if missing and report["deepspeed_chat"]:
        listed = ", ".join(deepspeed_chat.to_deepspeed_chat_name(name, prefix) for name in missing[:3])
        raise ModelError(f"{path}: is a reward model of DeepSpeed-Chat whose weights lack {listed}; save it there anew")
    others = sorted(name for name in report["unexpected_keys"] if not name.startswith("lm_head."))
    if missing == ["score.weight"] and others:  # a head by another name: TRL's v_head.summary, with its bias
        raise ModelError(
            f"{path}: its weights lack score.weight and hold {', '.join(others[:2])}, another kind of head; name a "
            f"model that was saved as {kind}, or call this one in a function of ppo.reward_functions"
        )
    if missing:
        wanted = "a reward model, as `rlhf reward` leaves it" if missing == ["score.weight"] else f"one saved as {kind}"
        raise ModelError(f"{path}: its weights lack {', '.join(missing[:3])}; name {wanted}")


def _fit(model: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Match the model to the tokenizer: embedding rows, pad and EOS ids; no cache while training."""
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        extend_embeddings(model, len(tokenizer))
    for part in (model.config, model.config.get_text_config(decoder=True)):  # of a composite model, both
        part.pad_token_id = tokenizer.pad_token_id
    model.config.use_cache = False
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        settings, own = model.generation_config, model.generation_config.eos_token_id
        if tokenizer.eos_token_id not in (own if isinstance(own, list) else [own]):
            ends = find_end_tokens(tokenizer, settings)
            settings.eos_token_id = ends if len(ends) > 1 else ends[0]
    return model
