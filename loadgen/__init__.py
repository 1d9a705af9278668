"""Load for eldrd: emulated and real fleets, an open-loop client, workloads, reports. The daemon imports none of it."""
