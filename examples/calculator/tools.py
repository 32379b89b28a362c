"""The tool of examples/calculator_grpo.yaml."""


def calc(a: int, sign: str, b: int) -> str:
    """Add two numbers, or subtract the second from the first.

    Args:
        a: The first number.
        sign: + or -.
        b: The second number.
    """
    return str({"+": a + b, "-": a - b}[sign])
