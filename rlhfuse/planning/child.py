"""The process that plans for a job: it answers the requests of rank 0 until that closes the connection.

What planning imports and holds ends with it (planning_process.py starts it).
"""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from rlhfuse.base.errors import InputError
from rlhfuse.planning.job import Job
from rlhfuse.planning.planner import plan_job
from rlhfuse.planning.settle import check_job


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 is interrupted, too, and this process ends with it
    requests = Connection(int(sys.argv[1]))
    while True:
        try:
            request: tuple[str, Job] = requests.recv()
        except EOFError:
            return
        try:
            requests.send(ANSWERS[request[0]](request[1]))
        except InputError as error:
            requests.send(error)


def text_and_costs(job: Job) -> tuple[str, Any]:
    plan = plan_job(job)
    return plan.to_text(), plan.costs


ANSWERS = {"check": check_job, "plan": text_and_costs}

if __name__ == "__main__":
    main()
