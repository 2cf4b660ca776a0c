"""Rayleigh-Benard convection under control: a simulator in C, its baselines and pictures."""
