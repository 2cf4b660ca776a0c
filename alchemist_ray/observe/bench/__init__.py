"""``alchemist bench``: what a machine gives to gangs, to compare machines."""
