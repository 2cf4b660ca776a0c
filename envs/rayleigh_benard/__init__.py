"""Controlled Rayleigh-Benard convection: a simulator in C, baselines, pictures, training."""
