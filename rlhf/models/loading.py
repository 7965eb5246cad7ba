"""Load causal language models and scalar-head models from a folder, a hub name or a GGUF file; build the embedded one.

A folder is checked before transformers reads it, so that a missing file is one clear line. transformers builds the
model without its weights and reports what the checkpoint lacks; the weights are then read one by one
(`rlhf.models.weight_loading`) into their final form: the compute precision on the device, or a shard. Files that only
transformers can read (GGUF, quantized checkpoints) are first loaded whole, in float32.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import nn

from accelerators import find_out_of_memory
from rlhf.config.schema import ModelConfig
from rlhf.errors import ModelError
from rlhf.models import lazy_tensors
from rlhf.models.compatibility import check_model_folder, check_support
from rlhf.models.hub import check_available, load_error
from rlhf.models.shape import EMBEDDED, round_up
from rlhf.models.tokenizers import find_end_tokens, load_tokenizer
from rlhf.models.transformers_patches import forget_key_mapping
from rlhf.models.weight_loading import (
    PlaceParameter,
    extend_embeddings,
    fill_parameters,
    has_all_weights,
    is_sharded,
    place_in_memory,
    prepare_parameters,
    read_parameters,
    rename_tensors,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)

# Reward models as DeepSpeed-Chat saves them: a language model's `config.json` and, in `pytorch_model.bin`, the state of
# DeepSpeed-Chat's own module, with a backbone called `rwtransformer` and a linear layer `v_head` without bias.

_DEEPSPEED_CHAT_BACKBONE = r"^(?:module\.)*rw(?:transformer|tranrsformer)\."  # the second is an early misspelling
_DEEPSPEED_CHAT_KEYS = {_DEEPSPEED_CHAT_BACKBONE: "", r"^(?:module\.)*v_head\.": "score."}
"""Its names -> those of transformers, for `key_mapping` of `from_pretrained`; wrappers add `module.`."""


def load_on_meta(
    path: str, config: ModelConfig, *, attention: str, scalar_head: bool = False, trained: bool = True
) -> PreTrainedModel:
    """Load the model at `path` without its weights, on torch's meta device; raise the errors of loading it.

    With `scalar_head` it is a sequence-classification model with one output; if `trained`, the weights must include
    the head.
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
    """Load the causal language model at `path`, and fit its vocabulary to the tokenizer.

    Args:
        config: says how to load it.
        tokenizer: the one that it is trained with.
        attention: transformers' name of its attention implementation.
        path: a folder or hub name; None: `config.path`.
        put: creates its parameters; None: in memory, in float32.

    Raises:
        ModelError: the folder is incomplete, transformers cannot load it, or its architecture is not supported.
    """
    model = _load(path or _require_path(config), config, attention)[0]
    model = _fit_to_tokenizer(model, tokenizer, config.vocabulary_multiple)
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
    """Load the sequence-classification model with one output at `path`.

    Other arguments are those of `load_causal_lm`. `seed` draws a new head if the model has none, or one with several
    outputs; without it, `path` must be a trained reward model. `reset_norm` resets the norm before a new head; `auto`:
    if its gains are very unequal. `say` is called with a line about each part that differs from the saved model.

    Raises:
        ModelError: as `load_causal_lm`; or there is no scalar head, in the architecture or in the weights.
        ConfigError: `reset_norm` is true, and there is no norm before the head.
    """
    from rlhf.models.scalar_head import find_final_norm, reset_final_norm

    if seed is not None:
        torch.manual_seed(seed)
    model, report = _load(path, config, attention, trained=seed is None, scalar_head=True)
    for _, saved_shape, _ in report["mismatched_keys"]:  # only of the head: others are errors
        say(
            f"note: {path}: its head has {saved_shape[0]} outputs, a reward model has one; "
            "a new head is drawn from the seed"
        )
    if report["missing_keys"] or report["mismatched_keys"]:
        if norm := find_final_norm(model):
            read_parameters(norm[1])
        if line := reset_final_norm(model, reset_norm):
            say(f"note: {path}: {line}")
    # DeepSpeed-Chat reads the score before the first padding. It pads with the end-of-sequence token, whose score has
    # therefore not been trained, except for Llama, whose tokenizer gets a separate pad token.
    if seed is None and report["deepspeed_chat"] and model.config.model_type != "llama":
        model.config.unread_token = tokenizer.eos_token_id
        say(f"note: {path}: is a reward model of DeepSpeed-Chat; replies are scored at the token before their end")
    model = _fit_to_tokenizer(model, tokenizer, config.vocabulary_multiple)
    return fill_parameters(model, put or place_in_memory(torch.float32))


def build_on_meta(model_config: Any, config: ModelConfig, *, attention: str, scalar_head: bool) -> PreTrainedModel:
    """Build a model without weights, on torch's meta device, from a copy of a loaded model's configuration.

    The arguments are those of `load_on_meta`.
    """
    model_config = copy.deepcopy(model_config)
    model_class = _find_auto_class(model_config, config, scalar_head=scalar_head)
    if scalar_head:
        model_config.num_labels = 1
    code = {"trust_remote_code": True} if config.trust_remote_code and getattr(model_config, "auto_map", None) else {}
    with torch.device("meta"):
        return model_class.from_config(model_config, attn_implementation=attention, **code)


