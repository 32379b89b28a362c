"""The fused-pipeline problem: schedules as values, bounds, search, lowering, verification."""
