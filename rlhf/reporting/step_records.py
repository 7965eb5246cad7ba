"""A stage's `steps.bin`: what each step read and drew, from which any step can be computed again.

The file is a list of frames, each complete or ignored: a session for each process that wrote to it (settings, machine,
versions), then a step each. Completions are kept exactly, their log-probabilities in eight bits with a checksum.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedRandom
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from rlhf.utils.atomic_io import atomic_file, refuse_link
from rlhf.utils.full_disk import retry_when_full

if TYPE_CHECKING:
    from rlhf.runs.stage_directory import StageDirectory

Phase = Literal["rows", "rollout", "scores", "advantages", "loss", "gradients", "update"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""The phases of a step, in their order: the rows of the data and the completions drawn, of this rank; what models and
rewards say of them; the inputs of the update; each loss; the gradient of each trained parameter, whole and summed over
all ranks; its float32 weight after the optimizer's step."""

_MAGIC = b"rlhf steps 1\n"
_FRAME = struct.Struct("<II")  # bytes of the content, and their CRC-32
_HEADER = struct.Struct("<I")  # bytes of the compressed header
_MOST = 1 << 31
_SCALE, _FINE = 23.0, 64.0  # codes of log-probabilities per octave, and the place where they become linear


@dataclass(frozen=True)
class RankStep:
    """What one rank read and drew in a step.

    Attributes:
        rows: the numbers of its rows among the stage's training rows.
        columns: the columns of completions, A; 0 if the stage draws none.
        digests: CRC-32 of the tensors of its rows (`rows`), of the exact log-probabilities drawn (`log_probs`), and of
            the generator's state before the step (`generator`).
        arrays: `lengths` of completions, their tokens one after the other (`ids`), log-probabilities as codes
            (`log_probs`), and the rewards: `reward`, and `part/NAME` for each part.
    """

    rows: list[int]
    columns: int = 0
    digests: dict[str, int] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class StepRecord:
    """One recorded step.

    Attributes:
        session: the settings, the machine and the versions of the process that took it; see `StepRecorder.begin`.
        metrics: its recorded numbers without those of speed; empty if it was left out.
        ranks: what each rank read and drew.
    """

    step: int
    session: Mapping[str, Any]
    metrics: dict[str, float]
    ranks: list[RankStep]


def encode_log_probs(log_probs: np.ndarray) -> np.ndarray:
    """Return log-probabilities as codes of eight bits, with an error of at most 1.6 % of their size plus 0.00025."""
    sizes = np.minimum(np.abs(np.nan_to_num(log_probs, posinf=1e3, neginf=-1e3)), 1e3)
    codes: np.ndarray = np.rint(_SCALE * np.log2(1 + _FINE * sizes))
    return codes.clip(0, 255).astype(np.uint8)


def decode_log_probs(codes: np.ndarray) -> np.ndarray:
    """Return the log-probabilities of codes, float32."""
    sizes: np.ndarray = (np.exp2(codes.astype(np.float64) / _SCALE) - 1) / _FINE
    return -sizes.astype(np.float32)


class StepRecorder:
    """Writes a stage's steps; see `rlhf.reporting.recorder.Recorder` for the arguments and what is dropped."""

    def __init__(self, directory: StageDirectory, *, enabled: bool, resume_step: int | None) -> None:
        self._directory, self._enabled, self._resume_step = directory, enabled, resume_step
        self._session: Mapping[str, Any] | None = None
        self._file: BufferedRandom | None = None

    @property
    def is_on(self) -> bool:
        """True if `begin` was called, on any rank."""
        return self._session is not None

    def begin(self, session: Mapping[str, Any]) -> None:
        """Record the steps that follow as those of this process; nothing is written before the first."""
        self._session = session

    def write(self, step: int, metrics: Mapping[str, float], ranks: Sequence[RankStep]) -> None:
        """Write a step; it is on disk when this returns."""
        assert self._session is not None
        if self._enabled:
            content = b""
            if self._file is None:
                self._file = self._open()
                content = _pack({"session": self._session}, [])
            content += _pack({"step": step, "metrics": dict(metrics)}, ranks)
            self._append(content)

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()

    def _append(self, content: bytes) -> None:
        assert self._file
        file, end = self._file, self._file.tell()

        def act() -> None:
            file.seek(end)
            file.write(content)
            file.flush()

        retry_when_full(act, self._directory.steps, len(content))

    def _open(self) -> BufferedRandom:
        path = self._directory.steps
        refuse_link(path)
        kept = b""
        if self._resume_step is not None and path.is_file():
            for header, content in _read_frames(path):
                if header.get("step", 0) > self._resume_step:
                    break
                kept += _frame(content)
        with atomic_file(path) as temporary:
            temporary.write_bytes(_MAGIC + kept)
        file = path.open("r+b")
        file.seek(0, 2)
        return file


