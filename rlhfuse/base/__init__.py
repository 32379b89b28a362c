"""What every floor stands on: errors, files, JSON values, compiled kernels."""
