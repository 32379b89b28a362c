"""What tools/make_tiny_models.py makes the embedded models from."""
