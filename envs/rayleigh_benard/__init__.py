"""Controlled Rayleigh-Benard convection: a simulator in C, compiled on the node that needs it."""
