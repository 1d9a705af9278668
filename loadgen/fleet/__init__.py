"""Emulated vLLM workers on loopback: dialect, KV hand-off, batching physics and the hook's frames. No router code."""

from loadgen.fleet.emulated import EmulatedFleet, FleetSpec
from loadgen.fleet.faults import Faults
from loadgen.fleet.handoff import Violation
from loadgen.fleet.model import EmulatedMoE, ModelSpec
from loadgen.fleet.worker import Worker

__all__ = ["EmulatedFleet", "EmulatedMoE", "Faults", "FleetSpec", "ModelSpec", "Violation", "Worker"]
