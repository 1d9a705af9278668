"""Real vLLM servers on this machine's CPU: a small MoE checkpoint, the fleet, and the truth about its routing."""
