"""The cost in loss of a delay of one update: raw data of delay_loss.py, and the page made of them."""
