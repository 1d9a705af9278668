"""Partitions: the file, the transform of counts to unit vectors, the fit and its quality. Knows nothing of HTTP."""
