"""Bytes and sockets between peers: connections, frames, handshakes, credentials, emulated links.

The modules here know nothing of training: a message is a head (plain data) and arrays. They may import
`jaxdt.run`, and the reserved peer ids of `jaxdt.protocol.events`, and nothing else of `jaxdt`. The rest of the runtime
uses `transport.py`, with the choices in `options.py`.
"""
