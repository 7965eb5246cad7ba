"""Measure how the time of a step grows with rows, length, layers and ranks: a curve for each size, not one point.

    python ci/bench/scaling.py                                     PPO and SFT, all four curves (about ten minutes)
    python ci/bench/scaling.py --stage sft --curves rows layers    some of them
    python ci/bench/scaling.py --apart                             one process at a time, if memory is short

One size varies at a time; the others stay at those of the base: 16 rows of 64 tokens, half of them a prompt, and 8
layers of a 135M Llama with random weights. The points of a curve take turns. A line through the logarithms of size and
seconds has the exponent as its slope: 1 if the time is proportional to the size, 0 if it does not depend on it. A point
that is more than 20 % off this line is marked. If the least time of the same work on this machine (arithmetic.py)
leaves its line in the same direction, the mark names the part of the work that decides it; otherwise the cause is not
in the arithmetic.

Ranks are processes of one thread each: two with the same rows together as one has alone, two with twice the rows, and
two that share the weights (ZeRO 3).
"""

from __future__ import annotations

import argparse
import random
import socket
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import report
import turns
from arithmetic import Shape, Work, decode_bytes, decode_flops, forward_flops, ppo_flops, speeds, update_bytes
from channel import Worker
from machine import ROOT
from random_models import add_shape, make

SHAPE = "smollm2-135m"
FAR = 0.2  # a point is marked if it is off the line by more than this share
PHASES = ("generation", "scoring", "training")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a step; the fields are named as the curves."""

    rows: int = 16
    length: int = 64
    layers: int = 8

    def work(self) -> Work:
        """Return the rows and their tokens: half of a row is its prompt."""
        return Work(self.rows, self.length // 2, self.length - self.length // 2)


BASE = Sizes()
CURVES = {"rows": (4, 8, 16, 32, 64), "length": (32, 64, 128, 256, 512), "layers": (2, 4, 8, 16, 30)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    turns.add_arguments(parser, rounds=3, warmup=1, apart=False)
    parser.add_argument("--stage", nargs="+", choices=("ppo", "sft"), default=["ppo", "sft"], help="default: both")
    names = (*CURVES, "ranks")
    parser.add_argument("--curves", nargs="+", choices=names, default=list(names), help="default: all")
    add_shape(parser, SHAPE)
    turns.add_precision(parser)
    arguments = parser.parse_args()
    turns.choose_precision(arguments)
    stages, curves = arguments.stage, arguments.curves
    if "ranks" in curves and arguments.accelerator != "cpu":
        parser.error("--curves ranks: compares processes of one CPU thread; name the other curves")
    some = "" if (len(stages), len(curves)) == (2, len(names)) else "-" + "-".join((*stages, *curves))
    shape = "" if arguments.shape == SHAPE else f"-{arguments.shape}"
    shape += turns.mark_precision(arguments, "-")
    settings = {"stages": stages, "curves": curves, "base": vars(BASE), "precision": arguments.precision}
    what = f"a step of {arguments.shape} by rows, length, layers and ranks"
    measured = turns.Turns(f"scaling{shape}{some}", what, settings, arguments)
    with tempfile.TemporaryDirectory() as temporary:
        start = partial(start_side, Path(temporary), arguments)
        points = {axis: [replace(BASE, **{axis: size}) for size in sizes] for axis, sizes in CURVES.items()}
        for stage in stages:
            for axis in (axis for axis in CURVES if axis in curves):
                measured.measure({label(stage, point): partial(start, stage, point) for point in points[axis]})
            if "ranks" in curves:
                measured.measure({label(stage, *side): partial(start, stage, *side) for side in RANKS})
        models = {point.layers: model(Path(temporary), arguments.shape, point) for point in points["layers"]}
        shapes = {layers: Shape.of(folder) for layers, folder in models.items()}
    sides, rows, described = measured.sides(), [], {}
    limit = {**speeds(measured.best_limits(), arguments.precision), "precision": arguments.precision}
    mark = turns.mark_precision(arguments, ", ")
    for stage in stages:
        for axis in (axis for axis in CURVES if axis in curves):
            steps = [sides[label(stage, point)] for point in points[axis]]
            parts = [least_seconds(shapes[point.layers], stage, point.work(), **limit) for point in points[axis]]
            curve = described[f"{stage}, {axis}"] = describe_curve(CURVES[axis], steps, parts)
            print(f"\n{stage}, a step against {axis}\n{table(axis, curve)}", flush=True)
            name = f"{stage}{mark}, exponent of a step's time in {axis}, against that of the least time"
            exponents = {"ours": curve["exponents"]["step"], "baseline": curve["exponents"]["least time"]}
            rows.append(report.row(name, **exponents, unit="", goal="at most"))
        if "ranks" in curves:
            rows += compare_ranks(stage, sides, mark)
    print()
    measured.finish(rows, curves=described)


# Sizes, ranks and ZeRO stage: alone, the same rows, twice the rows, the same rows with weights in parts.
RANKS = ((BASE, 1, None), (BASE, 2, None), (replace(BASE, rows=2 * BASE.rows), 2, None), (BASE, 2, 3))


def label(stage: str, point: Sizes, ranks: int = 0, zero: int | None = None) -> str:
    """Return the name of a side; `ranks` is 0 for one process on the whole machine, `zero` None for the default."""
    threads = f", {ranks} x 1 thread" if ranks else ""
    parts = "" if zero is None else f", ZeRO {zero}"
    return f"{stage} {point.rows} x {point.length}, {point.layers} layers{threads}{parts}"


class Ranks:
    """The workers of one run, which take each step together."""

    def __init__(self, command: list[str], folder: Path, ranks: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}

        def start(rank: int) -> Worker:
            places = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return Worker(command, errors=folder / f"rank-{rank}.log", environment=shared | places)

        self._pool = ThreadPoolExecutor(ranks)
        self._workers = list(self._pool.map(start, range(ranks)))
        self.ready = self._workers[0].ready

    def step(self, *, record: bool) -> dict[str, Any]:
        """Take a step on all ranks, and return the reply of rank 0."""
        first, *_ = self._pool.map(partial(Worker.step, record=record), self._workers)
        return first

    def stop(self) -> None:
        """Let all ranks end, and wait for them."""
        list(self._pool.map(Worker.stop, self._workers))
        self._pool.shutdown()


def start_side(
    folder: Path, arguments: argparse.Namespace, stage: str, point: Sizes, ranks: int = 0, zero: int | None = None
) -> Any:
    """Start the process of a point, or the ranks of one thread each, and return it when it is ready."""
    side = folder / label(stage, point, ranks, zero).replace(" ", "-")
    side.mkdir(exist_ok=True)
    work = workload(folder, arguments, stage, point) | {"zero_stage": zero}
    command = turns.ours_command(turns.write(work, side))
    return Ranks(command, side, ranks) if ranks else turns.start_worker(command, "ours", side, arguments.accelerator)


def model(folder: Path, shape: str, point: Sizes) -> Path:
    """Return the folder of the model with the point's layers."""
    return make(folder / f"{point.layers}-layers", shape, layers=point.layers)


