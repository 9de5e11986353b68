"""The decoding engine: a fused forward pass over a static KV cache, captured as CUDA graphs on a GPU."""
