"""The four roles on Megatron-core, their checkpoints, and one pipeline stage."""
