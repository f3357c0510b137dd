"""The parts of the page of SDPipe: the systems as event simulations, and their losses over simulated time."""
