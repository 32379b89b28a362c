"""What the engine does on CPUs, where bits are exact."""
