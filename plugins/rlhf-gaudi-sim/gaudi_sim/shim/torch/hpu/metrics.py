"""What the runtime counts."""

from gaudi_sim import accounting


class Metric:
    """Graphs that were compiled. The simulation compiles none of them, so no time passes."""

    def __init__(self, begin: int = 0) -> None:
        self._begin = begin

    def stats(self) -> list[tuple[str, int]]:
        """Return the number of compilations, and their microseconds in total and on average."""
        return [("TotalNumber", accounting.accounts().compilations() - self._begin), ("TotalTime", 0), ("AvgTime", 0)]

    def reset(self) -> None:
        """Count from now on."""
        self._begin = accounting.accounts().compilations()


_METRICS = {"graph_compilation": Metric()}


def metric_global(name: str) -> Metric | None:
    """Return a metric of the whole process; None if the simulation has none of this name."""
    return _METRICS.get(name)
