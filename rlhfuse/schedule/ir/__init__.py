"""The values of schedules: actions, problems, schedules, graphs."""
