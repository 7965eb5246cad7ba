"""Task measures on completions (`rlhf evaluate --metric`): the user's functions, BLEU and ROUGE.

A metric function has the arguments of a reward function, (prompt, completion, row), and runs in such a process
(`rlhf.rewards`). BLEU and ROUGE are computed by sacrebleu and rouge-score, with the defaults of these packages, against
the row's reply: its demonstration or its preferred reply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from rlhf.config.ppo import resolve_function
from rlhf.config.schema import RewardFunctionConfig
from rlhf.data.records import Row
from rlhf.errors import ConfigError, DependencyError
from rlhf.rewards.process import METRICS, RewardProcess, Sample
from rlhf.utils.statistics import CONFIDENCE, estimate, wilson

BLEU = "bleu"
ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
NO_REFERENCE = "no reply to compare with"
_PACKAGES = {BLEU: "sacrebleu"} | dict.fromkeys(ROUGE, "rouge_score")
_RESAMPLES = 1000
_SEED = 12345  # sacrebleu's


class MetricResult(NamedTuple):
    """The value of a metric over all completions, its 95 % interval, and the value of each completion.

    The bounds are None for a single completion.
    """

    value: float
    low: float | None
    high: float | None
    values: list[float]


class Metrics:
    """The metrics of a command, ready to measure; the process of the functions ends with this object.

    Args:
        names: module:function, metrics.py:function, plugin:name, `bleu`, or one of `ROUGE`.
        timeout: seconds for the imports, and for a batch of completions.

    Raises:
        ConfigError: a name has another form, or is given twice.
        DependencyError: a package for BLEU or ROUGE is missing.
        RewardError: a function does not exist, cannot be imported in time, or takes other arguments.
    """

    def __init__(self, names: Sequence[str], timeout: float) -> None:
        self.names = list(names)
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"--metric {twice}: is given twice; give it once")
        self._functions = {name: _resolve(name) for name in names if name not in _PACKAGES}
        self.needs_reference = len(self._functions) < len(names)
        for name in names:
            if package := _PACKAGES.get(name):
                _import_package(name, package)
        functions = [RewardFunctionConfig(function=function) for function in self._functions.values()]
        self._process = RewardProcess(functions, timeout, METRICS) if functions else None

    def measure(
        self, rows: Sequence[Row], completions: Sequence[str], *, batch_size: int, done: Callable[[int], None]
    ) -> dict[str, MetricResult]:
        """Return the result of each metric for a completion of each row's prompt.

        Args:
            rows: with their records, which functions get; and with the replies that BLEU and ROUGE compare with.
            batch_size: completions that the functions measure within the timeout.
            done: called after each batch with its number of completions.

        Raises:
            RewardError: a function failed with a completion.
        """
        samples = [Sample(row.text, text, row.as_dict()) for row, text in zip(rows, completions)]
        references = [row.response or "" for row in rows]
        values: dict[str, list[float]] = {name: [] for name in self._functions}
        for start in range(0, len(samples), batch_size):
            batch = samples[start : start + batch_size]
            for column, numbers in zip(values.values(), self._process(batch) if self._process else ()):
                column += numbers
            done(len(batch))
        results = {name: _average(column) for name, column in values.items()}
        for name in self.names:
            if name == BLEU:
                results[name] = compute_bleu(completions, references)
            elif name in ROUGE:
                results[name] = compute_rouge(name, completions, references)
        return {name: results[name] for name in self.names}


def compute_rouge(name: str, completions: Sequence[str], references: Sequence[str]) -> MetricResult:
    """Return the mean F measure of a ROUGE (Lin, 2004), from 0 to 1."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer([name])
    return _average([scorer.score(reference, text)[name].fmeasure for reference, text in zip(references, completions)])


def compute_bleu(completions: Sequence[str], references: Sequence[str]) -> MetricResult:
    """Return BLEU of all completions together (Papineni et al., 2002), from 0 to 100, and BLEU of each.

    The interval has the 2.5th and the 97.5th percentile of BLEU over samples with replacement of the completions
    (Koehn, 2004). BLEU of a text is a function of its counts, which add up over texts.
    """
    import torch
    from sacrebleu.metrics import BLEU as SacreBLEU

    scorer = SacreBLEU(effective_order=True)  # a text shorter than four tokens has no 4-grams
    scores = [scorer.sentence_score(text, [reference]) for reference, text in zip(references, completions)]
    counts = torch.tensor([[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores]).double()

    def combine(total: Any) -> float:
        numbers, orders = [round(number) for number in total.tolist()], scorer.max_ngram_order
        correct, possible, (length, wanted) = numbers[:orders], numbers[orders:-2], numbers[-2:]
        return float(SacreBLEU.compute_bleu(correct, possible, length, wanted, smooth_method="exp").score)

    low = high = None
    if len(scores) > 1:
        generator = torch.Generator().manual_seed(_SEED)
        resampled = sorted(
            combine(counts[torch.randint(len(scores), (len(scores),), generator=generator)].sum(0))
            for _ in range(_RESAMPLES)
        )
        outside = round((1 - CONFIDENCE) / 2 * _RESAMPLES)
        low, high = resampled[outside], resampled[-outside - 1]
    return MetricResult(combine(counts.sum(0)), low, high, [float(score.score) for score in scores])


def _average(values: list[float]) -> MetricResult:
    mean, _, interval = estimate(values)
    if interval and set(values) <= {0.0, 1.0}:  # a share: Student's interval would leave [0, 1], or be a point
        interval = wilson(sum(values), len(values))
    low, high = interval or (None, None)
    return MetricResult(mean, low, high, values)


def _resolve(name: str) -> str:
    try:
        return str(resolve_function(name))
    except ValueError as error:
        raise ConfigError(f"--metric: {error}; write one of these, or {', '.join(_PACKAGES)}") from error


def _import_package(name: str, package: str) -> None:
    try:
        import_module(package)
    except ImportError as error:
        raise DependencyError(
            f"--metric {name}: needs the package {package.replace('_', '-')}, which is not installed; run "
            "python -m pip install sacrebleu rouge-score (the extra `metrics`)"
        ) from error
