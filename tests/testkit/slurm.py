"""A SLURM of machines of the test kit: its controller on the first, a node on each, munge of its own, nothing left.

Its packages (Debian's slurm-wlm and munge) are not installed here; without them, or the right to make networks, the
test is skipped, and says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from testkit.machines import Machines, machines
from testkit.programs import Programs, eventually

NO_SLURM = "no SLURM here"
DAEMONS = ("munged", "slurmctld", "slurmd")
COMMAND_SECONDS = 60  # of a command that never waits for a job
REQUEUED_SECONDS = 10  # a job that is queued again begins after the lifetime of its credential; less is not taken
CONF = """
ClusterName=tests
SlurmctldHost={name}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire={requeued},socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=1
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """Commands of the user, on the first machine unless said, and what became of jobs."""

    def __init__(self, nodes: Machines, folder: Path) -> None:
        self.nodes, self.folder = nodes, folder
        self._variables = {"SLURM_CONF": str(folder / "slurm.conf"), "GLOO_SOCKET_IFNAME": "eth0"}

    def run(self, *words: object, node: int = 0, **more) -> subprocess.CompletedProcess[str]:
        """Raises subprocess.TimeoutExpired: a job that SLURM can place nowhere waits for ever."""
        return self.nodes.run(node, *words, timeout=COMMAND_SECONDS, **{**self._variables, **more})

    def told(self, *words: object, **more) -> str:
        """What a command says that must go well."""
        done = self.run(*words, **more)
        assert done.returncode == 0, (words, done.stdout, done.stderr, self.logs())
        return done.stdout.strip()

    def submit(self, *words: object, **more) -> str:
        """The number of the job."""
        return self.told("sbatch", "--parsable", *words, **more)

    def tasks(self, number: str) -> list[dict[str, str]]:
        """JobState, ExitCode, Restarts, ... of each task of an array, or of the one of another job."""
        lines = self.told("scontrol", "--oneliner", "show", "job", number).splitlines()
        return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]

    def job(self, number: str) -> dict[str, str]:
        """JobState, ExitCode, Restarts, ... of a job."""
        return self.tasks(number)[-1]

    def ended(self, number: str) -> dict[str, str]:
        """The state of a job, or of a task of an array that failed if one did, once all tasks are over."""
        running = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")

        def over() -> bool:
            return all(task["JobState"] not in running for task in self.tasks(number))

        eventually(over, lambda: f"{self.tasks(number)}\n{self.logs()}")
        return max(self.tasks(number), key=lambda task: task["ExitCode"] != "0:0")

    def logs(self) -> str:
        """The last of what the daemons have written."""
        return "\n".join(f"{file.name}: {file.read_text()[-2000:]}" for file in sorted(self.folder.glob("*.log")))

    def processes(self) -> list[str]:
        """The command lines of what runs on the machines."""
        pids = [pid for node in range(len(self.nodes.names)) for pid in self.nodes.pids(node)]
        files = [Path(f"/proc/{pid}/cmdline") for pid in pids]
        return [file.read_text().replace("\0", " ") for file in files if file.exists()]

    def cancel_all(self) -> None:
        """End every job; returns when no process of one is left."""
        self.run("scancel", "--user=root")
        eventually(lambda: not self.told("squeue", "--noheader"), self.logs)


@contextmanager
def slurm(programs: Programs, count: int = 2) -> Iterator[Slurm]:
    """A cluster of so many nodes of 4 processors, and none of its processes afterwards."""
    if missing := [name for name in DAEMONS if not shutil.which(name, path=_path())]:
        pytest.skip(f"{NO_SLURM}: {', '.join(missing)} not found (apt-get install slurm-wlm munge)")
    with tempfile.TemporaryDirectory(prefix="rlhfuse-slurm-") as name, machines(programs, Path(name), count) as nodes:
        folder = Path(name)
        folder.chmod(0o755)  # munge wants its socket where everybody can reach it
        _write(folder, nodes)
        made = Slurm(nodes, folder)
        made.told(
            "munged",
            *(f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")),
            f"--socket={folder}/munge.socket",
        )
        made.told("slurmctld", "-c")
        for node in range(count):
            made.told("slurmd", node=node)
        eventually(lambda: made.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == str(count), made.logs)
        yield made


def _write(folder: Path, nodes: Machines) -> None:
    """Write the cluster's slurm.conf, and munge's key."""
    text = CONF.format(name=nodes.names[0], address=nodes.addresses[0], folder=folder, requeued=REQUEUED_SECONDS)
    for name, address in zip(nodes.names, nodes.addresses, strict=True):
        text += f"NodeName={name} NodeAddr={address} CPUs=4 RealMemory=8000 State=UNKNOWN\n"
    (folder / "slurm.conf").write_text(text)
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)


def _path() -> str:
    """Where daemons are, which a user's PATH may lack."""
    return os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
