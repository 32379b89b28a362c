"""What the engine does on GPUs."""
