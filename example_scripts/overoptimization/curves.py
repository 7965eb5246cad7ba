"""Draw true quality and the reward against the square root of KL, for PPO and for the best of n samples.

`python example_scripts/overoptimization/curves.py FOLDER` prints the fits of arXiv:2210.10760 (section 3.1) and writes
FOLDER/overoptimization.html.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

import rlhf
from rlhf.data.toy_world import is_good_reply
from rlhf.diagnosis.records import read_run
from rlhf.report.charts import Point, plane
from rlhf.utils.statistics import best_of_kl, expected_best

ASSETS = Path(rlhf.__file__).parent / "report" / "assets"
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
FIT_COLOR, FIT_POINTS = 7, 40


class Curve(NamedTuple):
    """One way to optimize the reward.

    Attributes:
        distances: square roots of KL, in nats per sequence; the first is about 0.
        values: a number at each distance.
        labels: what each point is: a step, or a number of samples.
        is_sampling: best of n, not PPO.
    """

    name: str
    distances: Sequence[float]
    values: Sequence[float]
    labels: Sequence[str]
    is_sampling: bool


class Fit(NamedTuple):
    """value - start = d (alpha - beta d) for the best of n, d (alpha - beta log d) for PPO, at the distance d.

    `r2` is the share of the values' variance that the fit explains.
    """

    start: float
    alpha: float
    beta: float
    r2: float

    def at(self, distance: float, is_sampling: bool) -> float:
        """Return the value of the fit at a distance."""
        return self.start + self.alpha * distance - self.beta * _bend(distance, is_sampling)


def main(folder: Path) -> None:
    """Print the fits, and write the page."""
    runs = sorted(folder.glob("kl-*"), reverse=True)
    pictures = []
    print("| curve | number | alpha | beta | R2 |")
    print("|---|---|---|---|---|")
    for number, title in (("approved_share", "true quality: share of approved replies"), ("reward", "reward")):
        curves = [read_ppo(run, number) for run in runs] + [read_best_of_n(folder / "best-of-n.jsonl", number)]
        fits = [fit(curve) for curve in curves]
        for curve, found in zip(curves, fits):
            print(f"| {curve.name} | {number} | {found.alpha:.3g} | {found.beta:.3g} | {found.r2:.2f} |")
        pictures.append(draw(title, curves, fits))
    page = folder / "overoptimization.html"
    page.write_text(render(pictures), encoding="utf-8")
    print(f"\nwrote {page}")


def read_ppo(run: Path, number: str) -> Curve:
    """Return a held-out number of a run of PPO."""
    stage = read_run(run).stage("ppo")
    if stage is None:
        sys.exit(f"error: {run} holds no PPO; run example_scripts/overoptimization/run.sh")
    kl, values = (dict(zip(*stage.curve(f"heldout_{name}"))) for name in ("kl", number))
    steps = sorted(kl.keys() & values.keys())
    distances = [math.sqrt(max(kl[step], 0.0)) for step in steps]  # an estimate, which may be below 0 at the start
    labels = [f"step {step}" for step in steps]
    return Curve(f"PPO, {run.name}", distances, [values[step] for step in steps], labels, False)


def read_best_of_n(path: Path, number: str) -> Curve:
    """Return a number of the sample with the highest score, for growing n; its KL is that of arXiv:2009.01325."""
    prompts = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    values = {size: [] for size in SIZES}
    for prompt in prompts:
        ((texts,), (scores,)) = (list(prompt[key].values()) for key in ("completions", "scores"))
        measured = scores if number == "reward" else [float(is_good_reply(prompt["prompt"], text)) for text in texts]
        for size in SIZES:
            values[size].append(expected_best(scores, size, measured))
    return Curve(
        "best of n",
        [math.sqrt(best_of_kl(size)) for size in SIZES],
        [fmean(values[size]) for size in SIZES],
        [f"n = {size}" for size in SIZES],
        True,
    )


def fit(curve: Curve) -> Fit:
    """Return the least-squares fit of a curve, from its first value on."""
    features = np.array([(distance, -_bend(distance, curve.is_sampling)) for distance in curve.distances])
    gains = np.array(curve.values) - curve.values[0]
    (alpha, beta), *_ = np.linalg.lstsq(features, gains, rcond=None)
    spread = gains.var() * len(gains)
    errors = ((features @ (alpha, beta) - gains) ** 2).sum()
    return Fit(curve.values[0], float(alpha), float(beta), float(1 - errors / spread) if spread else math.nan)


def _bend(distance: float, is_sampling: bool) -> float:
    """Return what beta multiplies."""
    if is_sampling:
        return distance**2
    return distance * math.log(distance) if distance > 0 else 0.0


def draw(title: str, curves: Sequence[Curve], fits: Sequence[Fit]) -> str:
    """Return a figure of the curves, with their fits in grey."""
    paths = []
    for curve, found in zip(curves, fits):
        farthest = max(curve.distances)
        places = [farthest * place / FIT_POINTS for place in range(FIT_POINTS + 1)]
        paths.append(("fit", FIT_COLOR, [Point(place, found.at(place, curve.is_sampling)) for place in places]))
    for color, curve in enumerate(curves):
        points = [Point(*numbers) for numbers in sorted(zip(curve.distances, curve.values, curve.labels))]
        paths.append((curve.name, color, points))
    legend = "".join(f'<span><i class="s{color}"></i>{escape(curve.name)}</span>' for color, curve in enumerate(curves))
    picture = plane(title, paths, "√KL, nats per sequence", title)
    return f'<figure><figcaption>{escape(title)}</figcaption>{picture}<div class="legend">{legend}</div></figure>'


def render(pictures: Sequence[str]) -> str:
    """Return the page."""
    css = (ASSETS / "report.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Over-optimization</title><style>{css}</style></head>
<body><header><h1>Over-optimization of a reward model</h1>
<p class="soft">Held-out prompts of the embedded example; grey: the fits of arXiv:2210.10760.</p></header>
<main><div class="grid">{"".join(pictures)}</div></main></body></html>
"""


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER")
    main(Path(sys.argv[1]))
