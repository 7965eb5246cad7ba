"""Rollouts of one trainer by its servers: hand the weights over, check the receipts, draw, and replace what fails.

Every rank draws its own rows. Rank 0 hands over, and decides which servers all ranks use until the next hand-over:
nothing is drawn from weights that no receipt has confirmed.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf.checkpoint.export import save_adapter, save_model
from rlhf.config.rollout import PROBE_ROWS, PROBE_TOKENS
from rlhf.data.batches import Batch, pad_right
from rlhf.engine import distributed
from rlhf.engine.engine import Metrics, TrainingEngine
from rlhf.errors import ConfigError, DivergedError, RunError
from rlhf.generation.decoder import Completions, Decoder
from rlhf.models.forward import completion_log_probs
from rlhf.rollouts.client import RolloutServer, ServerError, ServerTimeout
from rlhf.rollouts.protocol import Capabilities, DrawnRow, DrawRequest, ScoreRequest
from rlhf.rollouts.receipts import LIMITS, Ledger
from rlhf.rollouts.server_pool import meet, nobody_left, real_tokens, share_rows
from rlhf.utils.atomic_io import PARTIAL, remove_folder

if TYPE_CHECKING:
    from rlhf.trainers.context import StageContext

_KEY = "ppo.rollout.where"
_NAME = "rollout-weights"  # of a partial folder and file, which the next start deletes if they are left

Version = tuple[int, str]
"""The steps that the weights have been trained, and which weights they are: the policy's, or their average."""


