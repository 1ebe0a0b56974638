"""KVLoft keeps an inference engine's KV cache in larger, cheaper memory and brings it back."""
