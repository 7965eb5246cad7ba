"""The sinks of a run (`sinks` in a recipe): find them by name, and pass them each record of a stage.

A sink is a convenience: `metrics.jsonl` is written first, and a sink that fails or hangs is switched off, not the run.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, TimeoutError
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

import pluggy

from rlhf.config.schema import Config
from rlhf.errors import ConfigError, summarize_error
from rlhf.reporting import hookspecs, trackers
from rlhf.reporting.console import console
from rlhf.reporting.hookspecs import Sink, SinkStage
from rlhf.runs.stage_directory import StageDirectory

_FAILURES = (Exception, SystemExit)
"""SystemExit, too: a package that cannot start must not end the run."""


def check_sinks(config: Config) -> None:
    """Raise `ConfigError` if a sink is unknown, or needs a package that is not installed."""
    for name in config.sinks:
        find_sink(name, "sinks")


def find_sink(name: str, key: str) -> type[Any]:
    """Return the class of a sink; its objects are made from a `SinkStage`.

    Args:
        key: the key or option that names it, for messages.

    Raises:
        ConfigError: no plugin offers it, several do, it cannot be imported, or its package is not installed.
    """
    offers = _collect_offers(key)
    offered = {plugin: sinks[name] for plugin, sinks in offers.items() if name in sinks}
    if not offered:
        known = sorted({known for sinks in offers.values() for known in sinks})
        raise ConfigError(f"{key}: no sink {name!r}; use one of {', '.join(known)}")
    if len(offered) > 1:
        raise ConfigError(f"{key}: {name} is offered by several plugins, {' and '.join(offered)}; uninstall one")
    [reference] = offered.values()
    module, _, attribute = reference.partition(":")
    try:
        sink: type[Any] = getattr(import_module(module), attribute)
    except _FAILURES as error:
        raise ConfigError(
            f"{key}: {name}: cannot import {reference} ({summarize_error(error, 160)}); repair or remove its plugin"
        ) from error
    package = getattr(sink, "package", None)
    if package and find_spec(package) is None:
        raise ConfigError(f"{key}: {name} is not installed; run: pip install {package}")
    return sink


def _collect_offers(key: str) -> dict[str, dict[str, str]]:
    """Return the sinks of each plugin, as module:class by name."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(trackers, "rlhf")
    offers: dict[str, dict[str, str]] = {}
    at = "metadata of an installed package cannot be read"
    try:
        for point in entry_points(group=hookspecs.GROUP):
            at = f"the plugin {point.name} cannot be imported"
            manager.register(point.load(), point.name)
        for implementation in manager.hook.rlhf_sinks.get_hookimpls():
            at = f"the plugin {implementation.plugin_name} does not say which sinks it offers"
            answer: Any = implementation.function()
            offers[implementation.plugin_name] = {str(name): str(reference) for name, reference in answer.items()}
    except _FAILURES as error:
        raise ConfigError(f"{key}: {at} ({summarize_error(error, 160)}); repair or uninstall it") from error
    return offers


def describe_stage(directory: StageDirectory, config: Config) -> SinkStage:
    """Return a stage of a run as its sinks see it."""
    run = directory.path.resolve().parent
    return SinkStage(
        project=run.parent.name,
        run=run.name,
        stage=directory.name,
        config=config.model_dump(mode="json"),
        folder=directory.path,
    )


class SinkGroup(AbstractContextManager["SinkGroup"]):
    """The sinks of one stage, as one sink; each is made at the first record, and switched off when it fails.

    Args:
        names: their names in the recipe.
        stage: the stage that they record.
        timeout: seconds that a sink may take for a record.
    """

    def __init__(self, names: Iterable[str], stage: SinkStage, timeout: float = 60.0) -> None:
        self._stage, self._timeout = stage, timeout
        self._sinks = {name: _SinkThread(name, stage) for name in names}

    def write(self, record: Mapping[str, Any]) -> None:
        """Pass a record to each sink that has not failed."""
        for name, sink in list(self._sinks.items()):
            self._call(name, partial(sink.write, dict(record)))

    def close(self) -> None:
        """Close the sinks that were made."""
        for name, sink in list(self._sinks.items()):
            self._call(name, sink.close)
        self._sinks.clear()

    def _call(self, name: str, function: Callable[[], None]) -> None:
        try:
            self._sinks[name].run(function).result(self._timeout)
        except TimeoutError:
            self._switch_off(name, f"it did not return within {self._timeout:g} s, sinks_timeout")
        except _FAILURES as error:
            self._switch_off(name, summarize_error(error, 160))

    def __exit__(self, *error: object) -> None:
        self.close()

    def _switch_off(self, name: str, reason: str) -> None:
        del self._sinks[name]
        console.print(
            f"{self._stage.stage}: note: the sink {name} has failed ({reason}) and is off until the stage ends; "
            "metrics.jsonl has all records",
            markup=False,
            soft_wrap=True,
        )


class _SinkThread:
    """A sink, whose code runs in a thread that the process does not wait for when it ends."""

    def __init__(self, name: str, stage: SinkStage) -> None:
        self._name, self._stage = name, stage
        self._sink: Sink | None = None
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=f"sink {name}", daemon=True).start()

    def run(self, function: Callable[[], None]) -> Future[None]:
        """Call a method of this object in the thread, after earlier ones."""
        future: Future[None] = Future()
        self._calls.put((function, future))
        return future

    def write(self, record: dict[str, Any]) -> None:
        if self._sink is None:
            self._sink = find_sink(self._name, "sinks")(self._stage)
        self._sink.write(record)

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()

    def _serve(self) -> None:
        while True:
            function, future = self._calls.get()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            if function == self.close:
                return