def load_model_tokenizer(config: ModelConfig, path: str | None = None) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """Load the tokenizer of the model at `path`, or the one that `config` names; see `load_tokenizer`."""
    source = path or config.tokenizer or _require_path(config)
    if path is None and config.tokenizer is None:
        check_model_folder(source)
    check_available(source, "model")
    return load_tokenizer(source, trust_remote_code=config.trust_remote_code, eos_token=config.eos_token)


def check_same_vocabulary(
    trained: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, path: str, alternative: str = ""
) -> None:
    """Raise `ModelError` unless the tokenizers of a stage's models map the same tokens to the same ids.

    Args:
        trained: that of the model that the stage trains.
        other: that of the model at `path`.
        alternative: what else the user can do.
    """
    ours, theirs = trained.get_vocab(), other.get_vocab()
    if ours == theirs:
        return
    example = next(token for token in (*ours, *theirs) if ours.get(token) != theirs.get(token))
    raise ModelError(
        f"{path}: this model's vocabulary ({len(theirs)} tokens) is not that of the model that is trained "
        f"({len(ours)}); they differ in {example!r} (id {theirs.get(example)} against {ours.get(example)}); "
        f"name one that was trained with the same tokenizer{', or ' * bool(alternative)}{alternative}"
    )


def check_tokenizer_fits(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, path: str) -> None:
    """Raise `ModelError` if the tokenizer belongs to another model than the one at `path`.

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
    """Move the buffers of a model, which DeepSpeed 0.19 does not do if its parameters are already sharded."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def place_parameters(model: nn.Module, device: torch.device) -> None:
    """Replace parameters that are elsewhere by copies on `device`, tied ones by one; sharded ones stay.

    `nn.Module.to` would untie weights and forget their sources on devices whose tensors cannot take the place of the
    host's (`parameter.data = ...`), and an optimizer that was created before would update the old ones.
    """
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in model.parameters():
        if not is_sharded(parameter) and (moved := parameter.detach().to(device)).device != parameter.device:
            placed[parameter] = nn.Parameter(moved, requires_grad=parameter.requires_grad)
            vars(placed[parameter]).update(vars(parameter))
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None:
                module._parameters[name] = placed.get(old, old)


def place_model(model: Model, device: torch.device, dtype: torch.dtype) -> Model:
    """Move a model to `device` in place, its parameters in `dtype`, and return it.

    Buffers keep their type, as they do under DeepSpeed: rotary frequencies rounded to bf16 turn the angle of position
    1,000 by several degrees, and two copies of one model, one trained and one frozen, would compute different numbers.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    place_parameters(model, device)
    place_buffers(model, device)
    return model


def _require_path(config: ModelConfig) -> str:
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
    """Return the model, with parameters that `fill_parameters` fills, and transformers' report about the weights.

    Without `weights`, all of it is on the meta device. The report also tells if DeepSpeed-Chat saved the weights.
    """
    check_model_folder(path)
    check_available(path, "model")
    model_config = check_support(path, config, attention=attention, scalar_head=scalar_head)
    model_class = _find_auto_class(model_config, config, scalar_head=scalar_head)
    options: dict[str, Any] = {"num_labels": 1} if scalar_head else {}
    gguf = bool(config.gguf_file) and path == config.path
    if gguf and not weights:  # reading the names of its tensors would read them all
        with torch.device("meta"):
            return model_class.from_config(model_config, attn_implementation=attention), {"deepspeed_chat": False}
    if gguf:
        from transformers import GgufConfig

        # Quantized weights could be neither trained nor saved.
        options |= {"gguf_file": config.gguf_file, "quantization_config": GgufConfig(dequantize=True)}
    load = partial(
        model_class.from_pretrained,
        path,
        dtype=torch.float32,
        attn_implementation=attention,
        trust_remote_code=config.trust_remote_code,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # `_check_whole` raises a clearer error than transformers
        **options,
    )
    try:
        tensors = None if gguf or hasattr(model_config, "quantization_config") else lazy_tensors.open_checkpoint(path)
        chats = any(re.match(_DEEPSPEED_CHAT_BACKBONE, name) for name in tensors or ())
        keys = _DEEPSPEED_CHAT_KEYS if chats and scalar_head else None
        load = partial(load, key_mapping=keys) if keys else load
        if tensors or not weights:
            model, report = load(device_map="meta")
        sources = rename_tensors(model, tensors, keys) if weights and tensors else None
        if weights and (sources is None or not has_all_weights(model, sources)):
            if sources is not None:  # unexpected, since it is neither GGUF nor quantized
                logger.warning(
                    "%s: its weights cannot be read one by one: each rank loads all, in float32, first", path
                )
            sources = None
            model, report = load()
    except Exception as error:
        if find_out_of_memory(error):  # its files may be in order
            raise
        problem = f"cannot be loaded as {model_class.__name__}"
        raise load_error(path, problem, error, "check its files, or name another") from error
    report |= {"deepspeed_chat": chats}
    _check_whole(path, report, model_class.__name__, model.base_model_prefix, trained=trained)
    if scalar_head and not hasattr(model, "score"):  # an architecture with custom code
        raise ModelError(
            f"{path}: {type(model).__name__} scores whole sequences, not tokens; choose a decoder-only architecture"
        )
    if sources is not None:
        prepare_parameters(model, sources)
    if keys:  # or the model would be saved under DeepSpeed-Chat's names
        forget_key_mapping(model)
    return model, report


def _find_auto_class(model_config: Any, config: ModelConfig, *, scalar_head: bool) -> Any:
    """Return the class that loads a model of this configuration."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from rlhf.models.scalar_head import build_scalar_head_class

    if not scalar_head:
        return AutoModelForCausalLM
    code = config.trust_remote_code and getattr(model_config, "auto_map", None)  # it names the classes
    return (None if code else build_scalar_head_class(model_config)) or AutoModelForSequenceClassification


