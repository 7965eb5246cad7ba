"""A Gaudi machine for tests: a `habana_frameworks` over CPU tensors, and an `hl-smi` that answers as told.

As thin as can be; what it imitates is what the bridge's documents and sources say of the calls that the backend makes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from accelerators.testing.stand_in import UndoableTape


@dataclass
class CompiledGraph:
    shape: tuple[int, ...]
    runs: int = 0


CHIPS = {"Gaudi": "HL-205", "Gaudi2": "HL-225", "Gaudi3": "HL-325L"}
"""The board of each chip, as hl-smi names it."""

DRIVER = "1.24.0-5f8fa9f"
HPEX = ("optimizers", "normalization", "kernels")
COMPILER = "hpu_backend"
COMPILED: list[CompiledGraph] = []
"""What torch.compile gave to the bridge's backend in this process."""


def rows(chip: str, count: int, first_module: int = 0) -> str:
    """What `hl-smi -Q module_id,name,driver_version -f csv,noheader` prints; cards come in no order of modules."""
    modules = reversed(range(first_module, first_module + count))
    return "".join(f"{module}, {CHIPS[chip]}, {DRIVER}\n" for module in modules)


def write_hl_smi(folder: Path, output: str = "", *, errors: str = "", code: int = 0, seconds: int = 0) -> None:
    """An `hl-smi` in `folder`, to be put on PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "output").write_text(output)
    (folder / "errors").write_text(errors)
    script = folder / "hl-smi"
    sleep = f"exec /bin/sleep {seconds}\n" if seconds else ""
    script.write_text(f'#!/bin/sh\n{sleep}/bin/cat "{folder}/errors" >&2\n/bin/cat "{folder}/output"\nexit {code}\n')
    script.chmod(0o755)


class Fallbacks:
    """The bridge's metric of operators that it ran on the host."""

    def stats(self) -> list[tuple[str, Any]]:
        return [("TotalNumber", 3), ("FallbackOps", {"aten::digamma": 2, "aten::unique": 1})]


class Bridge:
    """Gaudi's PyTorch bridge in one mode on one chip; counts what is asked of it."""

    def __init__(
        self,
        *,
        lazy: bool = False,
        fp16: bool = True,
        hpex: Iterable[str] = HPEX,
        runs_what_it_records: bool = True,
        free: bool = True,
    ) -> None:
        self.lazy = lazy
        self.fp16 = fp16
        self.hpex = tuple(hpex)
        self.runs_what_it_records = runs_what_it_records
        self.free = free
        self.calls: list[str] = []
        self.stats: Any = [("TotalNumber", 0), ("TotalTime", 0), ("AvgTime", 0)]
        self.memory = {"Limit": 96 << 30, "InUse": 5, "MaxInUse": 7, "NumAllocs": 1}
        self.generator = torch.Generator()

    def modules(self) -> dict[str, ModuleType]:
        """Everything to put in `sys.modules`."""
        contents: dict[str, dict[str, Any]] = {
            "habana_frameworks": {},
            "habana_frameworks.torch": {},
            "habana_frameworks.torch.core": {"mark_step": lambda: self.calls.append("mark_step")},
            "habana_frameworks.torch.utils": {},
            "habana_frameworks.torch.utils.internal": {"is_lazy": lambda: self.lazy},
            "habana_frameworks.torch.utils.experimental": {"_is_fp16_supported": lambda: self.fp16},
            "habana_frameworks.torch.distributed": {},
            "habana_frameworks.torch.distributed.hccl": {
                "initialize_distributed_hpu": lambda: self.calls.append("initialize_distributed_hpu")
            },
            "habana_frameworks.torch.hpu": {
                "init": self._init,
                "is_available": lambda: True,  # deepspeed 0.19.0 asks when it is imported
                "Event": torch.Event,
                "Stream": torch.Stream,
                "synchronize": lambda: self.calls.append("synchronize"),
                "memory_stats": lambda: self.memory,
                "reset_peak_memory_stats": lambda: self.calls.append("reset_peak_memory_stats"),
                # Graphs are imported in lazy mode only.
                **({"HPUGraph": self._graph, "graph": Recording, "default_stream": lambda: None} if self.lazy else {}),
            },
            "habana_frameworks.torch.hpu.random": {
                "manual_seed_all": self.generator.manual_seed,
                "get_rng_state": self.generator.get_state,
                "set_rng_state": self.generator.set_state,
            },
            "habana_frameworks.torch.hpu.metrics": {
                "metric_global": lambda name: {"graph_compilation": Metric(self), "cpu_fallback": Fallbacks()}.get(name)
            },
            "habana_frameworks.torch.hpex": {},
        }
        fused = {
            "optimizers": {"FusedAdamW": FusedAdamW},
            "normalization": {"FusedClipNorm": FusedClipNorm},
            "kernels": {"FusedSDPA": FusedSDPA},
        }
        contents |= {f"habana_frameworks.torch.hpex.{name}": fused[name] for name in self.hpex}
        modules = {name: _module(name, names) for name, names in contents.items()}
        modules["habana_frameworks.torch.core"].hpu = modules["habana_frameworks.torch.hpu"]  # type: ignore[attr-defined]
        return modules

    def install(self, monkeypatch: Any = None) -> Bridge:
        """Make it importable, for the length of a test or of this process."""
        if COMPILER not in torch.compiler.list_backends(exclude_tags=()):
            torch._dynamo.register_backend(_compile, name=COMPILER)
        for name, module in self.modules().items():
            monkeypatch.setitem(sys.modules, name, module) if monkeypatch else sys.modules.update({name: module})
        return self

    def _init(self) -> None:
        if not self.free:
            raise RuntimeError("synStatus=20 [Device already acquired] Device acquire failed.")
        self.calls.append("init")

    def _graph(self) -> HPUGraph:
        return HPUGraph(self.runs_what_it_records)


