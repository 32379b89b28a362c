"""Several ranks of the inter-stage code in one process, in an order that a seed decides, under virtual time."""
