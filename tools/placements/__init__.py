"""Which ranks every call of an iteration runs on, and in what layout."""