def read_steps(path: Path) -> Iterator[StepRecord]:
    """Yield the steps of a file; frames that a crash cut short, and what follows them, are left out.

    No file has no steps.
    """
    session: Mapping[str, Any] = {}
    for header, content in _read_frames(path):
        if "session" in header:
            session = header["session"]
        else:
            yield StepRecord(header["step"], session, header["metrics"], _unpack(header, content))


class StepFile(NamedTuple):
    """The content of a file, but for that of its steps.

    Attributes:
        steps: their numbers, in the order of the file.
        is_whole: False if a frame that is damaged or still being written follows them.
    """

    steps: list[int]
    is_whole: bool

    @property
    def note(self) -> str:
        """A clause about what cannot be read; empty if nothing is left out."""
        after = f"what follows step {self.steps[-1]}" if self.steps else "its content"
        return "" if self.is_whole else f"; {after} is damaged or still being written"


def list_steps(path: Path) -> StepFile:
    """Return the steps that `read_steps` would yield, and if they are all that the file has."""
    steps, end = [], len(_MAGIC)
    for header, content in _read_frames(path):
        end += _FRAME.size + len(content)
        steps += [header["step"]] if "step" in header else []
    return StepFile(steps, is_whole=not path.is_file() or path.stat().st_size == end)


def _pack(header: dict[str, Any], ranks: Sequence[RankStep]) -> bytes:
    blobs: list[bytes] = []
    described = []
    for rank in ranks:
        arrays = []
        for name, array in rank.arrays.items():
            # Bytes of one place next to each other: those of token numbers are mostly zeros in the upper ones.
            planes = np.ascontiguousarray(array).view(np.uint8).reshape(-1, array.itemsize).T
            blobs.append(zlib.compress(planes.tobytes(), 6))
            arrays.append([name, array.dtype.str, len(array), len(blobs[-1])])
        described.append({"rows": rank.rows, "columns": rank.columns, "digests": rank.digests, "arrays": arrays})
    text = zlib.compress(json.dumps(header | ({"ranks": described} if ranks else {})).encode(), 6)
    return _frame(_HEADER.pack(len(text)) + text + b"".join(blobs))


def _frame(content: bytes) -> bytes:
    return _FRAME.pack(len(content), zlib.crc32(content)) + content


def _read_frames(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    try:
        file = path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        return
    with file:
        if file.read(len(_MAGIC)) != _MAGIC:
            return
        while len(start := file.read(_FRAME.size)) == _FRAME.size:
            size, checksum = _FRAME.unpack(start)
            content = file.read(size) if _HEADER.size <= size < _MOST else b""
            if len(content) != size or zlib.crc32(content) != checksum:
                return
            (length,) = _HEADER.unpack_from(content)
            yield json.loads(zlib.decompress(content[_HEADER.size : _HEADER.size + length])), content


def _unpack(header: Mapping[str, Any], content: bytes) -> list[RankStep]:
    (length,) = _HEADER.unpack_from(content)
    place, ranks = _HEADER.size + length, []
    for rank in header.get("ranks", ()):
        arrays = {}
        for name, dtype, count, size in rank["arrays"]:
            planes = np.frombuffer(zlib.decompress(content[place : place + size]), np.uint8)
            itemsize = np.dtype(dtype).itemsize
            arrays[name] = np.ascontiguousarray(planes.reshape(itemsize, count).T).view(dtype).reshape(count)
            place += size
        ranks.append(RankStep(rank["rows"], rank["columns"], rank["digests"], arrays))
    return ranks
