"""One side of the comparison: a stage on this process's backend, whose steps are taken one at a time from given states.

A state is a checkpoint's folder: the trained weights, the optimizer and the generators, in the form that every backend
reads. The methods take and return plain values and host tensors, so that a driver in another process can call them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from accelerators import AcceleratorError
from rlhf.config.schema import Config, Stage
from rlhf.engine.engine import NotFiniteError
from rlhf.engine.observer import Place, whole_weights
from rlhf.engine.select import choose_shapes
from rlhf.lockstep.kernels import judge_kernels
from rlhf.lockstep.observations import Observed
from rlhf.lockstep.operators import Fault, OperatorJudge, OperatorWatch, Wanted
from rlhf.lockstep.places import Places
from rlhf.lockstep.rounding import PerturbedRounding
from rlhf.models.dropout import is_stochastic
from rlhf.runs.description import read_description
from rlhf.runs.directory import RunDirectory
from rlhf.trainers import loop, pipeline
from rlhf.trainers.context import StageContext
from rlhf.trainers.trainer import Trainer

if TYPE_CHECKING:
    from accelerators import Accelerator


class Judgement(NamedTuple):
    """The operators of one step: those at fault, how many were judged, and those that could not be, with the reason."""

    faults: list[Fault]
    judged: int
    not_judged: dict[str, str]
    notes: list[str]


class Side:
    """A backend that takes steps; one stage is open at a time."""

    def __init__(self, config: Config, accelerator: Accelerator) -> None:
        self.config, self.accelerator = config, accelerator
        self.run = RunDirectory(config.output)
        self._stack = ExitStack()
        self._trainer: Trainer
        self._context: StageContext

    @property
    def models(self) -> list[torch.nn.Module]:
        """The models of the open stage, without DeepSpeed."""
        models: list[Any] = list(self._context.models.values())
        return [getattr(model, "module", model) for model in models]

    def describe(self) -> dict[str, Any]:
        """Return what the report says about this side."""
        info = self.accelerator.info()
        precision = self.accelerator.precision(self.config.precision)
        return {
            "accelerator": self.accelerator.name,
            "device": info.model,
            "software": info.software,
            "precision": precision.name,
            "unit": str(precision.dtype).removeprefix("torch."),
            "lazy": self.accelerator.is_lazy(),
            "precisions": [name for name in ("bf16", "fp16", "fp32") if self._grants(name)],
            "padding": asdict(choose_shapes(self.config, self.accelerator)),
            "settings": self.config.model_dump(mode="json", exclude={"output", "accelerator"})
            | {"precision": precision.name},
        }

    def _grants(self, precision: str) -> bool:
        try:
            self.accelerator.precision(precision)
        except AcceleratorError:
            return False
        return True

    def open(self, stage: Stage) -> dict[str, Any]:
        """Load a stage's models and data; return what the driver needs to know about it."""
        stack = self._stack
        context = stack.enter_context(pipeline.stage_context(stage, self.config, self.accelerator, self.run))
        self._context = context
        pipeline.log_plan(context)
        self._trainer = pipeline.build_trainer(context)
        loop.resume_or_seed(self._trainer, context)
        random = [name for name, engine in self._trainer.engines.items() if is_stochastic(engine.module)]
        description = read_description(self.run.description)
        models = description.get("stages", {}).get(stage, {}).get("models", {})
        return {
            "steps": self._trainer.total_steps,
            "stochastic": random,
            "rows": description.get("data", {}),
            "models": models,
        }

    def close(self, *, keep: bool) -> str:
        """End the stage; with `keep` it saves its model and is complete. Return the stage's folder."""
        context, folder = self._context, self._context.directory.path
        if keep:
            self._trainer.save(context.directory.path)
            summary = {"steps": 0, **self._trainer.summarize()}
            pipeline.release_models(context)
            pipeline.finish(context, summary)
        else:
            pipeline.release_models(context)
        del self._trainer
        self._stack.close()
        return str(folder)

    def adopt(self, stage: Stage, folder: str) -> None:
        """Take over a complete stage's folder of the other side, so that later stages start from its model."""
        shutil.rmtree(self.run.stage(stage).path, ignore_errors=True)
        shutil.copytree(folder, self.run.stage(stage).path)

    def save_state(self, step: int, target: str) -> None:
        """Write the state after `step` steps into the folder `target`."""
        loop.save_checkpoint(self._trainer, self._context, step)
        latest = self._context.directory.latest_checkpoint
        assert latest is not None
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(latest, Path(target) / latest.name)

    def load_state(self, source: str) -> None:
        """Restore a state that either side wrote."""
        context = self._context
        shutil.rmtree(context.directory.checkpoints, ignore_errors=True)
        shutil.copytree(source, context.directory.checkpoints)
        loop.resume_or_seed(self._trainer, context)

    def take(
        self,
        step: int,
        state: str | None,
        *,
        completions: Tensor | None = None,
        perturbed: int | None = None,
        together: bool = False,
        eps_before_correction: bool = False,
    ) -> list[Observed]:
        """Take step `step`, from 0, and return what it reported.

        Args:
            step: the step.
            state: the state to start from; None: the current one.
            completions: ids [B, A] that PPO draws instead of sampled ones.
            perturbed: perturb each operator by one rounding, with this seed.
            together: all elements of a result in one direction.
            eps_before_correction: let AdamW add eps before it corrects the bias of the second moment.
        """
        if state is not None:
            self.load_state(state)
        with ExitStack() as stack:
            if eps_before_correction:
                stack.enter_context(_eps_before_correction(self._trainer, step))
            if perturbed is not None:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(PerturbedRounding(perturbed, together=together))
            return self._take(step, completions)

    def judge(self, step: int, state: str, *, completions: Tensor | None = None, until: str | None = None) -> Judgement:
        """Take a step again and judge each of its operators, to the end of the phase `until` or of the step."""
        context, places = self._context, Places()
        judge = OperatorJudge(places, context.accelerator.synchronize, until)

        def blame(kernel: str, line: str, ratio: float, index: Any, value: float, truth: float, shapes: str) -> None:
            where = (places.current().module, line, False, 0)
            judge.faults.append(Fault(judge.number, kernel, "kernel", *where, ratio, index, value, truth, shapes))

        configs = [getattr(module, "config", None) for model in self.models for module in model.modules()]
        attention = {getattr(config, "_attn_implementation", None) or "" for config in configs}
        notes = []
        with (
            _forced_eager(self._trainer),
            places.follow(context.models),
            judge_kernels(attention, blame),
        ):
            if context.accelerator.is_lazy():
                notes.append("operators of the lazy device were run one by one, and decoding steps were not recorded")
            self.load_state(state)
            with judge:
                self._take(step, completions, on_report=judge.assign)
        return Judgement([fault for fault in judge.faults if fault.phase], judge.judged, judge.not_judged, notes)

    def read(
        self, step: int, state: str, wanted: Sequence[Wanted], *, completions: Tensor | None = None
    ) -> dict[Wanted, float | None]:
        """Take a step again and return elements of the results of its operators."""
        places = Places()
        with _forced_eager(self._trainer), places.follow(self._context.models):
            self.load_state(state)
            with OperatorWatch(places, wanted) as watch:
                self._take(step, completions)
        values: dict[Wanted, float | None] = watch.values
        return values

    def weights(self) -> dict[tuple[str, str], Tensor]:
        """Return the float32 weights that are trained, by role and name."""
        host = self.accelerator.host_device()
        return {
            (engine.name, name): weight.detach().to(host, copy=True)
            for engine in self._trainer.engines.values()
            for name, weight in whole_weights(engine.module, engine.optimizer, zero_stage=engine.zero_stage)
        }

    def forced_eager(self) -> AbstractContextManager[None]:
        """Return a context in which what the backend compiles or records runs operator by operator."""
        return _forced_eager(self._trainer)

    def evaluate(self) -> dict[str, float]:
        """Return the held-out metrics of the current state."""
        return dict(self._trainer.evaluate("lockstep").numbers)

    def _take(self, step: int, completions: Tensor | None, on_report: Any = None) -> list[Observed]:
        context, observed = self._context, []
        decoder = getattr(self._trainer, "decoder", None)

        def keep(place: Place, name: str, tensor: Tensor) -> None:
            if on_report:
                on_report(place.phase, place.role, place.update)
            copy = tensor.to(context.accelerator.host_device(), copy=True)
            observed.append(Observed(place.phase, place.role, name, place.update, place.micro_batch, copy))

        context.observation.observer = keep
        if decoder is not None:
            decoder.forced = completions
        try:
            with context.phases.step(), context.observation.during(context.directory.name, step + 1):
                self._trainer.step(step)
        except NotFiniteError:
            pass  # what was reported shows where
        finally:
            context.observation.observer = None
            if decoder is not None:
                decoder.forced = None
        return observed + list(_derive(observed))


