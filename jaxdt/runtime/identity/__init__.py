"""The identities of processes in a run, and their roles: certificates, credential files, tokens, and the issuer.

A run has one root, whose key stays with the person who starts the run. The root signs the certificates of coordinators
and operators; a coordinator signs those of peers and the tokens with which they come. The modules here know no sockets.
They may import `jaxdt.run` and nothing else of `jaxdt`.
"""
