"""The two forward passes of training and scoring: log-probabilities of a policy, scores of a scalar head.

Both take a left- or right-padded batch with its mask and work with any decoder-only model of transformers.
Log-probabilities are computed without a tensor of logits if possible: a fused product replaces the forward pass of the
output layer for one call, so that hooks on the layer (DeepSpeed's ZeRO-3 gathers its weights with them) run as usual.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from accelerators import RealTokens, takes_real_tokens
from rlhf.losses.divergence import Logits, token_divergences
from rlhf.losses.fused_lm_head import projected_log_probs
from rlhf.losses.log_probs import token_log_probs, token_log_probs_and_entropy
from rlhf.models.dropout import is_stochastic
from rlhf.models.transformers_patches import build_causal_mask, cache_argument
from rlhf.models.weight_loading import is_sharded

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

logger = logging.getLogger(__name__)

LARGE = 64 << 20
"""Bytes of 16-bit logits above which they are not stored. Fused, the projection's forward and backward passes of 512
rows take 15 % longer, since logits are computed twice; with more rows the difference shrinks, and memory is scarce."""

LEAST_SAVED = 1 / 16
"""Smallest share of tokens that is left out: copying rows for attention takes about 3 % of a training step."""

TOKENWISE = frozenset(
    (
        "biogpt",
        "codegen",
        "ctrl",
        "gemma",
        "glm4",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "gptj",
        "granite",
        "jetmoe",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "opt",
        "phi",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "starcoder2",
    )
)
"""Architectures of transformers in which only attention reads other tokens, and the arguments of a pass reach it."""

_is_plain: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""True if the logits of a model are the output layer's result, unchanged; by the models examined so far."""


class LogProbs(NamedTuple):
    """log_probs: [B, A] float32; entropy: [B, A] float32, or None if it was not requested."""

    log_probs: Tensor
    entropy: Tensor | None


