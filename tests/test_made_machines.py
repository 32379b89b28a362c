"""Machines of the test kit: their link can be cut and is counted, and nothing is left of them."""

import os

import psutil
import pytest
from testkit.machines import machines
from testkit.programs import eventually


@pytest.fixture
def two(programs, tmp_path):
    with machines(programs, tmp_path) as made:
        yield made


def ping(two, node: int, name: str) -> bool:
    """Whether a connection to a closed port of that machine is refused, and not merely unanswered."""
    program = "import socket, sys; socket.create_connection((sys.argv[1], 9), 0.5)"
    return "refused" in two.run(node, "python3", "-c", program, name).stderr


def test_what_is_cut_heals_and_what_crosses_is_counted(two):
    two.cut(1)
    assert not ping(two, 0, "n1") and not ping(two, 1, "n0")
    two.heal(1)
    eventually(lambda: ping(two, 0, "n1"))
    before = [two.traffic(node) for node in (0, 1)]
    size = 2**20
    listen = "import socket; s = socket.create_server(('n1', 7000)); print(0, flush=True); c = s.accept()[0]\n"
    sink = two.start(1, "python3", "-c", f"{listen}while c.recv(65536): pass")
    assert sink.stdout and sink.stdout.readline() == "0\n"
    two.rate(80)
    send = f"import socket; socket.create_connection(('n1', 7000)).sendall(bytes({size}))"
    assert two.run(0, "python3", "-c", send).returncode == 0 and sink.wait() == 0
    there, here = (two.traffic(node).since(before[node]) for node in (0, 1))
    assert size < there.sent_bytes < 1.06 * size
    assert size < here.received_bytes < 1.06 * size
    assert there.sent_packets > 8 and here.received_packets > 8


def networks(made) -> list[str]:
    """What the kernel still has of them; other networks of this process are a fixture's."""
    return [name for name in os.listdir("/run/netns") if name.startswith(made.prefix)]


def test_nothing_is_left_of_them(programs, tmp_path):
    with machines(programs, tmp_path) as made:
        assert len(networks(made)) == 3
        sleeper = made.start(0, "sh", "-c", "sleep 1000 & sleep 1000")
        eventually(lambda: len(made.pids(0)) == 3)
        orphans = [psutil.Process(pid) for pid in made.pids(0)]
        assert sleeper.pid in made.pids(0) and not made.pids(1)
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in orphans)
    assert not networks(made)
