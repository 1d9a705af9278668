"""Micro-benchmarks of eldrd's hot paths, against the obvious NumPy version on the same machine. No assertions."""
