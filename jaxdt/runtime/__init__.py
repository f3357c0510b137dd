"""The machines on real hosts: the processes of a run, their event loop, their compute thread, and what they show.

`net` has bytes and sockets, `storage` has tensors and files, `calibrate` measures hosts and links. May import the
simulator (for predictions), build, model, codec, and the layers below them. Only `storage`, `calibrate` and the modules
that use them import jax."""
