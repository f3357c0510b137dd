"""Models in and out: the files of other projects on one side, model folders and checkpoints on the other."""
