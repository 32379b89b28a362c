"""What every part of the engine shares: sequences, the scheduler, the KV cache, one step's batch, a model's tensors."""
