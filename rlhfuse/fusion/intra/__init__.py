"""Intra-stage fusion: actor and critic trained at once (paper section 5)."""
