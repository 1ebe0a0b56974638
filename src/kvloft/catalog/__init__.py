"""The scheduler's side: which chunks and resume points exist, where, and in which state."""
