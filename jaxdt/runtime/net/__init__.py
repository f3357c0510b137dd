"""Bytes and sockets: connections, frames, credentials."""
