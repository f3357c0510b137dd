"""Parts of the machines of a sync with servers (jaxdt.sync.server). It may import what jaxdt.sync may."""