@contextmanager
def _eps_before_correction(trainer: Trainer, step: int) -> Iterator[None]:
    """Scale eps to what it is if it is added before the second moment's bias is corrected, as some kernels do."""
    groups = [group for engine in trainer.engines.values() for group in engine.optimizer.param_groups]
    known = [group["eps"] for group in groups]
    for group in groups:
        group["eps"] /= (1 - group["betas"][1] ** (step + 1)) ** 0.5
    try:
        yield
    finally:
        for group, eps in zip(groups, known):
            group["eps"] = eps


@contextmanager
def _forced_eager(trainer: Trainer) -> Iterator[None]:
    """Run what the backend compiles or records operator by operator: only then are there values to judge."""
    decoder: Any = getattr(trainer, "decoder", None)
    capture = getattr(decoder, "_capture", None)
    if decoder is not None:
        decoder.release()
        decoder._capture = None
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        if decoder is not None:
            decoder.release()
            decoder._capture = capture


def _derive(observed: Sequence[Observed]) -> Iterator[Observed]:
    """Yield the difference of drawn and scored log-probabilities: it shows a wrong cache, on one backend alone."""
    found = {(item.phase, item.role, item.name): item.tensor for item in observed}
    drawn, scored = found.get(("rollout", "actor", "drawn_log_probs")), found.get(("scores", "actor", "log_probs"))
    if drawn is not None and scored is not None and drawn.shape == scored.shape:
        yield Observed("scores", "actor", "drawn_minus_scored", 0, -1, drawn.float() - scored.float())
