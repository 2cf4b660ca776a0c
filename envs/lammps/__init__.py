"""LAMMPS as a simulator: crystallisation of a Lennard-Jones melt by its thermostat."""
