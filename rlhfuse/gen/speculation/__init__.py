"""Guesses of the tokens that will be drawn next, verified by the engine: tokens and bits are those without them."""
