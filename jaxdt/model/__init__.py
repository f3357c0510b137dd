"""The Flax GPT, its stage functions, optimizers and data."""