def _compile(graph: Any, inputs: list[torch.Tensor]) -> Any:
    compiled = CompiledGraph(tuple(inputs[0].shape))
    COMPILED.append(compiled)

    def run(*args: Any) -> Any:
        compiled.runs += 1
        return graph(*args)

    return run


class Metric:
    def __init__(self, bridge: Bridge) -> None:
        self.bridge = bridge

    def stats(self) -> Any:
        return self.bridge.stats


class HPUGraph:
    """Operators between the capture's begin and end, which `replay` runs again into the same tensors."""

    def __init__(self, runs_what_it_records: bool) -> None:
        self.tape = UndoableTape()
        self.runs_what_it_records = runs_what_it_records

    def capture_begin(self) -> None:
        self.tape.__enter__()

    def capture_end(self) -> None:
        self.tape.__exit__(None, None, None)
        if not self.runs_what_it_records:
            self.tape.undo()

    def replay(self, asynchronous: bool = False) -> None:
        self.tape.replay()


class Recording:
    """`habana_frameworks.torch.hpu.graph`."""

    def __init__(self, graph: HPUGraph, stream: Any = None) -> None:
        self.graph = graph

    def __enter__(self) -> None:
        self.graph.capture_begin()

    def __exit__(self, *exception: object) -> None:
        self.graph.capture_end()


class FusedAdamW(torch.optim.Optimizer):
    """Counts steps by group, and cannot take a group without gradients."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-6, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            given = [parameter for parameter in group["params"] if parameter.grad is not None]
            device = given[0].device  # an IndexError for an empty group
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            correction = math.sqrt(1 - second ** group["step"]) / (1 - first ** group["step"])
            for parameter in given:
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(parameter, device=device)
                    state["exp_avg_sq"] = torch.zeros_like(parameter, device=device)
                state["exp_avg"].lerp_(parameter.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                scale = state["exp_avg_sq"].sqrt().add_(group["eps"])
                parameter.addcdiv_(state["exp_avg"], scale, value=-group["lr"] * correction)


class FusedClipNorm:
    """Keeps `max_norm` in the dtype of the first parameter."""

    made = 0

    def __init__(self, parameters: Any, max_norm: float) -> None:
        type(self).made += 1
        self.max_norm = torch.ones(1, dtype=next(iter(parameters)).dtype) * max_norm

    def clip_norm(self, parameters: Any) -> torch.Tensor:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not gradients:
            return torch.tensor(0.0)
        norm = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in gradients])).reshape(1)
        for gradient in gradients:
            gradient.mul_((self.max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm


class FusedSDPA:
    """torch's own attention behind Gaudi's positional arguments; masks are added, heads are grouped by the kernel."""

    @staticmethod
    def apply(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, /):
        assert attn_mask is None or attn_mask.dtype == q.dtype
        assert isinstance(is_causal, bool)
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=True
        )


@contextmanager
def watching(calls: list[Any]) -> Iterator[None]:
    """Write down what FusedSDPA is called with in this block."""
    apply = FusedSDPA.apply
    FusedSDPA.apply = staticmethod(lambda *given: calls.append(given) or apply(*given))  # type: ignore[method-assign]
    try:
        yield
    finally:
        FusedSDPA.apply = staticmethod(apply)  # type: ignore[method-assign]


def _module(name: str, contents: dict[str, Any]) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    for key, value in contents.items():
        setattr(module, key, value)
    return module
