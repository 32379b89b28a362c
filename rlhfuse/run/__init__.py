"""One job: from a checked configuration to exported weights."""