class ScalarHead(nn.Module):
    """A sequence-classification model of transformers that scores every token instead of the last one.

    Its last product is in float32: rounded to bf16, the scores of two replies would often be equal.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        model.score.forward = MethodType(_in_float32, model.score)  # called by the module, so ZeRO-3 has gathered it

    def forward(self, input_ids: Tensor, attention_mask: Tensor, read: Tensor | None = None) -> Tensor:
        """Return scores [B, T], float32, for input_ids and attention_mask [B, T].

        `read`, [B, T], marks the tokens whose scores are used: all real ones, and perhaps some padding. None: all real
        ones. Other scores mean nothing.
        """
        backbone = getattr(self.model, self.model.base_model_prefix)
        inputs, tokens = in_one_row(backbone, model_inputs(backbone, input_ids, attention_mask), attention_mask, read)
        scores: Tensor = self.model.score(backbone(**inputs).last_hidden_state).squeeze(-1)
        return scores if tokens is None else tokens.spread(scores)


def _in_float32(linear: nn.Linear, hidden: Tensor) -> Tensor:
    bias = None if linear.bias is None else linear.bias.float()
    return nn.functional.linear(hidden.float(), linear.weight.float(), bias)


def completion_log_probs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    completion_length: int,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> LogProbs:
    """Return log-probabilities of the last `completion_length` tokens (A) of each row; those of padding mean nothing.

    Only their positions are projected to the vocabulary: no [B, T, V] tensor exists.

    Args:
        model: a causal language model.
        input_ids: [B, T].
        attention_mask: [B, T].
        completion_length: A.
        temperature: that of sampling; the log-probabilities are of the tempered distribution.
        entropy: compute the entropy at each position too.
    """
    inputs = completion_inputs(model, input_ids, attention_mask, completion_length)
    first = input_ids.shape[1] - completion_length
    labels = input_ids[:, first:]
    asked: dict[str, Any] = {"temperature": temperature, "entropy": entropy}
    alone, tokens = in_one_row(model, inputs, attention_mask)
    if tokens is None:
        return compute_log_probs(model, inputs, labels, **asked)
    del alone["logits_to_keep"]
    before = slice(first - 1, -1)  # a token is predicted at the place before it
    predicted = (attention_mask[:, first:] * attention_mask[:, before]).bool()
    places = tokens.numbers.view_as(attention_mask)[:, before][predicted]
    log_probs, entropies = compute_log_probs(model, alone, labels[predicted], places=places, **asked)
    blank = log_probs.new_zeros(labels.shape)
    return LogProbs(
        blank.masked_scatter(predicted, log_probs),
        None if entropies is None else blank.masked_scatter(predicted, entropies),
    )


def completion_inputs(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, completion_length: int
) -> dict[str, Any]:
    """Return `model_inputs` of a pass that has logits only before each of the last `completion_length` tokens."""
    # The last prompt position predicts the first completion token. Positions rather than a count: a slice of
    # the hidden states would make the projection of a frozen model a batched product, with a copy of the
    # vocabulary matrix for every row (torch 2.13).
    end = input_ids.shape[1] - 1
    positions = torch.arange(end - completion_length, end, device=input_ids.device)
    return model_inputs(model, input_ids, attention_mask) | {"logits_to_keep": positions}


def next_token_logits(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, completion_length: int) -> Logits:
    """Return the logits before each of the last `completion_length` tokens (A), of a model that is not trained.

    They are the hidden states [B, A, H] and the output layer if that can be fused (`can_be_fused`), else the logits.
    ZeRO-3 releases a layer after its pass, so the output layer of a sharded model is a copy.
    """
    inputs = completion_inputs(model, input_ids, attention_mask, completion_length)
    bare = getattr(model, "module", model)  # under DeepSpeed
    if not can_be_fused(bare):
        return Logits(model(**inputs).logits)
    head, kept = get_output_layer(bare), list[Tensor | None]()

    def keep(hidden: Tensor) -> Tensor:
        layer = (head.weight, head.bias)
        kept.extend(part if part is None or not is_sharded(part) else part.detach().clone() for part in layer)
        return hidden

    with _replace_forward(head, keep):
        hidden = model(**inputs).logits
    return Logits(hidden, *kept)


def completion_divergences(
    model: nn.Module,
    teacher: Logits,
    input_ids: Tensor,
    attention_mask: Tensor,
    completion_length: int,
    *,
    reverse: bool,
) -> Tensor:
    """Return the divergence of a model from a teacher at each of the last `completion_length` tokens (A) of each row.

    Args:
        model: a causal language model.
        teacher: the teacher's logits of the same tokens, from `next_token_logits`.
        input_ids, attention_mask: [B, T].
        completion_length: A.
        reverse: see `rlhf.losses.divergence.token_divergences`.

    Returns:
        [B, A] float32, in nats. If the model's output layer can be fused, its logits never exist as a whole.
    """
    inputs = completion_inputs(model, input_ids, attention_mask, completion_length)
    bare = getattr(model, "module", model)  # under DeepSpeed
    if not can_be_fused(bare):
        return token_divergences(Logits(model(**inputs).logits), teacher, reverse=reverse)
    head = get_output_layer(bare)

    def fused(hidden: Tensor) -> Tensor:
        student = Logits(hidden, head.weight, head.bias)
        return token_divergences(student, teacher, reverse=reverse).unsqueeze(-1)  # as the model's output

    with _replace_forward(head, fused):
        divergences: Tensor = model(**inputs).logits.squeeze(-1)
    return divergences


def model_inputs(model: Any, input_ids: Tensor, attention_mask: Tensor, cache: Cache | None = None) -> dict[str, Any]:
    """Return keyword arguments of a forward pass over whole rows, or over prompts that fill an empty `cache`.

    If the architecture allows, the mask is built here (`build_causal_mask`), [B, 1, T, S]. Positions, if the model
    takes them, count real tokens.

    Args:
        model: a language model of transformers.
        input_ids: [B, T].
        attention_mask: [B, S], S = T without a cache, else the cache's length.
        cache: a static cache; None: none is used.
    """
    model = getattr(model, "module", model)  # under DeepSpeed
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": cache is not None}
    if cache is not None:
        inputs[cache_argument(model)] = cache
    if not accepts_positions(model):
        return inputs  # the model derives positions from the [B, T] mask, as BLOOM does
    # The text part of a composite model (text and images).
    config = model.config.get_text_config(decoder=True)
    present = attention_mask[:, : input_ids.shape[1]]
    inputs["position_ids"] = position_ids(present)
    if getattr(config, "alibi", False):
        return inputs  # the model derives its biases from the [B, S] mask
    # Layers with a recurrent state (linear attention, convolutions) take the mask of the current tokens.
    inputs["attention_mask"] = present
    # One mask serves all layers if none has an attention window.
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds == {"full_attention"} and getattr(config, "sliding_window", None) is None:
        like = torch.empty((*input_ids.shape, 0), dtype=model.dtype, device=input_ids.device)
        inputs["attention_mask"] = build_causal_mask(config, like, attention_mask, cache)
    return inputs


def in_one_row(
    model: Any, inputs: dict[str, Any], attention_mask: Tensor, read: Tensor | None = None
) -> tuple[dict[str, Any], RealTokens | None]:
    """Return the inputs of a pass over the tokens of a batch as one row, and these tokens.

    Padding is left out, and so are first tokens that an earlier row has in the same columns, such as its prompt
    (`first_rows`), unless the model is not causal or the pass draws at random. If that is impossible or does not pay,
    return `inputs` and None. It needs an architecture of `TOKENWISE` and an attention that takes such a row, and pays
    from `LEAST_SAVED` on. Some of the tokens left out fill their number up (`round_count`).

    Args:
        model: a language model of transformers.
        inputs: its `model_inputs`.
        attention_mask: [B, T].
        read: [B, T], 1 for the tokens whose results are used: all real ones, and perhaps some padding. None: all real
            ones.
    """
    mask, model = inputs["attention_mask"], getattr(model, "module", model)  # under DeepSpeed
    if (
        mask is None
        or mask.dim() != 4
        or not type(model).__module__.startswith("transformers.models.")
        or model.config.model_type not in TOKENWISE
        or not takes_real_tokens(model.config._attn_implementation)
    ):
        return inputs, None
    needed, rows = (attention_mask if read is None else read).bool(), None
    count = int(needed.count_nonzero())
    if getattr(model.config, "is_causal", True):
        first = first_rows(inputs["input_ids"], attention_mask)
        distinct = needed & (first == torch.arange(len(first), device=first.device).unsqueeze(1))
        least = int(distinct.count_nonzero())
        # The search for dropout takes milliseconds: only if something is saved.
        if round_count(least) < round_count(count) and not (model.training and is_stochastic(model)):
            needed, rows, count = distinct, first, least
    rounded = round_count(count)
    if not count or rounded > needed.numel() * (1 - LEAST_SAVED):
        return inputs, None
    others = ~needed.flatten()
    filling = others & (others.cumsum(0) <= rounded - count)
    tokens = RealTokens(needed | filling.view_as(needed), rows)
    alone = {name: tokens.select(inputs[name]) for name in ("input_ids", "position_ids")}
    return inputs | alone | {RealTokens.ARGUMENT: tokens}, tokens


def round_count(count: int) -> int:
    """Round a number of tokens up to a multiple of 16; from 1,024 on, of 32, and of twice as much for each doubling.

    Libraries keep a product for each number, so there are few. Those of full batches, such as 6 x 256, stay the same.
    """
    count = max(count, 1)
    step = max(16, 1 << count.bit_length() >> 6)
    return -(-count // step) * step


def first_rows(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return, for each token of [B, T], the first row with the same tokens and padding up to its column.

    For padding, it is the padding's own row.
    """
    rows = torch.arange(len(input_ids), device=input_ids.device).unsqueeze(1).repeat(1, input_ids.shape[1])
    for row in range(1, len(rows)):  # one at a time: all pairs of rows would take memory
        earlier = slice(row + 1)  # and itself
        same = (input_ids[earlier] == input_ids[row]) & (attention_mask[earlier] == attention_mask[row])
        first = same.cumprod(1, dtype=torch.uint8).argmax(0)  # the first of equal numbers
        rows[row] = torch.where(attention_mask[row].bool(), first, row)
    return rows


