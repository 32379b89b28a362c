"""Process groups of a layout, weights moved between layouts, host copies, devices."""
