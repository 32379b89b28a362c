"""What is read out of a run directory afterwards."""
