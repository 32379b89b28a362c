"""The samples of an iteration, and the rewards that a function gives them."""
