"""Machines out of one: network namespaces with host names and addresses of their own, on a switch that can be cut.

Files, processors and process ids are shared, as under a common file system. It needs root and the right to make
networks; where that is missing the test is skipped, and says so.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from testkit.paths import ROOT
from testkit.programs import Programs, eventually

NO_NETWORK = "no network of its own can be made"
INTERFACE = "eth0"  # the same on all: what one machine says to its launcher is often copied to the others
TRAIN = ROOT / "tools" / "train_ppo.py"
Popen = subprocess.Popen[str]
_numbers = itertools.count()


class Traffic(NamedTuple):
    """What the kernel counted at a machine's interface, in bytes with all headers, and in packets."""

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int

    def since(self, earlier: Traffic) -> Traffic:
        return Traffic(*(now - before for now, before in zip(self, earlier, strict=True)))


class Machines:
    """Machines n0, n1, ... at 10.77.0.1, 10.77.0.2, ..., as `machines` makes them; `node` counts from 0."""

    def __init__(self, programs: Programs, count: int, folder: Path) -> None:
        self.names = [f"n{node}" for node in range(count)]
        self.addresses = [f"10.77.0.{node + 1}" for node in range(count)]
        self.hosts = folder / "hosts"
        self._programs = programs
        self.prefix = f"rlhfuse-{os.getpid()}-{next(_numbers)}-"  # of its networks: others make some at the same time
        self._switch, self._spaces = f"{self.prefix}switch", [f"{self.prefix}{name}" for name in self.names]
        self._ports = [f"port{node}" for node in range(count)]
        self._jobs = itertools.count(29500)

    def words(self, node: int, *words: object) -> list[object]:
        """The command that runs a command on that machine, in the same process: its id is the program's.

        Not by `ip netns exec`, which hides /sys.
        """
        here = f'hostname {self.names[node]}; mount --bind {self.hosts} /etc/hosts; exec "$@"'
        return [*self._enter(node), "unshare", "--uts", "--mount", "sh", "-c", here, "sh", *words]

    def start(self, node: int, *words: object, **more) -> Popen:
        return self._programs.start(*self.words(node, *words), **more)

    def run(self, node: int, *words: object, **more) -> subprocess.CompletedProcess[str]:
        return self._programs.run(*self.words(node, *words), **more)

    def launch(
        self, ranks: int, *words: object, program: Path = TRAIN, launcher: Sequence[str] = (), **variables: str
    ) -> list[Popen]:
        """Start a torchrun with so many ranks on every machine, for one job. `words`: of the program."""
        variables = {"GLOO_SOCKET_IFNAME": INTERFACE, **variables}
        port = next(self._jobs)
        job = ["--nnodes", len(self.names), "--nproc-per-node", ranks, "--rdzv-backend", "c10d", "--rdzv-id", port]
        job += ["--rdzv-endpoint", f"{self.addresses[0]}:{port}", *launcher, "--local-addr"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *job]
        return [
            self.start(node, *torchrun, address, program, *words, **variables)
            for node, address in enumerate(self.addresses)
        ]

    def cut(self, node: int) -> None:
        """Nothing arrives from the machine or at it any more, and no machine is told: the switch has lost the port."""
        _ip("-n", self._switch, "link", "set", self._ports[node], "nomaster")

    def heal(self, node: int) -> None:
        _ip("-n", self._switch, "link", "set", self._ports[node], "master", "switch")

    def rate(self, megabits: float) -> None:
        """Let every machine send so much in a second, or as much as it can: 0."""
        for node in range(len(self.names)):
            limit = ["tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "400ms"]
            queue = limit if megabits else ["noqueue"]
            change = ["tc", "qdisc", "replace", "dev", INTERFACE, "root", *queue]
            subprocess.run([*self._enter(node), *change], check=True, capture_output=True)

    def traffic(self, node: int) -> Traffic:
        told = json.loads(_ip("-n", self._spaces[node], "-s", "-j", "link", "show", "dev", INTERFACE))
        sent, received = (told[0]["stats64"][way] for way in ("tx", "rx"))
        return Traffic(sent["bytes"], received["bytes"], sent["packets"], received["packets"])

    def pids(self, node: int) -> list[int]:
        """All processes of the machine, whoever started them."""
        return [int(word) for word in _ip("netns", "pids", self._spaces[node]).split()]

    def kill(self, node: int) -> None:
        """End all processes of the machine at once, by SIGKILL."""

        def all_gone() -> bool:
            living = []
            for pid in self.pids(node):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(pid)
                    process.kill()
                    living += [] if process.status() == psutil.STATUS_ZOMBIE else [pid]
            return not living

        eventually(all_gone)

    def _enter(self, node: int) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self._spaces[node]}"]

    def set_up(self) -> None:
        """Raises subprocess.CalledProcessError where the kernel refuses, and FileNotFoundError without iproute2."""
        told = [("127.0.0.1", "localhost"), *zip(self.addresses, self.names, strict=True)]
        self.hosts.write_text("".join(f"{' '.join(one)}\n" for one in told))
        for space in (self._switch, *self._spaces):
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", self._switch, "link", "add", "switch", "up", "type", "bridge")
        for node, (space, port) in enumerate(zip(self._spaces, self._ports, strict=True)):
            self.set(node, "ipv6/conf/default/disable_ipv6", 1)  # its questions for neighbours would be counted
            ends = ["add", port, "type", "veth", "peer", "name", INTERFACE, "netns", space]
            _ip("-n", self._switch, "link", *ends)
            _ip("-n", self._switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", space, "address", "add", f"{self.addresses[node]}/24", "dev", INTERFACE)
            _ip("-n", space, "link", "set", INTERFACE, "up")

    def set(self, node: int, name: str, value: int) -> None:
        """Set one of the machine's /proc/sys/net; a kernel without it is left as it is."""
        file = f"/proc/sys/net/{name}"
        write = ["sh", "-c", f"[ ! -e {file} ] || echo {value} > {file}"]
        subprocess.run([*self._enter(node), *write], check=True, capture_output=True)

    def tear_down(self) -> None:
        made = [space for space in (*self._spaces, self._switch) if Path("/run/netns", space).exists()]
        for node, space in enumerate(self._spaces):
            if space in made:
                self.kill(node)
        for space in made:
            _ip("netns", "delete", space)


@contextmanager
def machines(programs: Programs, folder: Path, count: int = 2) -> Iterator[Machines]:
    """So many machines, and none of their processes afterwards. Skips the test where they cannot be made."""
    made = Machines(programs, count, folder)
    try:
        try:
            made.set_up()
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            pytest.skip(f"{NO_NETWORK}: {getattr(error, 'stderr', None) or error}")
        yield made
    finally:
        made.tear_down()


def _ip(*words: str) -> str:
    """What `ip` says. Raises subprocess.CalledProcessError."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
