"""eldrd: expert-locality-aware decode router for prefill/decode-disaggregated MoE serving. Holds the version, nothing else."""

__version__ = "0.1.0"
