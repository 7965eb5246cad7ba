"""`ppo.generation_exact`: drawn log-probabilities equal those of the training passes bit for bit.

Both are computed by operators whose numbers for a row do not depend on the batch (operation `batch_invariant`), from
the same weights in the same layout, adapters apart. A device or a model for which that fails is refused, with the
operator in the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from accelerators import RealTokens, find_batch_dependence
from rlhf.config.schema import Config, Stage
from rlhf.engine import distributed
from rlhf.engine.engine import TrainingEngine
from rlhf.errors import ConfigError
from rlhf.generation.decoder import Decoder
from rlhf.generation.hybrid_engine import generation_mode
from rlhf.losses.log_probs import exact_sums
from rlhf.models.dropout import is_stochastic
from rlhf.models.forward import LogProbs, in_one_row, model_inputs
from rlhf.models.quantized import find_quantized_layers
from rlhf.trainers.context import StageContext

if TYPE_CHECKING:
    from accelerators import Accelerator

Score = Callable[[Tensor, Tensor, int], LogProbs]

KEY = "ppo.generation_exact"

_LENGTHS, _STEPS = (19, 12, 7, 2), 5
"""Tokens of the prompts of the first comparison, and tokens that it draws; scoring leaves their padding out."""


@contextmanager
def exact_numbers(config: Config, stage: Stage, accelerator: Accelerator) -> Iterator[None]:
    """Compute the stage in this block with operators that do not depend on the batch, if its settings need that.

    Raises:
        ConfigError: an operator of the device depends on the batch.
    """
    if stage != "ppo" or not config.ppo.generation_exact:
        yield
        return
    make = accelerator.kernels.get("batch_invariant")
    with ExitStack() as stack:
        if make:
            stack.enter_context(make())
        stack.enter_context(exact_sums())
        dtype = accelerator.precision(config.precision).dtype
        if dependence := find_batch_dependence(accelerator, dtype):
            reason = "" if make else f" ({accelerator.kernels.capabilities()['batch_invariant'].reason})"
            raise ConfigError(f"{KEY}: not possible on {accelerator.name}: {dependence}{reason}; set it to false")
        yield


def check_exact(context: StageContext, actor: TrainingEngine, decoder: Decoder, score: Score) -> None:
    """Draw a few tokens and score them, and compare the log-probabilities bit for bit; all ranks call it.

    Args:
        context: that of the stage.
        actor: the policy.
        decoder: that of rollouts.
        score: (ids [B, T], mask [B, T], A) -> log-probabilities of the last A tokens, as scoring computes them.

    Raises:
        ConfigError: they differ, or training passes draw at random.
    """
    if is_stochastic(actor.module):
        raise ConfigError(
            f"{KEY}: the policy's training passes drop activations at random, so they cannot compute what was drawn; "
            "set ppo.dropout=0"
        )
    with torch.no_grad():
        mismatch = _find_mismatch(context, actor, decoder, score)
    if mismatch := next(filter(None, distributed.all_gather_objects(mismatch)), ""):
        chosen = getattr(cast(Any, actor.module).config, "_attn_implementation", "eager")
        remedy = "engine.kernels={attention: eager} if this is attention, or " if chosen != "eager" else ""
        if mismatch.partition(" ")[0] in find_quantized_layers(actor.module):
            remedy = "engine.kernels={quantized_weights: torch}, or "
        raise ConfigError(
            f"{KEY}: drawn and scored log-probabilities of this model differ, first in {mismatch}; set {remedy}"
            f"{KEY}=false"
        )


def _find_mismatch(context: StageContext, actor: TrainingEngine, decoder: Decoder, score: Score) -> str:
    """Return the first module whose numbers differ between drawing and scoring, with its class; "" if none does."""
    drawn_outputs, scored_outputs = _Outputs(actor.module), _Outputs(actor.module)
    accelerator, columns = context.accelerator, context.shapes.length(max(_LENGTHS), max(_LENGTHS))
    vocabulary = cast(Any, actor.module).config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(vocabulary, (len(_LENGTHS), columns), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(columns) >= columns - torch.tensor(_LENGTHS).unsqueeze(1)
    prompt_ids, prompt_mask = accelerator.to_device((ids, mask.long()))
    endless = Decoder(
        accelerator,
        eos_ids=(),
        pad_id=decoder.pad_id,
        max_new_tokens=_STEPS,
        shapes=context.shapes,
        rank_group=decoder.rank_group,
        exact=True,
    )
    with generation_mode(actor, decoder.rank_group, layout="unchanged") as model, drawn_outputs.recorded():
        drawn = endless.generate(model, prompt_ids, prompt_mask, context.config.ppo.sampling)
    endless.release()
    assert drawn.log_probs is not None
    actor.engine.eval()
    row_ids, row_mask = torch.cat([prompt_ids, drawn.ids], 1), torch.cat([prompt_mask, drawn.mask], 1)
    with scored_outputs.recorded():
        same = torch.equal(score(row_ids, row_mask, _STEPS).log_probs, drawn.log_probs)
    for row, length in enumerate(_LENGTHS):  # alone, and without its padding
        part = slice(row, row + 1), slice(columns - length, None)
        same &= torch.equal(score(row_ids[part], row_mask[part], _STEPS).log_probs[0], drawn.log_probs[row])
    tokens = in_one_row(actor.module, model_inputs(actor.module, row_ids, row_mask), row_mask)[1]
    return "" if same else drawn_outputs.first_difference(scored_outputs, tokens)


class _Outputs:
    """The latest outputs of a model's modules, in the order in which they ended."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._outputs: dict[str, tuple[str, Tensor]] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the outputs of forward passes in this block."""

        def record(name: str) -> Any:
            def hook(module: nn.Module, _: Any, output: Any) -> None:
                first = output[0] if isinstance(output, tuple) and output else output
                if isinstance(first, Tensor) and first.dim() == 3:
                    self._outputs.pop(name, None)
                    self._outputs[name] = type(module).__name__, first.detach().clone()

            return hook

        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                stack.callback(module.register_forward_hook(record(name)).remove)
            yield

    def first_difference(self, scored: _Outputs, tokens: RealTokens | None) -> str:
        """Return the first module of which the last decoding step and a pass over whole rows differ.

        Args:
            scored: outputs of that pass.
            tokens: those that the pass computed as one row; None: it computed the rows.
        """
        for name, (kind, drawn) in self._outputs.items():
            of_rows = scored._outputs.get(name, (kind, drawn[:0]))[1]
            if tokens is not None and of_rows.shape[:2] == (1, len(tokens.places)):
                of_rows = tokens.spread(of_rows)
            # The last drawn token was not read by generation; the output layer may have computed its targets alone.
            if len(of_rows) == len(drawn) and of_rows.shape[1] > 1 and not torch.equal(drawn[:, -1], of_rows[:, -2]):
                return f"{name} ({kind})"
        return "the log-probabilities, or in rows that are scored alone"
