"""The golden numbers of the level `learning`: the float64 truth of each stage's steps, and bands from many seeds.

`ci/golden.py` records them. A seed is a run in one precision that perturbs the operators of every tenth step by one
rounding each, so that it ends as another device of this precision might. Seeds give each quantity a mean and a spread.
The band is Student's interval for the next one, so wide that a correct device fails the comparison at most once in a
thousand times (`ALARMS`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf.certify.fixed_state import LARGEST_WEIGHT, STEPS
from rlhf.certify.trace import Name, Trace
from rlhf.config.schema import Stage
from rlhf.utils.statistics import student_quantile

FILE = Path(__file__).with_name("golden") / "learning.safetensors"
FORMAT = 1

ALARMS = 1e-3
"""Largest probability that a correct device fails the comparison, if deviations are normally distributed."""

BLOCK = 10
"""Steps whose deviation is averaged for one number of the curve."""

_SMALL = 8  # elements below which a tensor is compared by its mean alone
_UNITS = {"fp32": 2.0**-24, "bf16": 2.0**-9, "fp16": 2.0**-12}
"""The relative error of one rounding, which is always allowed."""

Kind = Literal["exact", "distance", "scale", "mean", "curve"]


class Quantity(NamedTuple):
    """A number that is compared.

    Attributes:
        kind: exact: the elements that differ; distance: the root mean square deviation of a tensor;
            scale: its component along the truth, minus 1; mean: the deviation of its mean; curve: that of a number in
            a block of steps.
        block: the number of the block, of the curve; -1 for the first step.
    """

    name: Name
    kind: Kind
    block: int = -1


class Band(NamedTuple):
    """How a quantity is distributed over the seeds of a precision."""

    mean: float
    spread: float


class Verdict(NamedTuple):
    """A quantity of a device in comparison.

    Attributes:
        here, golden: the values of the element that differs most, or of a block of steps; NaN if there are none.
        ratio: the deviation in bands: more than 1 is beyond; infinite if it is not a number.
        place: the element, the steps, or the reason why there are no values.
    """

    quantity: Quantity
    here: float
    golden: float
    ratio: float
    place: str


@dataclass
class GoldenStage:
    """The golden numbers of one stage.

    Attributes:
        truth: in float64.
        bands: by precision and quantity.
        seeds: of each precision.
    """

    truth: Trace
    bands: dict[str, dict[Quantity, Band]] = field(default_factory=dict)
    seeds: int = 0


Golden = dict[Stage, GoldenStage]


def measure(truth: Trace, own: Trace) -> dict[Quantity, float]:
    """Return the quantities of a trace, in the order of computation; NaN if it lacks a tensor, or has another shape."""
    numbers: dict[Quantity, float] = {}
    for name, right in truth.first.items():
        tensor = own.first.get(name)
        if tensor is not None and tensor.shape != right.shape:
            tensor = None
        numbers |= {Quantity(name, kind): value for kind, value in _measure_tensor(right, tensor).items()}
    for name, curve in truth.curve.items():
        values = own.curve.get(name, [])
        for block in range(len(curve) // BLOCK):
            steps = slice(block * BLOCK, (block + 1) * BLOCK)
            pairs = list(zip(values[steps], curve[steps]))
            complete = len(pairs) == BLOCK
            numbers[Quantity(name, "curve", block)] = sum(a - b for a, b in pairs) / BLOCK if complete else math.nan
    return numbers


def _measure_tensor(right: Tensor, tensor: Tensor | None) -> dict[Kind, float]:
    if not right.is_floating_point():
        return {"exact": math.nan if tensor is None else float((tensor != right).sum())}
    truth = right.double()
    size = _size(truth)
    own = torch.full_like(truth, math.nan) if tensor is None else tensor.double()
    if truth.numel() < _SMALL:
        return {"mean": float((own - truth).mean())}
    numbers: dict[Kind, float] = {"distance": _size(own - truth)}
    if size > 1e-12:
        numbers["scale"] = float((own * truth).mean() / size**2 - 1)
    return numbers


def _size(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt())


def summarize_seeds(truth: Trace, seeds: Sequence[Trace]) -> dict[Quantity, Band]:
    """Return the bands of a stage in one precision."""
    numbers = [measure(truth, seed) for seed in seeds]
    return {quantity: summarize([seed[quantity] for seed in numbers]) for quantity in numbers[0]}


def summarize(values: Sequence[float]) -> Band:
    """Return the mean and the standard deviation of values."""
    return Band(fmean(values), stdev(values))


def reach(seeds: int, comparisons: int) -> float:
    """Return how many standard deviations the next value may be from the mean of `seeds` values.

    Student's prediction interval, with Bonferroni's correction: the probability that any of so many comparisons is
    beyond it is at most `ALARMS`, however they correlate.
    """
    return student_quantile(seeds - 1, 1 - ALARMS / comparisons) * math.sqrt(1 + 1 / seeds)


def count_comparisons(golden: Golden) -> int:
    """Return how many numbers the level compares in all precisions."""
    return sum(sum(map(len, stage.bands.values())) for stage in golden.values())


def compare(right: GoldenStage, own: Trace, precision: str, factor: float, steps: int = STEPS) -> list[Verdict]:
    """Return the verdict about each quantity that has a band, in the order of computation.

    Args:
        right: the golden numbers of the stage.
        own: the trace of a device. A number that it lacks is beyond its band.
        precision: that of the trace.
        factor: that of `reach`.
        steps: the steps that the device was to take; only complete blocks of them are compared.
    """
    numbers = measure(right.truth, own)
    return [
        _judge(right, quantity, numbers.get(quantity, math.nan), own, precision, factor)
        for quantity in right.bands[precision]
        if (quantity.block + 1) * BLOCK <= steps
    ]


def judge_draws(own: Trace, comparisons: int, steps: int = STEPS) -> Verdict:
    """Return the verdict about `steps` of PPO whose completions were drawn.

    The log-probability of a token that is drawn from a distribution is on average minus its entropy. So the sum of both
    has the mean 0 in every step, however the policy changes: Student's test over the steps.
    """
    name = Name("scores", "actor", "log_probs", "mean")
    curves = [own.curve.get(each, []) for each in (name, name._replace(name="entropy"))]
    quantity = Quantity(Name("rollout", "actor", "log-probability plus entropy of the drawn tokens"), "mean")
    if any(len(curve) != steps or not all(map(math.isfinite, curve)) for curve in curves):
        return Verdict(quantity, math.nan, math.nan, math.inf, f"the steps did not report {steps} finite numbers")
    sums = [log_prob + entropy for log_prob, entropy in zip(*curves)]
    mean, error = fmean(sums), stdev(sums) / math.sqrt(len(sums))
    limit = student_quantile(len(sums) - 1, 1 - ALARMS / comparisons) * error
    return Verdict(quantity, mean, 0.0, abs(mean) / limit if limit else math.inf, f"{len(sums)} steps")


def _judge(right: GoldenStage, quantity: Quantity, value: float, own: Trace, precision: str, factor: float) -> Verdict:
    name, kind, block = quantity
    if kind == "curve":
        steps = slice(block * BLOCK, (block + 1) * BLOCK)
        size = fmean(map(abs, right.truth.curve[name._replace(part="size")][steps]))
        golden, place = fmean(right.truth.curve[name][steps]), f"steps {steps.start + 1} to {steps.stop}"
        here = golden + value
    else:
        truth, tensor = right.truth.first.get(name), own.first.get(name)
        if truth is None or tensor is None or truth.shape != tensor.shape:
            return Verdict(quantity, math.nan, math.nan, math.inf, _describe_shapes(truth, tensor))
        here, golden, place = _find_worst(truth, tensor)
        size = _size(truth.double())
    # The change of a weight is as exact as the weight, which is kept in float32.
    floor = _UNITS["fp32"] * LARGEST_WEIGHT if name.phase == "update" else _UNITS[precision] * size
    if kind == "scale":
        floor /= max(size, 1e-30)
    if kind == "exact":
        return Verdict(quantity, here, golden, 0.0 if value == 0 else math.inf, place)
    band = right.bands[precision][quantity]
    limit = abs(band.mean) + factor * band.spread
    ratio = abs(value) / max(limit, floor, 1e-30)
    return Verdict(quantity, here, golden, math.inf if math.isnan(ratio) else ratio, place)


def _find_worst(right: Tensor, tensor: Tensor) -> tuple[float, float, str]:
    """Return the values of the element that differs most, and its place."""
    gap = (tensor.double() - right.double()).abs().nan_to_num(nan=math.inf).flatten()
    number = int(gap.argmax())
    index = [int(part) for part in torch.unravel_index(torch.tensor(number), right.shape)]
    return float(tensor.flatten()[number]), float(right.flatten()[number]), f"element {index}"


def _describe_shapes(right: Tensor | None, tensor: Tensor | None) -> str:
    if right is None or tensor is None:
        return "the step did not report it"
    return f"shape {list(tensor.shape)} instead of {list(right.shape)}"


def write_golden(path: Path, golden: Golden) -> None:
    """Write the file."""
    tensors: dict[str, Tensor] = {}
    index: dict[str, Any] = {"format": FORMAT, "stages": {}}
    for stage, right in golden.items():
        tensors |= {f"{stage}/first/{number}": _shrink(item) for number, item in enumerate(right.truth.first.values())}
        tensors |= {f"{stage}/ids/{number}": _shrink(item) for number, item in enumerate(right.truth.ids)}
        tensors[f"{stage}/curve"] = torch.tensor(list(right.truth.curve.values()), dtype=torch.float64)
        for precision, bands in right.bands.items():
            tensors[f"{stage}/bands/{precision}"] = torch.tensor([list(band) for band in bands.values()])
        index["stages"][stage] = {
            "first": [list(name) for name in right.truth.first],
            "curve": [list(name) for name in right.truth.curve],
            "ids": len(right.truth.ids),
            "precisions": list(right.bands),
            "seeds": right.seeds,
        }
    path.parent.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"index": json.dumps(index)})


def _shrink(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor.short()  # tokens, masks, numbers of rows


def read_golden(path: Path = FILE) -> Golden:
    """Read the numbers that ship with the package."""
    golden: Golden = {}
    with safe_open(path, "pt") as file:
        index = json.loads(file.metadata()["index"])
        for stage, entry in index["stages"].items():
            first = {
                Name(*name): file.get_tensor(f"{stage}/first/{number}") for number, name in enumerate(entry["first"])
            }
            curve = dict(zip((Name(*name) for name in entry["curve"]), file.get_tensor(f"{stage}/curve").tolist()))
            ids = [file.get_tensor(f"{stage}/ids/{number}").long() for number in range(entry["ids"])]
            right = GoldenStage(Trace(first, curve, ids), seeds=entry["seeds"])
            quantities = list(measure(right.truth, right.truth))
            for precision in entry["precisions"]:
                bands = file.get_tensor(f"{stage}/bands/{precision}").tolist()
                right.bands[precision] = {
                    quantity: Band(*band) for quantity, band in zip(quantities, bands, strict=True)
                }
            golden[stage] = right
    return golden
