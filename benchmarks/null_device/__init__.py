"""A CUDA device that computes nothing, for a torch without CUDA."""
