"""rlhfuse: PPO for language models with generation/inference and actor/critic training fused."""