def workload(folder: Path, arguments: argparse.Namespace, stage: str, point: Sizes) -> dict[str, Any]:
    """Return the work of a point: rows of random tokens, all of the same length."""
    from transformers import AutoConfig

    path, work, generator = model(folder, arguments.shape, point), point.work(), random.Random(0)
    vocabulary = AutoConfig.from_pretrained(path).vocab_size

    def ids(count: int) -> list[int]:
        return [generator.randrange(16, vocabulary) for _ in range(count)]

    shared = {"stage": stage, "accelerator": arguments.accelerator, "model": str(path), "batch_size": work.rows}
    shared |= {"precision": arguments.precision}
    shared |= {"prompt_tokens": work.prompt, "completion_tokens": work.completion}
    if stage == "ppo":
        return shared | {"prompts": [ids(work.prompt) for _ in range(16 * work.rows)]}
    return shared | {
        "learning_rate": 1e-5,
        "rows": [[ids(work.prompt), ids(work.completion)] for _ in range(work.rows)],
    }


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, list[float]]:
    """Return the exponent of the power of `sizes` that is closest to `seconds`, and each point's distance from it.

    The distance is a share: 0.2 if a point takes 20 % longer than the line says. The fit is one of least squares
    between logarithms.
    """
    import numpy as np

    logs = np.log(np.asarray(seconds, dtype=float))
    columns = np.stack([np.log(np.asarray(sizes, dtype=float)), np.ones(len(sizes))], 1)
    solution = np.linalg.lstsq(columns, logs, rcond=None)[0]
    return float(solution[0]), [float(share) for share in np.expm1(logs - columns @ solution)]


def least_seconds(
    shape: Shape, stage: str, work: Work, *, bytes_per_second: float, flops_per_second: float, precision: str = "bf16"
) -> dict[str, float]:
    """Return the least time of a step by part of its work, in seconds.

    A decode step takes the slower of reading and computing, as in `arithmetic.rollout_limit`; all other passes compute.
    The optimizer's reads and writes are added: a small step is mostly these.
    """
    products = {
        "products of the layers": replace(shape, vocabulary=0, layers=0),
        "products of the output matrix": replace(shape, body=0, layers=0),
        "products of attention": replace(shape, body=0, vocabulary=0),
    }
    weights, cache = replace(shape, layers=0), replace(shape, body=0, vocabulary=0)
    reads = {"reads of the weights": weights, "reads of keys and values": cache}
    trained = 2 if stage == "ppo" else 1  # the policy and the critic
    seconds: defaultdict[str, float] = defaultdict(float)
    seconds["updates of the weights"] = trained * update_bytes(shape.body + shape.vocabulary) / bytes_per_second
    for name, part in products.items():
        if stage == "ppo":
            flops = ppo_flops(part, work)
            flops_outside_rollouts = flops["scoring"] + flops["training"]
        else:
            flops_outside_rollouts = 3 * forward_flops(part, work.rows, work.prompt + work.completion, work.completion)
        seconds[name] += flops_outside_rollouts / flops_per_second
    if stage == "ppo":
        for name, part in products.items():
            seconds[name] += forward_flops(part, work.rows, work.prompt, 1) / flops_per_second
        for seen in range(work.prompt + 1, work.prompt + work.completion):
            reading = decode_bytes(shape, work.rows, seen, precision) / bytes_per_second
            if reading > decode_flops(shape, work.rows, seen) / flops_per_second:
                for name, part in reads.items():
                    seconds[name] += decode_bytes(part, work.rows, seen, precision) / bytes_per_second
            else:
                for name, part in products.items():
                    seconds[name] += decode_flops(part, work.rows, seen) / flops_per_second
    return dict(seconds)