def accepts_positions(model: nn.Module) -> bool:
    """Return True if a model's forward pass takes `position_ids`."""
    return "position_ids" in inspect.signature(model.forward).parameters


def position_ids(attention_mask: Tensor) -> Tensor:
    """Return [B, T]: the index of each real token among its row's real tokens; 0 for padding before them."""
    return (attention_mask.cumsum(-1) - 1).clamp_min(0)


def sequence_scores(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return a reward model's score of each row, [B] float32: that of its last real token.

    If its configuration has an `unread_token` (see `load_scalar_head`), that of the last other token.
    """
    head = getattr(model, "module", model)  # under DeepSpeed
    unread = getattr(getattr(head.model, "config", None), "unread_token", None)
    read = attention_mask if unread is None else attention_mask * (input_ids != unread)
    return last_token_scores(model(input_ids, attention_mask), read)


def last_token_scores(token_scores: Tensor, attention_mask: Tensor) -> Tensor:
    """Return [B]: the score at each row's last real token, for scores and mask [B, T]."""
    columns = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return token_scores.gather(-1, (columns * attention_mask).argmax(-1, keepdim=True)).squeeze(-1).float()


def compute_log_probs(
    model: nn.Module,
    inputs: dict[str, Any],
    labels: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    places: Tensor | None = None,
) -> LogProbs:
    """Run a forward pass, and return the log-probabilities of `labels` under softmax(logits / temperature).

    Args:
        model: a causal language model.
        inputs: keyword arguments of the model's forward pass.
        labels: [B, T], one for each position that has logits; with `places` [N].
        temperature: that of sampling.
        entropy: compute the entropy of each distribution too.
        places: [N], the positions to project to the vocabulary, of B * T counted row by row; None: all.

    Returns:
        Of the shape of `labels`. No float32 tensor of logits exists; if the output layer can be fused with the rest
        (see `can_be_fused`), and its logits would be float32 or large, no tensor of logits at all.
    """
    entropies: Tensor | None = None  # kept out of the model output, or autograd would build a zero gradient for them

    def fused(hidden: Tensor) -> Tensor:
        nonlocal entropies
        log_probs, entropies = projected_log_probs(
            hidden, head.weight, head.bias, labels, temperature=temperature, entropy=entropy
        )
        return log_probs.unsqueeze(-1)  # as the model's output, which DeepSpeed's hooks see

    bare = getattr(model, "module", model)  # under DeepSpeed
    head = get_output_layer(bare)
    count = len(labels)
    with contextlib.ExitStack() as stack:
        if places is not None:
            assert head is not None
            padding = (0, round_count(count) - count)
            places, labels = nn.functional.pad(places, padding), nn.functional.pad(labels, padding)

            def select(_: nn.Module, args: tuple[Tensor]) -> Tensor:  # [B, T, H] -> [1, N, H]
                return args[0].flatten(0, -2).index_select(0, places).unsqueeze(0)

            stack.callback(head.register_forward_pre_hook(select).remove)
        if can_be_fused(bare) and _is_large(head, labels):
            stack.enter_context(_replace_forward(head, fused))
            log_probs = model(**inputs).logits
        else:
            logits = model(**inputs).logits
            logits = logits.view(*labels.shape, logits.shape[-1])
            if entropy:
                log_probs, entropies = token_log_probs_and_entropy(logits, labels, temperature)
            else:
                log_probs = token_log_probs(logits, labels, temperature)
    log_probs = log_probs.view(labels.shape)[:count]
    return LogProbs(log_probs, None if entropies is None else entropies.view(labels.shape)[:count])


def get_output_layer(model: nn.Module) -> Any:
    """Return the layer that computes logits; None if the model names none."""
    get_layer = getattr(model, "get_output_embeddings", None)
    return get_layer() if get_layer else None


def can_be_fused(model: nn.Module) -> bool:
    """Return True if a model's logits are a plain product of its last hidden states.

    They are not if an adapter or another forward pass replaces the output layer's (packed weights, for example), or if
    the model scales or caps the layer's result.
    """
    head = get_output_layer(model)
    if type(head) is not nn.Linear or "forward" in vars(head):
        return False
    if model not in _is_plain:
        _is_plain[model] = _returns_head_output(model, head)
        if not _is_plain[model]:
            logger.debug("%s: logits are computed in one piece: they are more than a product", type(model).__name__)
    return _is_plain[model]


def _is_large(head: nn.Linear, labels: Tensor) -> bool:
    """Return True if logits should not be stored; the same in scoring and training, so that their numbers agree."""
    size = head.weight.element_size()
    return size > 2 or labels.numel() * head.out_features * size > LARGE


@contextlib.contextmanager
def _replace_forward(module: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    module.forward = forward
    try:
        yield
    finally:
        del module.forward  # the instance attribute hid the class's method


def _returns_head_output(model: nn.Module, head: nn.Linear) -> bool:
    """Run the model's forward pass between stubs, and return True if its logits are the output layer's result.

    It uses no weight, no random number and no hook, and runs nothing on the device, where it would become part of the
    first batch's graph.
    """
    names = [name for name, child in model.named_children() if child is head]
    backbone = getattr(model, "base_model_prefix", "")
    if len(names) != 1 or backbone not in model._modules or backbone == names[0]:
        return False
    device = torch.device("meta")
    hidden, logits = (torch.zeros(1, 1, size, device=device) for size in (head.in_features, head.out_features))
    modules = model._modules.copy()
    try:
        model._modules[backbone] = _Stub(_HiddenOutput(last_hidden_state=hidden))
        model._modules[names[0]] = _Stub(logits, like=head)
        ids = torch.zeros(1, 1, dtype=torch.long, device=device)
        return type(model).forward(model, input_ids=ids, use_cache=False).logits is logits
    except Exception as error:  # an architecture that uses its parts in other ways keeps its logits
        logger.debug("%s: %s", type(model).__name__, error)
        return False
    finally:
        model._modules.update(modules)


class _Stub(nn.Module):
    """A module that returns a given result; its unknown attributes are itself."""

    def __init__(self, result: Any, like: nn.Module | None = None) -> None:
        super().__init__()
        self._result = result
        self._parameters = {} if like is None else like._parameters

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._result

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return self


class _HiddenOutput(BaseModelOutputWithPast):
    """The output of a decoder; attributes that only some decoders return are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
