"""Adapters between a loft and inference engines, one package each."""
