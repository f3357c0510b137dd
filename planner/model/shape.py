"""Whether a plan's shape fits a network. Imports nothing that takes long, so that a refusal is quick."""

from jaxdt.run.errors import BadInput
from jaxdt.run.network import Network


def check_n_devices(network: Network, n_stages: int, n_pipelines: int) -> None:
    """BadInput unless stages and pipelines, both at least 1, use all devices of the network."""
    if n_stages * n_pipelines != network.n_devices:
        raise BadInput(
            f"--stages x --pipelines: got {n_stages} x {n_pipelines} = {n_stages * n_pipelines}, "
            f"expected the {network.n_devices} devices of {network.name or 'the network'}"
        )
