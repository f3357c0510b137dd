"""What is planned: networks, devices, sizes, plans."""