class RolloutServers:
    """The servers of `ppo.rollout.where`."""

    def __init__(
        self,
        context: StageContext,
        engine: TrainingEngine,
        tokenizer: Any,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
    ) -> None:
        """Prepare to draw; servers are asked at the first hand-over.

        Args:
            context: of the stage.
            engine: trains the policy.
            tokenizer: saved with whole weights.
            decoder: draws the random numbers, and knows lengths and end tokens.
            prompts: rows of token ids, of which the probe consists.
        """
        self._context, self._engine, self._tokenizer, self._decoder = context, engine, tokenizer, decoder
        settings = context.config.ppo.rollout
        self._sends_adapter = settings.weights == "adapter" or (
            not settings.weights and bool(engine.placement.lora.rank)
        )
        self._servers = [RolloutServer(url, settings.timeout) for url in settings.where]
        self._usable = list(self._servers)
        self._version: Version | None = None
        self._failures: list[str] = []  # of this rank, since the last hand-over, which rank 0 has not reported
        self._lost: list[str] = []  # all of this rank's since then
        self._end_ids = decoder.eos_ids.tolist()
        self._thread = ThreadPoolExecutor(1, "rollout")
        self._drawing: Future[tuple[list[DrawnRow], list[str]]] | None = None
        for server in self._servers:
            context.exits.callback(server.close)  # a call must not hold up the end of the process
        self._probe = [list(row[:PROBE_TOKENS]) for row in prompts if len(row) > 1][:PROBE_ROWS]
        self._ledgers: list[Ledger] = []  # on rank 0
        self._compared: Metrics = {}

    def _meet(self, server: RolloutServer) -> Ledger:
        """Check that a server has the trainer's model.

        Raises:
            ConfigError: it has not, or cannot be reached.
        """
        has = meet(server, _KEY, self._context.config.data.max_length, "start it: rlhf serve MODEL --rollouts")
        rows = self._engine.vocabulary
        if has.vocabulary != rows:
            raise ConfigError(
                f"{_KEY}: {server.url}: its model {has.model} has {has.vocabulary} tokens, and the policy has {rows}; "
                "serve the model that this stage starts from"
            )
        self._context.say(f"ppo: rollouts by {server.url}: {has.model} on {has.accelerator} in {has.precision}")
        precision = self._context.precision.name
        return Ledger(_coarser(has, precision), is_exact=precision == "fp32")

    # --- hand-over

    def hand_over(self, version: Version) -> None:
        """Give all servers the weights that the engine has, unless they have this version; every rank calls it.

        Raises:
            RunError: no server has confirmed them.
            ConfigError: before the first step, a server cannot be reached, has another model, or confirms no weights.
            DivergedError: the policy's numbers are not finite.
        """
        if self._drawing:
            with suppress(RunError):  # which the next step meets, if it asks for these rows
                self._note(self._drawing.result()[1])
        if version == self._version:
            return
        for lines in distributed.all_gather_objects(self._failures):
            self._report(lines)
        self._failures.clear()
        if self._version is None:
            with distributed.on_main("meeting the rollout servers", takes_long=True) as main:
                if main:
                    self._ledgers = self._meet_all(is_first=not version[0])
        here = self._score_probe()
        if not np.isfinite(here).all():
            raise DivergedError("ppo: the policy's log-probabilities are not finite; resume from an earlier checkpoint")
        folder = self._context.directory.path / f"{_NAME}{PARTIAL}"
        if self._sends_adapter:
            save_adapter(self._engine, folder, None)
        else:
            save_model(self._engine, self._tokenizer, folder)
        with distributed.on_main("handing over the weights", takes_long=True) as main:
            confirmed: dict[int, str] = {}
            if main:
                confirmed = self._send(folder, here, is_first=self._version is None and not version[0])
        confirmed, self._compared = distributed.all_gather_objects((confirmed, self._compare()))[0]
        for number, receipt in confirmed.items():
            self._servers[number].receipt = receipt
        self._usable, self._version = [self._servers[number] for number in confirmed], version
        self._lost.clear()

    def _meet_all(self, *, is_first: bool) -> list[Ledger]:
        """Return a ledger for each server; before the first step each must answer.

        Raises:
            ConfigError: a server has another model, or does not answer before the first step.
        """
        ledgers = []
        for server in self._servers:
            try:
                ledgers.append(self._meet(server))
            except ConfigError as error:
                if is_first or not isinstance(error.__cause__, ServerError):
                    raise
                ledgers.append(Ledger("bf16", is_exact=False))  # it may come back, in whatever precision
        return ledgers

    def _send(self, folder: Path, here: np.ndarray, *, is_first: bool) -> dict[int, str]:
        """Send the weights, compare the probe, and return the receipts of the servers to use, by number."""
        archive = folder.with_name(f"{_NAME}.tar{PARTIAL}")
        try:
            with tarfile.open(archive, "w") as tar:
                for file in sorted(folder.iterdir()):
                    tar.add(file, file.name)

            def deliver(number: int) -> str:
                server = self._servers[number]
                for _ in range(2):  # the second repeats what was lost on the way
                    try:
                        if not server.receipt:  # it may have failed before, so that it costs little to ask first
                            server.capabilities()
                        server.take_weights(archive)
                        there = server.score(ScoreRequest(receipt=server.receipt, rows=self._probe))
                    except ServerTimeout as error:
                        return str(error)
                    except ServerError as error:
                        problem = str(error)
                    else:
                        problem = self._ledgers[number].check(here, there)
                    if not problem:
                        return ""
                return problem

            with ThreadPoolExecutor(len(self._servers)) as threads:
                problems = list(threads.map(deliver, range(len(self._servers))))
        finally:
            archive.unlink(missing_ok=True)
            remove_folder(folder)
        for server, problem in zip(self._servers, problems):
            server.receipt = "" if problem else server.receipt
        failed = [f"{server.url}: {problem}" for server, problem in zip(self._servers, problems) if problem]
        if failed and is_first:
            raise ConfigError(f"{_KEY}: {failed[0]}; nothing was trained")
        confirmed = {number: server.receipt for number, server in enumerate(self._servers) if server.receipt}
        if not confirmed:
            raise nobody_left(_KEY, failed)
        self._report(failed)
        return confirmed

    def _score_probe(self) -> np.ndarray:
        """Return the policy's log-probabilities of the probe's tokens; every rank calls it."""
        self._engine.engine.eval()
        ids, mask = pad_right(self._probe, self._context.shapes, PROBE_TOKENS, self._tokenizer.pad_token_id)
        batch = self._context.accelerator.to_device((ids, mask))
        with torch.no_grad(), self._context.precision.autocast():
            scores = completion_log_probs(self._engine.engine, *batch, ids.shape[1] - 1).log_probs
        self._context.accelerator.step_boundary("rollout/probe")
        numbers: np.ndarray = np.array(scores.tolist(), np.float32)[mask[:, 1:].bool().numpy()]
        return numbers

    # --- draw

    def request(self, prompts: Batch, uniform: Tensor) -> Callable[[], list[DrawnRow]]:
        """Begin to have this rank's prompts completed, and return a function that waits for the completions.

        The servers keep their weights until these are drawn: `hand_over` waits too.

        Args:
            prompts: `prompt_ids` and `prompt_mask`, [B, P].
            uniform: random numbers, [A, B].

        Raises:
            RunError: (by the function) every server has failed.
        """
        rows = real_tokens(prompts["prompt_ids"], prompts["prompt_mask"])
        numbers = np.array(uniform.T.tolist(), np.float32)
        self._drawing = drawing = self._thread.submit(self._draw, rows, numbers, prompts["prompt_ids"].shape[1])

        def wait_for_rows() -> list[DrawnRow]:
            drawn, failed = drawing.result()
            self._note(failed)
            return drawn

        return wait_for_rows

    def _draw(self, rows: list[list[int]], numbers: np.ndarray, width: int) -> tuple[list[DrawnRow], list[str]]:
        """Return the completions of rows, and which servers have failed; nothing here touches the device."""

        def ask(server: RolloutServer, share: list[int]) -> list[DrawnRow]:
            try:
                return self._draw_share(server, share, rows, numbers, width)
            except ServerError:
                server.receipt = ""
                raise

        # Those that fail are not used until the next hand-over.
        return share_rows(_KEY, self._usable, self._lost, len(rows), ask)

    def _draw_share(
        self, server: RolloutServer, share: Sequence[int], rows: list[list[int]], numbers: np.ndarray, width: int
    ) -> list[DrawnRow]:
        request = DrawRequest(
            receipt=server.receipt,
            prompts=[rows[index] for index in share],
            width=width,
            uniform=numbers[share].ravel(),
            tokens=self._decoder.max_new_tokens,
            temperature=self._context.config.ppo.sampling.temperature,
            end_ids=self._end_ids,
        )
        return server.draw(request, self._engine.vocabulary)

    def join(self, rows: Sequence[DrawnRow]) -> Completions:
        """Return the completions of one rank as tensors on the device, [B, A]."""
        decoder = self._decoder
        columns = decoder.shapes.length(max(len(row.ids) for row in rows), decoder.max_new_tokens)

        def stack(values: Callable[[DrawnRow], Any], filler: float, dtype: torch.dtype) -> Tensor:
            tensors = [torch.tensor(values(row), dtype=dtype) for row in rows]
            return torch.stack([pad(tensor, (0, columns - len(tensor)), value=filler) for tensor in tensors])

        moved: Batch = self._context.accelerator.to_device(
            {
                "ids": stack(lambda row: row.ids, decoder.pad_id, torch.long),
                "mask": stack(lambda row: [1] * len(row.ids), 0, torch.long),
                "log_probs": stack(lambda row: row.log_probs, 0.0, torch.float32),
            }
        )
        return Completions(**moved)

    # --- records

    def metrics(self) -> Metrics:
        """Return the numbers of the latest hand-over, the same on all ranks: those of the worst server."""
        return {"rollout_servers": float(len(self._usable)), **self._compared}

    def _compare(self) -> Metrics:
        """Return the worst numbers of the ledgers, which rank 0 has."""
        gaps = [ledger.gap for ledger in self._ledgers if ledger.gap is not None]
        slopes = [ledger.slope.value for ledger in self._ledgers if ledger.slope]
        metrics: Metrics = {}
        if gaps:
            metrics["handover_gap"] = max(gaps)
        if slopes:
            metrics["handover_slope"] = max(slopes, key=lambda slope: abs(slope - 1))
        return metrics

    def _note(self, failed: list[str]) -> None:
        """Report the failures of a rollout, once."""
        if distributed.world().is_main:
            self._report(failed)
        else:
            self._failures += failed  # rank 0 reports them
        failed.clear()

    def _report(self, failed: Sequence[str]) -> None:
        for line in failed:
            self._context.say(f"ppo: rollout server {line}; the others replace it until the next hand-over")


def _coarser(server: Capabilities, trainer: str) -> str:
    """Return the precision with the larger rounding of a server and its trainer."""
    return max((server.precision, trainer), key=lambda name: LIMITS.get(name, max(LIMITS.values())))
