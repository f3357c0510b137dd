"""What a delay of one update costs in loss: raw data of delay_loss.py, and the page made of them."""
