"""Discrete-event simulation of a fleet in virtual time, through the daemon's own policies. No network, no clocks."""

from typing import Final

# What `--cells` takes. `paper` is all but the search for guard and tau, which is no result of its own.
ABLATIONS: Final = ("tau", "guard", "kmeans", "transforms", "pool", "drift", "elastic", "traffic")
CELLS: Final = ("quick", "paper", "main", *ABLATIONS)
