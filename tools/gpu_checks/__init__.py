"""The checks that tools/gpu_check.py runs, by what they look at."""
