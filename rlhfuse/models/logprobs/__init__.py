"""Log-probabilities of tokens from hidden states, without whole logits."""