def _check_whole(path: str, report: dict[str, Any], kind: str, prefix: str, *, trained: bool) -> None:
    """Raise `ModelError` if weights are missing, or have other shapes than the configuration says."""
    for name, saved_shape, expected in sorted(report["mismatched_keys"]):
        if name == "score.weight":
            if not trained:
                continue  # a new one is drawn
            raise ModelError(
                f"{path}: its head has {saved_shape[0]} outputs, a reward model has one; name one that `rlhf reward` "
                "trained, or call this one in a function of ppo.reward_functions"
            )
        stored, wanted = (" x ".join(map(str, shape)) for shape in (saved_shape, expected))
        raise ModelError(f"{path}: its weights do not fit: {name} is {stored}, expected {wanted}; check config.json")
    if "CausalLM" in kind and (report["deepspeed_chat"] or "score.weight" in report["unexpected_keys"]):
        raise ModelError(f"{path}: is a reward model (its weights have a scalar head); name a language model")
    missing = sorted(name for name in report["missing_keys"] if trained or not name.startswith("score."))
    if missing and report["deepspeed_chat"]:
        names = {name: f"rwtransformer.{name.removeprefix(f'{prefix}.')}" for name in missing}
        listed = ", ".join((names | {"score.weight": "v_head.weight"})[name] for name in missing[:3])
        raise ModelError(
            f"{path}: is a reward model of DeepSpeed-Chat whose weights lack {listed}; save it again with "
            "DeepSpeed-Chat"
        )
    others = sorted(name for name in report["unexpected_keys"] if not name.startswith("lm_head."))
    if missing == ["score.weight"] and others:  # a head of another name, such as TRL's v_head.summary
        raise ModelError(
            f"{path}: its weights lack score.weight and hold {', '.join(others[:2])}, another kind of head; name a "
            f"model that was saved as {kind}, or call this one in a function of ppo.reward_functions"
        )
    if missing:
        wanted = "a reward model, as `rlhf reward` saves it" if missing == ["score.weight"] else f"one saved as {kind}"
        raise ModelError(f"{path}: its weights lack {', '.join(missing[:3])}; name {wanted}")


def _fit_to_tokenizer(model: Any, tokenizer: PreTrainedTokenizerBase, multiple: int = 1) -> Any:
    """Match the model's embedding rows, pad and EOS ids to the tokenizer, and switch its cache off for training.

    Rows are rounded up to a multiple of `multiple`.
    """
    rows = model.get_input_embeddings().num_embeddings
    if (needed := round_up(max(rows, len(tokenizer)), multiple)) > rows:
        extend_embeddings(model, needed)
    for part in (model.config, model.config.get_text_config(decoder=True)):  # two in a composite model
        part.pad_token_id = tokenizer.pad_token_id
    model.config.use_cache = False
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        settings, eos = model.generation_config, model.generation_config.eos_token_id
        if tokenizer.eos_token_id not in (eos if isinstance(eos, list) else [eos]):
            ends = find_end_tokens(tokenizer, settings)
            settings.eos_token_id = ends if len(ends) > 1 else ends[0]
    return model


def build_llama_on_meta(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Build the embedded model without weights, on torch's meta device."""
    with torch.device("meta"):
        return build_llama(tokenizer, attention="sdpa", seed=0, max_length=0)


def build_llama(
    tokenizer: PreTrainedTokenizerBase, *, attention: str, seed: int, max_length: int, multiple: int = 1
) -> PreTrainedModel:
    """Build the embedded model: a Llama of about two million parameters with the tokenizer's vocabulary.

    `seed` determines its weights; the rows of its embeddings are rounded up to a multiple of `multiple`.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        **EMBEDDED | {"vocab_size": round_up(len(tokenizer), multiple)},
        max_position_embeddings=max(128, max_length),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        use_cache=False,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)
