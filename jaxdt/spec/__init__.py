"""What a run is: values only, standard library only."""
