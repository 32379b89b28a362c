"""The programs. Installed as rlhfuse.tools, for the entry points of pyproject.toml."""
