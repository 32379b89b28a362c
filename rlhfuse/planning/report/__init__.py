"""The report of a plan: predictions and reasons, made by the process that plans."""
