"""How a pipeline comes back to a run whose replicas may differ: who gives it the states, and how each replica gets its
own. May import jaxdt.sync.download and the layers below jaxdt.sync."""