def describe_curve(
    sizes: Sequence[int], steps: Sequence[Mapping[str, Any]], parts: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """Return a curve's points with their marks, and the exponents of the step, of its phases and of the least time.

    Args:
        sizes: the size that varies.
        steps: the medians of each point.
        parts: the least time of each point by part of the work.
    """
    seconds = [step["median_seconds"] for step in steps]
    least = [sum(point.values()) for point in parts]
    exponent, distances = fit_line(sizes, seconds)
    least_exponent, least_distances = fit_line(sizes, least)
    phases = [phase for phase in PHASES if f"median_{phase}" in steps[0]]
    exponents = {phase: fit_line(sizes, [step[f"median_{phase}"] for step in steps])[0] for phase in phases}
    points = [
        {
            "size": size,
            "seconds": seconds[index],
            **{phase: steps[index][f"median_{phase}"] for phase in phases},
            "least time": least[index],
            "distance": distances[index],
            "mark": explain(index, distances, least_distances, parts),
        }
        for index, size in enumerate(sizes)
    ]
    return {"exponents": {"step": exponent, **exponents, "least time": least_exponent}, "points": points}


def explain(
    index: int, distances: Sequence[float], least: Sequence[float], parts: Sequence[Mapping[str, float]]
) -> str:
    """Return the mark of a point that is off the line, with the part of the work that the arithmetic names; else "".

    The arithmetic explains a point if its least time is off its line in the same direction, and at least half as far.
    The part is that whose share of the least time differs most from its average over the curve, in that direction.
    """
    distance = distances[index]
    if abs(distance) <= FAR:
        return ""
    if least[index] * distance <= 0 or abs(least[index]) < abs(distance) / 2:
        return "off the line; not in the arithmetic"
    shares = [{name: part / sum(point.values()) for name, part in point.items()} for point in parts]
    names = {name for point in shares for name in point}
    average = {name: sum(point.get(name, 0.0) for point in shares) / len(shares) for name in names}
    differences = {name: shares[index].get(name, 0.0) - average[name] for name in names}
    name = (max if distance > 0 else min)(sorted(names), key=differences.__getitem__)
    here = f"{100 * shares[index].get(name, 0.0):.0f} % of the least time, {100 * average[name]:.0f} % on average"
    return f"off the line: {'more' if distance > 0 else 'fewer'} {name} ({here})"


def table(axis: str, curve: Mapping[str, Any]) -> str:
    """Return a curve as a table of plain text; its last line has the exponents."""
    points, exponents = curve["points"], curve["exponents"]
    phases = [name for name in exponents if name not in ("step", "least time")]
    lines = [(axis, "step", *phases, "least time", "off the line", "")]
    for point in points:
        times = [f"{point[name]:.3g} s" for name in ("seconds", *phases, "least time")]
        lines.append((str(point["size"]), *times, f"{100 * point['distance']:+.0f} %", point["mark"]))
    lines.append(("exponent", *(f"{exponents[name]:.2f}" for name in ("step", *phases, "least time")), "", ""))
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in lines)


def compare_ranks(stage: str, sides: Mapping[str, Any], mark: str) -> list[dict[str, Any]]:
    """Return the rows of two ranks against one, with the same rows together (ideal: 2) and with twice (ideal: 1).

    With ZeRO 3, two ranks are compared with two ranks that have whole weights, by the step and by the rollout. The
    names of the rows have this `mark` of the precision.
    """
    medians = [sides[label(stage, *side)] for side in RANKS]
    alone, same, twice, parts = (side["median_seconds"] for side in medians)
    what = f"{stage}{mark}, 2 ranks of one thread"
    rows = [
        report.row(f"{what} against 1, the same {BASE.rows} rows (ideal: 2)", ours=same, baseline=alone, unit="s"),
        report.row(f"{what} against 1, {BASE.rows} rows each (ideal: 1)", ours=twice, baseline=alone, unit="s"),
        report.row(f"{what}, ZeRO 3 against whole weights", ours=parts, baseline=same, unit="s"),
    ]
    if stage == "ppo":
        whole, sharded = (medians[index]["median_generation"] for index in (1, 3))
        name = f"{what}, a rollout with ZeRO 3 against whole weights"
        rows.append(report.row(name, ours=sharded, baseline=whole, unit="s"))
    return rows


if __name__ == "__main__":
    main()
