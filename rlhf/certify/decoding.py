"""Greedy completions with steps recorded and plain, for two shapes in turn: tokens, graphs and speed.

In float32, a recording must draw the same tokens as plain steps, whose kernels it replays. Compiled steps, and steps in
16 bits, may round differently: each token only has to be the best one within the precision, according to one forward
pass over the whole row.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

import accelerators
from accelerators import AcceleratorError
from rlhf.certify.processes import CheckFailed
from rlhf.config.schema import SamplingConfig
from rlhf.generation.decoder import Decoder
from rlhf.models.compatibility import choose_attention_for
from rlhf.models.forward import model_inputs
from rlhf.models.loading import place_model

if TYPE_CHECKING:
    from accelerators import Accelerator, Precision

FAMILIES: Mapping[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 48},  # a recording must not repeat the window of the step that it saw
    "gemma3_text": {"sliding_window": 48, "layer_types": ["sliding_attention", "full_attention"]},
}

SLACK = {"fp32": 1e-3, "bf16": 3e-2, "fp16": 1e-2}
"""How much lower than the best logit that of a drawn token may be, as a fraction of the largest logit."""


class Sizes(NamedTuple):
    """A model, the shapes of its rollouts (rows, prompt), the new tokens of each, and the measured rounds."""

    layers: int
    hidden: int
    vocabulary: int
    shapes: tuple[tuple[int, int], ...]
    tokens: int
    rounds: int


TOY = Sizes(2, 48, 512, ((3, 12), (2, 20)), 24, 1)
FULL = Sizes(8, 576, 32_000, ((8, 64), (4, 96)), 128, 5)


def compare_decoding(accelerator: Accelerator, *, full: bool) -> dict[str, Any]:
    """Return facts about every family and precision.

    Raises:
        CheckFailed: tokens differ, steps are not recorded, or a known shape is recorded again.
    """
    sizes = FULL if full else TOY
    facts: dict[str, Any] = {"sizes": sizes._asdict()}
    for number, precision in enumerate(_precisions(accelerator)):
        # Architectures differ in masks and caches: another precision shows that again for one of them only.
        for family in list(FAMILIES)[: 1 if number else None]:
            facts[f"{family} in {precision.name}"] = _Comparison(accelerator, family, precision, sizes).run()
    return facts


def _precisions(accelerator: Accelerator) -> list[Precision]:
    """Return fp32, if the device has it, and the precision of runs."""
    automatic = accelerator.precision()
    try:
        exact = accelerator.precision("fp32")
    except AcceleratorError:
        return [automatic]
    return [exact] if automatic.name == exact.name else [exact, automatic]


class _Comparison:
    """One model, and a decoder with and one without recorded steps."""

    def __init__(self, accelerator: Accelerator, family: str, precision: Precision, sizes: Sizes) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.what = f"{family} in {precision.name}"
        self.accelerator, self.precision, self.sizes = accelerator, precision, sizes
        heads = sizes.hidden // 16 if sizes.hidden < 64 else 9
        changes = dict(FAMILIES[family])
        if kinds := changes.get("layer_types"):
            changes |= {"layer_types": (kinds * sizes.layers)[: sizes.layers], "head_dim": sizes.hidden // heads}
        config = AutoConfig.for_model(
            family,
            vocab_size=sizes.vocabulary,
            num_hidden_layers=sizes.layers,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.hidden * 2,
            num_attention_heads=heads,
            num_key_value_heads=heads // 3,
            **changes,
        )
        torch.manual_seed(0)
        attention = choose_attention_for(accelerator, config, family, None).name
        self.model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        place_model(self.model, accelerator.device(), precision.dtype)
        self.capture = accelerator.kernels.capabilities()["graph_capture"]
        self.decoders = {"recorded": self._decoder()}
        with _unrecorded(accelerator):
            self.decoders["plain"] = self._decoder()

    def run(self) -> dict[str, Any]:
        """Generate each shape with each decoder, several times in turn, and compare."""
        graphs: dict[str, list[int]] = {kind: [] for kind in self.decoders}
        seconds: dict[str, list[float]] = {kind: [] for kind in self.decoders}
        completions: dict[str, list[Tensor]] = {}
        for _ in range(2 + self.sizes.rounds):  # two warm up: buffers of the first are new
            for kind, decoder in self.decoders.items():
                before, start = self.accelerator.compilations(), time.perf_counter()
                completions[kind] = [self._generate(decoder, shape) for shape in self.sizes.shapes]
                seconds[kind].append(time.perf_counter() - start)
                graphs[kind].append((self.accelerator.compilations() or 0) - (before or 0))
        tokens = sum(rows for rows, _ in self.sizes.shapes) * self.sizes.tokens
        speed = {kind: round(tokens / statistics.median(times[2:])) for kind, times in seconds.items()}
        pairs = list(zip(completions["recorded"], completions["plain"], strict=True))
        equal = sum(float((one == other).float().mean()) for one, other in pairs) / len(pairs)
        facts = {
            "recorded by": self.capture.implementation or f"nothing ({self.capture.reason})",
            "equal tokens": equal,
            "graphs by round": graphs,
            "tokens per second": speed,
            "speedup": round(speed["recorded"] / max(speed["plain"], 1), 2),
        }
        self._judge(facts, equal, graphs["recorded"], completions)
        return facts

    def _judge(
        self,
        facts: dict[str, Any],
        equal: float,
        graphs: list[int],
        completions: dict[str, list[Tensor]],
    ) -> None:
        """Raise `CheckFailed` if the facts are not as they should be."""

        def require(holds: bool, reason: str) -> None:
            if not holds:
                raise CheckFailed(f"{self.what}: {reason}", {self.what: facts})

        parts = ", ".join(self.accelerator.fallbacks)
        require(not parts, f"generation is slower than possible: not captured or compiled: {parts}")
        counts = self.capture.ok and self.accelerator.compilations() is not None
        require(not counts or graphs[0] > 0, f"{self.capture.implementation} has recorded no step")
        late = sum(graphs[2:])
        require(late == 0, f"{late} more graphs for shapes that were known, expected none after two rounds")
        for kind, results in completions.items():
            worst = max(self._regret(shape, ids) for shape, ids in zip(self.sizes.shapes, results, strict=True))
            facts[f"regret, {kind}"] = worst
            require(
                worst <= SLACK[self.precision.name],
                f"{kind} steps drew tokens whose logits are {worst:.2g} of the largest below the best, by one forward "
                f"pass; expected at most {SLACK[self.precision.name]:g}",
            )
        replays = not self.capture.ok or self.accelerator.recordings_keep_memory()
        exact = self.precision.name == "fp32" and replays
        require(not exact or equal == 1.0, f"only {equal:.1%} of the recorded steps' tokens equal those of plain steps")

    def _decoder(self) -> Decoder:
        shapes = accelerators.ShapePolicy("static")
        return Decoder(self.accelerator, eos_ids=[], pad_id=0, max_new_tokens=self.sizes.tokens, shapes=shapes)

    def _prompts(self, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        rows, length = shape
        generator = torch.Generator().manual_seed(rows)
        ids = torch.randint(3, self.sizes.vocabulary, shape, generator=generator)
        mask = (torch.arange(length) >= torch.arange(rows).unsqueeze(1) * 4).long()  # padding of different lengths
        return self.accelerator.to_device((ids * mask, mask))

    def _generate(self, decoder: Decoder, shape: tuple[int, int]) -> Tensor:
        """Return the completions [B, A], after the device has finished them."""
        ids = decoder.generate(self.model, *self._prompts(shape), SamplingConfig(temperature=0)).ids
        self.accelerator.synchronize()
        return ids

    @torch.no_grad()
    def _regret(self, shape: tuple[int, int], completion: Tensor) -> float:
        """Return how far the drawn tokens' logits are below the best ones, as a fraction of the largest logit."""
        prompt, mask = self._prompts(shape)
        ids = torch.cat([prompt, completion], 1)
        mask = torch.cat([mask, torch.ones_like(completion)], 1)
        inputs = model_inputs(self.model, ids, mask) | {"use_cache": False}
        with self.precision.autocast():
            logits = self.model(**inputs).logits[:, shape[1] - 1 : -1].float()
        drawn = logits.gather(-1, completion.unsqueeze(-1)).squeeze(-1)
        return float((logits.amax(-1) - drawn).max() / logits.abs().max())


@contextmanager
def _unrecorded(accelerator: Accelerator) -> Iterator[None]:
    """Turn recording off for decoders that are made in this block."""
    capture = accelerator.capture
    accelerator.capture = lambda fn, key: fn  # type: ignore[method-assign]
    try:
        yield
    finally:
        accelerator.capture = capture  # type: ignore[method-assign]
