"""KVLoft as a KV connector of vLLM. Everything that touches vLLM's interfaces is in here."""
