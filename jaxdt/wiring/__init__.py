"""Who gets a microbatch next."""
