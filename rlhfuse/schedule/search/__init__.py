"""The annealing search, in one process or over MPI."""
