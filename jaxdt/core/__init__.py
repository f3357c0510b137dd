"""Values and vocabulary: standard library only; no clock, socket, thread, global randomness or array."""
