"""RLHF from Python: a session manages the accelerator, the run's folder and the processes; the loop is yours.

Settings have the form of the command line's. Stages write their results to the run's folder; `Session.ppo` returns an
object whose steps you take in a loop. example_scripts/python/README.md is a walk-through.
"""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from rlhf.config.dump import format_scalar
from rlhf.config.schema import STAGES, Config, Stage, load_config
from rlhf.errors import ConfigError, RunError
from rlhf.utils.process_info import current_process

if TYPE_CHECKING:
    from rlhf.api.ppo_learner import PPOLearner


def session(
    settings: Sequence[str] | Mapping[str, Any] = (),
    *,
    config: str | Path | None = None,
    output: str | Path | None = None,
    accelerator: str | None = None,
    quiet: bool = True,
) -> Session:
    """Open a session for training from your program or notebook.

        import rlhf

        with rlhf.session(["ppo.steps=20"], output="runs/mine") as session:
            session.run("sft", "reward")
            ppo = session.ppo()
            for step in range(ppo.steps):
                numbers = ppo.step(step)
                print(step, numbers["reward"], ppo.generate(["Which animal says moo?"]))
            session.save()

    If the settings name neither a model nor data, the embedded example is trained. In a notebook leave `with`
    out, and call `session.close()` at the end. Under a launcher (torchrun, `srun`, `mpirun`) every process runs the
    same program, and all share one session.

    Args:
        settings: keys of `rlhf config` as `["ppo.steps=20"]`, `{"ppo.steps": 20}` or `{"ppo": {"steps": 20}}`; they
            override those of `config`.
        config: a YAML file of settings, a recipe.
        output: folder of the run; default: that of the settings, or a temporary one that is deleted with the session.
        accelerator: backend to run on, as `rlhf accelerators list` names it; default: that of the settings.
        quiet: let libraries log errors only; your program's logging does not change.

    Raises:
        RLHFError: a setting is invalid; one line says which, and what to do.
    """
    options = {"output": str(output) if output else None, "accelerator": accelerator}
    return Session(load_config(Path(config) if config else None, _overrides(settings), options=options), quiet=quiet)


class Session:
    """A run's settings and folder, and PPO in your loop; `rlhf.session` creates it.

    A process has one PPO at a time: that of another session ends when this one starts to work.

    Attributes:
        config: every setting, as it will be recorded.
        output: the run's folder.
    """

    _working: ClassVar[Session | None] = None  # the session whose PPO uses this process's devices

    def __init__(self, config: Config, *, quiet: bool = True) -> None:
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if "output" not in config.model_fields_set:
            if current_process().size > 1:
                raise RunError("output: a run of several processes needs a folder that all of them see; name one")
            self._temporary = tempfile.TemporaryDirectory(prefix="rlhf-", ignore_cleanup_errors=True)
            config = config.model_copy(update={"output": Path(self._temporary.name)})
        self.config, self.output = config, config.output
        self._quiet, self._closed = quiet, False
        self._learner: PPOLearner | None = None
        self._ppo_resources, self._session_resources = ExitStack(), ExitStack()
        atexit.register(self.close)

    @property
    def is_main(self) -> bool:
        """True for the process that prints: rank 0, or the only one."""
        return current_process().rank == 0

    def run(self, *stages: Stage, overwrite: bool = False) -> dict[Stage, dict[str, Any]]:
        """Run stages to their end, as `rlhf` does; without names all three: SFT, reward model, PPO.

        Complete stages are not run again; a stopped stage resumes from its newest checkpoint.

        Args:
            overwrite: train complete stages again, and replace them.

        Returns:
            Each stage's summary: `before` and `after` with the held-out numbers, `steps`, `seconds`, ...

        Raises:
            RLHFError: something that you can fix.
            rlhf.launchers.exit_status.Interrupted: it was interrupted; call it again to resume.
        """
        from rlhf.runs.directory import RunDirectory
        from rlhf.trainers import run as launch

        self._ready()
        wanted: Sequence[Stage] = stages or STAGES
        resume = not overwrite and any(RunDirectory(self.output).stage(stage).started for stage in wanted)
        directory = launch.run(self.config, stages=wanted, resume=resume, overwrite=overwrite)
        return {stage: directory.stage(stage).summary() for stage in wanted}

    def ppo(self, *, overwrite: bool = False) -> PPOLearner:
        """Start PPO, and return it ready for its first `step`; it can also `generate`, `score` and `evaluate`.

        It starts from the settings' models or from the results of `run("sft", "reward")`, and resumes from the newest
        checkpoint of `ppo.checkpoint()`. A second call ends the previous PPO, and steps after its last checkpoint are
        lost.

        Args:
            overwrite: replace the PPO stage in the folder; it is restored if no step of the new one was recorded.

        Raises:
            RLHFError: a model or data cannot be used, the folder contains a complete PPO stage, or another process
                writes to it. Nothing was changed then.
        """
        from rlhf.runs.directory import RunDirectory
        from rlhf.trainers import run as launch

        if self.config.ppo.ends_early:
            raise ConfigError(
                "ppo.stop: over_optimized applies to `rlhf ppo`; in a Python loop, remove this key, and compare "
                "judge_reward of evaluate()"
            )
        self._ready()
        directory = RunDirectory(self.output)
        resume = not overwrite and directory.stage("ppo").started
        with ExitStack() as resources:
            run = launch.open_run(self.config, ("ppo",), resume=resume, overwrite=overwrite)
            config, accelerator = resources.enter_context(run)
            from rlhf.api.ppo_learner import PPOLearner  # imports DeepSpeed, which is configured for the device by now

            self._learner = resources.enter_context(PPOLearner.of(config, accelerator, directory))
            self._ppo_resources = resources.pop_all()
            Session._working = self
        return self._learner

    def save(self) -> Path:
        """Save PPO's policy as a plain transformers model, complete the stage, and return the model's folder.

        Raises:
            RLHFError: PPO was not started, or the disk is full.
        """
        if self._learner is None:
            raise RunError("save: there is no policy yet; begin with ppo = session.ppo()")
        return self._learner.save()

    def close(self) -> None:
        """End the session: unlock its folder, and delete it if it is temporary. Further calls do nothing."""
        self._close(None)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        atexit.unregister(self.close)
        self._closed = True
        try:
            self._leave_ppo(error)
        finally:
            self._session_resources.close()
            if self._temporary:
                self._temporary.cleanup()

    def _leave_ppo(self, error: BaseException | None) -> None:
        """End PPO; after an error, restore the stage that it would replace, unless one of its steps was recorded."""
        if Session._working is self:
            Session._working = None
        resources, self._ppo_resources, self._learner = self._ppo_resources, ExitStack(), None
        resources.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    def _ready(self) -> None:
        if self._closed:
            raise RunError("the session is closed; begin another with rlhf.session(...)")
        if self._quiet:
            from rlhf.reporting import verbosity as quiet

            self._session_resources.enter_context(quiet.quiet_libraries())
            self._quiet = False
        if Session._working:
            Session._working._leave_ppo(None)


def _overrides(settings: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """Return settings in the form of the command line's `--set`."""
    if isinstance(settings, Mapping):
        return [f"{key}={format_scalar(value)}" for key, value in _flat(settings)]
    return [settings] if isinstance(settings, str) else list(settings)


def _flat(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
