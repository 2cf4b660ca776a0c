"""LAMMPS as a simulator: crystallisation of a Lennard-Jones melt, controlled by its thermostat."""
