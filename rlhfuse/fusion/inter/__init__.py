"""Inter-stage fusion: generation with inference (paper section 4)."""
