"""Routing policies: who gets a request. Pure functions of loads and counts; knows nothing of HTTP or clocks."""
