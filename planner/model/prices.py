"""The price of a step in money: the devices that a plan uses, while they are used, and the bytes that leave regions.

Prices stand in the network file (`price_per_hour` of devices, `egress_per_gb` of regions), in any one currency. Bytes
inside a region are free. N devices.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxdt.run.network import Network

HOUR_S = 3600.0
GB = 1e9


@dataclass(frozen=True)
class PriceRules:
    """is_minimised: the price of a step is minimised, not its seconds. budget_per_hour: the most that the devices of a
    plan may cost in all; None allows any price."""

    is_minimised: bool = False
    budget_per_hour: float | None = None

    @property
    def empty(self) -> bool:
        """Whether prices decide nothing."""
        return not self.is_minimised and self.budget_per_hour is None


@dataclass(frozen=True)
class StepPrice:
    """per_hour: of all devices used; egress_per_step: of the bytes that leave their region; per_step: both, for a step
    of known seconds."""

    per_hour: float
    egress_per_step: float
    per_step: float


def has_prices(network: Network) -> bool:
    """Whether anything of a network has a price."""
    return any(device.price_per_hour for device in network.devices) or any(network.egress_per_gb.values())


def price_per_hour(network: Network, devices: Iterable[int]) -> float:
    """Price of some devices for an hour."""
    return sum(network.devices[d].price_per_hour for d in devices)


def egress_per_byte(network: Network) -> list[list[float]]:
    """Price [N][N] of one byte from each device to each other one."""
    regions = [device.region for device in network.devices]
    prices = {region: network.egress_per_gb.get(region, 0.0) / GB for region in set(regions)}
    return [[0.0 if src == dst else prices[src] for dst in regions] for src in regions]


def step_price(network: Network, devices: Iterable[int], step_s: float, egress_per_step: float) -> StepPrice:
    """The price of a step of step_s seconds on these devices, with what its bytes cost."""
    per_hour = price_per_hour(network, devices)
    return StepPrice(per_hour, egress_per_step, per_hour * step_s / HOUR_S + egress_per_step)
