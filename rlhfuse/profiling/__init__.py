"""Measuring what work costs on the machine at hand: points, work, company, and the run over all of them."""
