"""The coordinator's account of a run whose replicas may differ: which pipelines are whole, which averaging groups are
open, and how many steps are done. It may import what jaxdt.sync may."""
