"""The plan of a run: what is decided before anything is launched."""
