"""What the page of SDPipe is made of: the systems as event simulations, and their losses over simulated time."""
