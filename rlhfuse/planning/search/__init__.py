"""Which layouts a run trains, generates and scores in: all that can run, their price, and the fastest by proof."""
