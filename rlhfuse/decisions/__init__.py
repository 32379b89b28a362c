"""What follows from the settings of a run: its tasks with their layouts, the arithmetic of its batch, weight moves."""
