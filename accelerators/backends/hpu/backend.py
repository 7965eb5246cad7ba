"""The Gaudi backend: what differs from the interface's defaults on Intel Gaudi cards.

Gaudi's PyTorch bridge runs either lazily (operators wait for a step boundary; HPU graphs) or eagerly (torch.compile);
the runtime says which. Its fused AdamW, clipping and attention are offered if they can be imported.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeVar

import torch

from accelerators import capture, portable
from accelerators.accelerator import Accelerator
from accelerators.backends.hpu import compilation
from accelerators.backends.hpu import info as hpu_info
from accelerators.backends.hpu.kernels import FUSED, runtime
from accelerators.errors import AcceleratorError, describe_error
from accelerators.shapes import ShapePolicy
from accelerators.types import DeviceInfo, KernelImpl, Memory, Precision, Support

Function = TypeVar("Function", bound=Callable[..., Any])


class HPU(Accelerator):
    """Gaudi cards, one per process, with hccl between processes."""

    name = "hpu"
    chunk_elements = 1 << 24
    absent: ClassVar[Mapping[str, str]] = {
        "inference_weights": "the graph compiler chooses the order of weights itself",
    }

    # Errors of the bridge's allocator contain Synapse's status as a name or as text.
    out_of_memory_pattern = (
        r"(?is)PT_DEVMEM\b.*(?:allocation failed|cannot obtain device memory)|out\s?of\s?(?:device|host)\s?memory"
    )

    environment_prefixes: ClassVar[tuple[str, ...]] = ("PT_", "HABANA_", "GC_", "HCCL_", "HCL_", "LOG_LEVEL_")

    # placement

    def bind(self, local_rank: int) -> torch.device:
        """Bind a card of this machine."""
        cards = self._cards
        self.require_device(local_rank, cards.count, hpu_info.VISIBLE_MODULES)
        try:
            hccl = runtime("distributed.hccl")
        except AcceleratorError:  # from a bridge that words its errors for users
            raise
        except Exception as error:  # a missing library, or a bridge that was built for another torch
            if "stock pytorch" in str(error).lower():
                remedy = (
                    "this container has PyTorch's own torch, which has no lazy mode: unset PT_HPU_LAZY_MODE, or use "
                    "Intel's image with its fork of torch"
                )
            else:
                remedy = f"use Intel's container for driver {cards.driver}, with the torch in it"
            raise AcceleratorError(
                f"hpu: {hpu_info.RUNTIME} cannot be imported ({describe_error(error)}); "
                f"{remedy}{hpu_info.describe_mismatch(cards.driver)}"
            ) from error
        try:
            # Under a launcher (LOCAL_RANK, WORLD_SIZE) each rank gets its own module, otherwise any free card. The
            # import does the same, but before a session without a launcher has set these variables.
            hccl.initialize_distributed_hpu()
            self._choose_module(cards, local_rank)
            runtime("hpu").init()
        except Exception as error:
            raise AcceleratorError(
                f"hpu: the card of rank {local_rank} cannot be opened ({describe_error(error)}); "
                f"{hpu_info.describe_opening_remedy(error)}{hpu_info.describe_mismatch(cards.driver)}"
            ) from error
        if mismatch := hpu_info.describe_mismatch(cards.driver):
            self._try_operator(mismatch)
        return torch.device("hpu")

    @staticmethod
    def _choose_module(cards: hpu_info.Cards, local_rank: int) -> None:
        """Let rank N open the container's Nth module: the bridge chooses module N if the user has named none.

        It writes its choice to the environment when torch imports it.
        """
        modules = sorted(cards.modules, key=lambda module: module.zfill(4))
        by_rank = hpu_info.MODULE in os.environ and hpu_info.VISIBLE_MODULES not in os.environ
        if by_rank and all(module.isdigit() for module in modules) and local_rank < len(modules):
            os.environ[hpu_info.MODULE] = modules[local_rank]

    @staticmethod
    def _try_operator(mismatch: str) -> None:
        """Run an operator: software of another release than the driver opens the card, and fails at the first one."""
        try:
            torch.ones(8, 8, device="hpu").sum().item()
        except Exception as error:
            raise AcceleratorError(f"hpu: the card runs no operator ({describe_error(error)}){mismatch}") from error

    def info(self) -> DeviceInfo:
        """Return the facts of the driver and the release of the software."""
        software = f"torch {torch.__version__}, driver {self._cards.driver}"
        if release := hpu_info.release():
            software += f", release {release}"
        return DeviceInfo(self._cards.model, self._cards.count, software, peak_flops=self._cards.peak_flops)

    def environment_report(self) -> Mapping[str, str]:
        """Return what hl-smi, the driver's files and the bridge's version say."""
        return hpu_info.environment_report()

    def other_modes(self) -> Mapping[str, Mapping[str, str]]:
        """Return eager mode in lazy mode, and the reverse; only Intel's fork of torch has both."""
        if self.is_lazy():
            return {"eager": {"PT_HPU_LAZY_MODE": "0"}}
        return {"lazy": {"PT_HPU_LAZY_MODE": "1"}}

    @functools.cached_property
    def _cards(self) -> hpu_info.Cards:
        return hpu_info.cards()

    # synchronization

    def synchronize(self) -> None:
        """Wait for the card."""
        runtime("hpu").synchronize()

    def step_boundary(self, tag: str) -> None:
        """Run the collected operators in lazy mode."""
        if self.is_lazy():
            runtime("core").mark_step()

    def is_lazy(self) -> bool:
        """Return whether the bridge runs in lazy mode."""
        return bool(runtime("utils.internal").is_lazy())

    def recordings_keep_memory(self) -> bool:
        """Return whether functions are recorded as HPU graphs, which is the case in lazy mode."""
        return self.is_lazy()

    def compilations(self) -> int | None:
        """Return the bridge's count of compiled graphs."""
        metric = runtime("hpu.metrics").metric_global("graph_compilation")
        return None if metric is None else dict(metric.stats()).get("TotalNumber")

    def host_operators(self) -> Mapping[str, int]:
        """Return the bridge's counts of operators that fell back to the CPU."""
        metric = runtime("hpu.metrics").metric_global("cpu_fallback")
        return {} if metric is None else dict(dict(metric.stats()).get("FallbackOps", {}))

    def _record(self, body: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Run `body` once while an HPU graph records it (`capture.Record`)."""
        outputs, replay = self._recorded(body)
        if not self._runs_what_it_records:
            replay()
        return outputs, replay

    def _recorded(self, body: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        hpu = runtime("hpu")
        self.step_boundary("graphs/record")  # operators in the queue, copies of inputs too, are not part of the graph
        graph = hpu.HPUGraph()
        # On the stream of all other work: replays need not wait for another stream.
        with hpu.graph(graph, stream=hpu.default_stream()):
            outputs = body()
        return outputs, graph.replay

    @functools.cached_property
    def _runs_what_it_records(self) -> bool:
        """True if operators run while they are recorded: the published bridge runs them, but no document says so."""
        counter = torch.zeros(1, device=self.device())
        self._recorded(lambda: counter.add_(1))
        return counter.item() == 1

    # precision

    def precision(self, wish: str = "auto") -> Precision:
        """Return bf16, or the wished precision."""
        if wish in ("auto", "bf16"):
            return Precision(
                torch.bfloat16, "bf16", "native on every Gaudi, and free of the loss scaling that fp16 needs"
            )
        if wish == "fp16":
            if refusal := self._no_fp16():
                raise AcceleratorError(f"precision fp16 on hpu: {refusal}; use auto, bf16 or fp32")
            return Precision(torch.float16, "fp16", f"asked for; {self._cards.model} has it", loss_scaling=True)
        if wish == "fp32":
            return Precision(torch.float32, "fp32", "asked for; every Gaudi has it")
        raise AcceleratorError(f"precision {wish!r}: not known; use auto, bf16, fp16 or fp32")

    def _no_fp16(self) -> str | None:
        """Return why fp16 is refused. Gaudi2 and later have it, but DeepSpeed relies on the runtime's answer."""
        try:
            supported = runtime("utils.experimental")._is_fp16_supported()
        except (ImportError, AttributeError) as error:
            return f"the runtime does not say whether it supports fp16 ({describe_error(error)})"
        return None if supported else f"the runtime says that {self._cards.model} does not support it"

    # kernels

    def kernel_implementations(self) -> Iterable[KernelImpl]:
        """Return PyTorch's implementations and those of the bridge."""
        return (*portable.KERNELS, *FUSED, HPU_GRAPHS, compilation.STEPS, compilation.LAYERS)

    # shapes

    def shape_policy(self) -> ShapePolicy:
        """Return static shapes, because a new shape is a new graph to compile."""
        return ShapePolicy("static")

    # memory and random numbers

    def memory(self) -> Memory:
        """Return the figures of the bridge's allocator."""
        stats = runtime("hpu").memory_stats()
        return Memory(allocated=stats["InUse"], peak=stats["MaxInUse"], total=stats["Limit"])

    def reset_peak(self) -> None:
        """Reset the maximum of the bridge's allocator."""
        runtime("hpu").reset_peak_memory_stats()

    def empty_cache(self) -> None:
        """Do nothing: the bridge's allocator is not one of those that torch can empty."""

    def seed(self, n: int) -> None:
        """Seed the generators of Python, torch and all cards."""
        super().seed(n)
        runtime("hpu.random").manual_seed_all(n)

    def rng_module(self) -> Any:
        """Return the bridge's module for random numbers."""
        return runtime("hpu.random")

    # distributed

    def dist_backend(self) -> str:
        """Return Habana's collective library."""
        return "hccl"

    def deepspeed_defaults(self) -> Mapping[str, Any]:
        """Return the options of Intel's own recipes: nobody tests others over hccl.

        The last one would replace torch's linear layers by functions that the graph compiler cannot fuse.
        """
        names = ("overlap_comm", "contiguous_gradients", "reduce_scatter", "memory_efficient_linear")
        return dict.fromkeys(names, False)

    def refuse_zero_stage(self, stage: int) -> str:
        """Refuse ZeRO-3 in lazy mode: DeepSpeed exchanges `parameter.data`, in which the bridge crashes at random."""
        if stage < 3 or not self.is_lazy():
            return ""
        return "Gaudi's lazy mode crashes at ZeRO-3; unset PT_HPU_LAZY_MODE for eager mode, or use ZeRO-2"


def hpu_graphs(accelerator: Any) -> Callable[[Function, str], Any]:
    """Return a recorder for lazy mode."""
    return lambda fn, key: capture.Graph(fn, key, accelerator._record)


def _hpu_graphs_supported(accelerator: Accelerator) -> Support:
    if not accelerator.is_lazy():
        return Support(False, "HPU graphs exist in lazy mode only")
    return Support(True, "lazy mode: recorded once, replayed without collecting operators again")


HPU_GRAPHS = KernelImpl(
    operation="graph_capture",
    name="hpu-graphs",
    factory=hpu_graphs,
    supported=_hpu_graphs_supported,
    priority=10,
)
