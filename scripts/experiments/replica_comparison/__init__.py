"""Equal replicas and replicas that may differ: raw data of compare_replicas.py, and the page made of them."""
