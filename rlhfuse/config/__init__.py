"""Settings of a run and the shapes of models, layouts and hardware."""
