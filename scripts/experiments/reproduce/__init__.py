"""The papers' figures that reproduce.py knows, one module each."""
