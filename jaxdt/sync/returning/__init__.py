"""The return of a pipeline to a run whose replicas may differ: the choice of a donor, and the transfer of each
replica's state. May import jaxdt.sync.download and the layers below jaxdt.sync."""
