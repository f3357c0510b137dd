"""Decentralized training of GPT models: compiled stages, explicit send and recv, protocols as pure machines."""
