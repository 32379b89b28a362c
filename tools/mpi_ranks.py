"""The ranks of an MPI job, or the one process there is: what the first reads, and one end."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rlhfuse.base.errors import EXIT_BAD_INPUT, InputError
from rlhfuse.base.launcher import MPI_RANK
from rlhfuse.schedule.search.mpi import load_mpi, meet

STARTED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")  # how many, if said

Made = TypeVar("Made")


class MpiRanks:
    """`comm`: an mpi4py communicator of several ranks, None where there is one process."""

    def __init__(self, comm: Any = None) -> None:
        self.comm = comm
        self.rank, self.size = (comm.Get_rank(), comm.Get_size()) if comm is not None else (0, 1)

    @staticmethod
    def here() -> MpiRanks:
        """Those that a launcher (Open MPI, MPICH and its kin, srun with PMIx) started. Raises InputError where there
        are several and MPI cannot be loaded, or does not join them."""
        said = next((name for name in STARTED if name in os.environ), "")  # by the nearest launcher
        started = os.environ.get(said, "")
        if any(name in os.environ for name in MPI_RANK) and started != "1":
            comm = load_mpi().COMM_WORLD
            if comm.Get_size() > 1:
                return MpiRanks(comm)
        if started not in ("", "1"):
            # Each says so: variables of a launcher that is gone may give any process any number.
            raise InputError(
                f"{said}={started} processes were started, and no MPI joins them, so each would do all the work, and "
                "write it over the others': start them with mpirun, as scripts/slurm/search_schedule.sbatch does, or "
                f"one alone (srun --ntasks=1); without a launcher unset {said}"
            )
        return MpiRanks()

    @contextmanager
    def together(self) -> Iterator[None]:
        """An InputError in the body, which every rank meets, is left to the first to say; any other failure of a rank
        ends the job."""
        try:
            yield
        except InputError:
            if self.rank > 0:
                raise SystemExit(EXIT_BAD_INPUT) from None
            raise
        except Exception:
            if self.comm is not None:  # the other ranks wait for this one
                traceback.print_exc()
                self.comm.Abort(1)
            raise

    def from_first(self, make: Callable[[], Made]) -> Made:
        """What `make` returns on the first rank, on every rank. Where it ends the program there, the others leave in
        silence."""
        if self.comm is None:
            return make()
        made = None
        if self.rank == 0:
            try:
                made = make()
            except (InputError, SystemExit) as error:
                self._broadcast((None, error.code if isinstance(error, SystemExit) else EXIT_BAD_INPUT))
                raise
        made, code = self._broadcast((made, None))
        if code is not None:
            raise SystemExit(code)  # MPI's end waits for rank 0, which says why
        return made

    def _broadcast(self, value: Any) -> Any:
        meet(self.comm)
        return self.comm.bcast(value)
