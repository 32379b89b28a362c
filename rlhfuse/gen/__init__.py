"""The continuous-batching generation engine with a paged KV cache, and KV migration."""
