"""Strangers at the ports of a real run."""

import itertools
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.forks import ForkedProcess
from tests.helpers import assert_same_weights, sets, wait_for
from tests.launchers.test_coordinator import HOSTILE
from tests.launchers.test_rank_monitor import listening

COUNT = 10_000


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").is_file(), reason="reads the sockets of Linux")
def test_hostile_connections_do_not_change_a_run(rlhf: Any, tmp_path: Path) -> None:
    output, arguments = tmp_path / "run", ["sft", "--ranks", 2, *sets("sft.max_steps=1000", "sft.epochs=100")]
    rlhf(*arguments, "--output", tmp_path / "alone")
    command = [*arguments, "--output", output, "--config", rlhf.recipe]
    process = rlhf.forks.start("-m", "rlhf", *map(str, command))
    wait_for(output / "sft" / "metrics.jsonl", process)
    ports = find_ports(process)
    assert len(ports) >= 3, "the coordinator's, and gloo's of each rank"
    noise = random.Random(0)
    messages = [message for message in HOSTILE.values() if len(message) < 10_000]
    messages += [noise.randbytes(noise.randint(1, 500)) for _ in messages]
    targets = itertools.cycle(itertools.product(ports, messages))
    with ThreadPoolExecutor(8) as threads:
        sent = sum(threads.map(lambda target: send(*target), itertools.islice(targets, COUNT)))
    assert process.poll() is None, "the run is long enough"
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-2000:]
    assert sent == COUNT
    assert_same_weights(output / "sft" / "model", tmp_path / "alone" / "sft" / "model")


def find_ports(process: ForkedProcess) -> list[int]:
    """Return the ports at which the ranks of a launcher listen."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [port for child in children.read_text().split() for _, port in listening(child)]


def send(port: int, message: bytes) -> bool:
    """Send a message, and leave without reading an answer; return True if there was a connection."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.sendall(message)
    except ConnectionResetError:
        pass
    except OSError:
        return False
    return True
